"""One request between admission and its last event: what was reported so far, and the events that wait to be taken.

Event loop only. When a stream begins and ends is decided by `service.runtime.async_engine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from service.access import Caller
from service.engine.interfaces import EngineHandle
from service.engine.types import FinishReason, GenerationRequest, TokenEvent
from service.errors import RequestError, report_failure
from service.forecasting.admission import DeadlineAdmission, PredictedFinish
from service.forecasting.costing import Cost
from service.forecasting.prediction import LatencyPredictor, Quote
from service.runtime.model_queue import ModelQueue
from service.telemetry.metrics import RequestRecord
from service.telemetry.recorder import RecordedRequest
from service.telemetry.tracing import RequestTrace

# The most events that a slow client gets at once: they must fit into a message.
_MAX_EVENTS_TAKEN = 128
# A consumer that does not stream is woken once so many events wait: waking costs more than an event, and decoding the
# whole of a long answer at its end would block the event loop.
_EVENTS_GATHERED = 32


def request_key(caller: Caller, request_id: str) -> str:
    """The engine's id of a request: unique among all tenants, as ids are printable."""
    return f"{request_id}\t{caller.tenant}" if caller.tenant else request_id


def owned_request(caller: Caller, request: GenerationRequest) -> GenerationRequest:
    """The request as the engine gets it: with its caller's tenant, weight and priority, and its key as id."""
    key = request_key(caller, request.request_id)
    priority = request.priority or caller.default_priority
    return replace(request, request_id=key, tenant=caller.tenant, weight=caller.weight, priority=priority)


def held_by(request: GenerationRequest) -> tuple[int, int]:
    """The most sequences and tokens that a request holds."""
    return request.num_rows, request.num_rows * (request.num_prompt_tokens + request.stopping.max_tokens)


@dataclass(slots=True, eq=False)
class Tokens:
    """One output's tokens so far: how many were reported, when the first was, and when the last."""

    first_time: float
    last_time: float
    count: int = 1


@dataclass(slots=True, eq=False)
class Stream:
    """One request and what is known of it.

    Attributes:
        request_id: the client's, unique among its tenant's; `key` is the engine's.
        queue: of its model.
        trace: receives its begin and end.
        caller: whose request it is.
        request: None until it is handed to the engine, like all that follows but `is_streamed`.
        engine: the identity of the engine that has it; only events of that engine are its own.
        is_streamed: whether its events are wanted as they come.
        held: sequences and tokens that count against its caller's quota.
        admission: what judged its deadline, by `predicted`.
        predictor: what knew `quote` of its future when it was handed over.
        cost: what it has cost, once it is over; None if it had no first token.
    """

    request_id: str
    queue: ModelQueue
    trace: RequestTrace
    caller: Caller
    request: GenerationRequest | None = None
    engine: EngineHandle | None = None
    is_streamed: bool = True
    held: tuple[int, int] | None = None
    events: list[TokenEvent] = field(default_factory=list)
    waiter: asyncio.Future[None] | None = None
    admission: DeadlineAdmission | None = None
    predicted: PredictedFinish | None = None
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
    def _reports_each_token(self) -> bool:
        """Whether tokens are reported when they are chosen; those of beam search come all at once at its end."""
        return self.request is not None and self.request.beam_search is None

    def count_token(self, event: TokenEvent, now: float) -> None:
        """Counts an event's token and observes the time since the one before or, for the first, since arrival."""
        if self.predictor is not None:
            self.predictor.token_sent(self.key)
        tokens, metrics = self.tokens.get(event.output_index), self.queue.metrics
        if tokens is not None:
            if self._reports_each_token:
                metrics.next_token(now - tokens.last_time)
            tokens.count += 1
            tokens.last_time = now
            return
        if not self.tokens and self.request is not None:
            metrics.prompt_done(self.request.num_prompt_tokens, event.num_cached_tokens)
            metrics.first_token(now - self.request.arrival_time)
        self.tokens[event.output_index] = Tokens(now, now)

    def output_ended(self, index: int, reason: FinishReason, now: float) -> None:
        """Notes why an output ended; the predictor learns how long it was."""
        self.reasons[index] = reason
        tokens = self.tokens.get(index)
        if tokens is not None and self.request is not None and self.predictor is not None:
            self.predictor.output_ended(self.request, now, tokens.count, reason)

    def push(self, event: TokenEvent) -> None:
        """Adds an event; wakes the consumer if it wants single events, enough wait, or this is the last."""
        self.events.append(event)
        is_wanted = self.is_streamed or event.is_terminal or len(self.events) >= _EVENTS_GATHERED
        if is_wanted and self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def take(self) -> tuple[TokenEvent, ...]:
        """The oldest waiting events, at least one; for one consumer."""
        if not self.events:
            # One future a wait: an `asyncio.Event` makes that too, and keeps a queue of its own besides.
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        events = tuple(self.events[:_MAX_EVENTS_TAKEN])
        del self.events[:_MAX_EVENTS_TAKEN]
        if self.events:
            # Beams end with a great many tokens at once: decoding all of them must not block the loop.
            await asyncio.sleep(0)
        return events

    def settle(self, event: TokenEvent) -> None:
        """Sets `cost` from the terminal event, if it can be counted."""
        if self.request is None or self.predictor is None or self.quote is None:
            return
        num_tokens = {index: tokens.count for index, tokens in self.tokens.items()}
        try:
            self.cost = self.predictor.settle(self.quote, self.request, num_tokens, event)
        except Exception as cause:  # accounting must not end requests that run
            report_failure(f"what request {self.request_id} cost could not be counted", cause)

    def ended(self, event: TokenEvent, outcome: str) -> RequestRecord | None:
        """The request for the metrics once it is over; None if it was never handed to the engine."""
        if event.timings is None or self.request is None:
            return None
        outputs = self.tokens.values()
        num_later = sum(tokens.count - 1 for tokens in outputs)
        later_seconds = sum(tokens.last_time - tokens.first_time for tokens in outputs)
        return RequestRecord(
            outcome=outcome,
            timings=event.timings,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_generated_tokens=sum(tokens.count for tokens in outputs),
            num_longest_tokens=max((tokens.count for tokens in outputs), default=0),
            seconds_per_token=later_seconds / num_later if num_later and self._reports_each_token else None,
        )

    def recorded(self) -> RecordedRequest | None:
        """The open request for the recorder; None while the engine does not have it."""
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
            num_generated_tokens=sum(tokens.count for tokens in self.tokens.values()),
        )


class Place:
    """A place in a model's queue, taken before any work is done for a request; leaving the `with` block aborts it."""

    def __init__(
        self,
        stream: Stream,
        submit: Callable[[GenerationRequest], None],
        leave: Callable[[BaseException | None], None],
    ) -> None:
        self._stream = stream
        self._submit = submit
        self._leave = leave

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(error)

    def submit(self, request: GenerationRequest, *, is_streamed: bool = True) -> None:
        """Hands the request to the engine, once.

        Args:
            request: with the model and id of this place.
            is_streamed: whether events are wanted as they come; if not, they come in batches, the terminal one at once.

        Raises:
            DeadlineUnreachable: when it is predicted to miss its deadline.
            RequestError: when the engine has ended since the place was taken.
        """
        self._stream.is_streamed = is_streamed
        self._submit(request)

    @property
    def cost(self) -> Cost | None:
        """What the request has cost, once it is over; None if it had no first token."""
        return self._stream.cost

    async def events(self) -> AsyncGenerator[tuple[TokenEvent, ...], None]:
        """Yields the waiting events, one or more at a time; the terminal event is the last.

        A slow consumer gets several events in one batch. Events of one output are in order; those of several come as
        the engine reported them.

        Raises:
            RequestError: when the engine refused or failed the request; the events before that were yielded.
        """
        is_over = False
        while not is_over:
            events = await self._stream.take()
            error = events[-1].error
            if error is not None:
                if len(events) > 1:
                    yield events[:-1]
                raise error if isinstance(error, RequestError) else report_failure("a request failed", error)
            yield events
            is_over = events[-1].is_terminal
