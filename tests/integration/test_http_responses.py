"""`/v1/responses` with openai-python: the same text as chat, whole and as events; nothing is stored."""

from __future__ import annotations

import typing
from typing import Any

import openai as library
import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from tests.http_calls import MESSAGES, Answer, ask, openai, serving
from tests.servers import MODEL, Running

PATH = "/v1/responses"
OPTIONS: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
BODY: dict[str, Any] = {"input": "ab", "max_output_tokens": 6, "seed": 7, "temperature": 1, "ignore_eos": True}

SETS: dict[str, Any] = {
    "temperature": 0,
    "top_p": 0.3,
    "max_output_tokens": 3,
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "abc"}]}],
    "instructions": "c",
}
NEUTRAL: dict[str, Any] = {
    "model": MODEL,
    "user": "someone",
    "safety_identifier": "someone",
    "prompt_cache_key": "key",
    "metadata": {"a": "b"},
    "tools": [],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "background": False,
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "store": False,
    "stream_options": {"include_obfuscation": False},
    "input": [{"type": None, "role": "user", "content": "ab"}],
    "truncation": "disabled",
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "reasoning": {"effort": "none", "summary": "auto"},
}
REFUSED: dict[str, Any] = {
    "access_programs": {},
    "background": True,
    "background_options": {},
    "context_management": [{}],
    "conversation": "c",
    "image": {},
    "include": ["file_search_call.results"],
    "max_tool_calls": 1,
    "moderation": {},
    "previous_response_id": "resp_1",
    "prompt": {"id": "x"},
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "store": True,
    "truncation": "auto",
    "n": 2,
    "use_beam_search": True,
    "unheard_of": 1,
}
SHAPES = {"stream", "top_logprobs"}


def test_these_are_all_fields_of_openai_python() -> None:
    ours = {"n", "use_beam_search", "unheard_of"}
    assert {*SETS, *NEUTRAL, *REFUSED, *SHAPES} - ours == set(typing.get_type_hints(ResponseCreateParamsStreaming))


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    text: str = answer.json["output"][0]["content"][0]["text"]
    return text


async def respond(server: Running, changes: dict[str, Any]) -> Answer:
    return await ask(server, PATH, {**BODY, **changes})


async def test_every_field_has_its_effect_or_is_refused_by_name() -> None:
    async with serving() as server:
        plain = text_of(await respond(server, {}))
        for name, value in SETS.items():
            assert text_of(await respond(server, {name: value})) != plain, name
        for name, value in NEUTRAL.items():
            assert text_of(await respond(server, {name: value})) == plain, name
        for name, value in REFUSED.items():
            refused = await respond(server, {name: value})
            assert (refused.status, refused.error["param"]) == (400, name), refused.body
        for changes, param in (
            ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
            ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
            ({"input": []}, "input"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"top_logprobs": 1}, "top_logprobs"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
            ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
            ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
            ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
            ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        ):
            refused = await respond(server, changes)
            assert (refused.status, refused.error["param"]) == (400, param), refused.body


async def test_a_response_has_the_text_of_chat_and_says_when_it_is_cut() -> None:
    async with serving() as server, openai(server) as client:
        chat = await client.chat.completions.create(messages=MESSAGES, max_tokens=6, **OPTIONS)
        response = await client.responses.create(input="ab", max_output_tokens=6, **OPTIONS)
        assert response.output_text == chat.choices[0].message.content
        assert (response.status, response.incomplete_details and response.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        assert response.usage is not None
        assert chat.usage is not None
        assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, 6)
        stopped = await ask(server, PATH, {**BODY, "temperature": 0, "stop": response.output_text[2]})
        assert (stopped.json["status"], stopped.json["incomplete_details"]) == ("completed", None)
        # What was answered comes back as it is.
        more: Any = [*MESSAGES, *(each.to_dict() for each in response.output), {"role": "user", "content": "c"}]
        again = await client.responses.create(input=more, max_output_tokens=3, **OPTIONS)
        history: Any = [*MESSAGES, {"role": "assistant", "content": response.output_text}]
        history.append({"role": "user", "content": "c"})
        same = await client.chat.completions.create(messages=history, max_tokens=3, **OPTIONS)
        assert again.output_text == same.choices[0].message.content


async def test_events_build_the_response() -> None:
    async with serving() as server, openai(server) as client:
        options: dict[str, Any] = {**OPTIONS, "max_output_tokens": 6, "include": ["message.output_text.logprobs"]}
        whole = await client.responses.create(input="ab", **options)
        events = [event async for event in await client.responses.create(input="ab", stream=True, **options)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert (
            "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
        )
        last: Any = events[-1]
        assert last.response.output_text == whole.output_text
        assert last.response.usage == whole.usage
        assert last.response.output[0].content[0].logprobs == whole.output[0].content[0].logprobs
        history: Any = [*MESSAGES, whole.output[0].model_dump(), *MESSAGES]  # as it was given, with all that it has
        assert (await client.responses.create(input=history, **options)).output_text
        # openai-python's helper knows no other end than completed.
        options["extra_body"] = {"ignore_eos": True, "stop": whole.output_text[3]}
        async with client.responses.stream(input="ab", **options) as stream:
            assert (await stream.get_final_response()).output_text == whole.output_text[:3]


async def test_a_refusal_of_a_stream_has_its_status() -> None:
    async with serving() as server, openai(server) as client:
        with pytest.raises(library.BadRequestError, match="input: must have at most"):
            await client.responses.create(input="a" * 5000, stream=True, **OPTIONS)
