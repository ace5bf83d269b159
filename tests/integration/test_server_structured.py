"""Structured output through a whole server over a tiny model of random weights, which wants to say anything."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from service.app import App
from service.config import ServeConfig
from service.engine.types import StructuredOutput, StructureKind
from tests.artifacts import tiny_artifact
from tests.servers import Running, connect, generate_request, read, status_of, stream_request
from tests.structured import HOSTILE, draw_hostile, draw_schema, schema_of, shipped_schemas, validate

CUT = pb.FINISH_REASON_LENGTH
MAX_TOKENS = 300


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "tiny").symlink_to(tiny_artifact("decoder-only", context=512), target_is_directory=True)
    config = ServeConfig(models=folder, port=0, metrics=False, calibrate=False, threads=1, spin=False, max_batch_size=8)
    registry = CollectorRegistry()
    app = App.load(config, registry)
    async with app.listening() as endpoint, connect(app, endpoint, registry) as server:
        await app.verify_all()
        yield server


def form(asked: StructuredOutput) -> pb.StructuredOutput:
    value: Any = asked.value
    if asked.kind is StructureKind.CHOICE:
        value = pb.Choices(texts=value)
    return pb.StructuredOutput(**{asked.kind: True if asked.kind is StructureKind.JSON else value})


def asking(asked: StructuredOutput, seed: int = 1, **fields: Any) -> pb.GenerateRequest:
    fields = {"sampling": pb.SamplingParams(temperature=1.0, seed=seed), "max_tokens": MAX_TOKENS, **fields}
    return generate_request(structured_output=form(asked), **fields)


async def outputs_of(server: Running, request: pb.GenerateRequest) -> list[pb.GenerationOutput]:
    return list((await server.generation.Generate(request)).outputs)


def check(output: pb.GenerationOutput, schema: Any) -> bool:
    """Whether an output is whole, and then valid; one that is not whole was cut."""
    if output.finish_reason == CUT:
        assert len(output.token_ids) == MAX_TOKENS
        return False
    validate(output.text, schema)
    return True


async def test_outputs_are_valid_or_cut(server: Running, pytestconfig: pytest.Config) -> None:
    count = 1000 if pytestconfig.getoption("--whole") else 48
    schemas = [draw_schema(random.Random(seed)) for seed in range(count)]
    num_whole = 0
    for start in range(0, count, 8):
        some = schemas[start : start + 8]
        calls = [outputs_of(server, asking(schema_of(schema), start + at)) for at, schema in enumerate(some)]
        for schema, (output,) in zip(some, await asyncio.gather(*calls), strict=True):
            num_whole += check(output, schema)
    assert num_whole > count / 2


async def test_schemas_of_installed_packages_are_followed_or_refused_by_name(
    server: Running, pytestconfig: pytest.Config
) -> None:
    num_whole = 0
    for text in shipped_schemas(1500 if pytestconfig.getoption("--whole") else 40):
        call = server.generation.Generate(asking(StructuredOutput(StructureKind.JSON_SCHEMA, text)))
        if await call.code() != grpc.StatusCode.OK:
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert str(await call.details()).startswith("structured_output.json_schema")
            continue
        (output,) = (await call).outputs
        if output.finish_reason != CUT:
            validate(output.text, json.loads(text))
            num_whole += 1
    assert num_whole


@pytest.mark.parametrize("seed", range(3))
async def test_tokens_are_the_same_alone_and_in_company(server: Running, seed: int) -> None:
    requests = [asking(schema_of(draw_schema(random.Random(10 * seed + each))), each) for each in range(5)]
    requests.append(asking(schema_of(draw_schema(random.Random(seed))), sampling=None, beam_search=BEAMS))
    requests.append(generate_request(sampling=pb.SamplingParams(seed=seed), max_tokens=60))
    for request in requests:
        request.response.logprobs = 2
    alone = [await outputs_of(server, request) for request in requests]
    assert await asyncio.gather(*(outputs_of(server, request) for request in requests)) == alone


BEAMS = pb.BeamSearchParams(beam_size=3, num_hypotheses=3)


async def test_stream_has_the_same_text_and_says_how_it_ended(server: Running) -> None:
    schema = {"enum": ["red", "green"]}
    (whole,) = await outputs_of(server, asking(schema_of(schema)))
    stream = stream_request(structured_output=form(schema_of(schema)), sampling=asking(schema_of(schema)).sampling)
    events = await read(server.generation.GenerateStream(stream))
    assert "".join(event.delta.text for event in events) == whole.text
    (ended,) = [event.finished for event in events if event.HasField("finished")]
    assert ended.finish_reason == whole.finish_reason == pb.FINISH_REASON_STOP
    assert not ended.HasField("matched_stop")
    (cut,) = await outputs_of(server, asking(schema_of(schema), max_tokens=3))
    assert (cut.finish_reason, len(cut.token_ids)) == (CUT, 3)


async def test_refused_schema_names_the_keyword(server: Running) -> None:
    request = asking(schema_of({"properties": {"a": {"not": {"type": "null"}}}}))
    error = await status_of(server.generation.Generate(request), grpc.StatusCode.INVALID_ARGUMENT)
    assert str(error.details()).startswith("structured_output.json_schema#/properties/a/not: Unimplemented keys")
    estimate = server.generation.Estimate(pb.EstimateRequest(request=request))
    assert (await status_of(estimate)).code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_model_says_that_it_has_structured_output(server: Running) -> None:
    described = await server.models.GetModel(model_pb2.GetModelRequest())
    assert described.capabilities.structured_output
    assert described.limits.max_structured_output_bytes == 64 << 10


async def test_hostile_grammars_cost_no_other_stream_a_token(server: Running, pytestconfig: pytest.Config) -> None:
    """vllm-project/vllm#43920: one of them ended the engine."""
    free = generate_request(sampling=pb.SamplingParams(temperature=1.0, seed=9), max_tokens=400, ignore_eos=True)
    expected = await outputs_of(server, free)

    async def attack(asked: StructuredOutput) -> None:
        call = server.generation.Generate(asking(asked, max_tokens=40))
        assert await call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), await call.details()

    count = 10_000 if pytestconfig.getoption("--whole") else 3
    known = [*HOSTILE.values()]
    if not pytestconfig.getoption("--whole"):
        known = random.Random(f"{pytestconfig.getoption('randomly_seed', 0)}").sample(known, 3)
    attacks = [*known, *(draw_hostile(random.Random(seed)) for seed in range(count))]
    ended = asyncio.Event()

    async def victim() -> int:
        num_answers = 0
        while not ended.is_set():
            assert await outputs_of(server, free) == expected
            num_answers += 1
        return num_answers

    victims = asyncio.create_task(victim())
    for start in range(0, len(attacks), 4):
        await asyncio.gather(*map(attack, attacks[start : start + 4]))
    ended.set()
    assert await victims


async def test_schema_beyond_the_limit_is_refused_unread(server: Running, tmp_path: Path) -> None:
    schema = StructuredOutput(StructureKind.JSON_SCHEMA, '{"const": "' + "x" * (3 << 20) + '"}')
    error = await status_of(server.generation.Generate(asking(schema)), grpc.StatusCode.INVALID_ARGUMENT)
    assert "must have at most 65536 bytes" in str(error.details())
