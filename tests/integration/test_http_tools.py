"""Tools with openai-python, by a model of random weights: every call is one that its schema allows, or is cut."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import reduce
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from tests.http_calls import Answer, ask, openai, serving, serving_random
from tests.servers import Running

CHAT = "/v1/chat/completions"
# As Qwen's.
TEMPLATE = """<bos>{%- if tools %}Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Call: <tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>
{%- endif %}
{%- for message in messages %}
{{- message.role + ':' + message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- endfor %}"""
UNTAGGED = "<bos>{{ tools | tojson }}{% for message in messages %}{{ message.content }}{% endfor %}"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    # Such separators would be no JSON.
    "x-guidance": {"whitespace_flexible": False, "key_separator": "=", "item_separator": ";"},
}
TEXTS: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 8}},
    "required": ["text"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
SCHEMAS = {"weather": WEATHER, "say": TEXTS, "stop": {"type": "object", "maxProperties": 0}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "say", "parameters": TEXTS, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
MESSAGES: Any = [{"role": "user", "content": "ab"}]
BODY: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 250, "temperature": 1}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with serving_random(tmp_path_factory.mktemp("models"), TEMPLATE) as server:
        yield server


def check_calls(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        name = call["function"]["name"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[name])
    assert len({call["id"] for call in calls}) == len(calls)


async def whole_and_streamed(server: Running, fields: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A choice's message and its reason, the same both ways.

    As was not so in sgl-project/sglang#5661 and #4700, vllm-project/vllm#37937 and #37070.
    """
    answer = await ask(server, CHAT, {**BODY, **fields})
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    streamed = await ask(server, CHAT, {**BODY, **fields, "stream": True})
    content, calls, reasons = "", [], []
    for event in streamed.events:
        (delta_choice,) = event["choices"]
        reasons.append(delta_choice["finish_reason"])
        content += delta_choice["delta"].get("content") or ""
        for delta in delta_choice["delta"].get("tool_calls", ()):
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append({"type": delta["type"], "function": dict(delta["function"])})
            else:
                assert set(delta) == {"index", "function"}
                assert set(delta["function"]) == {"arguments"}
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    message = choice["message"]
    assert content == (message["content"] or "")
    assert calls == [{name: call[name] for name in ("type", "function")} for call in message.get("tool_calls", ())]
    assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]
    return message, choice["finish_reason"]


async def test_required_calls_follow_their_schemas(server: Running) -> None:
    """ollama/ollama#17597, ggml-org/llama.cpp#19051: calls that ignore their schemas."""
    names, num_parallel = set(), 0
    for seed in range(16):
        message, reason = await whole_and_streamed(server, {"tool_choice": "required", "seed": seed})
        assert message["content"] is None
        if reason == "length":
            continue
        assert reason == "tool_calls"
        check_calls(message["tool_calls"])
        names |= {call["function"]["name"] for call in message["tool_calls"]}
        num_parallel += len(message["tool_calls"]) > 1
    assert names == set(SCHEMAS)
    assert num_parallel


async def test_named_function_is_called_once(server: Running) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    for seed in range(4):
        message, reason = await whole_and_streamed(server, {"tool_choice": choice, "seed": seed})
        assert reason == "tool_calls"
        check_calls(message["tool_calls"])
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
        one = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed, "max_tokens": 400}
        message, reason = await whole_and_streamed(server, one)
        assert len(message["tool_calls"]) == 1


async def test_cut_call_is_no_whole_one(server: Running) -> None:
    choice = {"type": "function", "function": {"name": "say"}}
    for most in (5, 60):
        message, reason = await whole_and_streamed(server, {"tool_choice": choice, "max_tokens": most, "seed": 1})
        assert reason == "length"
        assert len(message.get("tool_calls", ())) == (most == 60)


async def test_a_call_that_a_stop_text_cuts_is_no_whole_one(server: Running) -> None:
    fields = {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "seed": 1, "stop": ['"days']}
    message, reason = await whole_and_streamed(server, fields)
    assert reason == "length"
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"].startswith('{"city"')
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    body = {"input": "ab", "tools": flat, "tool_choice": "required", "temperature": 1, "seed": 1, "stop": ['"days']}
    for stream in (False, True):
        answer = await ask(server, "/v1/responses", {**body, "stream": stream})
        last = answer.body.decode().strip().split("\n\n")[-2].partition("data: ")[2] if stream else ""
        response = json.loads(last)["response"] if stream else answer.json
        (item,) = response["output"]
        assert (response["status"], item["type"], item["status"]) == ("incomplete", "function_call", "incomplete")


async def test_a_stop_text_ahead_of_arguments_cuts_and_one_behind_them_does_not(server: Running) -> None:
    fields = {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "seed": 1}
    message, reason = await whole_and_streamed(server, {**fields, "stop": ["weather"]})
    assert (reason, message.get("tool_calls", [])) == ("length", [])
    message, reason = await whole_and_streamed(server, {**fields, "stop": ["</tool_call>"]})
    assert reason == "tool_calls"
    check_calls(message["tool_calls"])


async def test_model_may_answer_with_text_where_it_may_choose(server: Running) -> None:
    for fields in ({"tool_choice": "auto"}, {}):
        message, reason = await whole_and_streamed(server, {**fields, "seed": 2, "max_tokens": 40})
        assert reason == "length"
        assert message["content"]
        assert "tool_calls" not in message
    # Where it may not call, tools are not shown to it.
    message, _ = await whole_and_streamed(server, {"tool_choice": "none", "seed": 2, "max_tokens": 40})
    plain, _ = await whole_and_streamed(server, {"tools": None, "seed": 2, "max_tokens": 40})
    assert message == plain


async def test_conversation_with_calls_and_results_goes_on(server: Running) -> None:
    async with openai(server) as client:
        options: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "max_tokens": 250, "seed": 3}
        first = await client.chat.completions.create(messages=MESSAGES, tool_choice="required", **options)
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls or []
        results = [{"role": "tool", "tool_call_id": call.id, "content": "<eos> 7"} for call in calls]
        history: Any = [*MESSAGES, choice.message, *results]
        second = await client.chat.completions.create(messages=history, **{**options, "max_tokens": 5})
        # The results and the calls are in the prompt.
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.prompt_tokens > first.usage.prompt_tokens + 2 * len("<tool_call>")


async def test_response_has_the_calls_of_chat_streamed_and_not(server: Running) -> None:
    flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    async with openai(server) as client:
        for most in (250, 60):
            fields: dict[str, Any] = {"tool_choice": "required", "seed": 3, "max_tokens": most}
            message, reason = await whole_and_streamed(server, fields)
            extra: Any = {"model": "tiny", "tools": flat, "temperature": 1, "extra_body": {"seed": 3}}
            options = {**extra, "input": "ab", "max_output_tokens": most, "tool_choice": "required"}
            whole = await client.responses.create(**options)
            calls = [each for each in whole.output if each.type == "function_call"]
            assert calls == whole.output
            said = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
            assert [(call.name, call.arguments) for call in calls] == said
            assert whole.status == ("completed" if reason == "tool_calls" else "incomplete")
            assert (calls[-1].status == "incomplete") is (reason == "length")
            events = [event async for event in await client.responses.create(**options, stream=True)]
            done = [event.item for event in events if event.type == "response.output_item.done"]
            deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            last: Any = events[-1]
            assert [(each.name, each.arguments) for each in done] == said  # type: ignore[union-attr]
            assert "".join(deltas) == "".join(arguments for _, arguments in said)
            assert [each.to_dict() | {"id": "", "call_id": ""} for each in last.response.output] == [
                each.to_dict() | {"id": "", "call_id": ""} for each in calls
            ]
            if reason == "tool_calls":
                results = [{"type": "function_call_output", "call_id": call.call_id, "output": "7"} for call in calls]
                more: Any = [{"role": "user", "content": "ab"}, *(call.to_dict() for call in calls), *results]
                again = await client.responses.create(**{**options, "input": more, "tool_choice": "auto"})
                assert again.usage is not None
                assert whole.usage is not None
                assert again.usage.input_tokens > whole.usage.input_tokens + len("<tool_call>")
        text = await client.responses.create(**{**options, "max_output_tokens": 20, "tool_choice": "auto"})
        assert text.output_text
        kinds = [
            event.type.removeprefix("response.")
            async for event in await client.responses.create(**{**options, "tool_choice": "auto"}, stream=True)
        ]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]


PLACE, FORM = "tools[0].function.parameters", "response_format.json_schema"
NESTED: dict[str, Any] = reduce(lambda inner, _: {"not": inner}, range(300), {})


def tool_of(parameters: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}]


def after(*messages: Any) -> dict[str, Any]:
    return {"messages": [*MESSAGES, *messages]}


def call_of(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": tool_of({"properties": {"a": {"not": {}}}})}, f"{PLACE}#/properties/a/not"),
    ({"tools": tool_of({"properties": {"a": {"oneOf": [{}, {}]}}})}, f"{PLACE}#/properties/a/oneOf"),
    ({"tools": [TOOLS[0], *tool_of({"not": {}})]}, f"{PLACE.replace('0', '1')}#/not"),
    ({"tools": tool_of({"type": "string"})}, f"{PLACE}.type"),
    ({"tools": tool_of([])}, PLACE),
    ({"tools": tool_of({}, strict="yes")}, "tools[0].function.strict"),
    ({"tools": tool_of({}, returns={})}, "tools[0].function.returns"),
    ({"tools": tool_of({}, name="a b")}, "tools[0].function.name"),
    ({"tools": [*tool_of({}), *tool_of({})]}, "tools[1].function.name"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": tool_of({}) * 129}, "tools"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "unheard"}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {}}, "tool_choice.type"),
    ({"tool_choice": ""}, "tool_choice"),
    ({"tool_choice": "none", "tools": tool_of({"const": "x" * (512 << 10)})}, "tools"),
    ({"tool_choice": "none", "tools": tool_of(NESTED)}, PLACE),
    (
        {"tools": None, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": NESTED}}},
        f"{FORM}.schema",
    ),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": tool_of({"const": "x" * (70 << 10)})}, "tools"),
    (after(call_of(name="f", arguments="[1]")), "messages[1].tool_calls[0].function.arguments"),
    (after(call_of(name="f", arguments={})), "messages[1].tool_calls[0].function.arguments"),
    (after(call_of(arguments="{}")), "messages[1].tool_calls[0].function.name"),
    (after({"role": "assistant", "content": None}), "messages[1].content"),
    (after({"role": "user", "content": "a", "tool_call_id": "a"}), "messages[1].tool_call_id"),
    (after({"role": "tool", "content": "a", "tool_call_id": "<" * 100_000}), "messages"),
]


async def test_what_cannot_be_promised_is_refused_by_its_place(server: Running) -> None:
    for fields, param in REFUSED:
        answer: Answer = await ask(server, CHAT, {**BODY, **fields})
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert "structured_output" not in answer.error["message"]


async def test_template_says_which_tools_it_can_have(tmp_path: Path) -> None:
    async with serving_random(tmp_path, UNTAGGED) as server:
        auto = await ask(server, CHAT, BODY)
        assert (auto.status, auto.error["param"]) == (400, "tool_choice")
        message, reason = await whole_and_streamed(server, {"tool_choice": "required", "seed": 1})
        assert reason == "tool_calls"
        check_calls(message["tool_calls"])
    async with serving() as server:
        deaf = await ask(server, CHAT, BODY)
        assert (deaf.status, deaf.error["param"]) == (400, "tools")


async def test_thinking_is_switched_where_the_template_can(tmp_path: Path) -> None:
    switched = "<bos>{{ messages[-1].content }}{% if enable_thinking is false %}xyz{% endif %}"
    async with serving_random(tmp_path, switched) as server:
        lengths = []
        for given in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            fields = {"messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": given}
            lengths.append((await ask(server, CHAT, fields)).json["usage"]["prompt_tokens"])
        assert lengths == [lengths[0], lengths[0], lengths[0] + 3]
        for effort, length in (("none", lengths[2]), ("medium", lengths[0])):
            chat = await ask(server, CHAT, {"messages": MESSAGES, "max_tokens": 1, "reasoning_effort": effort})
            body = {"input": MESSAGES, "max_output_tokens": 1, "reasoning": {"effort": effort}}
            response = await ask(server, "/v1/responses", body)
            assert chat.json["usage"]["prompt_tokens"] == response.json["usage"]["input_tokens"] == length
        for given, name in (({"enable_thinking": 1}, "enable_thinking"), ({"other": True}, "other")):
            wrong = await ask(server, CHAT, {"messages": MESSAGES, "chat_template_kwargs": given})
            assert (wrong.status, wrong.error["param"]) == (400, f"chat_template_kwargs.{name}")
    async with serving() as server:
        deaf = await ask(server, CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}})
        assert (deaf.status, deaf.error["param"]) == (400, "chat_template_kwargs.enable_thinking")
        as_it_is = await ask(server, CHAT, {"messages": MESSAGES, "max_tokens": 1, "reasoning_effort": "none"})
        deaf = await ask(server, CHAT, {"messages": MESSAGES, "reasoning_effort": "medium"})
        assert (as_it_is.status, deaf.status, deaf.error["param"]) == (200, 400, "reasoning_effort")
