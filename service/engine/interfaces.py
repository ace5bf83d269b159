"""The engine's two seams: `StepEngine`, which its thread calls, and `Runner`, which a K/V backend implements.

A backend is a `Runner` over the graphs of one K/V layout, with a cache that carries out the batch's `KVOperation`s:
`service.engine.slots_backend` and `service.engine.paged_backend`. tests/contract/test_kv_contract.py holds their caches
to one contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from model.spec.golden import CaseResult, GoldenCase, Tolerance
from service.engine.batch import ScheduledBatch
from service.engine.chunks import ChunkRules
from service.engine.types import GenerationRequest, StepOutput, StepStats

Float32 = npt.NDArray[np.float32]


class StepEngine(Protocol):
    """What the engine thread calls. After `start`, no other thread may, except for what is constant."""

    @property
    def chunk_rules(self) -> ChunkRules:
        """Chunking and padding rules. Constant once the proofs have run."""

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens of one step, at most; 0 without speculation, as from a failed `check_batch_invariance` on."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @property
    def kv_memory_bytes(self) -> int:
        """K/V memory. Constant."""

    def limit_kv(self, num_bytes: int) -> None:
        """Limits K/V to `num_bytes` of `kv_memory_bytes`, as other engines hold the rest."""

    @property
    def kv_needed_bytes(self) -> int:
        """K/V memory in which all live requests can finish, if no more come."""

    def num_cached_tokens(self, request: GenerationRequest) -> int:
        """Tokens of a request that the prefix cache would provide, or raises RequestError; changes nothing."""

    def add_request(self, request: GenerationRequest) -> None:
        """Queues a request, or raises RequestError and changes nothing."""

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step boundary; unknown ids are ignored."""

    def prepare(self) -> bool:
        """Does a piece of background work while no request waits; returns whether more is left."""

    def step(self) -> StepOutput:
        """Moves every sequence that can move."""

    def verify_golden(self, cases: Sequence[GoldenCase], tolerance: Tolerance) -> Sequence[CaseResult]:
        """Replays golden cases on the provider in use; only while it has no work."""

    def check_batch_invariance(self, cases: Sequence[GoldenCase]) -> bool | None:
        """Whether a golden case has the same bits alone and in a batch; None: not checked. Only while it has no work.

        Where it has not, there is no speculation from then on.
        """

    def calibrate(self, max_seconds: float) -> Sequence[StepStats]:
        """Times steps of a few sizes; only while it has no work."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineHandle:
    """Identity of one engine, distinct from that of another engine of the same model. Holds none of its memory."""

    model: str


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
