"""What an engine is to those who drive it: the methods that the engine thread calls, and the engine's identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from model.spec.golden import CaseResult, GoldenCase, Tolerance
from service.engine.chunks import ChunkRules
from service.engine.types import GenerationRequest, StepOutput, StepStats


class StepEngine(Protocol):
    """What the thread needs of an engine. After `start`, only the thread calls it."""

    @property
    def chunk_rules(self) -> ChunkRules:
        """How it cuts and pads what it computes: for life, and for anybody to read."""

    @property
    def max_draft_tokens(self) -> int:
        """How many tokens of a row that decodes alone are drafted at once, at most; 0 where none ever are. Constant."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @property
    def kv_memory_bytes(self) -> int:
        """What its K/V may take: for life, and for anybody to read."""

    def limit_kv(self, num_bytes: int) -> None:
        """Keeps its K/V within so many bytes of `kv_memory_bytes` for now, as others hold the rest."""

    @property
    def kv_needed_bytes(self) -> int:
        """What its K/V must be able to take for all its requests to end, if no more come."""

    def num_cached_tokens(self, request: GenerationRequest) -> int:
        """How many tokens of a request it would find computed, or raises RequestError; leaves no trace of it."""

    def add_request(self, request: GenerationRequest) -> None:
        """Queues a request, or raises RequestError and leaves no trace of it."""

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step boundary; unknown ids are ignored."""

    def prepare(self) -> bool:
        """Does a piece of background work for later steps while no request waits; returns whether more is left."""

    def step(self) -> StepOutput:
        """Moves every sequence that can move."""

    def verify_golden(self, cases: Sequence[GoldenCase], tolerance: Tolerance) -> Sequence[CaseResult]:
        """Replays golden cases on the provider in use; only while it has no work."""

    def calibrate(self, max_seconds: float) -> Sequence[StepStats]:
        """Runs steps of no request, to measure how long they take; only while it has no work."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineHandle:
    """The identity of one engine, for what must not be confused with another engine of the same model.

    It holds no memory of the engine's.
    """

    model: str
