"""Around every call of ours: who may make it, errors become statuses, and how it ended is counted and logged.

A cancelled call ends with `CancelledError` where it awaits; `context.cancelled()` is still False then. That passes
through untouched, and closes a stream's handler where it is suspended in `yield`, so that the handler's own `finally`
frees what it holds. A call is admitted before its request is read. Of health only `List` is wrapped, since it names the
models. The other methods of health, and reflection, count nothing and ask no key, but their requests are bounded too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from prometheus_client import Counter

from service.access import Access, Allowance
from service.errors import AnswerTooLarge, ClientStalled, RateLimited
from service.forecasting.deadline_margin import deadline_margin
from service.telemetry.tracing import NoTracer, Tracer
from service.transport.flooding import FloodGuard
from service.transport.places import claim, current_place, stall_after
from service.transport.receiving import OpenStream, Receiver, bounded, in_steps
from service.transport.sending import abort, abort_stalled, send
from service.transport.status import Status, to_status
from service.transport.wire_limits import malformed

_LOGGER = logging.getLogger(__name__)

# How calls end that cost their caller nothing; so many of them in a second are logged one by one.
_REFUSALS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED}
_MAX_LOGGED_REFUSALS = 100
_AUTHORIZATION = "authorization"
_BEARER = "bearer"
# What the bidirectional call of the running task was let in with, and its part of the receiver that it came by.
_EXCHANGE: ContextVar[tuple[Allowance, Receiver, OpenStream]] = ContextVar("onward_exchange")

Context = grpc.aio.ServicerContext[Any, Any]
UnaryHandler = Callable[[Any, Context], Awaitable[Any]]
StreamHandler = Callable[[Any, Context], AsyncGenerator[Any, None]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Maps errors to statuses, counts, traces and logs calls.

    Args:
        services: full names of the services, or of single methods, whose calls are wrapped.
        handled: counts ended calls, labelled with the method's name and the status code's.
        access: who may call what.
        max_message_bytes: largest answer, or part of one.
        max_stall_seconds: how long a call waits for its client to read, or to send its request.
        tracer: hears of each call's begin and end; by default nobody does.
        check: raises for a request that holds too much, given its method's path and its bytes, before it is parsed. It
            looks in steps, between which others run.
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
    ) -> None:
        self._services = frozenset(services)
        self._handled = handled
        self._access = access
        self._max_message_bytes = max_message_bytes
        self._max_stall_seconds = max_stall_seconds
        # Of all receivers: what a connection has brought may be for any of them.
        self._guard = FloodGuard(max_message_bytes)
        self._receiver = Receiver(max_message_bytes, max_stall_seconds, self._guard)
        # Callers without a key may call the others' methods, whose requests are small. Each has places of its own: a
        # probe must not wait for watchers, nor for a tool that reads the contract.
        self._open_receivers: dict[str, Receiver] = {}
        self._open_receiver = partial(Receiver, max_message_bytes, max_stall_seconds, self._guard, max_bytes=0)
        self._tracer = tracer or NoTracer()
        self._check = check
        self._log = _CallLog()
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        """Handlers of wrapped calls that run."""
        return self._num_open

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
        path = handler_call_details.method.lstrip("/")
        service = path.partition("/")[0]
        if handler is None:
            return None
        if self._services.isdisjoint((service, path)):
            if path not in self._open_receivers:
                self._open_receivers[path] = self._open_receiver()
            return bounded(handler, self._open_receivers[path])
        # Requests are parsed in here and not by gRPC, which would answer garbage with UNKNOWN, uncounted; answers are
        # serialised in here, or one that no message can hold would be counted as OK and end otherwise.
        codec = _Codec(
            partial(self._check, path),
            handler.request_deserializer,
            handler.response_serializer,
            self._max_message_bytes,
        )
        # To gRPC every method's requests are a stream, which it does not read before it calls the handler.
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(self._wrap_exchange(handler.stream_stream, codec, path))
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._wrap_stream(handler.unary_stream, codec, path))
        return grpc.stream_unary_rpc_method_handler(self._wrap_unary(handler.unary_unary, codec, path))

    def _wrap_unary(self, handler: UnaryHandler, codec: _Codec, path: str) -> Any:
        async def call(_: AsyncIterator[bytes], context: Context) -> bytes:
            async with self._watch(path, context):
                # Before anything of the request is read.
                with self._admitted(path, context) as allowance:
                    answer = await handler(await self._request(codec, allowance, context), context)
                    answer = codec.serialize(answer)
                    if (place := current_place()) is not None:
                        await place.answer(len(answer), self._max_stall_seconds)
            return answer

        return call

    def _wrap_stream(self, handler: StreamHandler, codec: _Codec, path: str) -> Any:
        async def call(_: AsyncIterator[bytes], context: Context) -> None:
            async with self._watch(path, context):
                with self._admitted(path, context) as allowance:
                    request = self._request(codec, allowance, context)
                    async with aclosing(handler(await request, context)) as responses:
                        async for response in responses:
                            await send(codec.serialize(response), context, self._max_stall_seconds)

        return call

    def _wrap_exchange(self, handler: StreamHandler, codec: _Codec, path: str) -> Any:
        async def call(messages: AsyncIterator[bytes], context: Context) -> None:
            async with self._watch(path, context, has_many=True):
                with self._admitted(path, context) as allowance:
                    async with self._receiver.stream(context, _caller(allowance, context)) as stream:
                        _EXCHANGE.set((allowance, self._receiver, stream))

                        async def parsed() -> AsyncIterator[Any]:
                            async for data in messages:
                                self._receiver.took(stream, len(data))
                                with self._receiver.working(stream):
                                    await in_steps(codec.check(data))
                                    request = [codec.parse(data)]
                                    del data
                                    yield request.pop()
                                    # What has it in a task of its own begins now, and holds the stream then.
                                    await asyncio.sleep(0)

                        async with aclosing(handler(parsed(), context)) as responses:
                            async for response in responses:
                                with self._receiver.working(stream):
                                    await send(codec.serialize(response), context, self._max_stall_seconds)

        return call

    async def _request(self, codec: _Codec, allowance: Allowance, context: Context) -> Any:
        """The one request of a call, which must not give it a name: it would hold it until it ends."""
        return codec.parse(await self._receiver.message(context, _caller(allowance, context), codec.check))

    @contextmanager
    def _admitted(self, path: str, context: Context) -> Iterator[Allowance]:
        """A context to run a call in that its key is good for, and that is within its caller's share of places."""
        with self._access.admitted(_method(path), _api_key(context)) as allowance:
            try:
                claim(_caller(allowance, context), context.peer())
            except RateLimited:
                allowance.give_back()
                raise
            yield allowance

    @asynccontextmanager
    async def _watch(self, path: str, context: Context, *, has_many: bool = False) -> AsyncIterator[None]:
        method = _method(path)
        trace = self._tracer.call(path, context, has_many=has_many)
        self._num_open += 1
        self._idle.clear()
        started = time.monotonic()
        # Now, not when it ends: the time that is left then may still be a few milliseconds.
        timeout = context.time_remaining()
        status, is_stalled = Status(grpc.StatusCode.OK, ""), False
        try:
            try:
                yield
            except asyncio.CancelledError:
                status = Status(_cancelled_code(time.monotonic() - started, timeout), "")
                raise
            except (GeneratorExit, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of an extension module is no Exception
                status, is_stalled = to_status(error), isinstance(error, ClientStalled)
                _forget_frames(error)
            finally:
                # Counted before the client hears of it, so that whoever has an answer finds it counted.
                self._handled.labels(method, status.code.name).inc()
                trace.ended(status.code.name, status.message)
                self._log.ended(method, status.code, time.monotonic() - started)
        finally:
            self._guard.over(context.peer())
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()
        # No handler runs any more, and what is left waits for the client.
        if is_stalled:
            await abort_stalled(context, status)
        if status.code is not grpc.StatusCode.OK:
            await abort(context, status, self._max_stall_seconds)
        stall_after(self._max_stall_seconds)


class _CallLog:
    """One line for each call. Of refused ones, beyond so many a second, the next one's line follows a count.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second, self._num_refused = 0, 0

    def ended(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        if code in _REFUSALS:
            if (second := int(self._clock())) != self._second:
                if (num_left_out := self._num_refused - _MAX_LOGGED_REFUSALS) > 0:
                    _LOGGER.warning("%d more calls were refused within a second", num_left_out)
                self._second, self._num_refused = second, 0
            self._num_refused += 1
            if self._num_refused > _MAX_LOGGED_REFUSALS:
                return
        _LOGGER.info("%s %s %.3f s", method, code.name, seconds)


@contextmanager
def each_request() -> Iterator[None]:
    """A context to run one request in, of a call that brings many: it counts against its caller's key as a call would.

    Raises:
        Unauthenticated, PermissionDenied, RateLimited: when it is entered; see `service.access.Allowance`.
    """
    if (exchange := _EXCHANGE.get(None)) is None:
        yield
        return
    allowance, receiver, stream = exchange
    with receiver.working(stream), allowance.request():
        yield


@dataclass(frozen=True, slots=True)
class _Codec:
    """Bytes to a method's request, its answer to bytes."""

    check: Callable[[bytes], Iterator[None]]
    _parse: Callable[[bytes], Any]
    _serialize: Callable[[Any], bytes]
    _max_message_bytes: int

    def parse(self, data: bytes) -> Any:
        try:
            return self._parse(data)
        except DecodeError as error:
            raise malformed(data) from error

    def serialize(self, answer: Any) -> bytes:
        data = self._serialize(answer)
        if len(data) > self._max_message_bytes:
            raise AnswerTooLarge(len(data), self._max_message_bytes)
        return data


def _method(path: str) -> str:
    """The name without its service's."""
    return path.rpartition("/")[2]


def _caller(allowance: Allowance, context: Context) -> str:
    """Whose call it is: a key's, or a connection's where no key is needed.

    Not an address': that may be of a proxy, with every client behind it.
    """
    return allowance.owner or context.peer()


def _forget_frames(error: BaseException) -> None:
    """Has an error hold nothing that it passed: requests, for as long as its status takes to be sent."""
    errors: list[BaseException | None] = [error]
    while errors:
        if (each := errors.pop()) is None or each.__traceback__ is None:
            continue
        errors += [each.__cause__, each.__context__]
        at: TracebackType | None = each.__traceback__
        each.__traceback__ = None
        # Piece by piece: the context manager in which it was caught holds the first.
        while at is not None:
            at.tb_next, at = None, at.tb_next


def _api_key(context: Context) -> str | None:
    """What the caller shows: `authorization: Bearer KEY`. Whoever shows several shows none."""
    shown = [value for name, value in context.invocation_metadata() or () if name == _AUTHORIZATION]
    if len(shown) != 1 or not isinstance(shown[0], str):
        return None
    scheme, _, key = shown[0].partition(" ")
    return key.strip() if scheme.lower() == _BEARER else None


def _cancelled_code(elapsed: float, timeout: float | None) -> grpc.StatusCode:
    """A handler is cancelled alike when its client went away and when its deadline passed: tells them apart by time."""
    is_late = timeout is not None and elapsed >= timeout - deadline_margin(timeout)
    return grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
