"""Who may call over HTTP, and how it starts and stops: keys, TLS, limits, drain, disconnects."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onward.v1 import model_pb2
from service.app import App, Ready, run
from service.engine.batch import ScheduledBatch
from service.errors import StartupError
from service.repository.models import ModelState
from service.transport import tls
from service.transport.http import server as http_server
from tests.fakes import FakeRunner, Gate
from tests.http_calls import MESSAGES, POLITE, Answer, ask, connect, read_answer, request_bytes, serving
from tests.identities import HOST, Authority, key_table
from tests.servers import CONFIG, MODEL, SLOTS, Running, engine_for, eventually, running, served_model, stream_request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"prompt": "ab", "max_tokens": 200, "ignore_eos": True}


def keys(folder: Path, *tables: str) -> Path:
    path = folder / "keys.toml"
    path.write_text("".join(tables))
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_key_opens_what_it_permits_and_health_needs_none(tmp_path: Path) -> None:
    file = keys(tmp_path, key_table("alice"), key_table("bob", permissions='["manage"]'))
    async with serving(api_keys=file) as server:
        fields = {"prompt": "ab", "max_tokens": 2}
        for headers in ({}, bearer("nobody"), {"authorization": "alice"}):
            # Garbage is not even looked at, nor is a path told of.
            for path, body in ((COMPLETIONS, b"\xff"), ("/nowhere", fields), ("/v1/models", None)):
                refused = await ask(server, path, body, headers)
                assert (refused.status, refused.error["code"]) == (401, "invalid_api_key"), path
                assert refused.headers["www-authenticate"] == "Bearer"
        assert (await ask(server, COMPLETIONS, fields, bearer("alice"))).status == 200
        forbidden = await ask(server, COMPLETIONS, fields, bearer("bob"))
        assert (forbidden.status, forbidden.error["type"]) == (403, "permission_error")
        assert (await ask(server, "/health")).status == 200
        assert (await ask(server, "/version")).status == 200
        too_high = await ask(server, COMPLETIONS, {**fields, "priority": 1}, bearer("alice"))
        assert (too_high.status, too_high.error["param"]) == (400, "priority")
        unauthenticated = {"http_route": COMPLETIONS, "http_status": "401"}
        assert server.metric("http_server_handled_total", **unauthenticated) == 3


async def test_a_keys_limits_count_over_both_transports(tmp_path: Path) -> None:
    gate = Gate()
    file = keys(tmp_path, key_table("alice", rest="max_concurrent_requests = 1"))
    async with serving(api_keys=file, runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            metadata = (("authorization", "Bearer alice"),)
            call = server.generation.GenerateStream(stream_request(max_tokens=40), metadata=metadata)
            await call.read()
            limited = await ask(server, COMPLETIONS, LONG, bearer("alice"))
            assert (limited.status, limited.error["code"]) == (429, "rate_limit_exceeded")
            assert limited.headers["retry-after"] == "1"
            call.cancel()
        await server.until_ended(1)
        assert (await ask(server, COMPLETIONS, {**LONG, "max_tokens": 1}, bearer("alice"))).status == 200


async def over_tls(server: Running, context: ssl.SSLContext) -> Answer:
    reader, writer = await asyncio.open_connection(
        server.endpoint.host, server.endpoint.http_port, ssl=context, server_hostname=HOST
    )
    try:
        writer.write(request_bytes("/health"))
        return await read_answer(reader)
    finally:
        writer.close()


def trusting(authority: Authority, *own: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.pem))
    if own:
        context.load_cert_chain(*own)
    return context


async def test_tls_is_that_of_grpc_with_clients_certificates_and_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_LOOK_SECONDS", 0.0)
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    certificate, key = old.issue("server", HOST)
    files: dict[str, Any] = {"tls_certificate": certificate, "tls_key": key, "tls_client_ca": old.pem}
    own = old.issue("client", "client.example")
    async with _bare(**files) as server:
        assert (await over_tls(server, trusting(old, *own))).status == 200
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await over_tls(server, trusting(old))
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await over_tls(server, trusting(old, *new.issue("client", "client.example")))
        for path, fresh in zip((certificate, key), new.issue("server", HOST), strict=True):
            path.write_bytes(fresh.read_bytes())
        assert (await over_tls(server, trusting(new, *own))).status == 200
        with pytest.raises(ssl.SSLError):
            await over_tls(server, trusting(old, *own))
        certificate.write_bytes(b"half a file")
        assert (await over_tls(server, trusting(new, *own))).status == 200
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await ask(server, "/health")


async def test_a_handshake_that_does_not_come_counts_as_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_HANDSHAKE_SECONDS", 3600.0)  # not by its time
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server", HOST)
    async with _bare(tls_certificate=certificate, tls_key=key, max_connections=2) as server:
        silent = [await connect(server) for _ in range(2)]
        reader, writer = await connect(server)
        assert await reader.read() == b"", "a third is closed"
        for each in (writer, *(writer for _, writer in silent)):
            each.close()
        http: Any = server.app._http
        await eventually(lambda: not http._opening)
        assert (await over_tls(server, trusting(authority))).status == 200


def _bare(**changes: Any) -> Any:
    """A server over TLS; its gRPC channel, which is not used, is not."""
    return running(http_port=0, **changes)


async def test_what_http_needs_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn.config", None)
    monkeypatch.delitem(sys.modules, "service.transport.http.server")
    model = served_model()
    with pytest.raises(StartupError, match="--http-port needs the extra `http`"):
        App(replace(CONFIG, http_port=0), [model], {MODEL: engine_for(model)})
    App(CONFIG, [model], {MODEL: engine_for(model)})


async def test_a_port_in_use_stops_the_start() -> None:
    async with serving() as server:
        with pytest.raises(StartupError, match="for HTTP: "):
            async with running(http_port=server.endpoint.http_port):
                pass


async def test_signals_drain_as_over_grpc() -> None:
    gate, model = Gate(), served_model(**POLITE)
    runner = FakeRunner(SLOTS, before_run=gate)
    app = App(replace(CONFIG, http_port=0), [model], {MODEL: engine_for(model, runner)})
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    process = asyncio.create_task(run(app, ready.set_result))
    endpoint = (await ready).endpoint
    server: Any = type("Server", (), {"endpoint": endpoint})
    idle = await connect(server)
    idle[1].write(request_bytes("/health"))
    assert (await read_answer(idle[0])).status == 200
    with gate.closed():
        fields = {"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True, "stream": True}
        held = asyncio.create_task(ask(server, CHAT, fields))
        await gate.until_entered()
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: app.models.state(MODEL) is ModelState.DRAINING)
        # On the connection that was open, too; its answer closes it.
        idle[1].write(request_bytes(COMPLETIONS, LONG))
        refused = await read_answer(idle[0])
        assert (refused.status, refused.error["code"]) == (503, "not_serving")
        assert refused.headers["connection"] == "close"
        assert await idle[0].read() == b""
        idle[1].close()
        assert (await ask(server, "/health")).status == 503
    answer = await held
    assert sum(len(event["choices"][0]["delta"].get("content", "")) for event in answer.events) == 5
    assert await process == 0
    with pytest.raises(ConnectionError):
        await connect(server)


async def test_health_is_unavailable_at_a_stop_where_no_model_is_served() -> None:
    async with serving() as server:
        await server.models.UnloadModel(model_pb2.UnloadModelRequest(model=MODEL))
        assert (await ask(server, "/health")).status == 200
        server.app._http.withdraw()
        assert (await ask(server, "/health")).status == 503


@pytest.mark.parametrize("stage", ["in the head", "in the body", "in the queue", "while it runs", "in a stream"])
async def test_a_client_that_leaves_frees_what_it_held(stage: str) -> None:
    gate, is_single = Gate(), threading.Event()

    def before_run(batch: ScheduledBatch) -> None:
        gate(batch)
        if is_single.is_set():
            gate.open.clear()

    async with serving(runner=FakeRunner(SLOTS, before_run=before_run)) as server:
        reader, writer = await connect(server)
        data = request_bytes(COMPLETIONS, {**LONG, "stream": stage == "in a stream"})
        if stage in ("in the head", "in the body"):
            head = data.index(b"\r\n\r\n") + 4
            writer.write(data[: head - 10] if stage == "in the head" else data[: head + 10])
            await asyncio.sleep(0.05)
            writer.close()
            if stage == "in the body":
                await eventually(lambda: gone(server) == 1)
        elif stage == "in the queue":
            with gate.closed():
                ahead = asyncio.create_task(ask(server, COMPLETIONS, {**LONG, "n": SLOTS}))
                await gate.until_entered()
                writer.write(data)
                await eventually(lambda: server.num_streams == 2)
                writer.close()
                await eventually(lambda: gone(server) == 1)
            assert (await ahead).status == 200
        else:
            gate.open.clear()
            writer.write(data)
            await gate.until_entered()
            if stage == "in a stream":
                # One step: the stream must not be over before its client leaves.
                is_single.set()
                gate.open.set()
                await reader.readuntil(b"data: ")
                is_single.clear()
            writer.transport.abort()
            await eventually(lambda: gone(server) == 1)
            gate.open.set()
        ended = await server.until_idle()
        assert ended.get("cancelled", 0) == (0 if stage in ("in the head", "in the body") else 1)
        assert server.metric("num_requests_running", model_name=MODEL) == 0
        assert server.metric("kv_cache_usage_ratio", model_name=MODEL) == 0
        assert (await ask(server, COMPLETIONS, {"prompt": "ab", "max_tokens": 1})).status == 200


async def test_an_answer_that_outlives_the_grace_ends_with_an_error_whole_or_streamed() -> None:
    held = serving([served_model(context=100_000)], drain_grace_seconds=0.0)
    server = await held.__aenter__()
    fields = {"prompt": "ab", "max_tokens": 60_000, "ignore_eos": True}
    reader, writer = await connect(server)
    writer.write(request_bytes(COMPLETIONS, {**fields, "stream": True}))
    await reader.readuntil(b"data: ")
    streamed = asyncio.create_task(reader.read())
    whole = asyncio.create_task(ask(server, COMPLETIONS, fields))
    await eventually(lambda: server.num_streams == 2)
    await held.__aexit__(None, None, None)
    assert server.ended() == {"not_serving": 2}
    assert ((await whole).status, (await whole).error["code"]) == (503, "not_serving")
    last = (await streamed).rpartition(b"data: ")[2].partition(b"\n\n")[0]
    assert json.loads(last)["error"]["message"] == "the server has stopped"
    writer.close()


def gone(server: Running) -> float:
    """Calls whose clients left."""
    return server.metric("http_server_handled_total", http_route=COMPLETIONS, http_status="499")
