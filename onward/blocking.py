"""The blocking client. Threads may share it; each stream is read by one thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

import onward.requests as requests  # not `from onward`, which would import all of `onward.client`
from onward.answers import Chunk
from onward.errors import call_error
from onward.methods import Call, Methods
from onward.requests import GenerateOptions, Prompt
from onward.retries import Attempts
from onward.streams import StreamState
from onward.v1 import generation_pb2 as pb

_Result = TypeVar("_Result")


class Client(Methods):
    """The blocking client. Its arguments, methods and errors are those of `Methods`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and cancels every call in flight."""
        self._channel.close()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Generates and yields chunks as they are ready. Nothing is sent until the stream is read."""
        return Stream(self._generation.GenerateStream, requests.stream(prompt, options), self._begin(options))

    def _open(self) -> grpc.Channel:
        return self._connection.channel(*self._retries.channel_options)

    def _run(self, call: Call[_Result]) -> _Result:
        attempts = self._begin(call.options, is_repeatable=call.is_repeatable)
        while True:
            try:
                timeout = requests.carry_deadline(call.request, attempts.left_seconds)
                return call.read(call.method(call.request, timeout=timeout, metadata=attempts.metadata))
            except grpc.RpcError as error:
                pause = attempts.pause_seconds(call_error(error, requests.request_id(call.request)))
            time.sleep(pause)


class _Cancellable(Protocol):
    def cancel(self) -> bool: ...


class Stream(StreamState, Iterator[Chunk]):
    """A generation in progress: an iterator of chunks, with the attributes of `StreamFacts`.

    Leaving its `with` block, `close`, or dropping the last reference to it (as leaving a `for` loop over an unnamed
    stream does) cancels the call. The server then frees what it held at the model's next step.

    Raises, while it is read:
        CallError: of the class of the status; the chunks before it are valid.
        IncompleteStream: the stream ended without its summary.
    """

    def __init__(
        self,
        method: grpc.UnaryStreamMultiCallable[pb.GenerateStreamRequest, pb.GenerateStreamResponse],
        request: pb.GenerateStreamRequest,
        attempts: Attempts,
    ) -> None:
        super().__init__(request, attempts)
        self._method = method
        self._call: _Cancellable | None = None
        self._events: Iterator[pb.GenerateStreamResponse] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while not self._is_over:
            event = self._next_event()
            if event is None:
                self._end()
            elif (chunk := self._take(event)) is not None:
                return chunk
        raise StopIteration

    def close(self) -> None:
        """Cancels the call. A thread that waits for the next chunk gets the end of the iterator."""
        self._is_over = True
        if self._call is not None:
            self._call.cancel()

    def _next_event(self) -> pb.GenerateStreamResponse | None:
        """The next event; None after the last one, or if the stream was closed."""
        while not self._was_closed():
            try:
                if self._call is None:
                    timeout = requests.carry_deadline(self._request, self._attempts.left_seconds)
                    call = self._method(self._request, timeout=timeout, metadata=self._attempts.metadata)
                    self._call, self._events = call, iter(call)
                return next(self._events, None)
            except grpc.RpcError as error:
                if self._was_closed():
                    return None
                self._call = None
                pause = self._pause_seconds(call_error(error, self.request_id))
            time.sleep(pause)
        return None
