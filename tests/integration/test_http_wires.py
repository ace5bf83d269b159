"""Requests as Codex, Open WebUI and Open Responses' acceptance suite send them, written down from their sources."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai as library
import pytest
from jsonschema import Draft202012Validator

from model.spec.chat import Chat, ChatSettings
from service.engine.types import FinishReason, GenerationRequest, TokenEvent
from service.repository.models import ServedModel
from service.transport.http.responses import decode_response
from tests.fakes import EOS
from tests.http_calls import Answer, ask, openai, serving
from tests.integration.test_http_tools import TEMPLATE
from tests.scripted import ScriptedEngine, token
from tests.servers import MODEL, Running, served_model
from tests.structured import VOCAB_SIZE, tokenizer, vocabulary

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"

CODEX_HEADERS = {
    "content-type": "application/json",
    "accept": "text/event-stream",
    "authorization": "Bearer none",
    "originator": "codex_cli_rs",
    "user-agent": "codex_cli_rs/0.101.0 (Debian 13.0.0; x86_64) xterm",
    "session_id": "019a1c09-ddda-742c-b61d-d614ae0f6952",
}
CODEX = """{"model": "fake", "instructions": "You are a coding agent.", "input": [
  {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<sandbox>"}]},
  {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"},
                                                  {"type": "input_text", "text": "ab"}]},
  {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "cd"}]},
  {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ab"}]}],
 "tools": [], "tool_choice": "auto", "parallel_tool_calls": false, "reasoning": null, "store": false, "stream": true,
 "include": [], "prompt_cache_key": "019a1c09-ddda-742c-b61d-d614ae0f6952"}"""
# Newer ones, for a model that Codex does not know, with `web_search = "disabled"` and `features.multi_agent = false`.
CODEX_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "cmd": {"type": "string", "description": "The command."},
                "login": {"type": "boolean"},
                "max_output_tokens": {"type": "number"},
                "prefix_rule": {"type": "array", "items": {"type": "string"}},
                "sandbox_permissions": {"type": "string", "enum": ["use_default", "require_escalated"]},
                "yield_time_ms": {"type": "number"},
            },
            "required": ["cmd"],
            "additionalProperties": False,
        },
    },
    {
        "type": "function",
        "name": "update_plan",
        "description": "Changes the plan.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "explanation": {"type": "string"},
                "plan": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"status": {"type": "string"}, "step": {"type": "string"}},
                        "required": ["step", "status"],
                        "additionalProperties": False,
                    },
                },
            },
            "required": ["plan"],
            "additionalProperties": False,
        },
    },
]
CODEX_NEW: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files"}]},
    ],
    "tools": CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a1c09-ddda-742c-b61d-d614ae0f6952",
    "client_metadata": {
        "session_id": "019a1c09-ddda-742c-b61d-d614ae0f6952",
        "x-codex-installation-id": "4f0e",
        "x-codex-turn-metadata": '{"session_id":"019a1c09-ddda-742c-b61d-d614ae0f6952","request_kind":"turn"}',
    },
}
CODEX_SAID: list[dict[str, Any]] = [
    {
        "type": "reasoning",
        "id": "rs_x",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "I list them."}],
        "encrypted_content": None,
    },
    {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
    {"type": "function_call", "id": "fc", "name": "exec_command", "arguments": '{"cmd": "ls"}', "call_id": "call_0"},
    {"type": "function_call_output", "id": "fco", "call_id": "call_0", "output": "README.md"},
]
REASONING = {"effort": "medium", "summary": "auto"}
WEBUI_HEADERS = {
    "content-type": "application/json",
    "authorization": "Bearer none",
    "accept": "*/*",
    "accept-encoding": "gzip, deflate, br",
    "user-agent": "Python/3.11 aiohttp/3.12.15",
    "x-openwebui-user-name": "A%20User",
    "x-openwebui-user-id": "4f0e",
    "x-openwebui-user-email": "a@b.c",
    "x-openwebui-user-role": "user",
    "x-openwebui-chat-id": "7d1c",
}
WEBUI = """{"stream": true, "model": "fake", "messages": [{"role": "system", "content": "c"},
  {"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}, {"role": "user", "content": "ab"}],
 "stream_options": {"include_usage": true}, "temperature": 0.8, "top_p": 0.9, "max_tokens": 6, "seed": 1,
 "frequency_penalty": 0.1, "stop": ["@@"], "logit_bias": {"5": 1}}"""
WEBUI_TITLE = """{"model": "fake", "messages": [{"role": "user", "content": "### Task: a title"}], "stream": false,
 "max_tokens": 6}"""

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
USER: dict[str, Any] = {"type": "message", "role": "user"}
ACCEPTANCE: dict[str, dict[str, Any]] = {
    "basic-response": {"input": [{**USER, "content": "Say hello in exactly 3 words."}]},
    "streaming-response": {"input": [{**USER, "content": "Count from 1 to 5."}], "stream": True},
    "system-prompt": {
        "input": [
            {"type": "message", "role": "system", "content": "You are a pirate. Always respond in pirate speak."},
            {**USER, "content": "Say hello."},
        ]
    },
    "multi-turn": {
        "input": [
            {**USER, "content": "My name is Alice."},
            {"type": "message", "role": "assistant", "content": "Hello Alice! Nice to meet you."},
            {**USER, "content": "What is my name?"},
        ]
    },
}
WEATHER = [{**USER, "content": "What's the weather like in San Francisco?"}]
CALLING = {
    "tool-calling": {"input": WEATHER, "tools": [TOOL]},
    "tool-calling-streaming": {"input": WEATHER, "tools": [TOOL], "stream": True},
}
IMAGE = [
    {"type": "input_text", "text": "What do you see in this image?"},
    {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
]


def either(*kinds: str) -> dict[str, Any]:
    return {"type": [*kinds]}


TEXT, NUMBER, INTEGER = either("string"), either("number"), either("integer")
FLAG, PERHAPS_TEXT, PERHAPS_NUMBER = either("boolean"), either("string", "null"), either("integer", "null")


def whole(**properties: Any) -> dict[str, Any]:
    """An object that must have these."""
    return {"type": "object", "required": [*properties], "properties": properties}


PART = whole(type={"const": "output_text"}, text=TEXT, annotations={"type": "array"}, logprobs={"type": "array"})
ITEM = whole(
    type={"const": "message"},
    id=TEXT,
    status=TEXT,
    role={"const": "assistant"},
    content={"items": PART, "type": "array"},
)
CALL = whole(type={"const": "function_call"}, id=TEXT, call_id=TEXT, name=TEXT, arguments=TEXT, status=TEXT)
# What Open Responses' specification requires of a response.
RESPONSE = Draft202012Validator(
    whole(
        id=TEXT, object={"const": "response"}, created_at=INTEGER, completed_at=PERHAPS_NUMBER, status=TEXT, model=TEXT,
        incomplete_details=either("object", "null"), previous_response_id=PERHAPS_TEXT, instructions=PERHAPS_TEXT,
        output={"type": "array", "items": {"anyOf": [ITEM, CALL]}}, error=either("object", "null"),
        tools={"type": "array"},
        tool_choice={"enum": ["none", "auto", "required"]}, truncation={"enum": ["auto", "disabled"]},
        parallel_tool_calls=FLAG, text=whole(format=whole(type=TEXT)), top_p=NUMBER, presence_penalty=NUMBER,
        frequency_penalty=NUMBER, top_logprobs=INTEGER, temperature=NUMBER, reasoning=either("object", "null"),
        usage={
            "anyOf": [
                {"type": "null"},
                whole(
                    input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER,
                    input_tokens_details=whole(cached_tokens=INTEGER),
                    output_tokens_details=whole(reasoning_tokens=INTEGER),
                ),
            ]
        },
        max_output_tokens=PERHAPS_NUMBER, max_tool_calls=PERHAPS_NUMBER, store=FLAG, background=FLAG, service_tier=TEXT,
        metadata={}, safety_identifier=PERHAPS_TEXT, prompt_cache_key=PERHAPS_TEXT,
    )
)  # fmt: skip


def two_tokens(request: GenerationRequest) -> list[list[TokenEvent]]:
    return [[token(5)], [token(6, reason=FinishReason.END_OF_SEQUENCE)]]


async def send(server: Running, path: str, body: str, headers: dict[str, str]) -> Answer:
    answer = await ask(server, path, body.encode(), headers)
    assert answer.status == 200, answer.body
    return answer


def events_of(answer: Answer) -> list[Any]:
    """A response's events; each is named by its type."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, done = answer.body.decode().strip().split("\n\n")
    assert done == "data: [DONE]"
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


async def test_codex_has_the_events_that_it_reads() -> None:
    async with serving(engines={MODEL: ScriptedEngine(two_tokens)}, trust=True) as server:
        events = events_of(await send(server, RESPONSES, CODEX, CODEX_HEADERS))
        by_type = {event["type"]: event for event in events}
        text = "".join(event.get("delta", "") for event in events)
        done, completed = by_type["response.output_item.done"], by_type["response.completed"]
        assert events[-1] is completed
        assert done["item"]["content"][0]["text"] == text != ""
        usage = completed["response"]["usage"]
        assert (usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"]) == (2, 0)
        assert usage["input_tokens"] > usage["input_tokens_details"]["cached_tokens"] == 0
        # Its tools, and what it asks of models that reason: this one does not.
        for changes, param in (
            ({"tools": [TOOL]}, "tools"),
            ({"reasoning": REASONING, "include": ["reasoning.encrypted_content"]}, "reasoning.effort"),
            ({"tool_choice": "required"}, "tool_choice"),
        ):
            refused = await ask(server, RESPONSES, {**json.loads(CODEX), **changes}, CODEX_HEADERS)
            assert (refused.status, refused.error["param"]) == (400, param), refused.body
    decoded = decode_response(json.loads(CODEX) | {"reasoning": REASONING, "include": ["reasoning.encrypted_content"]})
    assert (decoded.enable_thinking, decoded.echoed["reasoning"]) == (True, REASONING)


@pytest.mark.parametrize("said", [[], CODEX_SAID], ids=["first turn", "after a call"])
async def test_codex_calls_its_tools_and_brings_their_results(said: list[dict[str, Any]]) -> None:
    body = {**CODEX_NEW, "input": [*CODEX_NEW["input"], *said]}
    arguments = '{"cmd": "ls", "yield_time_ms": 1000}'

    def script(request: GenerationRequest) -> list[list[TokenEvent]]:
        text = f'<tool_call>\n{{"name": "exec_command", "arguments": {arguments}}}\n</tool_call>'
        return spoken("Files." if said else text)

    async with serving([tool_model()], engines={MODEL: ScriptedEngine(script)}, trust=True) as server:
        *_, done, completed = events_of(await send(server, RESPONSES, json.dumps(body), CODEX_HEADERS))
        for index, kind in enumerate(("namespace", "web_search", "custom")):
            tools = [*CODEX_TOOLS[:index], {"type": kind, "name": "x"}]
            refused = await ask(server, RESPONSES, {**body, "tools": tools}, CODEX_HEADERS)
            assert (refused.status, refused.error["param"]) == (400, f"tools[{index}].type")
    assert (done["type"], completed["type"]) == ("response.output_item.done", "response.completed")
    if said:
        assert done["item"]["content"][0]["text"] == "Files."
    else:
        assert {name: done["item"][name] for name in ("type", "name", "arguments")} == {
            "type": "function_call",
            "name": "exec_command",
            "arguments": arguments,
        }
        assert done["item"]["call_id"]
    assert completed["response"]["usage"]["output_tokens"] > 1


async def test_an_error_within_a_response_is_an_event_that_codex_reads_and_one_that_openai_python_raises() -> None:
    def script(request: GenerationRequest) -> list[list[TokenEvent]]:
        return [[token(5)], [], [token(None, reason=FinishReason.DEADLINE)]]

    async with serving(engines={MODEL: ScriptedEngine(script)}, trust=True) as server:
        answer = await send(server, RESPONSES, CODEX, CODEX_HEADERS)
        async with openai(server) as client:
            with pytest.raises(library.APIError, match="the deadline passed"):
                async for _ in await client.responses.create(model=MODEL, input="ab", stream=True):
                    pass
    *_, delta, failed, error = answer.body.decode().strip().split("\n\n")
    assert delta.startswith("event: response.output_text.delta\n")
    name, data = failed.split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert (name, event["type"]) == ("event: response.failed", "response.failed")
    RESPONSE.validate(event["response"])
    assert (event["response"]["status"], event["response"]["error"]["code"]) == ("failed", "deadline_exceeded")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


async def test_open_webui_has_its_models_chats_and_titles() -> None:
    async with serving() as server:
        listed = (await ask(server, "/v1/models", headers=WEBUI_HEADERS)).json
        assert [model["id"] for model in listed["data"]] == [MODEL]
        *chunks, usage = (await send(server, CHAT, WEBUI, WEBUI_HEADERS)).events
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        fields = {**json.loads(WEBUI), "stream": False, "stream_options": None}
        whole = (await send(server, CHAT, json.dumps(fields), WEBUI_HEADERS)).json
        assert whole["choices"][0]["message"]["content"] == text != ""
        assert whole["usage"]["total_tokens"] == usage["usage"]["total_tokens"]
        title = (await send(server, CHAT, WEBUI_TITLE, WEBUI_HEADERS)).json
        assert title["choices"][0]["message"]["content"]


def checked(answer: Answer, *, is_streamed: bool) -> Any:
    """A response that the specification allows, and that is whole; of a stream the last."""
    events = events_of(answer) if is_streamed else []
    for event in events:
        if "response" in event:
            RESPONSE.validate(event["response"])
    response = events[-1]["response"] if is_streamed else answer.json
    RESPONSE.validate(response)
    assert response["status"] == "completed"
    assert response["completed_at"] >= response["created_at"]
    assert response["output"]
    return response


@pytest.mark.parametrize("case", ACCEPTANCE)
async def test_open_responses_cases_pass(case: str) -> None:
    body = {"model": MODEL, "stream": False, **ACCEPTANCE[case]}
    async with serving(engines={MODEL: ScriptedEngine(two_tokens)}, trust=True) as server:
        answer = await send(server, RESPONSES, json.dumps(body), {"authorization": "Bearer none"})
        checked(answer, is_streamed=body["stream"])


def spoken(text: str) -> list[list[TokenEvent]]:
    """What a model says, a token a step."""
    events = [token(token_id) for token_id in tokenizer().encode_plain(text)]
    return [[each] for each in (*events, token(EOS, reason=FinishReason.END_OF_SEQUENCE))]


def a_call(request: GenerationRequest) -> list[list[TokenEvent]]:
    """What a model says that calls the tool, once it may."""
    assert request.structured_output is not None
    return spoken('<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco"}}\n</tool_call>')


def tool_model() -> ServedModel:
    """A model whose template shows tools."""
    fake = served_model(context=4096)
    manifest = replace(fake.manifest, config=replace(fake.manifest.config, vocab_size=VOCAB_SIZE))
    own: dict[str, Any] = {"prompt_tokenizer": tokenizer(), "output_tokenizer": tokenizer(), "vocabulary": vocabulary()}
    return replace(fake, manifest=manifest, chat=Chat(ChatSettings(TEMPLATE), tokenizer()), **own)


@pytest.mark.parametrize("case", CALLING)
async def test_open_responses_cases_with_a_tool_pass(case: str) -> None:
    body = {"model": MODEL, **CALLING[case]}
    async with serving([tool_model()], engines={MODEL: ScriptedEngine(a_call)}, trust=True) as server:
        answer = await send(server, RESPONSES, json.dumps(body), {"authorization": "Bearer none"})
        (call,) = checked(answer, is_streamed="stream" in body)["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
    assert json.loads(call["arguments"]) == {"location": "San Francisco"}


async def test_what_a_model_cannot_do_is_refused_by_name() -> None:
    """Open Responses' case with an image, which no model of ours reads; and a tool where the template has none."""
    async with serving() as server:
        for body, param in (
            ({"input": [{**USER, "content": IMAGE}]}, "input[0].content[1].type"),
            (CALLING["tool-calling"], "tools"),
        ):
            refused = await ask(server, RESPONSES, {"model": MODEL, **body})
            assert (refused.status, refused.error["param"]) == (400, param), refused.body
