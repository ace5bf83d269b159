"""One request between admission and its last event: what was reported so far and when, and what waits to be taken.

All of it belongs to the event loop. Knows what is noted of a request, and nothing of when that begins and ends: places,
hand-over and the end are `service.runtime.async_engine`'s.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from service.access import Caller
from service.engine.step_engine import EngineHandle
from service.engine.types import FinishReason, GenerationRequest, TokenEvent
from service.forecasting.admission import DeadlineAdmission, PredictedFinish
from service.forecasting.costing import Cost
from service.forecasting.prediction import LatencyPredictor, Quote
from service.runtime.model_queue import Lane
from service.telemetry.metrics import ModelMetrics
from service.telemetry.recorder import RecordedRequest
from service.telemetry.tracing import RequestTrace

# A client far behind gets many tokens in a message, but not so many that no message holds them.
_MAX_EVENTS_TAKEN = 128
# A consumer that does not wait for single events is woken once so many are there: that costs more than any of them, and
# text for all of a long answer at its end would hold up others.
_EVENTS_GATHERED = 32


def request_key(caller: Caller, request_id: str) -> str:
    """The engine's id of a request: unique among all tenants, as ids are printable."""
    return f"{request_id}\t{caller.tenant}" if caller.tenant else request_id


@dataclass(slots=True, eq=False)
class Tokens:
    """One output's tokens so far: how many were reported, when the first was, and when the last."""

    first_time: float
    last_time: float
    count: int = 1


@dataclass(slots=True, eq=False)
class Stream:
    """One request between admission and its last event. `request` is None until it is handed to the engine.

    Where it `is_streamed`, its events are wanted as they come. `request_id` is the client's, unique among its tenant's;
    `key` is the engine's id of it.

    `engine` is the one that has it, whose events alone are its own; `held` is what its caller holds by it: sequences
    and tokens.

    `quote` is what `predictor` knew of its future then, `cost` what became of it, where it came to a token;
    `prediction` is what `admission` went by, where it has a deadline.
    """

    request_id: str
    model: str
    lane: Lane
    trace: RequestTrace
    caller: Caller
    request: GenerationRequest | None = None
    engine: EngineHandle | None = None
    is_streamed: bool = True
    held: tuple[int, int] | None = None
    events: list[TokenEvent] = field(default_factory=list)
    waiter: asyncio.Future[None] | None = None
    admission: DeadlineAdmission | None = None
    prediction: PredictedFinish | None = None
    predictor: LatencyPredictor | None = None
    quote: Quote | None = None
    cost: Cost | None = None
    tokens: dict[int, Tokens] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = request_key(self.caller, self.request_id)

    @property
    def last_reason(self) -> FinishReason | None:
        """Why its last output ended; None while none has."""
        return next(reversed(self.reasons.values()), None)

    @property
    def reports_each_token(self) -> bool:
        """Whether a token is reported when it is chosen: those of beam search come all at once, when that is over."""
        return self.request is not None and self.request.beam_search is None

    @property
    def num_tokens(self) -> int:
        """Tokens reported, over all outputs."""
        return sum(tokens.count for tokens in self.tokens.values())

    @property
    def num_longest_tokens(self) -> int:
        """Tokens of the output that has most."""
        return max((tokens.count for tokens in self.tokens.values()), default=0)

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of the tokens after each output's first; None where there are none, or all came at once."""
        outputs = self.tokens.values()
        count = sum(tokens.count - 1 for tokens in outputs)
        if not count or not self.reports_each_token:
            return None
        return sum(tokens.last_time - tokens.first_time for tokens in outputs) / count

    def count_token(self, metrics: ModelMetrics, event: TokenEvent, now: float) -> None:
        """Counts an event's token of its output, and the time since the one before or, of the first, since arrival."""
        if self.predictor is not None:
            self.predictor.token_sent(self.key)
        tokens = self.tokens.get(event.output_index)
        if tokens is not None:
            if self.reports_each_token:
                metrics.next_token(now - tokens.last_time)
            tokens.count += 1
            tokens.last_time = now
            return
        if not self.tokens and self.request is not None:
            metrics.prompt_done(self.request.num_prompt_tokens, event.num_cached_tokens)
            metrics.first_token(now - self.request.arrival_time)
        self.tokens[event.output_index] = Tokens(now, now)

    def push(self, event: TokenEvent) -> None:
        """Adds an event, and wakes its consumer."""
        self.events.append(event)
        is_wanted = self.is_streamed or event.is_terminal or len(self.events) >= _EVENTS_GATHERED
        if is_wanted and self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def take(self) -> tuple[TokenEvent, ...]:
        """The oldest events that wait, at least one; for one consumer."""
        if not self.events:
            # One future a wait: an `asyncio.Event` makes that, and keeps a queue of its own besides, for every token.
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        events = tuple(self.events[:_MAX_EVENTS_TAKEN])
        del self.events[:_MAX_EVENTS_TAKEN]
        if self.events:
            # Beams end with a great many tokens at once: others must not wait until all of them are text.
            await asyncio.sleep(0)
        return events

    def recorded(self) -> RecordedRequest | None:
        """The request, which is not over, as the recorder shows it; None while it is not the engine's."""
        if self.request is None:
            return None
        return RecordedRequest(
            request_id=self.request_id,
            outcome=None,
            arrival_time=self.request.arrival_time,
            scheduled_time=None,
            first_token_time=min((tokens.first_time for tokens in self.tokens.values()), default=None),
            finished_time=None,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_cached_tokens=None,
            num_generated_tokens=self.num_tokens,
        )
