"""How much of a server one caller gets: metadata, open calls, health checks, silent streams, answers not taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from onward.inference import open_inference_pb2
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.transport import flooding, open_methods, places, read_places
from service.transport import server as transport_server
from tests.fakes import FakeRunner, Gate
from tests.faults.http2 import BEGIN, Connection, code, message_header
from tests.identities import by, keys_file
from tests.servers import (
    MODEL,
    SLOTS,
    Running,
    eventually,
    generate_request,
    infer_request,
    nothing,
    read,
    read_accepted,
    running,
    status_of,
    stream_request,
    tokens_of,
)

GENERATE = b"/onward.v1.GenerationService/Generate"


def another(server: Running) -> grpc.aio.Channel:
    """A connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.endpoint.port}", options)


def check(server: Running) -> Any:
    return server.health.Check(health_pb2.HealthCheckRequest(service=MODEL))


def short(server: Running, **options: Any) -> Any:
    return server.generation.Generate(generate_request("ab", max_tokens=1), **options)


async def outcome(call: Any) -> grpc.StatusCode | None:
    """The status of a call that is refused; None of one that is not."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def test_more_metadata_than_the_limit_is_refused_and_the_next_call_is_not() -> None:
    async with running(max_metadata_bytes=2048) as server:
        await status_of(
            server.generation.Generate(generate_request("ab"), metadata=(("x-padding", "x" * 4096),)),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
        await server.generation.Generate(generate_request("ab", max_tokens=1), metadata=(("x-padding", "x" * 1024),))


async def test_metadata_is_limited_before_a_client_has_acknowledged_the_limit() -> None:
    fields = [(b"x", b"y" * 100)] * 20
    async with running(max_metadata_bytes=2048) as server:
        # It acknowledges what it has read, and reads after it has sent.
        connection = Connection(server.endpoint.port)
        calls = [connection.call(GENERATE, *fields[:most], head=message_header(0)) for most in (10, 20)]
        assert await asyncio.to_thread(connection.pump, lambda: set(calls) <= connection.ended.keys())
        assert [code(connection.ended[call]) for call in calls] == ["INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"]
        connection.close()


async def test_a_connection_that_never_acknowledges_the_limits_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_server, "_MAX_ACKNOWLEDGE_SECONDS", 0.2)
    async with running() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.endpoint.port)
        writer.write(BEGIN)
        async with asyncio.timeout(30):  # gRPC's own limit is a minute
            assert b"settings_timeout" in await reader.read()
        writer.close()


async def test_more_calls_than_the_limit_are_refused_and_harm_no_other() -> None:
    gate = Gate()
    # For one connection half, and the one that two cannot share.
    async with running(max_concurrent_rpcs=5, runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            held = [await read_accepted(server.stream(max_tokens=3, ignore_eos=True)) for _ in range(3)]
            error = await status_of(
                server.generation.Generate(generate_request("ab")), grpc.StatusCode.RESOURCE_EXHAUSTED
            )
            assert "3 calls of this caller are open, its share of 5" in str(error.details())
            async with another(server) as channel:
                await GenerationServiceStub(channel).Tokenize(pb.TokenizeRequest(model=MODEL, text="ab"))
        for call in held:
            assert len(tokens_of(await read(call))) == 3
        assert await server.until_ended(3) == {"length": 3}


async def test_unfinished_calls_of_one_key_leave_slots_to_another_and_are_freed_when_canceled(tmp_path: Path) -> None:
    async with running(api_keys=keys_file(tmp_path, alice="", bob=""), max_concurrent_rpcs=4) as server:
        begin = server.channel.stream_unary("/onward.v1.GenerationService/Generate")
        begun = []
        # A call that arrives together with the short one is refused and holds no slot.
        while (error := await outcome(short(server, **by("alice")))) is None:
            begun.append(begin(nothing(), **by("alice")))
        assert error is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Over the same connection, which may be a proxy's, beside calls that are refused.
        begun += [begin(nothing(), **by("wrong")) for _ in range(8)]
        assert await outcome(short(server, **by("bob"))) is None
        for call in begun:
            call.cancel()
        while await outcome(short(server, **by("alice"))) is not None:
            pass


async def test_a_silent_stream_loses_its_place_to_another_connections_and_one_at_work_does_not() -> None:
    gate = Gate()

    async def one_request() -> AsyncIterator[bytes]:
        yield infer_request().SerializeToString()
        await asyncio.Event().wait()

    async with AsyncExitStack() as stack:
        # 512 MiB are four such messages.
        changes: dict[str, Any] = {"max_message_bytes": 128 << 20, "runner": FakeRunner(SLOTS, before_run=gate)}
        server = await stack.enter_async_context(running(**changes))
        channels = [await stack.enter_async_context(another(server)) for _ in range(3)]
        begin = [each.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer") for each in channels]
        stack.enter_context(gate.closed())
        open_streams = server.app._calls._streams._open
        at_work = [begin[0](one_request()) for _ in range(2)]
        await eventually(lambda: [each.num_in_flight for each in open_streams] == [1, 1])
        silent = [begin[1](nothing()) for _ in range(2)]
        await eventually(lambda: len(open_streams) == 4)
        # It has no input: what matters is that it was read.
        request = open_inference_pb2.ModelInferRequest(model_name=MODEL, id="mine")
        answer = await begin[2](iter([request.SerializeToString()])).read()
        assert open_inference_pb2.ModelStreamInferResponse.FromString(answer).infer_response.id == "mine"
        await eventually(lambda: any(call.done() for call in silent + at_work))
        assert [await call.code() for call in silent if call.done()] == [grpc.StatusCode.ABORTED]
        for call in silent + at_work:
            call.cancel()


async def test_a_full_server_still_answers_health_checks() -> None:
    gate = Gate()
    async with (
        running(max_concurrent_rpcs=3, runner=FakeRunner(SLOTS, before_run=gate)) as server,
        another(server) as channel,
    ):
        with gate.closed():
            held = [await read_accepted(server.stream(max_tokens=3, ignore_eos=True)) for _ in range(2)]
            held.append(GenerationServiceStub(channel).GenerateStream(stream_request("ab", max_tokens=3)))
            await read_accepted(held[-1])
            watch = server.health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            for _ in range(4):
                assert (await check(server)).status == health_pb2.HealthCheckResponse.SERVING
            # Health checks and calls have separate limits.
            error = await status_of(server.generation.Generate(generate_request("ab")))
            assert (error.code(), error.details()) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "3 calls run, which is the most there may be at once",
            )
        watch.cancel()
        for call in held:
            assert len(tokens_of(await read(call))) == 3


async def test_health_checks_and_watchers_have_limits_of_their_own() -> None:
    async with running(max_concurrent_rpcs=3) as server:
        watches = [server.health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        refused = await status_of(server.health.Watch(health_pb2.HealthCheckRequest()))
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await check(server)).status == health_pb2.HealthCheckResponse.SERVING
        begin = server.channel.stream_unary("/grpc.health.v1.Health/Check")
        checks = []
        # A call that arrives together with the short one is refused and holds no slot.
        while (error := await outcome(check(server))) is None:
            checks.append(begin(nothing()))
        assert error is grpc.StatusCode.RESOURCE_EXHAUSTED
        await server.generation.Generate(generate_request("ab", max_tokens=1))
        for call in (*watches, *checks):
            call.cancel()


async def test_a_health_check_does_not_wait_for_reflection_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_places, "_PATIENCE_SECONDS", 600.0)
    async with running(max_stall_seconds=600.0) as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        # As many as one address may have. Each has its answer, and the server waits for what it asks next.
        streams = [stub.ServerReflectionInfo() for _ in range(2)]
        for stream in streams:
            await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            await stream.read()
        assert (await check(server)).status == health_pb2.HealthCheckResponse.SERVING
        for stream in streams:
            stream.cancel()


@pytest.mark.parametrize(
    "path", ["grpc.health.v1.Health/Check", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
)
async def test_a_request_that_needs_no_key_and_is_larger_than_any_name_is_refused(path: str) -> None:
    async with running() as server:

        async def code(num_bytes: int) -> grpc.StatusCode:
            # An unknown field, with three bytes for its number and length.
            data = pb.GenerateRequest(text="x" * (num_bytes - 3)).SerializeToString()
            assert len(data) == num_bytes
            call = server.channel.stream_stream(f"/{path}")(iter([b"\x7a" + data[1:]]))
            with suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            return await call.code()

        assert [await code(4096), await code(4097)] == [grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT]


@pytest.mark.parametrize("path", ["onward.v1.GenerationService/Generate", "grpc.health.v1.Health/Check"])
async def test_silent_calls_of_a_connection_end_for_the_others_of_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_places, "_OWN_PART", 0.0)
    monkeypatch.setattr(open_methods, "_MAX_REQUEST_SECONDS", 600.0)
    async with running(max_stall_seconds=600.0) as server:
        calls = server.app._calls
        is_ours = path.startswith("onward")
        # All places that one connection may have.
        num_places = 8 if is_ours else 2
        begin = server.channel.stream_unary(f"/{path}")
        silent = [begin(nothing()) for _ in range(num_places)]
        await eventually(
            lambda: (
                (receiver := calls._receiver if is_ours else calls._open_methods.receivers.get(path)) is not None
                and receiver.places.num_held == num_places
            )
        )
        call = (
            short(server, timeout=60) if is_ours else server.health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        )
        await call
        await eventually(lambda: any(each.done() for each in silent))
        assert {await each.code() for each in silent if each.done()} == {grpc.StatusCode.ABORTED}
        for each in silent:
            each.cancel()


async def test_unread_bytes_of_a_connections_ended_calls_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each judgement begins the count anew.
    monkeypatch.setattr(flooding, "_GROWTH_BYTES", 1 << 40)
    async with running(api_keys=keys_file(tmp_path, alice="")) as server:
        stream = server.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        begun = stream(nothing(), **by("alice"))
        # The only connection.
        connections = server.app._calls._guard._connections
        await eventually(lambda: len(connections) == 1)
        (connection,) = connections.values()
        assert await outcome(short(server, **by("wrong"))) is grpc.StatusCode.UNAUTHENTICATED
        refused = 80 << 10
        await eventually(lambda: connection.unread == refused)
        name = health_pb2.HealthCheckRequest(service="x" * 5000)
        assert await outcome(server.health.Check(name)) is grpc.StatusCode.INVALID_ARGUMENT
        await eventually(lambda: connection.unread == 2 * refused)
        silent = server.channel.stream_unary("/onward.v1.GenerationService/Generate")(nothing(), **by("alice"))
        await eventually(lambda: server.app._calls._receiver.places.num_held == 1)
        silent.cancel()
        await eventually(lambda: connection.unread == 3 * refused + (4 << 20))
        begun.cancel()


MAX_MESSAGE_BYTES = 16 << 10
# Of which the bound has room for four, in two copies each; and one caller for half of them.
NUM_TOKENS = 15 << 10
NUM_CALLS = 8


def ask_untaken(client: Connection, num_begun: int, num_refused: int) -> None:
    """Has a client ask for answers that it does not take: of the others some begin, and some wait."""
    data = pb.DetokenizeRequest(token_ids=[5] * NUM_TOKENS).SerializeToString()
    path = b"/onward.v1.GenerationService/Detokenize"
    for _ in range(NUM_CALLS):
        client.call(path, head=message_header(len(data)) + data, is_complete=True)
    assert client.pump(lambda: (len(client.begun - client.ended.keys()), len(client.ended)) == (num_begun, num_refused))
    assert {code(block) for block in client.ended.values()} == {"RESOURCE_EXHAUSTED"}


async def test_answers_that_are_not_taken_are_bounded_and_half_of_them_is_one_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "MAX_ANSWER_BYTES", 0)
    async with running(max_message_bytes=MAX_MESSAGE_BYTES) as server:
        with ExitStack() as stack:
            clients = [stack.enter_context(closing(Connection(server.endpoint.port, 0))) for _ in range(3)]
            # As many wait as may be on their way.
            for client, num in zip(clients, (2, 1, 1), strict=True):
                await asyncio.to_thread(ask_untaken, client, num, NUM_CALLS - 2 * num)
            asked = pb.DetokenizeRequest(token_ids=[5] * NUM_TOKENS)
            error = await status_of(server.generation.Detokenize(asked), grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert error.details().startswith("answers that clients did not take yet leave no room for this one")
            refused = {*clients[0].ended}
            for stream in range(1, 2 * NUM_CALLS, 2):
                clients[0].grant(stream, MAX_MESSAGE_BYTES)
            # What the others wait for may go before the last of them.
            assert await asyncio.to_thread(clients[0].pump, lambda: len(clients[0].ended) >= len(refused) + 3)
            for client in clients[1:]:
                client.close()
            assert await asyncio.to_thread(clients[0].pump, lambda: len(clients[0].ended) == NUM_CALLS)
            taken = [code(block) for stream, block in clients[0].ended.items() if stream not in refused]
            assert taken == ["OK"] * 4, "what waited is answered, too"
            assert len((await server.generation.Detokenize(asked)).text) == NUM_TOKENS, "what is taken makes room"
