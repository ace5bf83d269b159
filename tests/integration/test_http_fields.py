"""Every field of openai-python's requests over HTTP: its effect, which is that of gRPC's field, or its refusal."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParams

from onward.v1 import generation_pb2 as pb
from tests.http_calls import Answer, ask, serving
from tests.servers import Running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "ab"}]
BASE: dict[str, Any] = {"model": "fake", "max_tokens": 8, "seed": 7, "temperature": 1.0, "ignore_eos": True}
PROMPTS: Mapping[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "ab"}}

# A field's value and what it sets over gRPC, which must change the answer.
SETS: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {
    "temperature": (0.0, {"sampling": {"temperature": 0.0}}),
    "top_p": (0.3, {"sampling": {"top_p": 0.3}}),
    "seed": (8, {"sampling": {"seed": 8}}),
    "presence_penalty": (2.0, {"sampling": {"presence_penalty": 2.0}}),
    "frequency_penalty": (2, {"sampling": {"frequency_penalty": 2.0}}),
    "logit_bias": ({"9": 50}, {"sampling": {"logit_bias": {9: 50.0}}}),
    "n": (3, {"sampling": {"n": 3}}),
    "max_tokens": (3, {"stopping": {"max_tokens": 3}}),
}
CHAT_SETS = {**SETS, "max_completion_tokens": (3, {"stopping": {"max_tokens": 3}})}
# Labels, and values that ask for what is done anyway: the answer is as without them.
CHAT_NEUTRAL: dict[str, Any] = {
    "user": "someone",
    "safety_identifier": "someone",
    "prompt_cache_key": "key",
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "auto",
    "modalities": ["text"],
    "reasoning_effort": "none",
    "service_tier": "auto",
    "store": False,
}
NEUTRAL: dict[str, Any] = {"user": "someone", "echo": False, "best_of": 1}
CHAT_REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "mp3"},
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "metadata": {"a": "b"},
    "modalities": ["audio"],
    "moderation": {},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "store": True,
    "verbosity": "low",
    "web_search_options": {},
}
REFUSED: dict[str, Any] = {"best_of": 2, "echo": True, "suffix": "x"}
# Shown by tests of their own: below, in `test_http_openai`, `test_http_structured` and `test_http_tools`.
CHAT_SHAPES = {"messages", "model", "stream", "stream_options", "logprobs", "top_logprobs", "stop"}
CHAT_SHAPES |= {"response_format", "tools", "tool_choice", "parallel_tool_calls"}
SHAPES = {"prompt", "model", "stream", "stream_options", "logprobs", "stop"}


@pytest.mark.parametrize(
    ("params", "tables"),
    [
        (ChatParams, (CHAT_SETS, CHAT_NEUTRAL, CHAT_REFUSED, CHAT_SHAPES)),
        (CompletionParams, (SETS, NEUTRAL, REFUSED, SHAPES)),
    ],
    ids=["chat", "completions"],
)
def test_these_are_all_fields_of_openai_python(params: Any, tables: tuple[Any, ...]) -> None:
    assert set().union(*tables) == set(typing.get_type_hints(params))


@pytest.mark.parametrize("params", [ChatParams, CompletionParams, ResponseParams])
def test_the_page_names_every_field_of_openai_python(params: Any) -> None:
    """What is supported, and how it differs; or that it is refused."""
    page = (Path(__file__).parents[2] / "docs/serve/http.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+)`", page.partition("\n## Fields of requests\n")[2].partition("\n## ")[0]))
    assert named >= set(typing.get_type_hints(params))


async def body_of(server: Running, path: str, changes: Mapping[str, Any]) -> Answer:
    values = {**BASE, **PROMPTS[path], **changes}
    if "max_completion_tokens" in changes:
        del values["max_tokens"]
    return await ask(server, path, values)


def texts_of(path: str, answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    choices = answer.json["choices"]
    return [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]


async def over_grpc(server: Running, path: str, parts: Mapping[str, dict[str, Any]]) -> list[str]:
    sampling = {"temperature": 1.0, "seed": 7, **parts.get("sampling", {})}
    stopping = {"max_tokens": 8, "ignore_eos": True, **parts.get("stopping", {})}
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="ab")])
    prompt: dict[str, Any] = {"chat": chat} if path == CHAT else {"text": "ab"}
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(**sampling), stopping=pb.StoppingParams(**stopping), **prompt
    )
    return [output.text for output in (await server.generation.Generate(request)).outputs]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_field_does_what_it_does_over_grpc(path: str) -> None:
    async with serving() as server:
        plain = texts_of(path, await body_of(server, path, {}))
        assert plain == await over_grpc(server, path, {})
        for name, (value, parts) in (CHAT_SETS if path == CHAT else SETS).items():
            changed = texts_of(path, await body_of(server, path, {name: value}))
            assert changed != plain, name
            assert changed == await over_grpc(server, path, parts), name


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_label_changes_nothing_and_null_is_as_good_as_absent(path: str) -> None:
    async with serving() as server:
        plain = texts_of(path, await body_of(server, path, {}))
        for name, value in (CHAT_NEUTRAL if path == CHAT else NEUTRAL).items():
            assert texts_of(path, await body_of(server, path, {name: value})) == plain, name
        for name in CHAT_REFUSED if path == CHAT else REFUSED:
            assert texts_of(path, await body_of(server, path, {name: None})) == plain, name


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_has_no_effect_is_refused_by_name(path: str) -> None:
    async with serving() as server:
        for name, value in {**(CHAT_REFUSED if path == CHAT else REFUSED), "unheard_of": 1}.items():
            answer = await body_of(server, path, {name: value})
            assert (answer.status, answer.error["param"]) == (400, name), answer.body
            assert answer.error["message"].startswith(f"{name}: is not"), name


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_own_fields_do_what_they_do_over_grpc(path: str) -> None:
    table: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {
        "top_k": (1, {"sampling": {"top_k": 1}}),
        "min_p": (0.9, {"sampling": {"min_p": 0.9}}),
        "repetition_penalty": (2.0, {"sampling": {"repetition_penalty": 2.0}}),
        "allowed_token_ids": ([5, 6], {"sampling": {"allowed_token_ids": [5, 6]}}),
    }
    async with serving() as server:
        plain = texts_of(path, await body_of(server, path, {}))
        for name, (value, parts) in table.items():
            changed = texts_of(path, await body_of(server, path, {name: value}))
            assert changed != plain, name
            assert changed == await over_grpc(server, path, parts), name
        (text,) = plain
        stopped = await body_of(server, path, {"stop": text[2]})
        assert texts_of(path, stopped) == [text[:2]]
        assert stopped.json["choices"][0]["stop_reason"] == text[2]
        kept = {"stop": [text[2]], "include_stop_str_in_output": True}
        assert texts_of(path, await body_of(server, path, kept)) == [text[:3]]
        # Neither a stop nor an end counts before.
        late = texts_of(path, await body_of(server, path, {"stop": text[2], "min_tokens": 5}))
        assert len(late[0]) >= 5
        named = await body_of(
            server, path, {"request_id": "mine", "priority": 3, "cost": True, "return_token_ids": True}
        )
        assert named.json["id"].endswith("-mine")
        assert named.headers["x-request-id"] == "mine"
        assert named.json["cost"]["attended_pairs"] > 0
        assert len(named.json["choices"][0]["token_ids"]) == 8


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_beams_are_those_of_grpc(path: str) -> None:
    async with serving() as server:
        fields = {
            **PROMPTS[path],
            "use_beam_search": True,
            "n": 2,
            "beam_size": 3,
            "length_penalty": 0.5,
            "max_tokens": 6,
        }
        answer = await ask(server, path, fields)
        request = pb.GenerateRequest(
            beam_search=pb.BeamSearchParams(beam_size=3, num_hypotheses=2, length_penalty=0.5),
            stopping=pb.StoppingParams(max_tokens=6),
            **(
                {"text": "ab"}
                if path == COMPLETIONS
                else {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="ab")])}
            ),
        )
        wanted = (await server.generation.Generate(request)).outputs
        assert texts_of(path, answer) == [output.text for output in wanted]
        assert [choice["score"] for choice in answer.json["choices"]] == [output.score for output in wanted]
        for name, value in {"beam_size": 2, "patience": 1, "no_repeat_ngram_size": 2, "length_penalty": 1}.items():
            refused = await ask(server, path, {**PROMPTS[path], name: value})
            assert (refused.status, refused.error["param"]) == (400, name)
        sampled = await ask(server, path, {**fields, "temperature": 1})
        assert (sampled.status, sampled.error["param"]) == (400, "temperature")
        assert "use_beam_search" in sampled.error["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),  # CVE-2026-34756
        ({"seed": -1}, "seed"),
        ({"logit_bias": {"a": 1}}, "logit_bias[a]"),
        ({"logit_bias": {"9": 101}}, "logit_bias[9]"),
        ({"logit_bias": {"4000000000": 1}}, "logit_bias[4000000000]"),
        ({"logit_bias": []}, "logit_bias"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": "\ud800"}, "stop"),
        ({"user": 1}, "user"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"unheard_of": True}}, "stream_options.unheard_of"),
        ({"stream": 1}, "stream"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"target_prefix": "a"}, "target_prefix"),
        ({"model": 3}, "model"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_bad_value_is_refused_by_the_name_it_has_here(path: str, changes: dict[str, Any], param: str) -> None:
    async with serving() as server:
        answer = await body_of(server, path, changes)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        for foreign in ("sampling.", "stopping.", "response.", "prompt."):
            assert foreign not in answer.error["message"]


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{**MESSAGES[0], "name": "x"}]}, "messages[0].name"),
        (CHAT, {"messages": [{**MESSAGES[0], "tool_calls": []}]}, "messages[0].tool_calls"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": 2}, "logprobs"),
        (CHAT, {"max_completion_tokens": 10**9}, "max_completion_tokens"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, 10**6]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [1, -1]}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 2000}, "prompt"),
        (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
    ],
)
async def test_a_bad_value_of_one_route_is_refused(path: str, changes: dict[str, Any], param: str) -> None:
    async with serving() as server:
        answer = await body_of(server, path, changes)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
