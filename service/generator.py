"""One request's way, free of any transport: a call in; accepted, pieces of its outputs and an outcome out, or scores.

    resolve the model ─> take a place ─> tokenise ─> run ─> detokenise

Tokenising happens on an executor, since a long prompt takes milliseconds; detokenising on the event loop, token by
token, except for requests with stop strings, whose text the engine has already made. Knows neither protobuf nor gRPC.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

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
    TokenEvent,
    TokenLogprobs,
)
from service.errors import DeadlineExceeded, NotServing, RequestCancelled, RequestError, UnknownModel
from service.forecasting.costing import Cost
from service.forecasting.prediction import Estimate
from service.process.text_pool import TextPool
from service.repository.entry import Models
from service.repository.models import Prompt, ServedModel, text_size
from service.runtime.async_engine import AsyncEngine
from service.scoring import Score, ScoreCall, ScoreTask, make_task


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A request as far as it can be judged without its model.

    `model` may be empty, and so may `target_prefix`; `prompt` is text, raw ids or a conversation.
    """

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


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is valid and has its place. Comes first."""

    request_id: str
    model: str


@dataclass(frozen=True, slots=True)
class PromptScores:
    """How probable the prompt's next tokens are, for requests that ask. All come before the first piece."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What became ready of one output since its last piece.

    `logprobs` has an entry per token where the request asked for them.
    """

    output_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """One output is over, after its pieces. `score` is a beam search's."""

    output_index: int
    finish_reason: FinishReason
    matched_stop: str | int | None
    score: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The request is over with all its outputs, whose tokens are summed. Comes last. `cost` is there if asked for."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    timings: RequestTimings
    cost: Cost | None = None


Part = Accepted | PromptScores | Piece | Finished | Outcome


def _unwanted(request: GenerationRequest) -> frozenset[FinishReason]:
    """How an output ends that is not wanted any more: the call ends with an error."""
    cancelled = frozenset({FinishReason.CANCELLED})
    return cancelled if request.partial_on_deadline else cancelled | {FinishReason.DEADLINE}


class Generator:
    """Runs calls on the served models.

    Args:
        engine: where requests run.
        models: what is served.
        texts: where prompts are tokenized.
    """

    def __init__(self, engine: AsyncEngine, models: Models, texts: TextPool) -> None:
        self._engine = engine
        self._models = models
        self._texts = texts

    async def run(
        self, call: GenerateCall, time_remaining: float | None, *, is_streamed: bool = True
    ) -> AsyncGenerator[Part, None]:
        """One `Accepted`, any `PromptScores`, the outputs' `Piece` and `Finished`, one `Outcome`.

        Pieces of several outputs alternate; each output has one `Finished`, behind its last piece. Leaving early aborts
        the request.

        `time_remaining` is the transport's own deadline in seconds from now; the call's timeout counts if it is less.
        Where it is not to be streamed, pieces are few and long.

        Raises:
            RequestError: whatever ended the request other than success.
        """
        arrival = time.monotonic()
        model = self._models.resolve(call.model)
        self._require_serving(model.name, call.request_id)
        with self._engine.admit(model.name, call.request_id) as place:
            request = await self._prepare(call, model, arrival, time_remaining)
            # What was tokenised for one model means nothing to another that has taken its place meanwhile.
            while (current := self._models.resolve(model.name)) is not model:
                model = current
                request = await self._prepare(call, model, arrival, time_remaining)
            # Before `Accepted` is sent: a client that is slow to read it must not be late in the queue.
            place.submit(request, is_streamed=is_streamed)
            yield Accepted(request.request_id, request.model)
            outputs = _Outputs(request, model.output_tokenizer.decode)
            async with aclosing(place.events()) as batches:
                async for events in batches:
                    for part in outputs.take(events):
                        yield part
            outcome = outputs.outcome()
            yield replace(outcome, cost=place.cost) if call.wants_cost else outcome

    async def estimate(self, call: GenerateCall) -> Estimate:
        """What a call would cost and how long it would take, were it run now; nothing is computed.

        It holds a place meanwhile, as tokenizing takes memory and time.

        Raises:
            RequestError: what `run` would raise before it runs.
        """
        model = self._models.resolve(call.model)
        self._models.require_serving(model.name)
        with self._engine.place(model.name, call.request_id):
            request = await self._prepare(call, model, time.monotonic(), None)
            while (current := self._models.resolve(model.name)) is not model:
                model = current
                request = await self._prepare(call, model, time.monotonic(), None)
            return await self._engine.estimate(request)

    async def score(self, call: ScoreCall, time_remaining: float | None) -> Score:
        """How probable a given text is. It waits for its turn as `run` does; cancelling it frees what it holds.

        Raises:
            RequestError: whatever kept it from its end.
        """
        arrival = time.monotonic()
        model = self._models.resolve(call.model)
        self._require_serving(model.name, call.request_id)
        with self._engine.admit(model.name, call.request_id) as place:
            task, request = await self._prepare_score(call, model, arrival, time_remaining)
            while (current := self._models.resolve(model.name)) is not model:
                model = current
                task, request = await self._prepare_score(call, model, arrival, time_remaining)
            place.submit(request, is_streamed=False)
            seen: list[TokenEvent] = []
            async with aclosing(place.events()) as batches:
                async for events in batches:
                    seen += events
            logprobs = [each.logprob for event in seen for each in event.prompt_logprobs]
            reasons = [event.finish_reason for event in seen if event.finish_reason is not None]
            _require_complete(request, reasons, f"{len(logprobs)} scores", seen[-1].timings)
            return Score(task.scored_token_ids, tuple(logprobs), task.num_bytes)

    def refused(self, model_name: str, error: RequestError) -> None:
        """Counts a request that was refused before it became a call, if it names a model that is served."""
        try:
            model = self._models.resolve(model_name)
        except UnknownModel:
            return
        self._engine.refused(model.name, error)

    def _require_serving(self, model_name: str, request_id: str) -> None:
        try:
            self._models.require_serving(model_name)
        except NotServing as error:
            self._engine.refused(model_name, error, request_id)
            raise

    async def _prepare(
        self, call: GenerateCall, model: ServedModel, arrival: float, time_remaining: float | None
    ) -> GenerationRequest:
        model.check_stop_token_ids(call.stopping.stop_token_ids)
        num_bytes = text_size(call.prompt) + text_size(call.target_prefix)
        tenant = current_caller().tenant
        token_ids, prefix_token_ids, arrays = await self._texts.run(tenant, num_bytes, _encode, model, call)
        seconds = [limit for limit in (call.timeout_seconds, time_remaining) if limit is not None]
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
    """What may take milliseconds of a request's preparation: tokens of prompt and prefix, arrays of its rules."""
    model.check_logits_rules(call.sampling, call.stopping)
    token_ids, prefix_token_ids = model.encode_prompt(call.prompt), model.encode_target_prefix(call.target_prefix)
    return token_ids, prefix_token_ids, make_sampling_arrays(call.sampling)


def _require_complete(
    request: GenerationRequest,
    reasons: Collection[FinishReason | None],
    progress: str,
    timings: RequestTimings | None,
) -> None:
    """Refuses an end that is not the end of every output.

    Args:
        request: whose.
        reasons: why each output ended, None for one that did not.
        progress: how far it came, for the message.
        timings: its own.

    Raises:
        DeadlineExceeded: when its time was up, or would have been, and it does not take what there is.
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
    """A request's events, turned into the parts of its outputs."""

    def __init__(self, request: GenerationRequest, decode: Decode) -> None:
        self._request = request
        self._unwanted = _unwanted(request)
        self._outputs = [_Output(request, index, decode) for index in range(request.num_outputs)]
        self._last: TokenEvent | None = None

    def take(self, events: Sequence[TokenEvent]) -> Iterator[PromptScores | Piece | Finished]:
        """What a batch of events brings: one piece at most for each output, however many tokens of it there are."""
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
        """How it ended, after the last event.

        Raises:
            DeadlineExceeded: when its time was up.
            RequestCancelled: when it was aborted.
        """
        num_tokens = sum(output.num_tokens for output in self._outputs)
        # A search may find fewer hypotheses than it was asked for: then no event was of the others.
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
    """One output as it grows."""

    def __init__(self, request: GenerationRequest, index: int, decode: Decode) -> None:
        self._index = index
        self._text = TextStream(decode, prefix_token_ids=request.target_prefix_token_ids)
        self._engine_makes_text = bool(request.stopping.stop)
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def is_found(self) -> bool:
        """Whether any event was of it."""
        return self.num_tokens > 0 or self.finish_reason is not None

    def take(self, events: Sequence[TokenEvent]) -> Piece:
        """What its next events bring, in order."""
        text = "".join(event.text or "" if self._engine_makes_text else self._decode(event) for event in events)
        token_ids = tuple(event.token_id for event in events if event.token_id is not None)
        logprobs = tuple(event.logprobs for event in events if event.logprobs is not None)
        self.num_tokens += len(token_ids)
        self.finish_reason = events[-1].finish_reason or self.finish_reason
        return Piece(self._index, text, token_ids, logprobs)

    def _decode(self, event: TokenEvent) -> str:
        text = "" if event.token_id is None or event.is_mute else self._text.push(event.token_id)
        return text if event.finish_reason is None else text + self._text.flush()
