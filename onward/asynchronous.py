"""The client for asyncio: what `onward.blocking` does, without blocking. Belongs to the loop that it was made in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message

import onward.requests as requests  # not `from onward`, which would ask the names of `onward.client`
from onward.answers import Chunk, Generation, generation
from onward.calls import DEFAULT_TIMEOUT_SECONDS, CallDefaults, StreamTries, Tries
from onward.connection import Connection
from onward.errors import call_error
from onward.requests import CallOptions, GenerateOptions, Prompt, Target
from onward.retries import DEFAULT_RETRIES, RetryPolicy
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from onward.v1.model_pb2_grpc import ModelServiceAsyncStub

_Request = TypeVar("_Request", bound=Message)
_Answer = TypeVar("_Answer")


class AsyncClient:
    """Asks a server. Its methods are `Client`'s, awaited, with the same arguments, answers and errors.

    Args:
        connection: where to, and how; an address alone is in the clear and without a key.
        timeout_seconds: for calls that name none; None for ever.
        retries: how often calls are tried again, and how patiently.
    """

    def __init__(
        self,
        connection: Connection | str,
        *,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        retries: RetryPolicy = DEFAULT_RETRIES,
    ) -> None:
        self._defaults = CallDefaults.of(connection, timeout_seconds, retries)
        self._channel = self._defaults.aio_channel()
        self._generation: GenerationServiceAsyncStub = GenerationServiceStub(self._channel)
        self._models: ModelServiceAsyncStub = ModelServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection, and with it every call that still runs."""
        await self._channel.close()

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """See `Client.generate`."""
        return generation(await self._call(self._generation.Generate, requests.generate(prompt, options), options))

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """See `Client.stream`. Not awaited: nothing is sent until the stream is read."""
        return AsyncStream(
            self._generation.GenerateStream, requests.stream(prompt, options), self._defaults.begin(options)
        )

    async def score(
        self, prompt: Target, target: Target | None = None, *, model: str = "", **options: Unpack[CallOptions]
    ) -> pb.ScoreResponse:
        """See `Client.score`."""
        return await self._call(self._generation.Score, requests.score(prompt, target, model), options)

    async def estimate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> pb.EstimateResponse:
        """See `Client.estimate`."""
        request = pb.EstimateRequest(request=requests.generate(prompt, options))
        return await self._call(self._generation.Estimate, request, options)

    async def explain(
        self,
        prompt: Target,
        target: Target | None = None,
        *,
        model: str = "",
        layers: Sequence[int] = (),
        heads: Sequence[int] = (),
        kinds: Sequence[pb.AttentionKind.ValueType] = (),
        max_tokens: int | None = None,
        **options: Unpack[CallOptions],
    ) -> pb.ExplainResponse:
        """See `Client.explain`."""
        request = requests.explain(
            prompt, target, model=model, layers=layers, heads=heads, kinds=kinds, max_tokens=max_tokens
        )
        return await self._call(self._generation.Explain, request, options)

    async def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        side: pb.TextSide.ValueType = pb.TEXT_SIDE_UNSPECIFIED,
        add_special_tokens: bool | None = None,
        **options: Unpack[CallOptions],
    ) -> pb.TokenizeResponse:
        """See `Client.tokenize`."""
        request = pb.TokenizeRequest(model=model, text=text, side=side, add_special_tokens=add_special_tokens)
        return await self._call(self._generation.Tokenize, request, options)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        side: pb.TextSide.ValueType = pb.TEXT_SIDE_UNSPECIFIED,
        **options: Unpack[CallOptions],
    ) -> str:
        """See `Client.detokenize`."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, side=side)
        return (await self._call(self._generation.Detokenize, request, options)).text

    async def models(self, **options: Unpack[CallOptions]) -> Sequence[model_pb2.ListModelsResponse.Model]:
        """See `Client.models`."""
        return tuple((await self._call(self._models.ListModels, model_pb2.ListModelsRequest(), options)).models)

    async def model(self, name: str = "", **options: Unpack[CallOptions]) -> model_pb2.GetModelResponse:
        """See `Client.model`."""
        return await self._call(self._models.GetModel, model_pb2.GetModelRequest(model=name), options)

    async def verify_parity(self, name: str = "", **options: Unpack[CallOptions]) -> model_pb2.VerifyParityResponse:
        """See `Client.verify_parity`."""
        request = model_pb2.VerifyParityRequest(model=name)
        return await self._call(self._models.VerifyParity, request, options, is_repeatable=False)

    async def load_model(self, name: str, **options: Unpack[CallOptions]) -> None:
        """See `Client.load_model`."""
        await self._call(self._models.LoadModel, model_pb2.LoadModelRequest(model=name), options, is_repeatable=False)

    async def unload_model(self, name: str, **options: Unpack[CallOptions]) -> None:
        """See `Client.unload_model`."""
        request = model_pb2.UnloadModelRequest(model=name)
        await self._call(self._models.UnloadModel, request, options, is_repeatable=False)

    async def reload_model(self, name: str, **options: Unpack[CallOptions]) -> None:
        """See `Client.reload_model`."""
        request = model_pb2.ReloadModelRequest(model=name)
        await self._call(self._models.ReloadModel, request, options, is_repeatable=False)

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer],
        request: _Request,
        options: CallOptions,
        *,
        is_repeatable: bool = True,
    ) -> _Answer:
        tries = self._defaults.begin(options, is_repeatable=is_repeatable)
        while True:
            try:
                return await method(request, timeout=tries.next_timeout(request), metadata=tries.metadata)
            except grpc.RpcError as error:
                pause = tries.attempts.pause_seconds(call_error(error, requests.request_id(request)))
            await asyncio.sleep(pause)


class AsyncStream(StreamTries, AsyncIterator[Chunk]):
    """A generation under way: an asynchronous iterator of chunks, and what `StreamFacts` has of the whole.

    Leaving its `async with` block, `aclose`, or cancelling the task that reads it gives up what still runs, and the
    server frees what it held at the model's next step. So does dropping the last reference to it, which an `async for`
    loop over a stream without a name does when it is left.

    Raises, while it is read:
        CallError: of the class that belongs to the status; chunks that came before are good.
        IncompleteStream: when it ends before its summary.
    """

    def __init__(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[pb.GenerateStreamRequest, pb.GenerateStreamResponse],
        request: pb.GenerateStreamRequest,
        tries: Tries,
    ) -> None:
        super().__init__(request, tries)
        self._method = method
        self._call: grpc.aio.UnaryStreamCall[pb.GenerateStreamRequest, pb.GenerateStreamResponse] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._is_over:
            event = await self._next_event()
            if event is None:
                self._end()
            elif (chunk := self._take(event)) is not None:
                return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Gives up what still runs; nothing more comes. Another task that waits for the next chunk gets the end."""
        self._is_over = True
        if self._call is not None:
            self._call.cancel()

    async def _next_event(self) -> pb.GenerateStreamResponse | None:
        """The next event; None after the last, or once the stream is closed."""
        while not self._was_closed():
            try:
                if self._call is None:
                    timeout = self._tries.next_timeout(self._request)
                    self._call = self._method(self._request, timeout=timeout, metadata=self._tries.metadata)
                # Not by its own iterator: the two would hold each other, and nobody would notice that they are dropped.
                event = await self._call.read()
                return event if isinstance(event, pb.GenerateStreamResponse) else None
            except asyncio.CancelledError:
                was_closed = self._was_closed()
                self._is_over = True
                # gRPC says so too when it is the stream that was closed, and not the task that was cancelled.
                task = asyncio.current_task()
                if not was_closed or task is None or task.cancelling():
                    raise
                return None
            except grpc.RpcError as error:
                if self._was_closed():
                    return None
                self._call = None
                pause = self._pause_seconds(call_error(error, self.request_id))
            await asyncio.sleep(pause)
        return None
