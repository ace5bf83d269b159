"""The path of one request, free of any transport: a call in; events of its outputs and an outcome, or scores, out.

    resolve the model ─> admit ─> tokenize ─> run ─> detokenize

An executor tokenizes, since a long prompt takes milliseconds. The event loop detokenizes, token by token; the engine
does so itself for requests with stop strings. Knows neither protobuf nor gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from service.access import current_caller
from service.engine.logits import make_sampling_arrays
from service.engine.sampling.text import Decode, TextStream
from service.engine.types import (
    BeamSearchParams,
    FinishReason,
    GenerationRequest,
    PromptScoring,
    RequestTimings,
    SamplingArrays,
    SamplingParams,
    StoppingParams,
    StructuredOutput,
    TokenEvent,
    TokenLogprobs,
)
from service.errors import DeadlineExceeded, NotServing, RequestCancelled, RequestError, UnknownModel
from service.forecasting.costing import Cost
from service.forecasting.prediction import Estimate
from service.process.text_pool import TextPool
from service.repository.entry import Models
from service.repository.grammars import Grammars
from service.repository.models import Prompt, ServedModel, text_size
from service.runtime.async_engine import AsyncEngine
from service.runtime.stream import Place
from service.scoring import Score, ScoreCall, ScoreTask, make_task

_Prepared = TypeVar("_Prepared")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A request, checked as far as that needs no model. `model` and `target_prefix` may be empty."""

    request_id: str
    model: str
    prompt: Prompt
    target_prefix: str
    sampling: SamplingParams
    stopping: StoppingParams
    beam_search: BeamSearchParams | None
    logprobs: int | None
    prompt_logprobs: int | None
    wants_cost: bool
    priority: int
    timeout_seconds: float | None
    partial_on_deadline: bool
    structured_output: StructuredOutput | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is valid and admitted. Comes first."""

    request_id: str
    model: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt's next tokens, for requests that ask. All come before the first `Piece`."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """New text and tokens of one output. `logprobs` has an entry per token if the request asked for them."""

    output_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """One output is over, after its last `Piece`. `score` is a beam search's."""

    output_index: int
    finish_reason: FinishReason
    matched_stop: str | int | None
    score: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The request is over; token counts are sums over its outputs. Comes last. `cost` is set if asked for."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    timings: RequestTimings
    cost: Cost | None = None


Part = Accepted | PromptScores | Piece | Finished | Outcome


class Generator:
    """Runs calls on the served models; `texts` tokenizes prompts, `grammars` compiles structured output."""

    def __init__(self, engine: AsyncEngine, models: Models, texts: TextPool, grammars: Grammars) -> None:
        self._engine = engine
        self._models = models
        self._texts = texts
        self._grammars = grammars

    async def run(
        self, call: GenerateCall, time_remaining: float | None, *, is_streamed: bool = True
    ) -> AsyncGenerator[Part, None]:
        """One `Accepted`, any `PromptScores`, the outputs' `Piece` and `Finished`, one `Outcome`.

        Leaving early aborts the request.

        Args:
            call: the request.
            time_remaining: the transport's deadline in seconds from now; the call's timeout counts if it is less.
            is_streamed: if not, pieces are few and long.

        Raises:
            RequestError: whatever ended the request other than success.
        """
        arrival = time.monotonic()
        with self._admitted(call.model, call.request_id) as (served, place):
            model, request = await self._with_current(
                served, lambda model: self._prepare(call, model, arrival, time_remaining)
            )
            # Before `Accepted` is sent: a client that is slow to read it must not be late in the queue.
            place.submit(request, is_streamed=is_streamed)
            yield Accepted(request.request_id, request.model, request.num_prompt_tokens)
            outputs = _Outputs(request, model.output_tokenizer.decode)
            async with aclosing(place.events()) as batches:
                async for events in batches:
                    for part in outputs.take(events):
                        yield part
            outcome = outputs.outcome()
            yield replace(outcome, cost=place.cost) if call.wants_cost else outcome

    async def estimate(self, call: GenerateCall) -> Estimate:
        """What a call would cost and how long it would take now. Raises what `run` would before it runs.

        It holds a place meanwhile, as tokenizing takes memory and time.
        """
        model = self._models.resolve(call.model)
        self._models.require_serving(model.name)
        with self._engine.place(model.name, call.request_id):
            _, request = await self._with_current(
                model, lambda model: self._prepare(call, model, time.monotonic(), None)
            )
            return await self._engine.estimate(request)

    async def score(self, call: ScoreCall, time_remaining: float | None) -> Score:
        """How probable a given text is. Queues as `run` does; cancelling it frees what it holds.

        Raises:
            RequestError: whatever kept it from its end.
        """
        arrival = time.monotonic()
        with self._admitted(call.model, call.request_id) as (model, place):
            _, (task, request) = await self._with_current(
                model, lambda model: self._prepare_score(call, model, arrival, time_remaining)
            )
            place.submit(request, is_streamed=False)
            seen: list[TokenEvent] = []
            async with aclosing(place.events()) as batches:
                async for events in batches:
                    seen += events
            logprobs = [each.logprob for event in seen for each in event.prompt_logprobs]
            reasons = [event.finish_reason for event in seen if event.finish_reason is not None]
            _require_complete(request, reasons, f"{len(logprobs)} scores", seen[-1].timings)
            return Score(task.scored_token_ids, tuple(logprobs), task.num_bytes)

    @contextmanager
    def counting_refusal(self, model_name: str) -> Iterator[None]:
        """Counts a `RequestError` of the block as a refusal by the model, if it is served."""
        try:
            yield
        except RequestError as error:
            with suppress(UnknownModel):
                self._engine.refused(self._models.resolve(model_name).name, error)
            raise

    @contextmanager
    def _admitted(self, model_name: str, request_id: str) -> Iterator[tuple[ServedModel, Place]]:
        """A context for a request that has a place in its model's queue.

        Raises:
            RequestError: when the model does not serve, or has no place.
        """
        model = self._models.resolve(model_name)
        try:
            self._models.require_serving(model.name)
        except NotServing as error:
            self._engine.refused(model.name, error, request_id)
            raise
        with self._engine.admit(model.name, request_id) as place:
            yield model, place

    async def _with_current(
        self, model: ServedModel, prepare: Callable[[ServedModel], Awaitable[_Prepared]]
    ) -> tuple[ServedModel, _Prepared]:
        """Prepares a request; again if another model took the name meanwhile, to which its tokens mean nothing."""
        while True:
            prepared = await prepare(model)
            if (current := self._models.resolve(model.name)) is model:
                return model, prepared
            model = current

    async def _prepare(
        self, call: GenerateCall, model: ServedModel, arrival: float, time_remaining: float | None
    ) -> GenerationRequest:
        model.check_stop_token_ids(call.stopping.stop_token_ids)
        num_bytes = text_size(call.prompt) + text_size(call.target_prefix)
        tenant, asked = current_caller().tenant, call.structured_output
        seconds = [limit for limit in (call.timeout_seconds, time_remaining) if limit is not None]
        # A partial answer is the engine's to give, also one without tokens.
        async with within(arrival + min(seconds) if seconds and not call.partial_on_deadline else None):
            token_ids, prefix_token_ids, arrays = await self._texts.run(tenant, num_bytes, _encode, model, call)
            grammar = None if asked is None else await self._grammars.compile(tenant, model.vocabulary, asked)
        return GenerationRequest(
            request_id=call.request_id,
            model=model.name,
            prompt_token_ids=token_ids,
            target_prefix_token_ids=prefix_token_ids,
            sampling=call.sampling,
            stopping=call.stopping,
            beam_search=call.beam_search,
            logprobs=call.logprobs,
            scoring=None if call.prompt_logprobs is None else PromptScoring(num_top=call.prompt_logprobs),
            priority=call.priority,
            deadline=arrival + min(seconds) if seconds else None,
            partial_on_deadline=call.partial_on_deadline,
            arrival_time=arrival,
            sampling_arrays=arrays,
            structured_output=asked,
            grammar=grammar,
        )

    async def _prepare_score(
        self, call: ScoreCall, model: ServedModel, arrival: float, time_remaining: float | None
    ) -> tuple[ScoreTask, GenerationRequest]:
        num_bytes = text_size(call.prompt) + text_size(call.target)
        tenant = current_caller().tenant
        task = await self._texts.run(tenant, num_bytes, make_task, model, call.prompt, call.target)
        request = GenerationRequest(
            request_id=call.request_id,
            model=model.name,
            prompt_token_ids=task.prompt_token_ids,
            target_prefix_token_ids=task.target_prefix_token_ids,
            stopping=StoppingParams(max_tokens=0),
            scoring=PromptScoring(start=task.start),
            deadline=None if time_remaining is None else arrival + time_remaining,
            arrival_time=arrival,
        )
        return task, request


def _encode(model: ServedModel, call: GenerateCall) -> tuple[tuple[int, ...], tuple[int, ...], SamplingArrays | None]:
    """The slow part of a request's preparation: tokens of prompt and prefix, arrays of its sampling rules."""
    model.check_logits_rules(call.sampling, call.stopping)
    token_ids, prefix_token_ids = model.encode_prompt(call.prompt), model.encode_target_prefix(call.target_prefix)
    return token_ids, prefix_token_ids, make_sampling_arrays(call.sampling)


def _unwanted(request: GenerationRequest) -> frozenset[FinishReason]:
    """The finish reasons of an output that end the call with an error."""
    cancelled = frozenset({FinishReason.CANCELLED})
    return cancelled if request.partial_on_deadline else cancelled | {FinishReason.DEADLINE}


@asynccontextmanager
async def within(deadline: float | None) -> AsyncIterator[None]:
    """Ends what precedes a request at its deadline, of `time.monotonic`; from then on the engine does.

    Raises:
        DeadlineExceeded: when the deadline passes in the block.
    """
    limit = asyncio.timeout(None if deadline is None else deadline - time.monotonic())
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineExceeded("the deadline passed before the request was ready for the queue") from error


def _require_complete(
    request: GenerationRequest,
    reasons: Collection[FinishReason | None],
    progress: str,
    timings: RequestTimings | None,
) -> None:
    """Checks that every output ended well; `progress` says how far the request came.

    Raises:
        DeadlineExceeded: when its time was up, or could not suffice, without `partial_on_deadline`.
        RequestCancelled: when it was aborted.
    """
    if not reasons or None in reasons:
        raise ValueError(f"request {request.request_id} ended before its outputs did: {', '.join(map(str, reasons))}")
    unwanted = _unwanted(request).intersection(reasons)
    if FinishReason.DEADLINE in unwanted:
        left = 0.0 if request.deadline is None or timings is None else request.deadline - timings.finished_time
        if left > 0:
            raise DeadlineExceeded(f"waited until the deadline, {left:.3f} s away, could not be met any more")
        raise DeadlineExceeded(f"the deadline passed after {progress}")
    if unwanted:
        raise RequestCancelled("the request was cancelled")


class _Outputs:
    """Turns a request's token events into parts."""

    def __init__(self, request: GenerationRequest, decode: Decode) -> None:
        self._request = request
        self._unwanted = _unwanted(request)
        self._outputs = [_Output(request, index, decode) for index in range(request.num_outputs)]
        self._last: TokenEvent | None = None

    def take(self, events: Sequence[TokenEvent]) -> Iterator[PromptScores | Piece | Finished]:
        """The parts of a batch of events; at most one `Piece` per output."""
        self._last = events[-1]
        by_output: dict[int, list[TokenEvent]] = {}
        for event in events:
            if event.prompt_logprobs:
                yield PromptScores(event.prompt_logprobs)
            by_output.setdefault(event.output_index, []).append(event)
        for index, own in by_output.items():
            piece = self._outputs[index].take(own)
            if piece.text or piece.token_ids:
                yield piece
            last = own[-1]
            if last.finish_reason is not None and last.finish_reason not in self._unwanted:
                yield Finished(index, last.finish_reason, last.matched_stop, last.score)

    def outcome(self) -> Outcome:
        """How the request ended, after its last event.

        Raises:
            RequestError: as `_require_complete` does.
        """
        num_tokens = sum(output.num_tokens for output in self._outputs)
        # A beam search may find fewer hypotheses than asked for; the others have no events.
        found = [output for output in self._outputs if not self._request.beam_search or output.is_found]
        reasons = [output.finish_reason for output in found]
        timings = None if self._last is None else self._last.timings
        _require_complete(self._request, reasons, f"{num_tokens} tokens", timings)
        if self._last is None or timings is None:
            raise ValueError(f"request {self._request.request_id} ended without a terminal event")
        return Outcome(
            num_prompt_tokens=self._request.num_prompt_tokens,
            num_cached_tokens=self._last.num_cached_tokens,
            num_generated_tokens=num_tokens,
            timings=timings,
        )


class _Output:
    """The state of one output."""

    def __init__(self, request: GenerationRequest, index: int, decode: Decode) -> None:
        self._index = index
        self._text = TextStream(decode, prefix_token_ids=request.target_prefix_token_ids)
        self._engine_makes_text = bool(request.stopping.stop)
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def is_found(self) -> bool:
        """Whether it had any event."""
        return self.num_tokens > 0 or self.finish_reason is not None

    def take(self, events: Sequence[TokenEvent]) -> Piece:
        """The new text and tokens of its next events."""
        text = "".join(event.text or "" if self._engine_makes_text else self._decode(event) for event in events)
        token_ids = tuple(event.token_id for event in events if event.token_id is not None)
        logprobs = tuple(event.logprobs for event in events if event.logprobs is not None)
        self.num_tokens += len(token_ids)
        self.finish_reason = events[-1].finish_reason or self.finish_reason
        return Piece(self._index, text, token_ids, logprobs)

    def _decode(self, event: TokenEvent) -> str:
        text = "" if event.token_id is None or event.is_mute else self._text.push(event.token_id)
        return text if event.finish_reason is None else text + self._text.flush()
