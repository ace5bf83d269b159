"""Around every call of ours: errors become statuses, and how it ended is counted and logged.

A cancelled call ends with `CancelledError` where its handler awaits, or with `GeneratorExit` where a stream's handler
is suspended in `yield`; `context.cancelled()` is still False then. Both pass through untouched, so that the handler's
own `finally` frees what it holds. Health and reflection are not ours and are left alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from prometheus_client import Counter

from service.errors import InvalidRequest
from service.transport.status import Status, to_status

_LOGGER = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Parse = Callable[[bytes], Any]
UnaryHandler = Callable[[Any, Context], Awaitable[Any]]
StreamHandler = Callable[[Any, Context], AsyncGenerator[Any, None]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Maps errors to statuses, counts and logs calls.

    Args:
        services: full names of the services whose calls are wrapped.
        handled: counts ended calls, labelled with the method's name and the status code's.
    """

    def __init__(self, services: Collection[str], handled: Counter) -> None:
        self._services = frozenset(services)
        self._handled = handled
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Waits until no handler of a wrapped call runs; a cancelled one still does, until its `finally` is done."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of a call; a method that nobody implements has none, and gRPC answers UNIMPLEMENTED."""
        handler: Any = await continuation(handler_call_details)
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        if handler is None or service not in self._services:
            return handler
        # Requests are parsed in here and not by gRPC, which would answer garbage with UNKNOWN, uncounted.
        parse, serialize = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            behaviour: Any = self._wrap_stream(handler.unary_stream, parse, method)
            return grpc.unary_stream_rpc_method_handler(behaviour, response_serializer=serialize)
        behaviour = self._wrap_unary(handler.unary_unary, parse, method)
        return grpc.unary_unary_rpc_method_handler(behaviour, response_serializer=serialize)

    def _wrap_unary(self, handler: UnaryHandler, parse: Parse, method: str) -> UnaryHandler:
        async def call(data: bytes, context: Context) -> Any:
            async with self._watch(method, context):
                return await handler(_parse(parse, data), context)

        return call

    def _wrap_stream(self, handler: StreamHandler, parse: Parse, method: str) -> StreamHandler:
        async def call(data: bytes, context: Context) -> AsyncGenerator[Any, None]:
            async with self._watch(method, context), aclosing(handler(_parse(parse, data), context)) as responses:
                async for response in responses:
                    yield response

        return call

    @asynccontextmanager
    async def _watch(self, method: str, context: Context) -> AsyncIterator[None]:
        self._num_open += 1
        self._idle.clear()
        started = time.monotonic()
        status = Status(grpc.StatusCode.OK, "")
        try:
            try:
                yield
            except (asyncio.CancelledError, GeneratorExit):
                status = Status(_cancelled_code(context), "")
                raise
            except Exception as error:
                status = to_status(error)
            finally:
                # Counted before the client hears of it, so that whoever has an answer finds it counted.
                self._handled.labels(method, status.code.name).inc()
                _LOGGER.info("%s %s %.3f s", method, status.code.name, time.monotonic() - started)
            if status.code is not grpc.StatusCode.OK:
                await context.abort(status.code, status.message, status.trailing_metadata)
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()


def _parse(parse: Parse, data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidRequest("request", f"{len(data)} bytes", "must be a message of the method's type") from error


def _cancelled_code(context: Context) -> grpc.StatusCode:
    """A handler is cancelled alike when its client went away and when its deadline passed."""
    remaining = context.time_remaining()
    is_late = remaining is not None and remaining <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
