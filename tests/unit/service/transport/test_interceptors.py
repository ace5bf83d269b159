"""What the interceptor makes of calls that end in ways that no client can bring about at will."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from service.access import OpenAccess
from service.errors import InvalidRequest, UnknownModel
from service.telemetry.metrics import Metrics
from service.transport.call_log import CallLog
from service.transport.interceptors import CallInterceptor
from service.transport.streams import each_request

METHOD = "/onward.v1.GenerationService/GenerateStream"


class Context:
    """A call whose client is gone, before its handler is cancelled."""

    def __init__(self) -> None:
        self.aborted: list[Any] = []

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> bytes:
        return b""

    async def write(self, message: bytes) -> None:
        raise grpc.aio.InternalError(f"cannot send {len(message)} bytes")

    async def abort(self, *details: Any) -> None:
        self.aborted.append(details)


async def wrapped(
    handler: Any, registry: CollectorRegistry, parse: Any = bytes, *, has_many: bool = False
) -> tuple[CallInterceptor, Any]:
    """An interceptor, and the call that it makes of a stream's handler."""
    interceptor = CallInterceptor(
        ["onward.v1.GenerationService"],
        Metrics(registry).handled,
        OpenAccess(),
        max_message_bytes=100,
        max_stall_seconds=1,
    )

    async def continuation(_: Any) -> Any:
        kind = grpc.stream_stream_rpc_method_handler if has_many else grpc.unary_stream_rpc_method_handler
        return kind(handler, parse, bytes)

    details: Any = SimpleNamespace(method=METHOD)
    return interceptor, (await interceptor.intercept_service(continuation, details)).stream_stream


async def test_a_call_that_ended_under_a_message_is_cancelled_and_its_handler_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed = []

    async def handler(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            yield b"b"
        finally:
            closed.append(True)

    registry = CollectorRegistry()
    interceptor, call = await wrapped(handler, registry)
    context = Context()
    with pytest.raises(asyncio.CancelledError):
        await call(b"", context)
    assert closed == [True]
    assert context.aborted == []
    labels = {"grpc_method": "GenerateStream", "grpc_code": "CANCELLED"}
    assert registry.get_sample_value("onward_grpc_server_handled_total", labels) == 1
    assert interceptor.num_open == 0
    assert "unexpected" not in caplog.text


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
async def test_what_ends_the_process_passes_through(end: type[BaseException]) -> None:
    async def handler(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        raise end
        yield b""

    interceptor, call = await wrapped(handler, CollectorRegistry())
    context = Context()
    with pytest.raises(end):
        await call(b"", context)
    assert context.aborted == []
    assert interceptor.num_open == 0


async def test_a_call_whose_end_is_at_hand_is_sent_no_message() -> None:
    sent = []

    class Open(Context):
        async def write(self, message: bytes) -> None:
            sent.append(message)

    async def handler(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        yield b"a"
        # What cancels the call is what the event loop does next.
        asyncio.get_running_loop().call_soon(calling.cancel)
        yield b"b"

    _, call = await wrapped(handler, CollectorRegistry())
    calling = asyncio.create_task(call(b"", Open()))
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert sent == [b"a"]


class Request:
    """A request that knows when it is gone."""


class Sending(Context):
    """A call whose bytes have a name here alone."""

    def __init__(self) -> None:
        super().__init__()
        self.data = bytes(bytearray(b"the bytes of a request"))  # its own, not the constant of all

    async def read(self) -> bytes:
        return self.data

    async def write(self, message: bytes) -> None:
        """Takes it."""


@pytest.mark.parametrize("when", ["it runs", "its status is sent", "it was no message"])
async def test_a_call_holds_neither_its_request_nor_the_bytes(when: str) -> None:
    requests, held = list[weakref.ref[Request]](), list[Any]()

    def look() -> None:
        held.append(([gone() for gone in requests], sys.getrefcount(context.data) - alone))

    class Looking(Sending):
        async def abort(self, *details: Any) -> None:
            look()

    def parse(_: bytes) -> Any:
        if when == "it was no message":
            raise DecodeError
        request = Request()
        requests.append(weakref.ref(request))
        return request

    async def handler(request: Any, _: Any) -> AsyncGenerator[bytes, None]:
        if when == "its status is sent":
            # The errors' frames have the request.
            try:
                raise UnknownModel("x", ())
            except UnknownModel as error:
                raise InvalidRequest("model", "x", "must be served") from error
        del request
        look()
        yield b"a"

    context = Looking()
    alone = sys.getrefcount(context.data)
    _, call = await wrapped(handler, CollectorRegistry(), parse)
    await call(b"", context)
    assert held == [([None] * len(requests), 0)]


async def test_a_stream_that_is_sent_an_answer_is_not_silent() -> None:
    in_flight = []

    class Reading(Context):
        async def write(self, message: bytes) -> None:
            in_flight.extend(stream.num_in_flight for stream in interceptor._streams)

    async def handler(requests: Any, _: Any) -> AsyncGenerator[bytes, None]:
        yield b"a"

    interceptor, call = await wrapped(handler, CollectorRegistry(), has_many=True)
    await call(b"", Reading())
    assert in_flight == [1]


async def test_a_stream_is_not_silent_from_the_request_that_comes_until_it_is_worked_on() -> None:
    num_in_flight = []

    def look() -> None:
        num_in_flight.extend(stream.num_in_flight for stream in interceptor._streams)

    def parse(data: bytes) -> bytes:
        look()
        return data

    async def one_message() -> AsyncIterator[bytes]:
        yield b"a"

    async def work() -> None:
        look()
        with each_request():
            look()

    async def handler(requests: Any, _: Any) -> AsyncGenerator[bytes, None]:
        async with asyncio.TaskGroup() as group:
            async for _ in requests:
                group.create_task(work())
        yield b"a"

    interceptor, call = await wrapped(handler, CollectorRegistry(), parse, has_many=True)
    await call(one_message(), Sending())
    assert num_in_flight == [1, 1, 2]


def test_refused_calls_are_counted_beyond_a_hundred_lines_a_second(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now = [7.0]
    log = CallLog(lambda: now[0])
    for seconds in (0.0, 1.0):
        now[0] += seconds
        for _ in range(250):
            log.ended("Generate", "UNAUTHENTICATED", 0.0)
            log.ended("Generate", "OK", 0.0)
    lines = Counter(record.getMessage() for record in caplog.records)
    assert lines == {
        "Generate UNAUTHENTICATED 0.000 s": 200,
        "Generate OK 0.000 s": 500,
        "150 more calls were refused within a second": 1,
    }
