"""Structured output over HTTP by OpenAI's and vLLM's names, with random weights: the model wants to say anything."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai as library
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from onward.v1 import generation_pb2 as pb
from tests.http_calls import Answer, ask, openai, serving_random
from tests.servers import Running
from tests.structured import draw_schema, validate

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES: Any = [{"role": "user", "content": "ab"}]
PROMPTS: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "ab"}}
MOST = 300


class Fruit(BaseModel):
    kind: Literal["apple", "pear"]
    grams: int = Field(ge=0, le=999)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("models")
    async with serving_random(folder, "<bos>{% for message in messages %}{{ message.content }}{% endfor %}") as server:
        yield server


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


async def choice_of(server: Running, path: str, fields: dict[str, Any]) -> tuple[str, str]:
    answer = await ask(server, path, {"max_tokens": MOST, "seed": 1, "temperature": 1, **PROMPTS[path], **fields})
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    return choice["message"]["content"] if path == CHAT else choice["text"], choice["finish_reason"]


async def over_grpc(server: Running, fields: dict[str, Any]) -> tuple[str, str]:
    request = pb.GenerateRequest(
        text="ab",
        sampling=pb.SamplingParams(temperature=1, seed=1),
        stopping=pb.StoppingParams(max_tokens=MOST),
        structured_output=pb.StructuredOutput(**fields),
    )
    (output,) = (await server.generation.Generate(request)).outputs
    return output.text, "length" if output.finish_reason == pb.FINISH_REASON_LENGTH else "stop"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_answer_has_its_schema_or_says_that_it_is_cut_and_is_that_of_grpc(server: Running, path: str) -> None:
    num_whole = 0
    for seed in range(20):
        schema = draw_schema(random.Random(seed))
        text, reason = await choice_of(server, path, {"response_format": schema_format(schema)})
        assert (text, reason) == await over_grpc(server, {"json_schema": json.dumps(schema, ensure_ascii=False)})
        if reason == "stop":
            validate(text, schema)
            num_whole += 1
    assert num_whole > 10
    text, reason = await choice_of(server, path, {"response_format": schema_format({"const": "long"}), "max_tokens": 3})
    assert (text, reason) == ('"lo', "length")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_vllms_names_have_the_forms_of_grpc(server: Running, path: str) -> None:
    schema = {"enum": ["red", "green"]}
    forms: list[tuple[str, Any, dict[str, Any]]] = [
        ("json", schema, {"json_schema": json.dumps(schema)}),
        ("json", json.dumps(schema), {"json_schema": json.dumps(schema)}),
        ("regex", "[a-c]{3}x", {"regex": "[a-c]{3}x"}),
        ("choice", ["yes", "no"], {"choice": pb.Choices(texts=["yes", "no"])}),
        ("grammar", 'start: "a" | "b"', {"grammar": 'start: "a" | "b"'}),
    ]
    for name, value, form in forms:
        wanted = await over_grpc(server, form)
        assert wanted[1] == "stop"
        assert await choice_of(server, path, {"structured_outputs": {name: value}}) == wanted, name
        assert await choice_of(server, path, {f"guided_{name}": value}) == wanted, name


async def test_any_object_is_an_object(server: Running) -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        text, reason = await choice_of(server, CHAT, {**fields, "seed": 3})
        assert text.lstrip()[0] == "{"
        if reason == "stop":
            assert isinstance(json.loads(text), dict)


async def test_pydantic_models_are_parsed_streamed_and_not(server: Running) -> None:
    async with openai(server) as client:
        options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": MOST, "seed": 5}
        answer = await client.chat.completions.parse(response_format=Fruit, **options)
        parsed = answer.choices[0].message.parsed
        assert isinstance(parsed, Fruit)
        async with client.chat.completions.stream(response_format=Fruit, **options) as stream:
            assert (await stream.get_final_completion()).choices[0].message.parsed == parsed
        with pytest.raises(library.LengthFinishReasonError):
            await client.chat.completions.parse(response_format=Fruit, **{**options, "max_tokens": 4})
        response = await client.responses.parse(
            input="ab", model="tiny", text_format=Fruit, max_output_tokens=MOST, extra_body={"seed": 5}
        )
        assert response.output_parsed == parsed
        assert response.text is not None
        assert response.text.format is not None
        assert response.text.format.type == "json_schema"
        cut = await ask(
            server, RESPONSES, {"input": "ab", "max_output_tokens": 3, **as_text(Fruit.model_json_schema())}
        )
        assert cut.json["status"] == "incomplete"


def as_text(schema: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}


NOT = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
AT_NOT = "#/properties/a/not"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"response_format": schema_format(NOT)}, f"response_format.json_schema.schema{AT_NOT}"),
    (COMPLETIONS, {"response_format": schema_format(NOT)}, f"response_format.json_schema.schema{AT_NOT}"),
    (RESPONSES, as_text(NOT), f"text.format.schema{AT_NOT}"),
    (CHAT, {"structured_outputs": {"json": NOT}}, f"structured_outputs.json{AT_NOT}"),
    (CHAT, {"guided_json": NOT}, f"guided_json{AT_NOT}"),
    (CHAT, {"guided_json": 1}, "guided_json"),
    (CHAT, {"guided_regex": "("}, "guided_regex"),
    (CHAT, {"guided_regex": ""}, "guided_regex"),
    (CHAT, {"guided_choice": []}, "guided_choice"),
    (CHAT, {"guided_choice": ["a", ""]}, "guided_choice[1]"),
    (CHAT, {"guided_choice": ["a", 1]}, "guided_choice[1]"),
    (CHAT, {"guided_grammar": "start: {{{"}, "guided_grammar"),
    (CHAT, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    (CHAT, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    (CHAT, {"response_format": "json"}, "response_format"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.name"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}},
        "response_format.json_schema.schema",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 1}}},
        "response_format.json_schema.strict",
    ),
    (CHAT, {"guided_json": {"const": "x" * (70 << 10)}}, "guided_json"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "text.format.type"),
]


async def test_what_cannot_be_followed_is_refused_by_its_place(server: Running) -> None:
    for path, fields, param in REFUSED:
        prompt = {"input": "ab"} if path == RESPONSES else PROMPTS[path]
        answer: Answer = await ask(server, path, {**prompt, **fields})
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert "structured_output." not in answer.error["message"]
