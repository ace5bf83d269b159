"""`grpc.health.v1` of a whole server: a watcher gets the newest state, whatever others do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.app import App, Ready, run
from service.repository.entry import ModelEntry
from service.repository.models import ModelState, Parity
from service.transport import open_methods
from service.transport.health import HealthServicer, _HealthListResponse
from service.transport.server import SERVICES
from tests.fakes import FakeRunner, Gate
from tests.identities import key_table
from tests.servers import (
    CONFIG,
    MODEL,
    SLOTS,
    TRUSTED,
    Running,
    connect,
    engine_for,
    eventually,
    generate_request,
    nothing,
    read_accepted,
    running,
    served_model,
    status_of,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
LIST = "/grpc.health.v1.Health/List"


async def watching(stub: health_pb2_grpc.HealthStub, name: str, state: int) -> Any:
    """A watcher that has been sent a first state, which must be this one."""
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
    assert (await watch.read()).status == state
    return watch


@pytest.mark.parametrize("leaver", [0, 1])
async def test_a_watcher_is_sent_the_drain_though_another_of_the_same_name_has_left(leaver: int) -> None:
    held = running()
    server = await held.__aenter__()
    async with grpc.aio.insecure_channel(f"{server.endpoint.host}:{server.endpoint.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [await watching(stub, MODEL, SERVING) for _ in range(2)]
        watches.pop(leaver).cancel()
        # The one that comes last is served after the other has left.
        watches.append(await watching(stub, MODEL, SERVING))
        await held.__aexit__(None, None, None)
        for watch in watches:
            assert (await watch.read()).status == NOT_SERVING
            error = await status_of(watch)
            assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the server has stopped")


async def test_a_watcher_of_an_unknown_name_is_sent_its_later_states() -> None:
    async with running() as server:
        watch = await watching(server.health, "later", SERVICE_UNKNOWN)
        model = served_model("later")
        queue = server.app._engine.open("later", engine := engine_for(model), model.cost_model(engine))
        server.app.models.insert(ModelEntry(model, queue, None, ModelState.SERVING, Parity((TRUSTED,))))
        assert (await watch.read()).status == SERVING
        server.app.models.remove("later")
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


@pytest.mark.parametrize("field", [b"\x0a", b"\x12"], ids=["name", "unknown"])
async def test_a_watcher_whose_request_is_larger_than_any_name_is_refused(field: bytes) -> None:
    async with running() as server:
        watch = server.channel.unary_stream("/grpc.health.v1.Health/Watch")
        # With three bytes for the field and its length.
        error = await status_of(watch(field + b"\xfe\x07" + b"x" * 1022))
        assert (error.code(), error.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "request: must have at most 1024 bytes",
        )
        call = watch(field + b"\xfd\x07" + b"x" * 1021)
        assert await call.read()
        call.cancel()


async def test_a_check_that_brings_no_request_ends_though_calls_may_take_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_methods, "_MAX_REQUEST_SECONDS", 0.01)
    async with running(max_stall_seconds=600.0) as server:
        await status_of(server.channel.stream_unary("/grpc.health.v1.Health/Check")(nothing()), grpc.StatusCode.ABORTED)


class Slow:
    """A watcher's context: a message is taken when the test takes it."""

    def __init__(self) -> None:
        self.coming = asyncio.Queue[int](1)

    async def send_initial_metadata(self, _: object) -> None:
        pass

    async def write(self, message: health_pb2.HealthCheckResponse) -> None:
        await self.coming.put(message.status)
        await self.coming.join()

    async def abort(self, code: grpc.StatusCode, details: str, _: object) -> None:
        raise grpc.aio.AbortError(code, details)

    async def take(self) -> int:
        state = await self.coming.get()
        self.coming.task_done()
        return state


async def test_a_slow_watcher_is_sent_the_newest_state_and_no_state_twice() -> None:
    health, slow = HealthServicer(max_stall_seconds=60.0), Slow()
    context: Any = slow
    health.set("a", is_serving=True)
    watch = asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(service="a"), context))
    await eventually(slow.coming.full)
    # While the first message is on its way.
    for is_serving in (False, True, False, True, True, False):
        health.set("a", is_serving=is_serving)
        await asyncio.sleep(0)
    assert [await slow.take(), await slow.take()] == [SERVING, NOT_SERVING]
    for name, is_serving in (("a", False), ("b", True), ("a", True)):
        health.set(name, is_serving=is_serving)
        await asyncio.sleep(0)
    assert await slow.take() == SERVING
    health.withdraw()
    health.set("a", is_serving=True)
    assert await slow.take() == NOT_SERVING
    health.close()
    with pytest.raises(grpc.aio.AbortError):
        await watch
    assert slow.coming.empty()
    assert health._watchers == set()


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def listed(server: Running, **call: Any) -> dict[str, str]:
    answer = _HealthListResponse.FromString(await server.channel.unary_unary(LIST)(b"", **call))
    return {name: each["status"] for name, each in json_format.MessageToDict(answer)["statuses"].items()}


async def test_list_has_the_state_of_every_name() -> None:
    async with running([served_model("good"), served_model("wrong", golden_error=0.5)]) as server:
        bad = dict.fromkeys(("", "wrong", *SERVICES), "NOT_SERVING")
        assert await listed(server) == bad | {"good": "SERVING", "onward.v1.ModelService": "SERVING"}


async def test_list_names_the_models_to_the_holder_of_a_key_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(key_table("alice", "key"))
    async with running(api_keys=path) as server:
        await status_of(server.channel.unary_unary(LIST)(b""), grpc.StatusCode.UNAUTHENTICATED)
        assert MODEL in await listed(server, metadata=bearer("key"))


async def test_the_process_ends_with_1_once_grpc_accepts_no_calls_though_a_stream_is_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, model = Gate(), served_model()
    app = App(CONFIG, [model], {MODEL: engine_for(model, FakeRunner(SLOTS, before_run=gate))})
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[Ready] = loop.create_future()
    process = asyncio.create_task(run(app, ready.set_result))
    endpoint = (await ready).endpoint
    async with connect(app, endpoint, app._registry) as server:
        watch = await watching(server.health, "", SERVING)
        with gate.closed():
            stream = await read_accepted(server.stream(max_tokens=3))
            create_task = loop.create_task

            def fail(coroutine: Any, **options: Any) -> asyncio.Task[Any]:
                # What gRPC's serving task does with each call that it accepts.
                if getattr(coroutine, "__qualname__", "") == "_schedule_rpc_coro":
                    coroutine.close()
                    raise MemoryError
                return create_task(coroutine, **options)

            monkeypatch.setattr(loop, "create_task", fail)
            lost = server.generation.Generate(generate_request())
            assert (await watch.read()).status == NOT_SERVING
            monkeypatch.undo()
        # What was begun has the grace to end.
        while await stream.read() is not grpc.aio.EOF:
            pass
        assert await stream.code() is grpc.StatusCode.OK
        assert await process == 1
        assert (await status_of(lost)).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert "no call is accepted any more" in caplog.text


async def test_a_server_that_is_stopped_underneath_its_app_is_noticed() -> None:
    async with running() as server:
        waiting = asyncio.create_task(server.app.wait(asyncio.Event()))
        await server.app._server._server.stop(None)  # type: ignore[attr-defined]
        assert str(await waiting) == "no call is accepted any more"
