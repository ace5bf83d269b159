"""Who gets in, over which wire, and how much of it: TLS, client certificates, API keys, limits, stalled readers."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from onward.inference import open_inference_pb2
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.access import Permission
from service.app import serve
from service.commands.ask import ask
from service.commands.ask import health as probe
from service.config import AskConfig, HealthConfig, ServeConfig
from service.errors import StartupError
from service.transport import flooding, open_methods, read_places
from service.transport import server as transport_server
from service.transport.health import LIST
from service.transport.permissions import PERMISSIONS
from service.transport.server import SERVICES, GrpcServer
from service.transport.tls import TlsFiles, server_credentials
from tests.fakes import FakeRunner, Gate
from tests.faults.http2 import BEGIN, Connection, code, message_header
from tests.identities import key_table
from tests.servers import (
    MODEL,
    SLOTS,
    Running,
    eventually,
    generate_request,
    read,
    read_accepted,
    rich_details,
    running,
    served_model,
    status_of,
    stream_request,
    tokens_of,
)

# gRPC's poller holds on to every event loop it has met: one for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

HOST = "localhost"
KEY = "an-api-key"
GENERATE = b"/onward.v1.GenerationService/Generate"


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority and files that it signed."""

    ca: trustme.CA
    folder: Path

    @property
    def pem(self) -> Path:
        path = self.folder / "ca.pem"
        self.ca.cert_pem.write_to_path(path)
        return path

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """The certificate's file and its key's; under the same name, new ones replace them."""
        issued = self.ca.issue_cert(*hosts)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return certificate, key


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(trustme.CA(), tmp_path_factory.mktemp("authority"))


@asynccontextmanager
async def secured(server: Running, authority: Authority, *own: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A channel over TLS, with a certificate of its own (certificate, key) where given."""
    certificate, key = (path.read_bytes() for path in own) if own else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.pem.read_bytes(), key, certificate)
    # Or it would share a connection, and the handshake with it, with the channel before.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"{HOST}:{server.endpoint.port}", credentials, options) as channel:
        yield channel


async def is_serving(channel: grpc.aio.Channel) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    return bool((await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status)


async def test_tls_serves_whoever_trusts_its_authority_and_nobody_in_the_clear(authority: Authority) -> None:
    certificate, key = authority.issue("server", HOST)
    async with running(tls_certificate=certificate, tls_key=key) as server:
        async with secured(server, authority) as channel:
            answer = await GenerationServiceStub(channel).Generate(generate_request("ab", max_tokens=2))
            assert len(answer.outputs[0].token_ids) == 2
        stranger = Authority(trustme.CA(), authority.folder / "stranger")
        stranger.folder.mkdir()
        async with secured(server, stranger) as channel:
            assert (await status_of(is_serving(channel))).code() is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(f"{HOST}:{server.endpoint.port}") as channel:
            assert (await status_of(is_serving(channel))).code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_refuses_the_handshake_without_a_certificate_of_the_right_authority(
    authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.issue("server", HOST)
    async with running(tls_certificate=certificate, tls_key=key, tls_client_ca=authority.pem) as server:
        async with secured(server, authority, *authority.issue("client", "client.example")) as channel:
            assert await is_serving(channel)
        async with secured(server, authority) as channel:
            assert (await status_of(is_serving(channel))).code() is grpc.StatusCode.UNAVAILABLE
        stranger = Authority(trustme.CA(), tmp_path)
        async with secured(server, authority, *stranger.issue("client", "client.example")) as channel:
            assert (await status_of(is_serving(channel))).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_new_certificate_is_shown_to_the_next_who_connects(authority: Authority, tmp_path: Path) -> None:
    old, new = Authority(trustme.CA(), tmp_path / "old"), Authority(trustme.CA(), tmp_path / "new")
    for each in (old, new):
        each.folder.mkdir()
    certificate, key = old.issue("server", HOST)
    async with running(tls_certificate=certificate, tls_key=key) as server, secured(server, old) as before:
        assert await is_serving(before)
        for path, fresh in zip((certificate, key), new.issue("server", HOST), strict=True):
            path.write_bytes(fresh.read_bytes())
        async with secured(server, new) as channel:
            assert await is_serving(channel)
        async with secured(server, old) as channel:
            assert (await status_of(is_serving(channel))).code() is grpc.StatusCode.UNAVAILABLE
        assert await is_serving(before), "who is connected already stays so"
        shown = certificate.read_bytes()
        # Half a file; and half of a new pair, which its key follows a moment later.
        for unfit in (b"half a file", shown[: len(shown) // 2], old.issue("other", HOST)[0].read_bytes()):
            certificate.write_bytes(unfit)
            async with secured(server, new) as channel:
                assert await is_serving(channel)
        key.write_bytes((old.folder / "other.key").read_bytes())
        async with secured(server, old) as channel:
            assert await is_serving(channel)


async def test_unreadable_certificates_are_named_before_anything_listens(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"x")
    with pytest.raises(StartupError) as caught:
        server_credentials(TlsFiles(garbage, tmp_path / "missing", tmp_path / "missing-too"))
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [
        str(garbage),
        str(tmp_path / "missing"),
        str(tmp_path / "missing-too"),
    ]


@pytest.mark.parametrize("what", ["another's key", "half a certificate", "no authority"])
async def test_certificates_that_no_handshake_could_be_made_with_are_refused_before_anything_listens(
    authority: Authority, tmp_path: Path, what: str
) -> None:
    certificate, key = authority.issue("server", HOST)
    broken, client_ca = tmp_path / "broken.pem", None
    match what:
        case "another's key":
            _, key = authority.issue("other", HOST)
        case "half a certificate":
            broken.write_bytes(certificate.read_bytes()[:400])
            certificate = broken
        case _:
            broken.write_bytes(key.read_bytes())
            client_ca = broken
    with pytest.raises(StartupError) as caught:
        server_credentials(TlsFiles(certificate, key, client_ca))
    (problem,) = caught.value.problems
    assert problem.startswith(f"{client_ca or key}: ")


async def test_files_are_read_once_and_what_was_read_is_checked(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = authority.issue("raced", HOST)
    fitting = certificate.read_bytes()
    certificate.write_bytes(authority.issue("another", HOST)[0].read_bytes())
    read_bytes = Path.read_bytes

    def read_and_replace(path: Path) -> bytes:
        content = read_bytes(path)
        if path == certificate:
            path.write_bytes(fitting)
        return content

    monkeypatch.setattr(Path, "read_bytes", read_and_replace)
    with pytest.raises(StartupError, match="cannot be used as the key"):
        server_credentials(TlsFiles(certificate, key, None))
    server_credentials(TlsFiles(certificate, key, None))


def keys_file(folder: Path, permissions: str = '["generate"]', rest: str = "") -> Path:
    path = folder / "keys.toml"
    path.write_text(key_table("alice", KEY, permissions, rest))
    return path


def bearer(key: str = KEY) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest.mark.parametrize(
    "metadata",
    [(), bearer("wrong"), (("authorization", KEY),), (("authorization", f"Basic {KEY}"),), bearer() + bearer()],
    ids=["none", "wrong", "no scheme", "another scheme", "twice"],
)
async def test_no_key_wrong_key_is_unauthenticated(tmp_path: Path, metadata: Any) -> None:
    async with running(api_keys=keys_file(tmp_path)) as server:
        error = await status_of(server.generation.Generate(generate_request("ab"), metadata=metadata))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert KEY not in str(error.details())
        error = await status_of(server.generation.GenerateStream(stream_request("ab"), metadata=metadata))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        # Garbage is not even looked at.
        call = server.channel.unary_unary(f"/{SERVICES[0]}/Generate")
        assert (await status_of(call(b"\xff\xff", metadata=metadata))).code() is grpc.StatusCode.UNAUTHENTICATED
        assert server.metric("grpc_server_handled_total", grpc_method="Generate", grpc_code="UNAUTHENTICATED") == 2
        assert server.ended() == {}


async def test_a_key_opens_what_it_is_for_and_health_needs_none(tmp_path: Path) -> None:
    async with running(api_keys=keys_file(tmp_path)) as server:
        answer = await server.generation.Generate(generate_request("ab", max_tokens=2), metadata=bearer())
        assert len(answer.outputs[0].token_ids) == 2
        assert (await server.models.ListModels(model_pb2.ListModelsRequest(), metadata=bearer())).models[
            0
        ].name == MODEL
        error = await status_of(server.models.VerifyParity(model_pb2.VerifyParityRequest(), metadata=bearer()))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert await is_serving(server.channel)


async def test_a_managing_key_may_have_a_model_verified(tmp_path: Path) -> None:
    async with running(api_keys=keys_file(tmp_path, '["manage"]')) as server:
        answer = await server.models.VerifyParity(model_pb2.VerifyParityRequest(), metadata=bearer())
        assert answer.parity.passed
        error = await status_of(server.generation.Generate(generate_request("ab"), metadata=bearer()))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_used_up_key_is_told_when_to_come_again(tmp_path: Path) -> None:
    path = keys_file(tmp_path, rest="requests_per_second = 0.01\nburst = 2")
    async with running(api_keys=path) as server:
        for _ in range(2):
            await server.generation.Generate(generate_request("ab", max_tokens=1), metadata=bearer())
        error = await status_of(server.generation.Generate(generate_request("ab"), metadata=bearer()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        assert rich_details(error)[0].Unpack(retry)
        assert 90 < retry.retry_delay.seconds <= 100


async def test_a_keys_calls_at_once_are_bounded_and_a_cancelled_one_frees_its_place(tmp_path: Path) -> None:
    gate = Gate()
    async with running(
        api_keys=keys_file(tmp_path, rest="max_concurrent_requests = 1"), runner=FakeRunner(SLOTS, before_run=gate)
    ) as server:
        with gate.closed():
            held = server.generation.GenerateStream(stream_request("ab"), metadata=bearer())
            await read_accepted(held)
            error = await status_of(server.generation.Generate(generate_request("ab"), metadata=bearer()))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            held.cancel()
            cancelled = {"grpc_method": "GenerateStream", "grpc_code": "CANCELLED"}
            await eventually(lambda: server.metric("grpc_server_handled_total", **cancelled) == 1)
        assert await server.until_ended(1) == {"cancelled": 1}
        await server.generation.Generate(generate_request("ab", max_tokens=1), metadata=bearer())


async def test_every_method_of_ours_has_a_permission() -> None:
    methods = {
        method.name
        for file in (pb.DESCRIPTOR, model_pb2.DESCRIPTOR, open_inference_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert set(PERMISSIONS) == {*methods, LIST.rpartition("/")[2]}
    changing = {"VerifyParity", "LoadModel", "UnloadModel", "ReloadModel"}
    changing |= {"RepositoryModelLoad", "RepositoryModelUnload"}
    assert {name for name, permission in PERMISSIONS.items() if permission is Permission.MANAGE} == changing


BEYOND = "0.0.0.0"


@pytest.fixture
def beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a server that is to listen on `BEYOND` listen on loopback, so that a test is not reached from outside."""
    start = GrpcServer.start
    monkeypatch.setattr(GrpcServer, "start", lambda self, _, port: start(self, "127.0.0.1", port))


async def managed(channel: grpc.aio.Channel, metadata: Any = ()) -> dict[str, grpc.aio.AioRpcError | None]:
    """How each method that manages models ends with an empty request; None is without an error."""
    found: dict[str, grpc.aio.AioRpcError | None] = {}
    for file in (model_pb2.DESCRIPTOR, open_inference_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            for method in service.methods:
                if PERMISSIONS[method.name] is Permission.MANAGE:
                    call = channel.unary_unary(f"/{service.full_name}/{method.name}")
                    try:
                        await call(b"", metadata=metadata)
                    except grpc.aio.AioRpcError as error:
                        found[method.name] = error
                    else:
                        found[method.name] = None
    assert len(found) == 6
    return found


def is_managed(outcomes: dict[str, grpc.aio.AioRpcError | None]) -> bool:
    """Whether the calls are let in: the empty request is good for one, and wrong for others."""
    codes = {error.code() for error in outcomes.values() if error}
    refused = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
    assert not codes & refused or codes <= refused, "all or none"
    return not codes & refused


@pytest.mark.usefixtures("beyond")
async def test_models_are_not_managed_by_callers_from_beyond_loopback_without_keys() -> None:
    async with running(host=BEYOND) as server:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.endpoint.port}") as channel:
            outcomes = await managed(channel)
            for name, error in outcomes.items():
                assert error is not None
                assert error.code() is grpc.StatusCode.PERMISSION_DENIED
                details = str(error.details())
                assert details.startswith(f"{name}: ")
                assert all(way in details for way in ("--api-keys", "--tls-client-ca", "loopback"))
            answer = await GenerationServiceStub(channel).Generate(generate_request("ab", max_tokens=2))
            assert len(answer.outputs[0].token_ids) == 2
        assert server.app.models.names == (MODEL,)


@pytest.mark.usefixtures("beyond")
@pytest.mark.parametrize("way", ["loopback", "keys", "TLS", "mutual TLS"])
async def test_models_are_managed_from_loopback_with_a_key_or_a_client_certificate(
    way: str, authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.issue("server", HOST)
    tls = {"tls_certificate": certificate, "tls_key": key}
    changes: dict[str, dict[str, Any]] = {
        "loopback": {},
        "keys": {"host": BEYOND, "api_keys": keys_file(tmp_path, '["generate", "manage"]')},
        "TLS": {"host": BEYOND, **tls},
        "mutual TLS": {"host": BEYOND, **tls, "tls_client_ca": authority.pem},
    }
    async with running(**changes[way]) as server:
        if "TLS" in way:
            async with secured(server, authority, *authority.issue("client", "client.example")) as channel:
                assert is_managed(await managed(channel)) is (way == "mutual TLS")
        else:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.endpoint.port}") as channel:
                assert is_managed(await managed(channel, bearer() if way == "keys" else ()))


async def test_people_and_probes_bring_their_key_and_trust(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server", HOST)
    own, own_key = authority.issue("client", "client.example")
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    files = {"tls_certificate": certificate, "tls_key": key, "tls_client_ca": authority.pem}
    async with running(api_keys=keys_file(tmp_path), **files) as server:
        connection: dict[str, Any] = {
            "target": f"127.0.0.1:{server.endpoint.port}",
            "server_name": HOST,
            "api_key_file": key_file,
            "ca_certificate": authority.pem,
            "client_certificate": own,
            "client_key": own_key,
        }
        out, err = io.StringIO(), io.StringIO()
        assert await asyncio.to_thread(probe, HealthConfig(**connection), out, err) == 0
        for stream in (False, True):
            config = AskConfig(model=MODEL, text="ab", max_tokens=3, temperature=0, stream=stream, **connection)
            assert await asyncio.to_thread(ask, config, out, err) == 0, err.getvalue()
        assert err.getvalue() == ""
        connection["api_key_file"] = None
        config = AskConfig(model=MODEL, text="ab", **connection)
        assert await asyncio.to_thread(ask, config, out, err) == 1
        assert err.getvalue().startswith("UNAUTHENTICATED: ")


async def test_a_half_given_client_certificate_is_refused_by_name(authority: Authority) -> None:
    own, _ = authority.issue("client", "client.example")
    with pytest.raises(StartupError) as caught:
        await asyncio.to_thread(probe, HealthConfig(client_certificate=own), io.StringIO(), io.StringIO())
    assert len(caught.value.problems) == 2


async def test_more_metadata_than_the_limit_is_refused_and_the_next_call_is_not() -> None:
    async with running(max_metadata_bytes=2048) as server:
        error = await status_of(
            server.generation.Generate(generate_request("ab"), metadata=(("x-padding", "x" * 4096),))
        )
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
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
    monkeypatch.setattr(transport_server, "_MAX_ACKNOWLEDGE_SECONDS", 1.0)
    async with running() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.endpoint.port)
        writer.write(BEGIN)
        async with asyncio.timeout(30):  # gRPC's own limit is a minute
            assert b"settings_timeout" in await reader.read()
        writer.close()


async def test_more_calls_than_the_limit_are_refused_and_hurt_nobody() -> None:
    gate = Gate()
    # For one connection half, and the one that two cannot share.
    async with running(max_concurrent_rpcs=5, runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            held = [await read_accepted(server.stream(max_tokens=3, ignore_eos=True)) for _ in range(3)]
            error = await status_of(server.generation.Generate(generate_request("ab")))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "3 calls of this caller are open, its share of 5" in str(error.details())
            async with another(server) as channel:
                await GenerationServiceStub(channel).Tokenize(pb.TokenizeRequest(model=MODEL, text="ab"))
        for call in held:
            assert len(tokens_of(await read(call))) == 3
        assert await server.until_ended(3) == {"length": 3}


def another(server: Running) -> grpc.aio.Channel:
    """A connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.endpoint.port}", options)


async def test_unfinished_calls_of_one_key_leave_places_to_another(tmp_path: Path) -> None:
    async with running(api_keys=keys_file(tmp_path, rest=key_table("bob")), max_concurrent_rpcs=4) as server:
        begin = server.channel.stream_unary("/onward.v1.GenerationService/Generate")
        begun = []
        # One that arrives beside the question is refused, and holds nothing.
        while (error := await outcome(short(server, metadata=bearer()))) is None:
            begun.append(begin(nothing(), metadata=bearer()))
        assert error is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Over the same connection, which may be a proxy's, beside calls that are refused.
        begun += [begin(nothing(), metadata=bearer("wrong")) for _ in range(8)]
        assert await outcome(short(server, metadata=bearer("bob"))) is None
        for call in begun:
            call.cancel()


async def test_a_silent_stream_loses_its_place_to_another_connections_and_one_at_work_does_not() -> None:
    gate = Gate()
    text = open_inference_pb2.ModelInferRequest(model_name=MODEL)
    tensor = text.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"ab")

    async def one_request() -> AsyncIterator[bytes]:
        yield text.SerializeToString()
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


def check(server: Running) -> Any:
    return server.health.Check(health_pb2.HealthCheckRequest(service=MODEL))


async def test_a_full_server_tells_health_checks_that_it_is_well() -> None:
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
            # They take nobody's place, and nobody takes theirs.
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
        # One that arrives beside the question is refused, and holds nothing.
        while (error := await outcome(check(server))) is None:
            checks.append(begin(nothing()))
        assert error is grpc.StatusCode.RESOURCE_EXHAUSTED
        await server.generation.Generate(generate_request("ab", max_tokens=1))
        for call in (*watches, *checks):
            call.cancel()


async def nothing() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_a_call_whose_request_never_comes_holds_a_place_until_its_client_goes() -> None:
    async with running(max_concurrent_rpcs=2) as server:
        begin = server.channel.stream_unary("/onward.v1.GenerationService/Generate")
        begun = []
        # One that arrives beside the question is refused, and holds nothing.
        while (error := await outcome(short(server))) is None:
            begun.append(begin(nothing()))
        assert error is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in begun:
            call.cancel()
        while await outcome(short(server)) is not None:
            pass


def short(server: Running, **options: Any) -> Any:
    return server.generation.Generate(generate_request("ab", max_tokens=1), **options)


async def outcome(call: Any) -> grpc.StatusCode | None:
    """The status of a call that is refused; None of one that is not."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def test_a_check_does_not_wait_for_tools_that_read_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("is_offered", [True, False])
async def test_reflection_can_be_turned_off(*, is_offered: bool) -> None:
    async with running(reflection=is_offered) as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        calls = stub.ServerReflectionInfo(iter([request]))
        if is_offered:
            names = {each.name for each in (await calls.read()).list_services_response.service}
            assert set(SERVICES) <= names
        else:
            assert (await status_of(calls.read())).code() is grpc.StatusCode.UNIMPLEMENTED


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


async def test_a_client_that_stops_reading_loses_its_place_and_the_others_keep_theirs() -> None:
    # Far more than the windows of HTTP/2 hold, all of it with alternatives to every token.
    model = served_model(context=200_000)
    async with running([model], max_stall_seconds=0.5) as server:
        request = stream_request("ab", max_tokens=50_000, ignore_eos=True)
        request.response.logprobs = 20
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.endpoint.port}", options) as channel:
            stalled = GenerationServiceStub(channel).GenerateStream(request)
            await read_accepted(stalled)
            ended = {"grpc_method": "GenerateStream", "grpc_code": "ABORTED"}
            await eventually(lambda: server.metric("grpc_server_handled_total", **ended) == 1)
            await server.until_ended(1)
            assert server.ended() == {"cancelled": 1}
            await server.generation.Generate(generate_request("ab", max_tokens=2))
            stalled.cancel()


@pytest.mark.parametrize(("host", "is_warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
async def test_an_open_door_is_warned_about(
    host: str, is_warned: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(StartupError):
        serve(ServeConfig(models=tmp_path, host=host), lambda _: None)
    assert ("without TLS and API keys" in caplog.text) is is_warned


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


async def test_what_a_connection_brought_for_calls_that_end_unread_is_counted_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each judgement begins the count anew.
    monkeypatch.setattr(flooding, "_GROWTH_BYTES", 1 << 40)
    async with running(api_keys=keys_file(tmp_path)) as server:
        stream = server.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        begun = stream(nothing(), metadata=bearer())
        # The only connection.
        connections = server.app._calls._guard._connections
        await eventually(lambda: len(connections) == 1)
        (connection,) = connections.values()
        assert await outcome(short(server, metadata=bearer("wrong"))) is grpc.StatusCode.UNAUTHENTICATED
        refused = 80 << 10
        await eventually(lambda: connection.unread == refused)
        name = health_pb2.HealthCheckRequest(service="x" * 5000)
        assert await outcome(server.health.Check(name)) is grpc.StatusCode.INVALID_ARGUMENT
        await eventually(lambda: connection.unread == 2 * refused)
        silent = server.channel.stream_unary("/onward.v1.GenerationService/Generate")(nothing(), metadata=bearer())
        await eventually(lambda: server.app._calls._receiver.places.num_held == 1)
        silent.cancel()
        await eventually(lambda: connection.unread == 3 * refused + (4 << 20))
        begun.cancel()
