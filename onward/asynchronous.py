"""The asyncio client. It belongs to the event loop that it was made in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio

import onward.requests as requests  # not `from onward`, which would import all of `onward.client`
from onward.answers import Chunk
from onward.errors import call_error
from onward.methods import Call, Methods
from onward.requests import GenerateOptions, Prompt
from onward.retries import Attempts
from onward.streams import StreamState
from onward.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_Result = TypeVar("_Result")


class AsyncClient(Methods):
    """The asyncio client. Its arguments, methods and errors are those of `Methods`; the methods are awaited."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection and cancels every call in flight."""
        await self._channel.close()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Generates and yields chunks as they are ready. Not awaited: nothing is sent until the stream is read."""
        generation = cast("GenerationServiceAsyncStub", self._generation)
        return AsyncStream(generation.GenerateStream, requests.stream(prompt, options), self._begin(options))

    def _open(self) -> grpc.aio.Channel:
        return self._connection.aio_channel(*self._retries.channel_options)

    async def _run(self, call: Call[_Result]) -> _Result:
        attempts = self._begin(call.options, is_repeatable=call.is_repeatable)
        while True:
            try:
                timeout = requests.carry_deadline(call.request, attempts.left_seconds)
                return call.read(await call.method(call.request, timeout=timeout, metadata=attempts.metadata))
            except grpc.RpcError as error:
                pause = attempts.pause_seconds(call_error(error, requests.request_id(call.request)))
            await asyncio.sleep(pause)


class AsyncStream(StreamState, AsyncIterator[Chunk]):
    """A generation in progress: an asynchronous iterator of chunks, with the attributes of `StreamFacts`.

    Leaving its `async with` block, `aclose`, canceling the task that reads it, or dropping the last reference to it
    (as leaving an `async for` loop over an unnamed stream does) cancels the call. The server then frees what it held at
    the model's next step.

    Raises, while it is read:
        CallError: of the class of the status; the chunks before it are valid.
        IncompleteStream: the stream ended without its summary.
    """

    def __init__(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[pb.GenerateStreamRequest, pb.GenerateStreamResponse],
        request: pb.GenerateStreamRequest,
        attempts: Attempts,
    ) -> None:
        super().__init__(request, attempts)
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
        """Cancels the call. A task that waits for the next chunk gets the end of the iterator."""
        self._is_over = True
        if self._call is not None:
            self._call.cancel()

    async def _next_event(self) -> pb.GenerateStreamResponse | None:
        """The next event; None after the last one, or if the stream was closed."""
        while not self._was_closed():
            try:
                if self._call is None:
                    timeout = requests.carry_deadline(self._request, self._attempts.left_seconds)
                    self._call = self._method(self._request, timeout=timeout, metadata=self._attempts.metadata)
                # Not through the call's iterator: their reference cycle would keep a dropped stream alive.
                event = await self._call.read()
                return event if isinstance(event, pb.GenerateStreamResponse) else None
            except asyncio.CancelledError:
                was_closed = self._was_closed()
                self._is_over = True
                # gRPC raises this as well when the stream was closed and the task was not canceled.
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
