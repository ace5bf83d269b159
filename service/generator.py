"""One request's way, free of any transport: a call in; accepted, pieces of text and an outcome out, or scores.

    resolve the model ─> take a place ─> tokenise ─> run ─> detokenise

Tokenising happens on an executor, since a long prompt takes milliseconds; detokenising on the event loop, token by
token, except for requests with stop strings, whose text the engine has already made. Knows neither protobuf nor gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass

from service.async_engine import AsyncEngine
from service.engine.text import Decode, TextStream
from service.engine.types import (
    FinishReason,
    GenerationRequest,
    PromptScoring,
    RequestTimings,
    SamplingParams,
    StoppingParams,
    TokenEvent,
    TokenLogprobs,
)
from service.errors import DeadlineExceeded, NotServing, RequestCancelled, RequestError, UnknownModel
from service.models import Models, ServedModel
from service.scoring import Score, ScoreCall, make_task


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A request as far as it can be judged without its model.

    `model` may be empty, and so may `target_prefix`; `prompt` is text or raw ids.
    """

    request_id: str
    model: str
    prompt: str | tuple[int, ...]
    target_prefix: str
    sampling: SamplingParams
    stopping: StoppingParams
    logprobs: int | None
    prompt_logprobs: int | None
    timeout_seconds: float | None


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
    """What became ready since the last piece. `logprobs` has an entry per token where the request asked for them."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the request ended. Comes last."""

    finish_reason: FinishReason
    matched_stop: str | int | None
    num_prompt_tokens: int
    num_generated_tokens: int
    timings: RequestTimings


class Generator:
    """Runs calls on the served models.

    Args:
        engine: where requests run.
        models: what is served.
        executor: where prompts are tokenised.
    """

    def __init__(self, engine: AsyncEngine, models: Models, executor: Executor) -> None:
        self._engine = engine
        self._models = models
        self._executor = executor

    async def run(
        self, call: GenerateCall, time_remaining: float | None
    ) -> AsyncGenerator[Accepted | PromptScores | Piece | Outcome, None]:
        """One `Accepted`, any number of `PromptScores` and `Piece`, one `Outcome`; leaving early aborts the request.

        `time_remaining` is the transport's own deadline in seconds from now; the call's timeout counts if it is less.

        Raises:
            RequestError: whatever ended the request other than success.
        """
        arrival = time.monotonic()
        model = self._models.resolve(call.model)
        self._require_serving(model.name, call.request_id)
        with self._engine.admit(model.name, call.request_id) as place:
            request = await self._prepare(call, model, arrival, time_remaining)
            # Before `Accepted` is told: a client that is slow to read it must not be late in the queue.
            place.submit(request)
            yield Accepted(request.request_id, request.model)
            output = _Output(request, model.output_tokenizer.decode)
            async with aclosing(place.events()) as batches:
                async for events in batches:
                    for event in events:
                        if event.prompt_logprobs:
                            yield PromptScores(event.prompt_logprobs)
                    piece = output.take(events)
                    if piece.text or piece.token_ids:
                        yield piece
            yield output.outcome()

    async def score(self, call: ScoreCall, time_remaining: float | None) -> Score:
        """How probable a given text is. It waits for its turn as `run` does; cancelling it frees what it holds.

        Raises:
            RequestError: whatever kept it from its end.
        """
        arrival = time.monotonic()
        model = self._models.resolve(call.model)
        self._require_serving(model.name, call.request_id)
        with self._engine.admit(model.name, call.request_id) as place:
            loop = asyncio.get_running_loop()
            task = await loop.run_in_executor(self._executor, make_task, model, call.prompt, call.target)
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
            place.submit(request)
            logprobs: list[float] = []
            last = None
            async with aclosing(place.events()) as batches:
                async for events in batches:
                    logprobs += [each.logprob for event in events for each in event.prompt_logprobs]
                    last = events[-1]
            _require_complete(request.request_id, last, f"{len(logprobs)} scores")
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
        loop = asyncio.get_running_loop()
        token_ids, prefix_token_ids = await loop.run_in_executor(self._executor, _encode, model, call)
        seconds = [limit for limit in (call.timeout_seconds, time_remaining) if limit is not None]
        return GenerationRequest(
            request_id=call.request_id,
            model=model.name,
            prompt_token_ids=token_ids,
            target_prefix_token_ids=prefix_token_ids,
            sampling=call.sampling,
            stopping=call.stopping,
            logprobs=call.logprobs,
            scoring=None if call.prompt_logprobs is None else PromptScoring(num_top=call.prompt_logprobs),
            deadline=arrival + min(seconds) if seconds else None,
            arrival_time=arrival,
        )


def _encode(model: ServedModel, call: GenerateCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What may take milliseconds of a request's preparation: the tokens of its prompt and of its target prefix."""
    model.check_logits_rules(call.sampling, call.stopping)
    return model.encode_prompt(call.prompt), model.encode_target_prefix(call.target_prefix)


def _require_complete(
    request_id: str, last: TokenEvent | None, progress: str
) -> tuple[TokenEvent, FinishReason, RequestTimings]:
    """The last event and what it must have, unless the request came to no good end."""
    if last is None or last.finish_reason is None or last.timings is None:
        raise ValueError(f"request {request_id} ended without a terminal event")
    if last.finish_reason is FinishReason.DEADLINE:
        raise DeadlineExceeded(f"the deadline passed after {progress}")
    if last.finish_reason is FinishReason.CANCELLED:
        raise RequestCancelled("the request was cancelled")
    return last, last.finish_reason, last.timings


class _Output:
    """A request's events, turned into pieces."""

    def __init__(self, request: GenerationRequest, decode: Decode) -> None:
        self._request = request
        self._text = TextStream(decode, prefix_token_ids=request.target_prefix_token_ids)
        self._engine_makes_text = bool(request.stopping.stop)
        self._num_tokens = 0
        self._last: TokenEvent | None = None

    def take(self, events: Sequence[TokenEvent]) -> Piece:
        """What a batch of events brings."""
        text = "".join(event.text or "" if self._engine_makes_text else self._decode(event) for event in events)
        token_ids = tuple(event.token_id for event in events if event.token_id is not None)
        self._num_tokens += len(token_ids)
        self._last = events[-1]
        return Piece(text, token_ids, tuple(event.logprobs for event in events if event.logprobs is not None))

    def outcome(self) -> Outcome:
        """How it ended, after the last event.

        Raises:
            DeadlineExceeded: when its time was up.
            RequestCancelled: when it was aborted.
        """
        last, reason, timings = _require_complete(self._request.request_id, self._last, f"{self._num_tokens} tokens")
        return Outcome(
            finish_reason=reason,
            matched_stop=last.matched_stop,
            num_prompt_tokens=self._request.num_prompt_tokens,
            num_generated_tokens=self._num_tokens,
            timings=timings,
        )

    def _decode(self, event: TokenEvent) -> str:
        text = "" if event.token_id is None or event.is_mute else self._text.push(event.token_id)
        return text + self._text.flush() if event.is_terminal else text
