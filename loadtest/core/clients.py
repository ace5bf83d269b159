"""asyncio clients of `onward.v1` and of the Open Inference Protocol, with one interface."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc

from loadtest.core import wire
from loadtest.core.access import Access
from loadtest.core.records import Piece
from loadtest.core.wire import Facts, Sampling, TextModel
from loadtest.core.workload import Prompt
from onward.inference import open_inference_pb2 as oip
from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from onward.v1 import model_pb2 as models
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub

if TYPE_CHECKING:
    from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceAsyncStub
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

Answer = TypeVar("Answer")
_FACTS_TIMEOUT_SECONDS = 10.0
_CONNECT_TIMEOUT_SECONDS = 10.0
PLAINTEXT = Access()


class WireProtocol(StrEnum):
    """The protocol of the server."""

    ONWARD = "onward"
    OIP = "oip"


@dataclass(frozen=True, slots=True)
class Call:
    """A request in flight, streamed or unary.

    Iterating `pieces` raises grpc.aio.AioRpcError if the call ends with a status other than OK, and
    asyncio.CancelledError if it was cancelled.
    """

    pieces: AsyncGenerator[Piece, None]
    cancel: Callable[[], bool]


Start: TypeAlias = Callable[[Prompt, str, float | None], Call]
"""Sends a prompt under a request id with a deadline in seconds; None for no deadline."""


class Client:
    """A client of one model, round-robin over its channels; `counts_prompts` if prompts are sent as token ids."""

    def __init__(self, facts: Facts, starts: Sequence[Start], *, counts_prompts: bool) -> None:
        self.facts = facts
        self._starts = itertools.cycle(starts)
        self._counts_prompts = counts_prompts

    def ask(self, prompt: Prompt, request_id: str, timeout_seconds: float | None) -> Call:
        """Sends a request with this deadline; None for no deadline."""
        return next(self._starts)(prompt, request_id, timeout_seconds)

    def known_prompt_tokens(self, prompt: Prompt) -> int | None:
        """The number of prompt tokens; None if only the server can count them."""
        return len(prompt.token_ids) if self._counts_prompts else None


def _onward(channel: grpc.aio.Channel, model: str, sampling: Sampling, access: Access, *, is_streamed: bool) -> Start:
    stub: GenerationServiceAsyncStub = GenerationServiceStub(channel)

    def stream(prompt: Prompt, request_id: str, timeout: float | None) -> Call:
        request = wire.onward_request(prompt, request_id, model, sampling)
        call = stub.GenerateStream(request, timeout=timeout, metadata=access.metadata)
        return Call((wire.onward_piece(event) async for event in call), call.cancel)

    def ask(prompt: Prompt, request_id: str, timeout: float | None) -> Call:
        request = wire.onward_whole_request(prompt, request_id, model, sampling)
        call = stub.Generate(request, timeout=timeout, metadata=access.metadata)
        return Call(_read_answer(call, wire.onward_answer), call.cancel)

    return stream if is_streamed else ask


def _open_inference(
    channel: grpc.aio.Channel, model: TextModel, sampling: Sampling, access: Access, *, is_streamed: bool
) -> Start:
    """One stream for each request, or unary calls."""
    stub: GRPCInferenceServiceAsyncStub = GRPCInferenceServiceStub(channel)

    def stream(prompt: Prompt, request_id: str, timeout: float | None) -> Call:
        request = model.request(prompt, request_id, sampling)
        metadata = (*wire.REAL_STATUSES, *access.metadata)
        call = stub.ModelStreamInfer(iter([request]), timeout=timeout, metadata=metadata)
        return Call(_read_open_inference(call, model.text_output), call.cancel)

    def ask(prompt: Prompt, request_id: str, timeout: float | None) -> Call:
        request = model.request(prompt, request_id, sampling, is_streamed=False)
        call = stub.ModelInfer(request, timeout=timeout, metadata=access.metadata)
        return Call(_read_answer(call, partial(wire.oip_answer, text_output=model.text_output)), call.cancel)

    return stream if is_streamed else ask


async def _read_answer(
    call: grpc.aio.UnaryUnaryCall[Any, Answer], read: Callable[[Answer], Piece]
) -> AsyncGenerator[Piece, None]:
    yield read(await call)


async def _read_open_inference(
    call: grpc.aio.StreamStreamCall[oip.ModelInferRequest, oip.ModelStreamInferResponse], text_output: str
) -> AsyncGenerator[Piece, None]:
    has_answered = is_end_marked = False
    async for message in call:
        has_answered = True
        is_end_marked |= wire.has_final_flag(message)
        yield wire.oip_piece(message, text_output)
    # Some servers never mark the last message: the end of the stream does.
    if has_answered and not is_end_marked:
        yield Piece(0, is_last=True)


@contextlib.asynccontextmanager
async def connect(
    protocol: WireProtocol,
    target: str,
    model: str,
    sampling: Sampling,
    access: Access = PLAINTEXT,
    *,
    connections: int = 1,
    is_streamed: bool = True,
) -> AsyncIterator[Client]:
    """Connects to "host:port" and reads the model's facts.

    `model` may be empty if the server speaks `onward.v1` and serves one model. A unary answer is one message: its
    first token is its last.

    Raises:
        grpc.aio.AioRpcError: if the server is unreachable or lacks the model.
        ValueError: if the model is not a text model.
    """
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(access.open_async(target)) for _ in range(connections)]
        if protocol is WireProtocol.ONWARD:
            answer = await ModelServiceStub(channels[0]).GetModel(
                models.GetModelRequest(model=model), timeout=_FACTS_TIMEOUT_SECONDS, metadata=access.metadata
            )
            facts = wire.onward_facts(answer)
            starts = [_onward(each, facts.model, sampling, access, is_streamed=is_streamed) for each in channels]
        else:
            metadata = await GRPCInferenceServiceStub(channels[0]).ModelMetadata(
                oip.ModelMetadataRequest(name=model), timeout=_FACTS_TIMEOUT_SECONDS, metadata=access.metadata
            )
            text_model = TextModel.from_metadata(metadata)
            facts = Facts(text_model.name, len(wire.WORDS))
            starts = [_open_inference(each, text_model, sampling, access, is_streamed=is_streamed) for each in channels]
        # Connection set-up must not count as latency of the first requests.
        for channel in channels[1:]:
            async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
                await channel.channel_ready()
        yield Client(facts, starts, counts_prompts=protocol is WireProtocol.ONWARD)
