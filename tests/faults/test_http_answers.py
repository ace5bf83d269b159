"""Answers over HTTP: those that are not taken, too large, or sent while the server stops."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from typing import Any

import pytest

from service.errors import Overloaded, RateLimited
from service.process.text_pool import LONG_BYTES, TextPool
from service.transport.http import server as http_server
from service.transport.http.calls import Request
from service.transport.http.exchange import Exchange
from service.transport.places import Place
from tests.http_calls import MESSAGES, POLITE, answering, ask, connect, read_answer, request_bytes, send, serving
from tests.servers import MODEL, Running, eventually, served_model

COMPLETIONS = "/v1/completions"
FIELDS: dict[str, Any] = {"prompt": "ab", "max_tokens": 2}


async def test_a_body_behind_its_answer_leaves_its_connection_idle_time_and_the_next_request_all_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_KEEP_ALIVE_SECONDS", 1)

    async def handler(_request: Request) -> bytes:
        await asyncio.sleep(2)
        return b"[]"

    async with answering(handler) as (server, _):
        for rest, statuses in ((b"{}", []), (b"{}" + request_bytes("/it"), [200])):
            reader, writer = await connect(server)
            writer.write(b"POST /nothing HTTP/1.1\r\ncontent-length: 2\r\n\r\n")
            assert (await read_answer(reader)).status == 405
            writer.write(rest)
            assert [(await read_answer(reader)).status for _ in statuses] == statuses
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()


async def test_an_answer_that_cannot_be_sent_is_logged_and_ends_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(_request: Request) -> Any:
        return "no bytes"

    async with answering(handler) as (server, open_calls):
        assert (await send(server, request_bytes("/it"))).endswith(b"\r\n\r\n")
        await open_calls.wait_idle()
    assert "an unexpected error ended an answer" in caplog.text


def reading_late(server: Running, data: bytes) -> socket.socket:
    """A client that has sent a request, and takes little of the answer while nothing is read."""
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect((server.endpoint.host, server.endpoint.http_port))
    slow.sendall(data)
    return slow


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    async def handler(request: Request) -> bytes:
        return b"y" * (20 << 20)

    async with answering(handler, max_stall_seconds=0.5) as (server, open_calls):
        slow = reading_late(server, request_bytes("/it"))
        received = await asyncio.to_thread(read_all, slow)
        await open_calls.wait_idle()
        slow.close()
        assert received < 20 << 20


async def test_a_stream_whose_client_reads_nothing_frees_its_row() -> None:
    served = served_model(context=1 << 15)
    async with serving([served], max_stall_seconds=0.5) as server:
        fields = {"prompt": "ab", "max_tokens": 30_000, "ignore_eos": True, "logprobs": 20, "stream": True}
        slow = reading_late(server, request_bytes(COMPLETIONS, fields))
        await eventually(lambda: server.num_streams == 1)
        ended = await server.until_idle()
        assert ended == {"cancelled": 1}
        http: Any = server.app._http
        await eventually(lambda: not http._state.connections)
        assert server.metric("kv_cache_usage_ratio", model_name=MODEL) == 0
        assert (await ask(server, COMPLETIONS, FIELDS)).status == 200
        slow.close()


def read_all(slow: socket.socket) -> int:
    """How many bytes still come, to a client that begins to read late, before the connection ends."""
    time.sleep(2)
    received = 0
    with suppress(ConnectionError):
        while part := slow.recv(1 << 16):
            received += len(part)
    return received


async def test_a_connection_whose_last_answer_is_never_taken_ends() -> None:
    async def handler(request: Request) -> bytes:
        return b"y" * (1 << 20)

    async with answering(handler, max_stall_seconds=0.5) as (server, open_calls):
        slow = reading_late(server, request_bytes("/it"))
        connections = server.app._http._state.connections
        await eventually(lambda: bool(connections))
        await eventually(lambda: not connections)
        slow.close()
        await eventually(lambda: open_calls.num_open == 0)


async def test_a_call_is_open_while_its_answer_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a server that stops waits for it as long as its grace allows."""
    is_sending, may_go_on = asyncio.Event(), asyncio.Event()
    end = Exchange.end

    async def wait(exchange: Exchange, data: bytes = b"") -> None:
        is_sending.set()
        await may_go_on.wait()
        await end(exchange, data)

    monkeypatch.setattr(Exchange, "end", wait)
    async with serving() as server:
        asking = asyncio.ensure_future(ask(server, COMPLETIONS, FIELDS))
        await is_sending.wait()
        assert server.app._open_calls.num_open == 1
        may_go_on.set()
        assert (await asking).status == 200
        await eventually(lambda: server.app._open_calls.num_open == 0)


class Flushing:
    """A connection that still has bytes of its last answer for a while."""

    def __init__(self, connections: set[Any]) -> None:
        self.transport, self.is_aborted = self, False
        self._connections = connections
        connections.add(self)

    def shutdown(self) -> None:
        asyncio.get_running_loop().call_later(0.1, self._connections.discard, self)

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_stop_lets_a_connection_have_the_last_bytes_of_its_answer() -> None:
    async def handler(_request: Request) -> bytes:
        return b"[]"

    async with answering(handler) as (server, _):
        flushing = Flushing(server.app._http._state.connections)
        await server.app._http.stop(30)
        assert not flushing.is_aborted


async def test_an_answer_for_which_there_is_no_room_has_the_status_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: Place, num_bytes: int, _seconds: float) -> None:
        if num_bytes > 2000:
            raise RateLimited("answers leave no room", 1.0)

    async with serving() as server:
        monkeypatch.setattr(Place, "answer", answer)
        refused = await ask(server, COMPLETIONS, {**FIELDS, "max_tokens": 100, "logprobs": 5, "ignore_eos": True})
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        labels = {"http_route": COMPLETIONS, "http_status": "429"}
        assert server.metric("http_server_handled_total", **labels) == 1


async def test_an_answer_that_is_too_large_ends_before_it_is_whole() -> None:
    served = served_model(context=1 << 14, chat=POLITE["chat"])
    async with serving([served], max_message_bytes=10_000) as server:
        for path, more in (
            ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5}),
            (COMPLETIONS, {**FIELDS, "n": 4}),
        ):
            refused = await ask(server, path, {**more, "max_tokens": 10_000, "ignore_eos": True})
            assert (refused.status, refused.error["code"]) == (400, "answer_too_large"), refused.body
        assert await server.until_idle() == {"cancelled": 2}


async def test_an_answer_is_not_refused_where_other_texts_have_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TextPool.run

    async def full(pool: TextPool, tenant: str, num_bytes: int, *arguments: Any) -> Any:
        if num_bytes > LONG_BYTES:
            raise Overloaded("texts", 16, 16, 1.0)
        return await run(pool, tenant, num_bytes, *arguments)

    monkeypatch.setattr(TextPool, "run", full)
    async with serving([served_model(context=2048)]) as server:
        fields = {"prompt": [5, 6], "max_tokens": 1500, "logprobs": 5, "ignore_eos": True}
        answer = await ask(server, COMPLETIONS, fields)
        assert answer.status == 200
        assert len(answer.body) > LONG_BYTES


async def test_a_client_that_takes_all_gets_all_of_a_large_answer() -> None:
    async def handler(request: Request) -> bytes:
        return b"y" * (5 << 20)

    async with answering(handler) as (server, _):
        assert (await ask(server, "/it")).body == b"y" * (5 << 20)
