"""An engine that plays scripts: events step by step, without a scheduler.

Tests of what lies between engine and client use it for streams of events that a real engine produces rarely, or in
unpredictable order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from model.spec.golden import CaseResult, GoldenCase, Tolerance
from service.engine.chunks import ChunkRules
from service.engine.types import FinishReason, GenerationRequest, RequestTimings, StepOutput, StepStats, TokenEvent

RULES = ChunkRules(chunk=128, context=1024, prompt_padding=4, short_prompt=32, source_padding=16, source_context=0)
Steps = Sequence[Sequence[TokenEvent]]


def token(
    token_id: int | None, output_index: int = 0, reason: FinishReason | None = None, score: float | None = None
) -> TokenEvent:
    """An output's next event, with a token or without; the engine fills in whose it is."""
    return TokenEvent(request_id="", output_index=output_index, token_id=token_id, finish_reason=reason, score=score)


class ScriptedEngine:
    """A `StepEngine` whose requests get the events that `script` has for them, one step's worth in each step.

    The last event is made the terminal one. Aborting a request ends its outputs that have not ended.

    Args:
        script: a request to its events, step by step.
        before_step: called before every step; may block.
        num_cached_tokens: of every event.
        num_preemptions: of every step.
        clock: seconds, for the end of a request.
    """

    def __init__(
        self,
        script: Callable[[GenerationRequest], Steps],
        *,
        before_step: Callable[[], object] = lambda: None,
        num_cached_tokens: int = 0,
        num_preemptions: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.requests: list[GenerationRequest] = []
        self._script = script
        self._before_step = before_step
        self._num_cached_tokens = num_cached_tokens
        self._num_preemptions = num_preemptions
        self._pending: dict[str, tuple[GenerationRequest, deque[Sequence[TokenEvent]]]] = {}
        self._ended: dict[str, set[int]] = {}

    @property
    def chunk_rules(self) -> ChunkRules:
        """A real engine's defaults."""
        return RULES

    @property
    def max_draft_tokens(self) -> int:
        """It has no speculation."""
        return 0

    @property
    def kv_memory_bytes(self) -> int:
        """It has no K/V."""
        return 0

    def limit_kv(self, num_bytes: int) -> None:
        """Nothing to limit."""

    @property
    def kv_needed_bytes(self) -> int:
        """It needs none."""
        return 0

    def num_cached_tokens(self, request: GenerationRequest) -> int:
        """The number that every event has."""
        return self._num_cached_tokens

    @property
    def has_work(self) -> bool:
        """Whether a script is not at its end."""
        return bool(self._pending)

    def add_request(self, request: GenerationRequest) -> None:
        """Begins the request's script."""
        self.requests.append(request)
        self._pending[request.request_id] = (request, deque(self._script(request)))
        self._ended[request.request_id] = set()

    def abort(self, request_id: str) -> None:
        """Puts an end of every output in the place of what is left."""
        if request_id in self._pending:
            request, _ = self._pending[request_id]
            left = sorted(set(range(request.num_outputs)) - self._ended[request_id])
            cancelled = [token(None, index, FinishReason.CANCELLED) for index in left]
            self._pending[request_id] = (request, deque([cancelled]))

    def prepare(self) -> bool:
        """There is no background work."""
        return False

    def step(self) -> StepOutput:
        """The next events of every request."""
        self._before_step()
        reported: list[TokenEvent] = []
        for request_id, (request, steps) in list(self._pending.items()):
            events = [
                replace(event, request_id=request_id, num_cached_tokens=self._num_cached_tokens)
                for event in steps.popleft()
            ]
            self._ended[request_id] |= {event.output_index for event in events if event.finish_reason is not None}
            if not steps:
                timings = RequestTimings(
                    arrival_time=request.arrival_time,
                    scheduled_time=request.arrival_time,
                    first_token_time=request.arrival_time,
                    finished_time=self._clock(),
                )
                events[-1] = replace(events[-1], timings=timings)
                del self._pending[request_id]
            reported += events
        stats = StepStats(
            num_rows=len(reported),
            num_tokens=len(reported),
            num_padding_tokens=0,
            run_seconds=0.0,
            host_seconds=None,
            num_preemptions=self._num_preemptions,
            num_running=len(self._pending),
            num_waiting=0,
            kv_usage_ratio=0.0,
        )
        return StepOutput(tuple(reported), stats)

    def verify_golden(self, cases: Sequence[GoldenCase], tolerance: Tolerance) -> Sequence[CaseResult]:
        """Nothing to replay on."""
        raise NotImplementedError

    def check_batch_invariance(self, cases: Sequence[GoldenCase]) -> bool | None:
        """Nothing to check on."""
        return None

    def calibrate(self, max_seconds: float) -> Sequence[StepStats]:
        """Nothing that would take time."""
        return ()
