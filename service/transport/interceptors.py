"""Wraps every call: admits it, maps errors to statuses, and counts, traces and logs how it ended.

A cancelled call ends with `CancelledError` where it awaits; `context.cancelled()` is still False then. That passes
through, and closes a stream's handler where it is suspended in `yield`: its own `finally` frees what it holds. A call
is admitted before its request is read. Of health only `List` is wrapped here, since it names the models; `open_methods`
wraps the other methods of health, and reflection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from prometheus_client import Counter

from service.access import Access, Allowance
from service.errors import AnswerTooLarge, ClientStalled
from service.telemetry.tracing import NoTracer, Tracer
from service.transport.admission import OpenCalls, admitted
from service.transport.call_log import CallLog
from service.transport.flooding import FloodGuard
from service.transport.open_methods import OpenMethods
from service.transport.places import current_place, stall_after
from service.transport.receiving import Check, Receiver
from service.transport.sending import Context, abort, abort_stalled, send
from service.transport.status import Status, cancelled_code, forget_frames, to_status
from service.transport.streams import OpenStreams
from service.transport.wire_limits import parse

UnaryHandler = Callable[[Any, Context], Awaitable[Any]]
StreamHandler = Callable[[Any, Context], AsyncGenerator[Any, None]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all calls.

    Args:
        services: full names of the services, or of single methods, whose calls are wrapped here.
        handled: counts ended calls by method and status code.
        access: decides on calls.
        max_message_bytes: largest message, either way.
        max_stall_seconds: how long a call waits for its client to read, or to send its request.
        tracer: gets each call's begin and end.
        check: raises for a request that holds too much, given its method's path and its bytes; yields between steps.
        open_calls: counts calls until their handlers have ended.
    """

    def __init__(
        self,
        services: Collection[str],
        handled: Counter,
        access: Access,
        *,
        max_message_bytes: int,
        max_stall_seconds: float,
        tracer: Tracer | None = None,
        check: Callable[[str, bytes], Iterator[None]] = lambda *_: iter(()),
        open_calls: OpenCalls | None = None,
    ) -> None:
        self._services = frozenset(services)
        self._handled = handled
        self._access = access
        self._max_message_bytes = max_message_bytes
        self._max_stall_seconds = max_stall_seconds
        # One for all: a connection may bring messages of every kind.
        self._guard = FloodGuard(max_message_bytes)
        self._receiver = Receiver(max_message_bytes, max_stall_seconds, self._guard)
        self._streams = OpenStreams(max_message_bytes, self._guard)
        self._open_methods = OpenMethods(max_message_bytes, max_stall_seconds, self._guard)
        self._tracer = tracer or NoTracer()
        self._check = check
        self._log = CallLog()
        self._open_calls = open_calls or OpenCalls()

    @property
    def num_open(self) -> int:
        """Running handlers of wrapped calls."""
        return self._open_calls.num_open

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of a call; without one, gRPC answers UNIMPLEMENTED."""
        handler: Any = await continuation(handler_call_details)
        path = handler_call_details.method.lstrip("/")
        service = path.partition("/")[0]
        if handler is None:
            return None
        if self._services.isdisjoint((service, path)):
            return self._open_methods.wrap(path, handler)
        # gRPC would answer malformed requests with UNKNOWN, uncounted, and count an answer that is too large as OK.
        codec = _Codec(
            partial(self._check, path),
            handler.request_deserializer,
            handler.response_serializer,
            self._max_message_bytes,
        )
        # gRPC reads a unary request before it calls the handler, so to gRPC every method's requests are a stream.
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(self._wrap_exchange(handler.stream_stream, codec, path))
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._wrap_stream(handler.unary_stream, codec, path))
        return grpc.stream_unary_rpc_method_handler(self._wrap_unary(handler.unary_unary, codec, path))

    def _wrap_unary(self, handler: UnaryHandler, codec: _Codec, path: str) -> Any:
        async def call(_messages: AsyncIterator[bytes], context: Context) -> bytes:
            async with self._watch(path, context):
                with self._admitted(path, context) as (_, caller):
                    answer = codec.serialize(await handler(await self._request(codec, caller, context), context))
                    if (place := current_place()) is not None:
                        await place.answer(len(answer), self._max_stall_seconds)
            return answer

        return call

    def _wrap_stream(self, handler: StreamHandler, codec: _Codec, path: str) -> Any:
        async def call(_messages: AsyncIterator[bytes], context: Context) -> None:
            async with self._watch(path, context):
                with self._admitted(path, context) as (_, caller):
                    request = self._request(codec, caller, context)
                    async with aclosing(handler(await request, context)) as responses:
                        async for response in responses:
                            await send(codec.serialize(response), context, self._max_stall_seconds)

        return call

    def _wrap_exchange(self, handler: StreamHandler, codec: _Codec, path: str) -> Any:
        async def call(messages: AsyncIterator[bytes], context: Context) -> None:
            async with self._watch(path, context, has_many=True):
                with self._admitted(path, context) as (allowance, caller):
                    async with self._streams.open(context.peer(), caller) as stream:
                        requests = stream.requests(messages, allowance, codec.check, codec.parse)
                        async with aclosing(handler(requests, context)) as responses:
                            async for response in responses:
                                with stream.working():
                                    await send(codec.serialize(response), context, self._max_stall_seconds)

        return call

    async def _request(self, codec: _Codec, caller: str, context: Context) -> Any:
        """The one request of a call. The call must not bind it to a name, which would hold it until the call ends."""
        return codec.parse(await self._receiver.message(context, caller, codec.check))

    def _admitted(self, path: str, context: Context) -> AbstractContextManager[tuple[Allowance, str]]:
        return admitted(self._access, _method(path), context)

    @asynccontextmanager
    async def _watch(self, path: str, context: Context, *, has_many: bool = False) -> AsyncIterator[None]:
        method = _method(path)
        trace = self._tracer.call(path, context, has_many=has_many)
        started = time.monotonic()
        # Read now: when the call ends late, a few milliseconds may still be left.
        timeout = context.time_remaining()
        status, is_stalled = Status(grpc.StatusCode.OK, ""), False
        try:
            with self._open_calls.opened():
                try:
                    yield
                except asyncio.CancelledError:
                    status = Status(cancelled_code(time.monotonic() - started, timeout), "")
                    raise
                except (GeneratorExit, KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # a panic of an extension module is no Exception
                    status, is_stalled = to_status(error), isinstance(error, ClientStalled)
                    forget_frames(error)
                finally:
                    # Before the status is sent: a client that has its answer finds it counted.
                    self._handled.labels(method, status.code.name).inc()
                    trace.ended(status.code.name, status.message)
                    self._log.ended(method, status.code.name, time.monotonic() - started)
        finally:
            self._guard.over(context.peer())
        # The handler has ended; what is left waits for the client.
        if is_stalled:
            await abort_stalled(context, status)
        if status.code is not grpc.StatusCode.OK:
            await abort(context, status, self._max_stall_seconds)
        stall_after(self._max_stall_seconds)


@dataclass(frozen=True, slots=True)
class _Codec:
    """Bytes to a method's request, its answer to bytes."""

    check: Check
    _deserialize: Callable[[bytes], Any]
    _serialize: Callable[[Any], bytes]
    _max_message_bytes: int

    def parse(self, data: bytes) -> Any:
        return parse(self._deserialize, data)

    def serialize(self, answer: Any) -> bytes:
        data = self._serialize(answer)
        if len(data) > self._max_message_bytes:
            raise AnswerTooLarge(len(data), self._max_message_bytes)
        return data


def _method(path: str) -> str:
    """The name without its service's."""
    return path.rpartition("/")[2]
