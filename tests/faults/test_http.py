"""Hostile and broken clients of the HTTP transport: each is answered or cut off, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest

from service.transport.http import connection
from service.transport.http.calls import Request
from tests.http_calls import MESSAGES, answering, ask, connect, read_answer, request_bytes, send, serving
from tests.servers import Running, eventually

COMPLETIONS = "/v1/completions"
FIELDS: dict[str, Any] = {"prompt": "ab", "max_tokens": 2}
POST = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
DOCUMENTED = {200, 400, 401, 404, 405, 408, 413, 429, 431}


async def is_well(server: Running) -> bool:
    return (await ask(server, COMPLETIONS, FIELDS)).status == 200


async def test_a_head_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 0.2)
    async with serving() as server:
        for data in (b"", b"P", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n", b"\r\n"):
            assert await send(server, data) == b""
        # The same behind an answer on the same connection; idle, it stays open.
        reader, writer = await connect(server)
        writer.write(request_bytes("/health"))
        assert (await read_answer(reader)).status == 200
        await asyncio.sleep(0.3)
        writer.write(request_bytes("/health"))
        assert (await read_answer(reader)).status == 200
        writer.write(b"GET /he")
        assert await reader.read() == b""
        writer.close()
        assert await is_well(server)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % index for index in range(4000)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nx: " + b"y" * (1 << 20),
        b"GET /" + b"a" * (1 << 20),
        b"GET /health HTTP/1.1\r\n" + b"y" * (1 << 20),
    ],
    ids=["many headers", "a long header", "a long path", "a long name"],
)
async def test_a_flood_in_the_head_is_refused(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 3600.0)  # not by its time
    async with serving() as server:
        answer = await send(server, head)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
        assert await is_well(server)


@pytest.mark.parametrize("head", [CHUNKED, CHUNKED.replace(POST, b"GET /health HTTP/1.1\r\n")], ids=["post", "get"])
@pytest.mark.parametrize("begin", [b"0\r\nx: ", b"0\r\n", b"1;"], ids=["a trailer", "its name", "an extension"])
async def test_what_does_not_end_in_a_body_is_refused_before_it_is_kept(head: bytes, begin: bytes) -> None:
    async with serving(max_stall_seconds=3600) as server:
        async with asyncio.timeout(60):
            answer = await send(server, head + begin + b"y" * (4 << 20))
        assert b" 431 " in answer or not answer or answer.startswith(b"HTTP/1.1 200 "), answer
        http: Any = server.app._http
        await eventually(lambda: not http._state.connections)
        assert await is_well(server)


async def test_a_large_body_is_refused_before_it_is_read_and_the_connection_goes_on() -> None:
    async with serving(max_message_bytes=100_000) as server:
        reader, writer = await connect(server)
        writer.write(POST + b"content-length: 150000\r\n\r\n")
        assert (await read_answer(reader)).status == 413  # nothing of it was sent
        writer.write(b"x" * 150_000 + request_bytes(COMPLETIONS, FIELDS))
        assert await reader.read() == b"", "as much as another body is discarded, then the connection ends"
        writer.close()
        chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
        reader, writer = await connect(server)
        writer.write(CHUNKED + 4 * chunk)
        refused = await read_answer(reader)
        assert (refused.status, refused.error["param"]) == (413, "body")
        writer.write(b"0\r\n\r\n" + request_bytes(COMPLETIONS, FIELDS))
        assert (await read_answer(reader)).status == 200
        writer.close()


async def test_a_body_that_does_not_come_is_ended() -> None:
    async with serving(max_stall_seconds=0.3) as server:
        reader, writer = await connect(server)
        writer.write(request_bytes(COMPLETIONS, FIELDS)[:-5])
        assert (await read_answer(reader)).status == 408
        assert await reader.read() == b"", "its rest has as long again"
        writer.close()
        assert await is_well(server)


async def test_a_body_that_comes_behind_its_deadline_is_ended() -> None:
    async with serving() as server:
        reader, writer = await connect(server)
        head = request_bytes("/v1/completions", b"", {"content-length": "100", "x-request-timeout": "0.2"}, "POST")
        writer.write(head + b'{"prompt":')
        answer = await read_answer(reader)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert await reader.read() == b""
        writer.close()


async def test_what_is_pipelined_behind_a_request_is_not_served() -> None:
    async with serving() as server:
        twice = request_bytes(COMPLETIONS, FIELDS) + request_bytes(COMPLETIONS, {**FIELDS, "max_tokens": 1})
        for rest in (b"", b"garbage \0\1\2", b"x" * 300_000):
            answer = await send(server, twice + rest)
            assert answer.count(b"HTTP/1.1 ") == 1
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2
        # A flood of it ends the connection at once.
        endless = request_bytes(COMPLETIONS, {**FIELDS, "max_tokens": 200, "ignore_eos": True}) + b"GET / HTTP/1.1\r\n"
        await send(server, endless + b"x" * (6 << 20))
        await server.until_idle()
        assert await is_well(server)


async def test_a_line_break_or_a_request_behind_a_body_does_not_end_a_long_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 0.1)

    async def handler(request: Request) -> bytes:
        await asyncio.sleep(0.4)
        return b"{}"

    async with answering(handler) as (server, _):
        for behind in (b"\r\n", b"GET /it HTTP/1.1\r\n"):
            reader, writer = await connect(server)
            writer.write(request_bytes("/it"))
            await asyncio.sleep(0.05)
            writer.write(behind)
            assert (await read_answer(reader)).body == b"{}", behind[:20]
            writer.close()


async def test_a_wish_for_another_protocol_is_ignored_and_its_body_is_no_request_of_its_own() -> None:
    """Java's client wishes for HTTP/2. A proxy that passes the wish on must not be sent a second answer."""
    wish = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABk"}
    hidden = request_bytes("/version")
    async with serving() as server:
        reader, writer = await connect(server)
        for body in (FIELDS, hidden, FIELDS):
            sent = request_bytes(COMPLETIONS, body, wish)
            head, _, rest = sent.partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            await asyncio.sleep(0.05)
            writer.write(rest)
            assert (await read_answer(reader)).status == (400 if body is hidden else 200)
        writer.write(request_bytes("/version", headers=wish))
        assert (await read_answer(reader)).json.keys() == {"version"}
        writer.write(b"CONNECT a:80 HTTP/1.1\r\n\r\n" + hidden)
        assert (await reader.read()).count(b"HTTP/1.1 400 ") == 1
        writer.close()


async def test_a_flood_of_tiny_chunks_is_refused() -> None:
    async with serving() as server:
        answer = await send(server, CHUNKED + b"1\r\n \r\n" * 200_000)
        assert answer == b"" or b"chunks are too small" in answer
        await eventually(lambda: server.app._open_calls.num_open == 0)
        body = json.dumps(FIELDS).encode()
        honest = CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        assert (await send(server, honest, 15)).startswith(b"HTTP/1.1 200 ")


async def test_headers_behind_a_body_are_not_the_requests() -> None:
    """RFC 9110, 6.5.1: a proxy that checks or strips a key looks at the head alone."""
    seen: list[str | None] = []

    async def handler(request: Request) -> bytes:
        seen.append(request.exchange.header("x-late"))
        return b"{}"

    async with answering(handler) as (server, _):
        chunked = b"GET /it HTTP/1.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        assert (await send(server, chunked + b"1\r\n \r\n0\r\nx-late: 1\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert seen == [None]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, {"\ud800": 1}, 400),
        (COMPLETIONS, {**FIELDS, "logit_bias": {"\ud800": 1}}, 400),
        ("/v1/responses", {"input": "ab", "max_output_tokens": 1, "metadata": {"\ud800": "\udfff"}}, 200),
        (COMPLETIONS, {**FIELDS, "request_id": "\u4e2d %2"}, 200),
    ],
    ids=["a field's name", "a name in a field", "a label", "a request's id"],
)
async def test_text_that_has_no_bytes_of_its_own_is_answered_in_json(path: str, body: Any, status: int) -> None:
    async with serving() as server:
        answer = await ask(server, path, body)
        assert answer.status == status
        assert answer.headers["content-type"] == "application/json"
        if "metadata" in body:
            assert answer.json["metadata"] == body["metadata"]
        if "request_id" in body:
            assert answer.headers["x-request-id"] == "%E4%B8%AD %2"
            assert answer.json["id"].endswith(body["request_id"])


@pytest.fixture
def usual_stack() -> Iterator[None]:
    """Python's own limit, as a server's process has it: libraries that tests use raise it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' occurs twice"),
        (b'{"temperature": NaN}', "NaN is no number"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "must be a JSON object"),
        (b"[" * 100_000, "body: "),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "body: "),
        (b'{"prompt": "\xff"}', "must be a JSON object in UTF-8"),
        (b'{"prompt": [' + b"1," * 600_000 + b"1]}", "body: must have at most"),
        (b'{"x": [' + b"{}," * 600_000 + b"1]}", "body: must have at most"),
        (b'{"prompt": "' + b'\\"' * 600_000 + b'"}', "prompt: must have at most"),
        (b'{"prompt": "' + b"\\\\" * 600_000, "must be a JSON object"),
    ],
    ids=lambda each: repr(each[:20]) if isinstance(each, bytes) else "",
)
@pytest.mark.usefixtures("usual_stack")
async def test_json_that_is_none_or_too_much_is_refused(body: bytes, words: str) -> None:
    async with serving() as server:
        answer = await ask(server, COMPLETIONS, body)
        assert answer.status == 400
        assert words in answer.error["message"]


async def test_paths_methods_and_headers_have_their_statuses() -> None:
    async with serving() as server:
        assert (await ask(server, "/nowhere", FIELDS)).status == 404
        assert (await ask(server, "/v1/models/", None)).status == 404
        other = await ask(server, COMPLETIONS, None)
        assert (other.status, other.headers["allow"]) == (405, "POST")
        assert (await ask(server, "/health", FIELDS)).status == 405
        for headers in (
            {"content-encoding": "gzip"},
            {"content-type": "text/plain"},
            {"content-type": ""},
            {"x-request-timeout": "soon"},
            {"x-request-timeout": "-1"},
        ):
            refused = await ask(server, COMPLETIONS, FIELDS, headers)
            assert (refused.status, refused.error["param"]) == (400, *headers)
        untyped = request_bytes(COMPLETIONS, FIELDS, {"connection": "close"}).replace(b"content-type", b"x-type")
        assert b"content-type: must be application/json, got None" in await send(server, untyped)
        patient = request_bytes(COMPLETIONS, FIELDS, {"expect": "100-continue", "connection": "close"})
        assert (await send(server, patient)).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")


async def test_connections_and_calls_are_bounded_and_health_is_still_answered() -> None:
    async with serving(max_connections=3, max_concurrent_rpcs=2) as server:
        half = [await connect(server) for _ in range(2)]
        for _, writer in half:
            writer.write(request_bytes(COMPLETIONS, FIELDS)[:-1])
        await eventually(lambda: server.app._open_calls.num_open == 2)
        full = await ask(server, COMPLETIONS, FIELDS)
        assert (full.status, full.error["code"]) == (429, "rate_limit_exceeded")
        assert (await ask(server, "/health")).status == 200
        http: Any = server.app._http
        await eventually(lambda: len(http._state.connections) == 2)
        third = await connect(server)
        await eventually(lambda: len(http._state.connections) == 3)
        asked = request_bytes("/health", headers={"connection": "close"})
        assert await send(server, asked) == b"", "a fourth connection is closed"
        for _, writer in (*half, third):
            writer.close()
        await eventually(lambda: server.app._open_calls.num_open == 0)
        assert await is_well(server)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"\ud800": 1}, "\ud800"),
        ({"logit_bias": {"\ud800": 1}}, "logit_bias[\ud800]"),
        ({"stream": True, "stream_options": {"\udfff": 1}}, "stream_options.\udfff"),
    ],
)
async def test_a_name_that_is_no_unicode_is_refused_by_that_name(fields: dict[str, Any], param: str) -> None:
    async with serving() as server:
        answer = await ask(server, COMPLETIONS, {**FIELDS, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_id_that_no_header_can_have_is_percent_encoded_there(*, streamed: bool) -> None:
    async with serving() as server:
        answer = await ask(server, COMPLETIONS, {**FIELDS, "request_id": "é 50%日", "stream": streamed})
    assert (answer.status, answer.headers["x-request-id"]) == (200, "%C3%A9 50%%E6%97%A5")
    assert (answer.events[0] if streamed else answer.json)["id"] == "cmpl-é 50%日"


SOUND: dict[str, dict[str, Any]] = {
    COMPLETIONS: FIELDS,
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 2},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/models": {},
    "/health": {},
    "/x": {},
}
ITEMS = [
    [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]}],
    [{"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": [1]}'}],
    [{"type": "function_call_output", "call_id": "c", "output": "b"}, {"role": "user", "content": None}],
    [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "[]"}}]}],
    [{"type": "function", "name": "f", "function": {"name": "f"}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}],
    {"type": "Unimplemented keys: [x]"},
    {"type": "function"},
]


def mutated(rng: random.Random) -> bytes:
    """A request with something wrong, perhaps."""
    path = rng.choice([*SOUND])
    values: dict[str, Any] = dict(SOUND[path])
    odd = [None, True, -1, 0, 1.5, 1e308, 2**70, "", "x", "\u0000", "é" * 9, [], [[]], {}, {"a": 1}, ["a"], [1, "b"]]
    odd += ITEMS
    names = [
        "prompt", "messages", "model", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias",
        "stream", "stream_options", "logprobs", "top_logprobs", "user", "tools", "response_format", "priority",
        "use_beam_search", "beam_size", "request_id", "timeout_seconds", "min_tokens", "stop_token_ids", "echo",
        "unheard_of", "top_k", "input", "instructions", "max_output_tokens", "metadata", "include", "reasoning", "text",
        "tool_choice", "tokens", "guided_json", "guided_regex", "guided_choice", "structured_outputs",
        "guided_grammar", "reasoning_effort", "max_completion_tokens", "parallel_tool_calls", "chat_template_kwargs",
        "client_metadata", "return_token_ids", "min_p", "presence_penalty", "repetition_penalty", "safety_identifier",
    ]  # fmt: skip
    for _ in range(rng.randint(0, 3)):
        values[rng.choice(names)] = rng.choice(odd)
    data = bytearray(request_bytes(path, values, {"connection": "close"}, rng.choice([None, None, "GET", "PUT"])))
    for _ in range(rng.choice([0, 0, 0, 1, 5])):
        at = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randint(1, 9)]
            case _:
                data[at:at] = rng.randbytes(rng.randint(1, 9))
    return bytes(data)


async def test_fuzzed_requests_have_documented_statuses(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 0.3)
    seen, answered = defaultdict[int, int](int), set[str]()

    async def one(server: Running, seed: int) -> None:
        asked = mutated(random.Random(seed))
        answer = await send(server, asked, 300)
        # None for a head that has no end or no beginning.
        status = int(answer[9:12]) if answer else 0
        assert status in {0, *DOCUMENTED}, (seed, answer)
        seen[status] += 1
        if status == HTTPStatus.OK:
            answered.update(path for path in SOUND if f" {path} ".encode() in asked)

    async with serving(max_stall_seconds=0.3) as server:
        seeds = iter(range(pytestconfig.getoption("--fuzz")))

        async def some() -> None:
            for seed in seeds:
                await one(server, seed)

        await asyncio.gather(*(some() for _ in range(64)))
        await server.until_idle()
        assert await is_well(server)
    print(f"statuses: {dict(seen)}")
    assert {*seen} >= {200, 400, 404, 405}
    assert seen[0] <= 0.1 * sum(seen.values())
    assert answered == {*SOUND} - {"/x"}
    assert "an unexpected error" not in caplog.text
