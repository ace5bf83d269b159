"""The engine as its thread sees it: a protocol, and the engine's identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from model.spec.golden import CaseResult, GoldenCase, Tolerance
from service.engine.chunks import ChunkRules
from service.engine.types import GenerationRequest, StepOutput, StepStats


class StepEngine(Protocol):
    """What the engine thread calls. After `start`, no other thread may, except for what is constant."""

    @property
    def chunk_rules(self) -> ChunkRules:
        """Chunking and padding rules. Constant."""

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens of one step, at most; 0 without speculation. Constant."""

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

    def calibrate(self, max_seconds: float) -> Sequence[StepStats]:
        """Times steps of a few sizes; only while it has no work."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineHandle:
    """Identity of one engine, distinct from that of another engine of the same model. Holds none of its memory."""

    model: str
