"""Places of calls: how many one caller has, and what a refused call holds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from service.access import OpenAccess
from service.errors import RateLimited
from service.telemetry.metrics import Metrics
from service.transport import places, sending
from service.transport.concurrency import CallLimit
from service.transport.flooding import FloodGuard
from service.transport.interceptors import CallInterceptor
from service.transport.open_methods import OpenMethods
from service.transport.places import claim
from tests.servers import eventually

HANDLER: Any = object()
GENERATE: Any = SimpleNamespace(method="/onward.v1.GenerationService/Generate", invocation_metadata=())


async def nothing(_: Any) -> Any:
    """A call that only takes a place has no use for its handler."""
    return HANDLER


async def hold(limit: CallLimit, caller: str) -> None:
    """One call, for as long as it is not cancelled."""
    assert await limit.intercept_service(nothing, GENERATE) is HANDLER, "there is no place at all"
    claim(caller, "ipv4:127.0.0.1:1")
    await asyncio.Event().wait()


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def num_placed(limit: CallLimit, caller: str, num_calls: int) -> tuple[int, list[asyncio.Task[None]]]:
    """How many calls of a caller have places, and all that run."""
    tasks = [asyncio.create_task(hold(limit, caller)) for _ in range(num_calls)]
    await settle()
    refused = [task for task in tasks if task.done()]
    assert all(isinstance(task.exception(), RateLimited) for task in refused)
    return num_calls - len(refused), [task for task in tasks if not task.done()]


async def test_a_caller_has_half_of_the_places_and_those_who_come_later_find_some() -> None:
    limit = CallLimit(12, 100, 100)
    running: dict[str, list[asyncio.Task[None]]] = {}
    counts = []
    for caller in "abc":
        count, running[caller] = await num_placed(limit, caller, 20)
        counts.append(count)
    assert counts == [6, 3, 2]
    for task in running["a"]:
        task.cancel()
    await asyncio.gather(*running["a"], return_exceptions=True)
    assert (await num_placed(limit, "d", 20))[0] == 4


@pytest.mark.parametrize("name", ["text", "some-bin"])
async def test_metadata_is_refused_from_the_first_byte_beyond_its_limit(name: str) -> None:
    value: Any = b"\xff" * 40 if name.endswith("-bin") else "x" * 40
    metadata = ((name, value),)
    size = len(name) + 40 + 32  # RFC 9113, 6.5.2
    details: Any = SimpleNamespace(method=GENERATE.method, invocation_metadata=metadata)
    assert await CallLimit(1, 100, size).intercept_service(nothing, details) is HANDLER
    limit = CallLimit(1, 100, size - 1)
    refusal = (await limit.intercept_service(nothing, details)).stream_stream
    assert (refusal.func, refusal.args) == (limit._refuse_metadata, (size,))


class Shut:
    """A call over a connection that takes no bytes: its status is never sent."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, *_: object) -> None:
        await asyncio.Event().wait()


async def refused(limit: CallLimit, context: Shut) -> None:
    """A call that has a place, is refused for want of a right, and whose status cannot be sent."""
    interceptor = CallInterceptor(
        ["onward.v1.GenerationService"],
        Metrics(CollectorRegistry()).handled,
        OpenAccess(("Generate",)),
        max_message_bytes=100,
        max_stall_seconds=600.0,
    )

    async def handler(_: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(nothing, bytes, bytes)

    async def inner(details: Any) -> Any:
        return await interceptor.intercept_service(handler, details)

    await (await limit.intercept_service(inner, GENERATE)).stream_unary(None, context)


async def unknown(_: Any) -> None:
    """A method without a handler."""


@pytest.mark.parametrize("why", ["no right", "full", "unknown"])
async def test_a_refused_call_whose_status_is_never_sent_is_evicted_for_the_next(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(sending, "REFUSAL_SECONDS", 0.0)
    monkeypatch.setattr(places, "_REST_SECONDS", 0.0)
    monkeypatch.setattr(places, "find", lambda peers: dict.fromkeys(peers, 0))
    monkeypatch.setattr(places, "shut", closed.extend)
    limit = CallLimit(1, 100, 100)
    running = (await num_placed(limit, "a", 1))[1] if why == "full" else []

    async def call(context: Shut) -> None:
        if why == "no right":
            await refused(limit, context)
        else:
            await (await limit.intercept_service(unknown, GENERATE)).stream_stream(None, context)

    first, second = Shut(), Shut()
    tasks = [asyncio.create_task(call(first))]
    await eventually(lambda: len(limit._places.stalled) == 1)
    assert not tasks[0].done()
    if why != "full":
        count, (placed,) = await num_placed(limit, "a", 1)
        assert count == 1, "it has no other call's place"
        placed.cancel()
        await settle()
    tasks.append(asyncio.create_task(call(second)))
    await eventually(tasks[0].done)
    assert closed == [first.peer()]
    for task in (*running, *tasks):
        task.cancel()


class Silent:
    """A health check that never brings its request."""

    def __init__(self, peer: str) -> None:
        self.peer = lambda: peer

    async def read(self) -> None:
        await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, *_: object) -> None:
        raise grpc.aio.AbortError(code)


async def test_checks_of_all_connections_of_one_address_have_half_of_the_places() -> None:
    limit = CallLimit(4, 100, 100, apart=["grpc.health.v1.Health/Check"])
    path: Any = SimpleNamespace(method="/grpc.health.v1.Health/Check", invocation_metadata=())
    methods = OpenMethods(100, 600.0, FloodGuard(100))

    async def handler(_: object) -> Any:
        return methods.wrap("check", grpc.unary_unary_rpc_method_handler(nothing, bytes, bytes))

    async def check(peer: str) -> None:
        await (await limit.intercept_service(handler, path)).stream_stream(None, Silent(peer))

    peers = [f"ipv4:10.0.0.1:{port}" for port in range(4)] + ["ipv4:10.0.0.2:1"]
    tasks = [asyncio.create_task(check(peer)) for peer in peers]
    await settle()
    assert [task.done() for task in tasks] == [False, False, True, True, False]
    assert all(str(task.exception()) == str(grpc.StatusCode.RESOURCE_EXHAUSTED) for task in tasks[2:4])
    for task in tasks:
        task.cancel()
