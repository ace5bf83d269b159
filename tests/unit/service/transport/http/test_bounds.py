"""What a body may cost: memory and work follow from its length, and what exceeds a bound is refused by name."""

from __future__ import annotations

import gc
import json
import resource
from pathlib import Path
from typing import Any

import pytest

from service.engine.types import FinishReason, GenerationRequest
from service.errors import InvalidRequest, RequestError
from service.transport.http.bodies import parse
from service.transport.http.calls import Request
from service.transport.http.requests import MAX_LABEL, MAX_MESSAGES, decode_chat
from service.transport.http.responses import LOGPROBS, decode_response
from tests.http_calls import MESSAGES, ask, serving
from tests.scripted import ScriptedEngine, Steps, token
from tests.servers import MODEL

LONG = 1 << 20
ASKED: dict[str, Any] = {"role": "user", "content": "a"}


def thoughts(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def resident_bytes() -> int:
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


def test_items_of_one_message_take_memory_by_their_length_alone() -> None:
    """Two thousand that each go on with a mebibyte: copied for each, they would be gigabytes."""
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    before = resident_bytes()
    joined = decode_response({"input": [ASKED, thoughts("x" * LONG), *[thoughts("y")] * 2000, *[called] * 2000]})
    assert resident_bytes() - before < 32 * LONG
    _, message = joined.messages
    assert message.content.count("<think>") == 2001
    assert len(message.tool_calls) == 2000


def calls_of(arguments: str) -> list[tuple[Any, Any, str]]:
    """The same call in each shape: how it is decoded, its values, and the field of its arguments."""
    function = {"name": "f", "arguments": arguments}
    chat = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    item = {"type": "function_call", "call_id": "c", **function}
    return [
        (decode_chat, {"messages": [ASKED, chat, chat]}, "messages[2].tool_calls[0].function.arguments"),
        (decode_response, {"input": [ASKED, item, item]}, "input[2].arguments"),
    ]


def test_arguments_of_all_calls_have_a_bounded_number_of_elements() -> None:
    for decode, values, field in calls_of('{"a": [' + ",".join(["{}"] * 5000) + "]}"):
        with pytest.raises(InvalidRequest, match="16384 elements in all") as error:
            decode(values)
        assert error.value.field == field
    # A file's text has as many commas as it likes.
    for decode, values, _ in calls_of('{"a": "' + ",[{" * 100_000 + '"}'):
        assert decode(values).messages


@pytest.mark.parametrize(
    ("depth", "said"),
    [(64, "nest at most 64 deep"), (900, "nest at most 64 deep|text of a JSON object"), (100_000, "elements in all")],
)
def test_arguments_nest_to_a_bounded_depth(depth: int, said: str) -> None:
    for decode, values, _ in calls_of('{"a": ' + "[" * depth + "]" * depth + "}"):
        with pytest.raises(InvalidRequest, match=said):
            decode(values)
    for decode, values, _ in calls_of('{"a": ' + "[" * 63 + "]" * 63 + "}"):
        assert decode(values).messages


async def test_a_conversation_has_a_bounded_number_of_messages() -> None:
    many = [{**ASKED, "content": ""}] * (MAX_MESSAGES + 1)
    async with serving() as server:
        for path, name in (("/tokenize", "messages"), ("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
            refused = await ask(server, path, {"model": MODEL, name: many})
            assert (refused.status, refused.error["param"]) == (400, name)
            assert f"must have at most {MAX_MESSAGES}" in refused.error["message"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"user": "x" * (MAX_LABEL + 1)}, "user"),
        ({"prompt_cache_key": "x" * (MAX_LABEL + 1)}, "prompt_cache_key"),
        ({"metadata": {"a": "x" * (MAX_LABEL + 1)}}, "metadata"),
        ({"metadata": {"x" * (MAX_LABEL + 1): "a"}}, "metadata"),
    ],
)
def test_labels_have_a_bounded_length(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=f"{field}.*{MAX_LABEL}"):
        decode_response({"input": "a", **changes})
    if "metadata" not in changes:
        with pytest.raises(RequestError, match=f"{field}.*{MAX_LABEL}"):
            decode_chat({"messages": MESSAGES, **changes})
    decode_response({"input": "a", "user": "x" * MAX_LABEL, "metadata": {"a": "x" * MAX_LABEL}})


@pytest.mark.parametrize("field", ["name", "description"])
def test_what_a_response_repeats_of_a_form_has_a_bounded_length(field: str) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {}, field: "x" * 5000}
    with pytest.raises(InvalidRequest, match=rf"text\.format\.{field}.*at most 4096"):
        decode_response({"input": "a", "text": {"format": form}})


async def test_a_streamed_answer_that_is_repeated_at_its_end_is_bounded() -> None:
    fields = {"input": "ab", "stream": True, "max_output_tokens": 200, "ignore_eos": True, "top_logprobs": 9}
    async with serving(max_message_bytes=100_000) as server:
        answer = await ask(server, "/v1/responses", {**fields, "include": [LOGPROBS]})
        assert b'"code":"answer_too_large"' in answer.body
        short = await ask(server, "/v1/responses", fields | {"top_logprobs": None})
        assert short.events[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 400 + ".0"])
def test_a_number_that_is_infinite_as_a_double_is_refused(number: str) -> None:
    with pytest.raises(InvalidRequest, match="beyond a double's range"):
        parse(f'{{"a": {number}}}'.encode())
    assert parse(b'{"a": 1e308}') == {"a": 1e308}
    for decode, values, _ in calls_of(f'{{"a": {number}}}'):
        with pytest.raises(InvalidRequest, match="text of a JSON object"):
            decode(values)


async def test_a_body_is_not_kept_while_its_answer_is_sent() -> None:
    bodies: list[bytes] = []

    def look() -> None:
        bodies.extend(each.body for each in gc.get_objects() if type(each) is Request)

    def script(_: GenerationRequest) -> Steps:
        return [[token(5)], [token(6, reason=FinishReason.END_OF_SEQUENCE)]]

    async with serving(engines={MODEL: ScriptedEngine(script, before_step=look)}, trust=True) as server:
        body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": True}).encode()
        answer = await ask(server, "/v1/chat/completions", body)
        assert answer.status == 200
    assert set(bodies) == {b""}
