"""Authentication and permissions: TLS, client certificates, API keys, management of models."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.app import serve
from service.commands.ask import ask
from service.commands.ask import health as probe
from service.config import AskConfig, HealthConfig, ServeConfig
from service.errors import StartupError
from service.transport.health import LIST
from service.transport.permissions import PERMISSIONS
from service.transport.server import SERVICES, GrpcServer
from service.transport.tls import TlsFiles, server_credentials
from tests.contracts import MANAGING, METHODS
from tests.fakes import FakeRunner, Gate
from tests.identities import HOST, Authority, key_table
from tests.servers import (
    MODEL,
    SLOTS,
    Running,
    generate_request,
    read_accepted,
    running,
    status_of,
    stream_request,
)

KEY = "an-api-key"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


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


async def test_tls_serves_clients_that_trust_its_authority_and_none_without_tls(authority: Authority) -> None:
    certificate, key = authority.issue("server", HOST)
    async with running(tls_certificate=certificate, tls_key=key) as server:
        async with secured(server, authority) as channel:
            answer = await GenerationServiceStub(channel).Generate(generate_request("ab", max_tokens=2))
            assert len(answer.outputs[0].token_ids) == 2
        stranger = Authority(authority.folder / "stranger")
        async with secured(server, stranger) as channel:
            await status_of(is_serving(channel), grpc.StatusCode.UNAVAILABLE)
        async with grpc.aio.insecure_channel(f"{HOST}:{server.endpoint.port}") as channel:
            await status_of(is_serving(channel), grpc.StatusCode.UNAVAILABLE)


async def test_mutual_tls_refuses_the_handshake_without_a_certificate_of_the_right_authority(
    authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.issue("server", HOST)
    async with running(tls_certificate=certificate, tls_key=key, tls_client_ca=authority.pem) as server:
        async with secured(server, authority, *authority.issue("client", "client.example")) as channel:
            assert await is_serving(channel)
        async with secured(server, authority) as channel:
            await status_of(is_serving(channel), grpc.StatusCode.UNAVAILABLE)
        stranger = Authority(tmp_path)
        async with secured(server, authority, *stranger.issue("client", "client.example")) as channel:
            await status_of(is_serving(channel), grpc.StatusCode.UNAVAILABLE)


async def test_a_new_certificate_is_used_for_new_connections(authority: Authority, tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    certificate, key = old.issue("server", HOST)
    async with running(tls_certificate=certificate, tls_key=key) as server, secured(server, old) as before:
        assert await is_serving(before)
        for path, fresh in zip((certificate, key), new.issue("server", HOST), strict=True):
            path.write_bytes(fresh.read_bytes())
        async with secured(server, new) as channel:
            assert await is_serving(channel)
        async with secured(server, old) as channel:
            await status_of(is_serving(channel), grpc.StatusCode.UNAVAILABLE)
        assert await is_serving(before), "an open connection stays open"
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


async def test_certificates_are_read_once_and_checked_as_read(
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


def alices_keys(folder: Path, permissions: str = '["generate"]', rest: str = "") -> Path:
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
    async with running(api_keys=alices_keys(tmp_path)) as server:
        error = await status_of(
            server.generation.Generate(generate_request("ab"), metadata=metadata), grpc.StatusCode.UNAUTHENTICATED
        )
        assert KEY not in str(error.details())
        error = await status_of(
            server.generation.GenerateStream(stream_request("ab"), metadata=metadata), grpc.StatusCode.UNAUTHENTICATED
        )
        # Garbage is not even looked at.
        call = server.channel.unary_unary(f"/{SERVICES[0]}/Generate")
        await status_of(call(b"\xff\xff", metadata=metadata), grpc.StatusCode.UNAUTHENTICATED)
        assert server.metric("grpc_server_handled_total", grpc_method="Generate", grpc_code="UNAUTHENTICATED") == 2
        assert server.ended() == {}


async def test_a_key_opens_what_it_permits_and_health_needs_none(tmp_path: Path) -> None:
    keys = alices_keys(tmp_path, rest=key_table("bob", permissions='["manage"]'))
    async with running(api_keys=keys) as server:

        def generate(key: str) -> Any:
            return server.generation.Generate(generate_request("ab", max_tokens=2), metadata=bearer(key))

        def verify(key: str) -> Any:
            return server.models.VerifyParity(model_pb2.VerifyParityRequest(), metadata=bearer(key))

        assert len((await generate(KEY)).outputs[0].token_ids) == 2
        listed = await server.models.ListModels(model_pb2.ListModelsRequest(), metadata=bearer())
        assert [model.name for model in listed.models] == [MODEL]
        await status_of(verify(KEY), grpc.StatusCode.PERMISSION_DENIED)
        assert (await verify("bob")).parity.passed
        await status_of(generate("bob"), grpc.StatusCode.PERMISSION_DENIED)
        assert await is_serving(server.channel)


async def test_a_keys_calls_at_once_are_bounded_and_a_cancelled_one_frees_its_place(tmp_path: Path) -> None:
    gate = Gate()
    async with running(
        api_keys=alices_keys(tmp_path, rest="max_concurrent_requests = 1"), runner=FakeRunner(SLOTS, before_run=gate)
    ) as server:
        with gate.closed():
            held = server.generation.GenerateStream(stream_request("ab"), metadata=bearer())
            await read_accepted(held)
            await status_of(
                server.generation.Generate(generate_request("ab"), metadata=bearer()),
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
            held.cancel()
            await server.until_handled("GenerateStream", "CANCELLED")
        assert await server.until_ended(1) == {"cancelled": 1}
        await server.generation.Generate(generate_request("ab", max_tokens=1), metadata=bearer())


async def test_every_method_of_ours_has_a_permission() -> None:
    assert set(PERMISSIONS) == {method.name for method in METHODS.values()} | {LIST.rpartition("/")[2]}
    changing = {"VerifyParity", "LoadModel", "UnloadModel", "ReloadModel"}
    changing |= {"RepositoryModelLoad", "RepositoryModelUnload"}
    assert {path.rpartition("/")[2] for path in MANAGING} == changing


BEYOND = "0.0.0.0"


@pytest.fixture
def beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a server that is to listen on `BEYOND` listen on loopback, so that a test is not reached from outside."""
    start = GrpcServer.start
    monkeypatch.setattr(GrpcServer, "start", lambda self, _, port: start(self, "127.0.0.1", port))


async def managed(channel: grpc.aio.Channel, metadata: Any = ()) -> dict[str, grpc.aio.AioRpcError | None]:
    """How each method that manages models ends with an empty request; None is without an error."""
    found: dict[str, grpc.aio.AioRpcError | None] = {}
    for path in MANAGING:
        found[METHODS[path].name] = None
        try:
            await channel.unary_unary(f"/{path}")(b"", metadata=metadata)
        except grpc.aio.AioRpcError as error:
            found[METHODS[path].name] = error
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
        "keys": {"host": BEYOND, "api_keys": alices_keys(tmp_path, '["generate", "manage"]')},
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


async def test_commands_use_keys_and_certificates(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server", HOST)
    own, own_key = authority.issue("client", "client.example")
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    files = {"tls_certificate": certificate, "tls_key": key, "tls_client_ca": authority.pem}
    async with running(api_keys=alices_keys(tmp_path), **files) as server:
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


async def test_reflection_can_be_turned_off() -> None:
    async with running(reflection=False) as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        await status_of(stub.ServerReflectionInfo(iter([request])).read(), grpc.StatusCode.UNIMPLEMENTED)


@pytest.mark.parametrize(("host", "is_warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
async def test_an_open_door_is_warned_about(
    host: str, is_warned: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(StartupError):
        serve(ServeConfig(models=tmp_path, host=host), lambda _: None)
    assert ("without TLS and API keys" in caplog.text) is is_warned
