"""What the interceptor makes of calls that end in ways that no client can bring about at will."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from service.access import OpenAccess
from service.metrics import Metrics
from service.transport.interceptors import CallInterceptor

METHOD = "/onward.v1.GenerationService/GenerateStream"


class Context:
    """A call whose client is gone, which the handler has not been told yet."""

    def __init__(self) -> None:
        self.aborted: list[Any] = []

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def write(self, message: bytes) -> None:
        raise grpc.aio.InternalError(f"cannot send {len(message)} bytes")

    async def abort(self, *details: Any) -> None:
        self.aborted.append(details)


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
    interceptor = CallInterceptor(
        ["onward.v1.GenerationService"],
        Metrics(registry).handled,
        OpenAccess(),
        max_message_bytes=100,
        max_stall_seconds=1,
    )

    async def continuation(_: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(handler, bytes, bytes)

    wrapped = await interceptor.intercept_service(continuation, SimpleNamespace(method=METHOD))
    context = Context()
    with pytest.raises(asyncio.CancelledError):
        await wrapped.unary_stream(b"", context)
    assert closed == [True]
    assert context.aborted == []
    labels = {"grpc_method": "GenerateStream", "grpc_code": "CANCELLED"}
    assert registry.get_sample_value("onward_grpc_server_handled_total", labels) == 1
    assert interceptor.num_open == 0
    assert "unexpected" not in caplog.text
