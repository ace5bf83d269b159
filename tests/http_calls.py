"""Calls over HTTP to a server of `tests.servers`: openai-python's clients, and bytes as they are."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry, Counter

from model.spec.artifact import CHAT, MANIFEST, hash_file, read_manifest
from model.spec.chat import ChatSettings
from service.access import OpenAccess
from service.app import App
from service.config import ServeConfig
from service.telemetry.tracing import NoTracer
from service.transport.admission import OpenCalls
from service.transport.http.calls import Calls, Request, Route
from service.transport.http.server import HttpServer
from service.transport.setup import transport_limits
from tests.artifacts import rehash, tiny_artifact
from tests.integration.test_server_chat import TEMPLATE
from tests.servers import CONFIG, Running, running, served_model
from tests.servers import connect as connect_clients

POLITE: dict[str, Any] = {"chat": TEMPLATE, "context": 256}
"""A model that has a chat template."""
MESSAGES: Any = [{"role": "user", "content": "ab"}]


@asynccontextmanager
async def serving(served: Any = None, **changes: Any) -> AsyncIterator[Running]:
    """A server with both transports; by default over one model with a chat template."""
    async with running(served or [served_model(**POLITE)], http_port=0, **changes) as server:
        yield server


@asynccontextmanager
async def serving_random(folder: Path, template: str) -> AsyncIterator[Running]:
    """A server with both transports over `tiny`, a model of random weights with this chat template."""
    made = folder / "tiny"
    shutil.copytree(tiny_artifact("decoder-only", context=1536), made)
    (made / CHAT).write_text(ChatSettings(template).to_json())
    manifest = read_manifest(made)
    files = {**manifest.files, CHAT: hash_file(made / CHAT)}
    (made / MANIFEST).write_text(replace(manifest, files=files).to_json())
    rehash(made)
    config = ServeConfig(
        models=folder, port=0, http_port=0, metrics=False, calibrate=False, threads=1, spin=False, max_batch_size=8
    )
    registry = CollectorRegistry()
    app = App.load(config, registry)
    async with app.listening() as endpoint, connect_clients(app, endpoint, registry) as server:
        await app.verify_all()
        yield server


@asynccontextmanager
async def openai(server: Running, api_key: str = "none", **options: Any) -> AsyncIterator[AsyncOpenAI]:
    """openai-python's client, without retries."""
    async with AsyncOpenAI(base_url=f"{url(server)}/v1", api_key=api_key, max_retries=0, **options) as client:
        yield client


def url(server: Running) -> str:
    return f"http://{server.endpoint.host}:{server.endpoint.http_port}"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream, without the mark of its end."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.rpartition("\n")[2].removeprefix("data: ")) for line in lines]


async def connect(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(server.endpoint.host, server.endpoint.http_port)


def request_bytes(
    path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> bytes:
    """A request; `body` is JSON, or bytes as they are."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", "host: test"]
    kind = {} if body is None else {"content-type": "application/json"}
    given = {"content-length": str(len(data)), **kind, **(headers or {})}
    lines += [f"{name}: {value}" for name, value in given.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


async def ask(
    server: Running, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> Answer:
    """One request on a connection of its own."""
    reader, writer = await connect(server)
    try:
        writer.write(request_bytes(path, body, headers, method))
        return await read_answer(reader)
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """The next answer on a connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return Answer(int(head[0].split()[1]), headers, body)


async def send(server: Running, data: bytes, most: int = -1) -> bytes:
    """All that a client gets for some bytes; with `most`, what comes first of it."""
    reader, writer = await connect(server)
    try:
        writer.write(data)
        await writer.drain()
        return await reader.read(most)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@asynccontextmanager
async def answering(handler: Callable[[Request], Any], **changes: Any) -> AsyncIterator[tuple[Running, OpenCalls]]:
    """An HTTP server whose only route is the handler's."""
    config = ServeConfig(models=CONFIG.models, **changes)
    handled = Counter("handled", "", ["http_route", "http_status"], registry=CollectorRegistry())
    open_calls = OpenCalls()
    routes = {"/": Route("GET", handler, "Generate"), "/it": Route("GET", handler, "Generate")}
    calls = Calls(routes, handled, OpenAccess(), transport_limits(config), lambda: 1000, NoTracer(), open_calls)
    server = HttpServer(calls, config)
    port = await server.start("127.0.0.1", 0)
    endpoint = type("Endpoint", (), {"host": "127.0.0.1", "http_port": port})
    try:
        app = type("App", (), {"_http": server})
        yield type("Server", (), {"endpoint": endpoint, "app": app}), open_calls  # type: ignore[misc]
    finally:
        await server.stop(1)
