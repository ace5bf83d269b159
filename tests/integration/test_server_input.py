"""What clients send wrong, over real gRPC: every refusal names its field, and nothing else suffers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2

from onward.v1 import generation_pb2 as pb
from tests.fakes import FakeRunner
from tests.servers import SLOTS, Running, generate_request, rich_details, running, served_model, status_of

INVALID, TOO_LONG = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": pb.SamplingParams(**fields)}


BEAMS = {"sampling": None, "beam_search": pb.BeamSearchParams(beam_size=2)}
NO_TOKEN = "below the vocabulary's size 32, got 32"
NONE_LEFT = "every allowed token ends the output, got 1"
# The refused field, words of the message, and the status unless it is INVALID_ARGUMENT.
BAD_INPUT: list[tuple[Any, ...]] = [
    ({"text": None}, "prompt", "must be set"),
    ({"text": ""}, "prompt.text", "must not be empty"),
    ({"token_ids": pb.TokenIds()}, "prompt.token_ids.ids", "empty"),
    ({"token_ids": pb.TokenIds(ids=[3, 4, 5, 32])}, "prompt.token_ids.ids[3]", NO_TOKEN),
    ({"text": "a" * 64}, "prompt.text", "at most 63 tokens, got 65", TOO_LONG),
    ({"token_ids": pb.TokenIds(ids=[3] * 64)}, "prompt.token_ids.ids", "at most 63 tokens, got 64", TOO_LONG),
    ({"target_prefix": "b"}, "target_prefix", "must be empty, as fake is decoder-only, got 'b'"),
    ({"model": "unknown"}, "", "model: 'unknown' is not served", grpc.StatusCode.NOT_FOUND),
    ({"request_id": "x" * 129}, "request_id", "128 characters"),
    ({"request_id": "a\nb"}, "request_id", "printable"),
    (sampling(temperature=math.nan), "sampling.temperature", "must be finite and at least 0, got nan"),
    (sampling(temperature=math.inf), "sampling.temperature", "got inf"),
    (sampling(temperature=-0.5), "sampling.temperature", "got -0.5"),
    (sampling(top_p=0.0), "sampling.top_p", "must be above 0 and at most 1, got 0.0"),
    (sampling(top_p=1.5), "sampling.top_p", "got 1.5"),
    (sampling(top_p=math.nan), "sampling.top_p", "got nan"),
    (sampling(top_k=-1), "sampling.top_k", "got -1"),
    (sampling(min_p=1.01), "sampling.min_p", "from 0 to 1"),
    (sampling(n=0), "sampling.n", f"from 1 to {SLOTS}, got 0"),
    (sampling(n=SLOTS + 1), "sampling.n", f"from 1 to {SLOTS}, got {SLOTS + 1}"),
    ({"sampling": None, "beam_search": pb.BeamSearchParams()}, "beam_search.beam_size", f"from 1 to {SLOTS}, got 0"),
    (BEAMS | sampling(temperature=0.0), "sampling.temperature", "must not be set with beam_search, got 0.0"),
    (BEAMS | {"stop": ["a"]}, "stopping.stop", "must be empty with beam_search, got ['a']"),
    ({"max_tokens": 0}, "stopping.max_tokens", "got 0"),
    ({"max_tokens": 2**31 - 1}, "stopping.max_tokens", "must be from 1 to 65536, got 2147483647"),
    ({"min_tokens": -1}, "stopping.min_tokens", "got -1"),
    (
        {"min_tokens": 4, "max_tokens": 3},
        "stopping.min_tokens",
        "must be from 0 to stopping.max_tokens, which is 3, got 4",
    ),
    ({"min_tokens": 1, "stop_token_ids": [3]} | sampling(allowed_token_ids=[3, 2]), "stopping.min_tokens", NONE_LEFT),
    ({"min_tokens": 1, "stop_token_ids": range(32)}, "stopping.min_tokens", NONE_LEFT),
    (sampling(logit_bias={3: 1.0, 32: 1.0}), "sampling.logit_bias[32]", NO_TOKEN),
    (sampling(logit_bias={3: 101.0}), "sampling.logit_bias[3]", "must be from -100 to 100, got 101.0"),
    (sampling(logit_bias=dict.fromkeys(range(301), 1.0)), "sampling.logit_bias", "at most 300 entries, got 301"),
    (sampling(allowed_token_ids=[3, 32]), "sampling.allowed_token_ids[1]", NO_TOKEN),
    (
        sampling(allowed_token_ids=[3] * 33),
        "sampling.allowed_token_ids",
        "at most 32 entries, as many as the vocabulary, got 33",
    ),
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty", "must be above 0 and at most 2, got 0.0"),
    ({"stop": ["x"] * 17}, "stopping.stop", "at most 16 entries, got"),
    ({"stop": ["a", ""]}, "stopping.stop[1]", "from 1 to 256"),
    ({"stop": ["a" * 257]}, "stopping.stop[0]", "from 1 to 256"),
    ({"stop_token_ids": [3, 32]}, "stopping.stop_token_ids", NO_TOKEN),
    ({"stop_token_ids": [3] * 65}, "stopping.stop_token_ids", "at most 64 entries"),
    ({"response": pb.ResponseOptions(logprobs=21)}, "response.logprobs", "from 0 to 20, got 21"),
    ({"response": pb.ResponseOptions(logprobs=-1)}, "response.logprobs", "got -1"),
    ({"response": pb.ResponseOptions(prompt_logprobs=21)}, "response.prompt_logprobs", "from 0 to 20, got 21"),
    ({"timeout_seconds": math.nan}, "timeout_seconds", "got nan"),
    ({"timeout_seconds": -1}, "timeout_seconds", "got -1.0"),
]


RUNNER = FakeRunner(SLOTS)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[Running]:
    async with running(runner=RUNNER) as server:
        yield server


@pytest.mark.parametrize(("fields", "field", "words", "code"), [(*case, INVALID)[:4] for case in BAD_INPUT])
async def test_bad_input_is_refused_with_path_value_and_limit_and_is_not_run(
    server: Running, fields: dict[str, Any], field: str, words: str, code: grpc.StatusCode
) -> None:
    num_batches = len(RUNNER.batches)
    text = fields.get("text", "ab")
    message = generate_request(**fields) if text is not None else generate_request(token_ids=None)
    stream = pb.GenerateStreamRequest.FromString(message.SerializeToString())
    for call in (server.generation.Generate(message), server.generation.GenerateStream(stream)):
        error = await status_of(call, code)
        assert words in str(error.details())
        if field:
            assert str(error.details()).startswith(f"{field}: ")
            request = error_details_pb2.BadRequest()
            assert rich_details(error)[0].Unpack(request)
            assert [violation.field for violation in request.field_violations] == [field]
    assert len(RUNNER.batches) == num_batches
    assert (await server.generation.Generate(generate_request(max_tokens=1))).outputs


async def test_model_may_be_left_out_only_where_one_is_served() -> None:
    both = [served_model("one"), served_model("two")]
    async with running(both) as server:
        error = await status_of(server.generation.Generate(generate_request()))
        answers = [await server.generation.Generate(generate_request(model=model.name)) for model in both]
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "one, two" in str(error.details())
    assert [answer.model for answer in answers] == ["one", "two"]


@pytest.mark.parametrize(
    ("request_", "encoder_decoder", "words", "code"),
    [
        (pb.ScoreRequest(target_text="a"), False, "prompt: must be set", INVALID),
        (pb.ScoreRequest(text="a"), True, "target: must be set, as fake is an encoder-decoder", INVALID),
        (
            pb.ScoreRequest(text="ab", target_text="c" * 62),
            False,
            "target.target_text: must have at most 61 tokens",
            grpc.StatusCode.OUT_OF_RANGE,
        ),
    ],
)
async def test_bad_score_is_refused_by_its_field_and_counted(
    request_: pb.ScoreRequest, encoder_decoder: bool, words: str, code: grpc.StatusCode
) -> None:
    async with running([served_model(encoder_decoder=encoder_decoder)]) as server:
        error = await status_of(server.generation.Score(request_), code)
        assert sum(server.ended().values()) == 1
    assert str(error.details()).startswith(words)


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xff\xff", b"\x1a\x05ab", b"\x1a\x02\xc3\x28"],
    ids=["random bytes", "truncated", "text that is no UTF-8"],
)
async def test_garbage_is_refused_and_the_next_request_served(garbage: bytes) -> None:
    async with running() as server:
        for method in (server.channel.unary_unary, server.channel.unary_stream):
            name = "Generate" if method == server.channel.unary_unary else "GenerateStream"
            await status_of(method(f"/onward.v1.GenerationService/{name}")(garbage), grpc.StatusCode.INVALID_ARGUMENT)
            handled = {"grpc_method": name, "grpc_code": "INVALID_ARGUMENT"}
            assert server.metric("grpc_server_handled_total", **handled) == 1
        assert (await server.generation.Generate(generate_request())).outputs


async def test_unknown_fields_are_ignored() -> None:
    async with running() as server:
        call = server.channel.unary_unary("/onward.v1.GenerationService/Generate")
        data = await call(generate_request(max_tokens=2).SerializeToString() + b"\xf8\x7f\x01")
    assert len(pb.GenerateResponse.FromString(data).outputs[0].token_ids) == 2
