"""What the engine asks of a KV backend.

A backend is a `Runner` over the graphs of one K/V layout, with a cache that carries out the batch's `KVOperation`s:
`service.engine.slots_backend` and `service.engine.paged_backend`. tests/contract/test_kv_contract.py holds their caches
to one contract.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from service.engine.batch import ScheduledBatch

Float32 = npt.NDArray[np.float32]


class Runner(Protocol):
    """Computes batches, one after another, each on the K/V that earlier ones left."""

    def run(self, batch: ScheduledBatch) -> Float32:
        """Carries out the batch's K/V operations, then computes it.

        Returns:
            `[slots + R, V] float32`: row `slot` has the logits after the last token fed to that slot, the R rows behind
            them those that chunks want besides (`PrefillChunk.num_scored`). Rows that were not fed are undefined. The
            next call overwrites the array.

        Raises:
            Exception: when the step fails; the K/V of all slots are undefined then.
        """

    def own_weights(self) -> None:
        """Makes all graphs independent of their files; called when all of them have run.

        Raises:
            StartupError: when the files have changed since the graphs were loaded.
        """
