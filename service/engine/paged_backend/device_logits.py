"""What a run over blocks leaves on a device: logits of many rows, and what of them is enough to choose most tokens by.

A row of logits is as long as the vocabulary; its highest ones, which the graph singles out, are a few hundred bytes.
Greedy and top-k sampling need no more (`service.engine.sampling.top_logits`). Both stay on the
device until they are fetched. Runs of all sizes write to the same places, one after the other.

Knows the outputs of a decoder graph over blocks by name (`model.spec.artifact.paged_decoder_signature`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from model.spec.artifact import MAX_CANDIDATES
from service.engine.sessions.device_memory import Bindable, DevicePack, DeviceTensor, DeviceView

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class DeviceLogits:
    """Memory for what a run says of its rows.

    Args:
        max_rows: how many a run has at most.
        vocab_size: how many logits each has.
        device: "cpu" or "cuda".

    Raises:
        StartupError: when the device does not have so much memory.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: str) -> None:
        self.max_rows = max_rows
        self.num_candidates = min(MAX_CANDIDATES, vocab_size)
        self._logits = DeviceTensor([max_rows, vocab_size], "float32", device)
        self._highest = DevicePack(
            {
                "candidate_ids": ((max_rows, self.num_candidates), "int64"),
                "candidate_logits": ((max_rows, self.num_candidates), "float32"),
                "log_normalizer": ((max_rows,), "float32"),
            },
            device,
        )

    def outputs(self, num_rows: int) -> dict[str, Bindable]:
        """What is to be tied to the outputs of a run of so many rows, by name."""
        views = {"logits": DeviceView(self._logits, 0, self._logits.shape, "float32"), **self._highest.views}
        return {
            name: DeviceView(view.owner, view.offset, (num_rows, *view.shape[1:]), view.dtype)
            for name, view in views.items()
        }

    def read(self, rows: Float32) -> None:
        """Fetches the first rows, `[n, V]` contiguous, whole."""
        self._logits.read_into(rows)

    def read_highest(self, num_rows: int) -> tuple[Int64, Float32, Float32]:
        """Fetches what is singled out of the first rows, to memory that the next call overwrites.

        Returns:
            Ids of the highest logits, highest first, `[num_rows, K]`; these logits; and the logarithm of the sum of
            exponentials of each row, `[num_rows]`, which is not finite where one of its logits is not.
        """
        self._highest.read()
        arrays = self._highest.arrays
        return (
            arrays["candidate_ids"][:num_rows],
            arrays["candidate_logits"][:num_rows],
            arrays["log_normalizer"][:num_rows],
        )
