"""One request's way, free of any transport: a call in; accepted, pieces of text and an outcome out.

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
    RequestTimings,
    SamplingParams,
    StoppingParams,
    TokenEvent,
    TokenLogprobs,
)
from service.errors import DeadlineExceeded, NotServing, RequestCancelled, RequestError, UnknownModel
from service.models import Models, ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A request as far as it can be judged without its model. `model` may be empty; `prompt` is text or raw ids."""

    request_id: str
    model: str
    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    logprobs: int | None
    timeout_seconds: float | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is valid and has its place. Comes first."""

    request_id: str
    model: str


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
    ) -> AsyncGenerator[Accepted | Piece | Outcome, None]:
        """One `Accepted`, any number of `Piece`, one `Outcome`; leaving early aborts the request.

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
                    piece = output.take(events)
                    if piece.text or piece.token_ids:
                        yield piece
            yield output.outcome()

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
        token_ids = await loop.run_in_executor(self._executor, model.encode_prompt, call.prompt)
        seconds = [limit for limit in (call.timeout_seconds, time_remaining) if limit is not None]
        return GenerationRequest(
            request_id=call.request_id,
            model=model.name,
            prompt_token_ids=token_ids,
            sampling=call.sampling,
            stopping=call.stopping,
            logprobs=call.logprobs,
            deadline=arrival + min(seconds) if seconds else None,
            arrival_time=arrival,
        )


class _Output:
    """A request's events, turned into pieces."""

    def __init__(self, request: GenerationRequest, decode: Decode) -> None:
        self._request = request
        self._text = TextStream(decode)
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
        last = self._last
        if last is None or last.finish_reason is None or last.timings is None:
            raise ValueError(f"request {self._request.request_id} ended without a terminal event")
        if last.finish_reason is FinishReason.DEADLINE:
            raise DeadlineExceeded(f"the deadline passed after {self._num_tokens} tokens")
        if last.finish_reason is FinishReason.CANCELLED:
            raise RequestCancelled("the request was cancelled")
        return Outcome(
            finish_reason=last.finish_reason,
            matched_stop=last.matched_stop,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_generated_tokens=self._num_tokens,
            timings=last.timings,
        )

    def _decode(self, event: TokenEvent) -> str:
        text = "" if event.token_id is None or event.is_mute else self._text.push(event.token_id)
        return text + self._text.flush() if event.is_terminal else text
