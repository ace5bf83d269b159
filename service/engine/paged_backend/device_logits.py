"""Results of a run on a device: logits, and the highest of each row, which suffice to sample most tokens.

A row of logits is as long as the vocabulary; its highest are a few hundred bytes, and greedy and top-k sampling need no
more (`service.engine.sampling.top_logits`). Both stay on the device until they are fetched. All runs share this memory.

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
    """Memory for the results of runs of up to `max_rows` rows, on "cpu" or "cuda".

    Raises:
        StartupError: when the device has too little memory.
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
        """What to bind to the outputs of a run of `num_rows` rows, by name."""
        views = {"logits": DeviceView(self._logits, 0, self._logits.shape, "float32"), **self._highest.views}
        return {
            name: DeviceView(view.owner, view.offset, (num_rows, *view.shape[1:]), view.dtype)
            for name, view in views.items()
        }

    def read(self, rows: Float32) -> None:
        """Fetches the logits of the first rows, `[n, V]` contiguous."""
        self._logits.read_into(rows)

    def read_highest(self, num_rows: int) -> tuple[Int64, Float32, Float32]:
        """Fetches the highest logits of the first rows, to memory that the next call overwrites.

        Returns:
            Ids of the highest logits, highest first, `[num_rows, K]`; these logits; and each row's log-sum-exp,
            `[num_rows]`, which is not finite if a logit is not.
        """
        self._highest.read()
        arrays = self._highest.arrays
        return (
            arrays["candidate_ids"][:num_rows],
            arrays["candidate_logits"][:num_rows],
            arrays["log_normalizer"][:num_rows],
        )
