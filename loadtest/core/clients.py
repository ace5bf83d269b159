"""asyncio clients of `onward.v1` and of the Open Inference Protocol, with one interface."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import grpc

from loadtest.core import wire
from loadtest.core.access import Access
from loadtest.core.records import Piece
from loadtest.core.wire import Facts, Sampling, TextModel
from loadtest.core.workload import Prompt
from onward.inference import open_inference_pb2 as oip
from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from onward.v1 import generation_pb2 as pb
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


class Call(Protocol):
    """A request in flight, streamed or unary."""

    def cancel(self) -> bool:
        """Cancels it."""
        ...

    def pieces(self) -> AsyncGenerator[Piece, None]:
        """Its messages, decoded.

        Raises:
            grpc.aio.AioRpcError: if it ends with a status other than OK.
            asyncio.CancelledError: if it was cancelled.
        """
        ...


class Client(Protocol):
    """A client of one model."""

    facts: Facts

    def ask(self, prompt: Prompt, request_id: str, timeout_seconds: float | None) -> Call:
        """Sends a request with this deadline; None for no deadline."""
        ...

    def known_prompt_tokens(self, prompt: Prompt) -> int | None:
        """The number of prompt tokens; None if only the server can count them."""
        ...


@dataclass(frozen=True, slots=True)
class _OnwardCall:
    call: grpc.aio.UnaryStreamCall[pb.GenerateStreamRequest, pb.GenerateStreamResponse]

    def cancel(self) -> bool:
        return self.call.cancel()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        async for event in self.call:
            yield wire.onward_piece(event)


@dataclass(frozen=True, slots=True)
class _WholeCall(Generic[Answer]):
    """A unary call: its answer is one piece."""

    call: grpc.aio.UnaryUnaryCall[Any, Answer]
    read: Callable[[Answer], Piece]

    def cancel(self) -> bool:
        return self.call.cancel()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        yield self.read(await self.call)


class OnwardClient:
    """Calls `onward.v1`, streaming or unary, round-robin over its channels."""

    def __init__(
        self,
        channels: Sequence[grpc.aio.Channel],
        facts: Facts,
        sampling: Sampling,
        access: Access,
        *,
        is_streamed: bool,
    ) -> None:
        self.facts = facts
        self._sampling = sampling
        self._metadata = access.metadata
        self._is_streamed = is_streamed
        stubs: list[GenerationServiceAsyncStub] = [GenerationServiceStub(channel) for channel in channels]
        self._stubs = itertools.cycle(stubs)

    def ask(self, prompt: Prompt, request_id: str, timeout_seconds: float | None) -> Call:
        """See `Client.ask`."""
        model, sampling, stub = self.facts.model, self._sampling, next(self._stubs)
        if not self._is_streamed:
            whole = wire.onward_whole_request(prompt, request_id, model, sampling)
            return _WholeCall(
                stub.Generate(whole, timeout=timeout_seconds, metadata=self._metadata), wire.onward_answer
            )
        request = wire.onward_request(prompt, request_id, model, sampling)
        return _OnwardCall(stub.GenerateStream(request, timeout=timeout_seconds, metadata=self._metadata))

    def known_prompt_tokens(self, prompt: Prompt) -> int | None:
        """The number of ids sent; the server's usage overrides it."""
        return len(prompt.token_ids)


@dataclass(frozen=True, slots=True)
class _OpenInferenceCall:
    call: grpc.aio.StreamStreamCall[oip.ModelInferRequest, oip.ModelStreamInferResponse]
    text_output: str

    def cancel(self) -> bool:
        return self.call.cancel()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        has_answered = is_end_marked = False
        async for message in self.call:
            has_answered = True
            is_end_marked |= wire.has_final_flag(message)
            yield wire.oip_piece(message, self.text_output)
        # Some servers never mark the last message: the end of the stream does.
        if has_answered and not is_end_marked:
            yield Piece(0, is_last=True)


class OpenInferenceClient:
    """Calls the Open Inference Protocol, one stream per request or unary, round-robin over its channels."""

    def __init__(
        self,
        channels: Sequence[grpc.aio.Channel],
        model: TextModel,
        sampling: Sampling,
        access: Access,
        *,
        is_streamed: bool,
    ) -> None:
        self.facts = Facts(model.name, len(wire.WORDS))
        self._model = model
        self._sampling = sampling
        self._metadata = access.metadata
        self._is_streamed = is_streamed
        stubs: list[GRPCInferenceServiceAsyncStub] = [GRPCInferenceServiceStub(channel) for channel in channels]
        self._stubs = itertools.cycle(stubs)

    def ask(self, prompt: Prompt, request_id: str, timeout_seconds: float | None) -> Call:
        """See `Client.ask`."""
        model, stub = self._model, next(self._stubs)
        request = model.request(prompt, request_id, self._sampling, is_streamed=self._is_streamed)
        if not self._is_streamed:
            read = partial(wire.oip_answer, text_output=model.text_output)
            return _WholeCall(stub.ModelInfer(request, timeout=timeout_seconds, metadata=self._metadata), read)
        metadata = (*wire.REAL_STATUSES, *self._metadata)
        call = stub.ModelStreamInfer(iter([request]), timeout=timeout_seconds, metadata=metadata)
        return _OpenInferenceCall(call, model.text_output)

    def known_prompt_tokens(self, prompt: Prompt) -> int | None:  # noqa: ARG002
        """None: the server tokenizes the text."""
        return None


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
        client: Client
        if protocol is WireProtocol.ONWARD:
            answer = await ModelServiceStub(channels[0]).GetModel(
                models.GetModelRequest(model=model), timeout=_FACTS_TIMEOUT_SECONDS, metadata=access.metadata
            )
            client = OnwardClient(channels, wire.onward_facts(answer), sampling, access, is_streamed=is_streamed)
        else:
            metadata = await GRPCInferenceServiceStub(channels[0]).ModelMetadata(
                oip.ModelMetadataRequest(name=model), timeout=_FACTS_TIMEOUT_SECONDS, metadata=access.metadata
            )
            text_model = TextModel.from_metadata(metadata)
            client = OpenInferenceClient(channels, text_model, sampling, access, is_streamed=is_streamed)
        # Connection set-up must not count as latency of the first requests.
        for channel in channels[1:]:
            await _connected(channel)
        yield client


async def _connected(channel: grpc.aio.Channel) -> None:
    async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
        await channel.channel_ready()
