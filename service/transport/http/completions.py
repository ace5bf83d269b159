"""Runs chat and completions: a body to a call of `service.generator`, its parts to an answer or a stream.

A stream's status line waits for the first token or the first error, so that a refusal has a status of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, nullcontext
from dataclasses import replace
from string import printable
from typing import Any, TypeVar
from urllib.parse import quote

from service.access import current_caller
from service.config import RequestLimits
from service.errors import AnswerTooLarge
from service.generator import Accepted, GenerateCall, Generator, Part, Piece, within
from service.process.text_pool import LONG_BYTES, FairQueue, TextPool, lower_priority
from service.repository.entry import Models
from service.repository.models import Conversation
from service.transport import codec
from service.transport.http.answers import Answer, ChatAnswer, CompletionAnswer
from service.transport.http.bodies import parse
from service.transport.http.calls import Request
from service.transport.http.fields import renaming
from service.transport.http.requests import Asked, decode_chat, decode_completion
from service.transport.http.responses import ResponseAnswer, decode_response
from service.transport.http.tools import extra_bytes

DONE = b"data: [DONE]\n\n"
# Bytes of JSON for a token, and for each token with its log-probability: what an answer takes to be encoded.
_TOKEN_BYTES, _LOGPROB_BYTES = 8, 100
_Result = TypeVar("_Result")


class Completions:
    """Answers chat, completions and responses.

    Args:
        generator: runs them.
        models: what is served.
        limits: what one request may ask.
        texts: parses long bodies.
        max_answer_bytes: largest answer that is not streamed.
    """

    def __init__(
        self, generator: Generator, models: Models, limits: RequestLimits, texts: TextPool, max_answer_bytes: int
    ) -> None:
        self._generator = generator
        self._models = models
        self._limits = limits
        self._texts = texts
        # Long answers wait here for one thread: what was computed is never refused because other texts have all places.
        encoder = ThreadPoolExecutor(1, thread_name_prefix="answers", initializer=lower_priority)
        self._encoding = FairQueue(encoder, 1)
        self._max_answer_bytes = max_answer_bytes

    async def chat(self, request: Request) -> bytes:
        """`/v1/chat/completions`."""
        names = {"prompt.chat": "messages", "response.logprobs": "top_logprobs"}
        return await self._run(request, decode_chat, ChatAnswer, "messages", names)

    async def complete(self, request: Request) -> bytes:
        """`/v1/completions`."""
        return await self._run(request, decode_completion, CompletionAnswer, "prompt", {})

    async def respond(self, request: Request) -> bytes:
        """`/v1/responses`."""
        names = {
            "stopping.max_tokens": "max_output_tokens",
            "response.logprobs": "top_logprobs",
            "prompt.chat": "input",
        }
        return await self._run(request, decode_response, ResponseAnswer, "input", names)

    async def _run(
        self,
        request: Request,
        decode: Callable[[Mapping[str, Any]], Asked],
        kind: type[Answer],
        prompt: str,
        names: Mapping[str, str],
    ) -> bytes:
        num_bytes = len(request.body)
        async with within(request.deadline):
            values = await self.parsed(request)
        if values.get("max_completion_tokens") is not None:
            names = {**names, "stopping.max_tokens": "max_completion_tokens"}
        with self._generator.counting_refusal(_model(values)):
            async with within(request.deadline):
                asked, call = await self.off_loop(num_bytes, self._decoded, values, decode, prompt, names)
        del values
        locating = nullcontext() if asked.tools is None else asked.tools.locating()
        with renaming(prompt, {**names, **asked.names}), locating:
            answer = kind(asked, call.sampling, self._models.resolve)
            parts = self._generator.run(call, request.time_remaining(), is_streamed=asked.is_streamed)
            async with aclosing(parts):
                if asked.is_streamed:
                    request.exchange.failed = answer.failed
                    async for part in parts:
                        if isinstance(part, Accepted):
                            accept(request, answer, part)
                        for chunk in answer.chunks(part):
                            await request.exchange.event(answer.encode(chunk), chunk.get("type", ""))
                        if answer.num_repeated_bytes > self._max_answer_bytes:
                            raise AnswerTooLarge(answer.num_repeated_bytes, self._max_answer_bytes, "ask for less")
                    return DONE
                collected: list[Part] = []
                least_bytes = 0
                async for part in parts:
                    if isinstance(part, Accepted):
                        accept(request, answer, part)
                    collected.append(part)
                    if isinstance(part, Piece):
                        least_bytes += answer.least_bytes(part)
                        if least_bytes > self._max_answer_bytes:
                            raise AnswerTooLarge(least_bytes, self._max_answer_bytes)
        return await self.encoded(collected, lambda: answer.encode(answer.whole(collected)))

    async def parsed(self, request: Request) -> dict[str, Any]:
        """The body's JSON object."""
        return await self.off_loop(len(request.body), parse, request.take_body())

    async def encoded(self, parts: list[Part], build: Callable[[], bytes]) -> bytes:
        """An answer built of these parts, off the event loop where they are many.

        Raises:
            AnswerTooLarge: when it exceeds the largest.
        """
        pieces = [part for part in parts if isinstance(part, Piece)]
        num_bytes = sum(len(each.text) + _TOKEN_BYTES * len(each.token_ids) for each in pieces)
        num_bytes += sum(_LOGPROB_BYTES * (1 + len(own.top_token_ids)) for each in pieces for own in each.logprobs)
        if num_bytes <= LONG_BYTES:
            data = build()
        else:
            data = await self._encoding.run(current_caller().tenant, num_bytes, build)
        if len(data) > self._max_answer_bytes:
            raise AnswerTooLarge(len(data), self._max_answer_bytes)
        return data

    def _decoded(
        self,
        values: Mapping[str, Any],
        decode: Callable[[Mapping[str, Any]], Asked],
        prompt: str,
        names: Mapping[str, str],
    ) -> tuple[Asked, GenerateCall]:
        with renaming(prompt, names):
            asked = decode(values)
        with renaming(prompt, {**names, **asked.names}):
            has_choice = asked.tools is not None or asked.thinking is not None
            chat = self._models.resolve(_model(values)).chat if has_choice else None
            if asked.tools is not None:
                asked.tools.constrain(asked.request, chat)
            call = codec.decode_generate(asked.request, self._limits, self._models.defaults(_model(values)))
            if asked.thinking is not None and chat is not None:
                asked.thinking.check(chat)
            if asked.messages:
                tools = () if asked.tools is None else asked.tools.for_template
                size = extra_bytes(asked.tools, asked.messages)
                call = replace(call, prompt=Conversation(asked.messages, tools, size, asked.enable_thinking))
            return asked, call

    async def off_loop(self, num_bytes: int, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Runs work on so long a body or answer: short work here, long work on a thread."""
        if num_bytes <= LONG_BYTES:
            return work(*arguments)
        return await self._texts.run(current_caller().tenant, num_bytes, work, *arguments)


def _model(values: Mapping[str, Any]) -> str:
    model = values.get("model")
    return model if isinstance(model, str) else ""


def accept(request: Request, answer: Answer, part: Accepted) -> None:
    """The request is admitted: its answer has its names. A header is ASCII: other characters are percent-encoded."""
    answer.accepted(part)
    request.exchange.headers.append(("x-request-id", quote(part.request_id, safe=printable)))
