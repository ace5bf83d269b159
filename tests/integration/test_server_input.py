"""What clients send wrong, over real gRPC: every refusal names its field, and nothing else suffers."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from onward.v1 import generation_pb2 as pb
from tests.fakes import FakeRunner
from tests.servers import (
    SLOTS,
    generate_request,
    rich_details,
    running,
    served_model,
    status_of,
)

# gRPC's poller holds on to every event loop it has met: one for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")


TOO_MANY = ["x"] * 17
BAD_INPUT: dict[str, tuple[dict[str, Any], grpc.StatusCode, str, str]] = {
    "no prompt": ({"text": None}, grpc.StatusCode.INVALID_ARGUMENT, "prompt", "must be set"),
    "empty text": ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "prompt.text", "must not be empty"),
    "no token ids": ({"token_ids": pb.TokenIds()}, grpc.StatusCode.INVALID_ARGUMENT, "prompt.token_ids.ids", "empty"),
    "token id out of range": (
        {"token_ids": pb.TokenIds(ids=[3, 4, 5, 32])},
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt.token_ids.ids[3]",
        "below the vocabulary's size 32, got 32",
    ),
    "over-long prompt": ({"text": "a" * 64}, grpc.StatusCode.OUT_OF_RANGE, "prompt.text", "at most 63 tokens, got 65"),
    "over-long ids": (
        {"token_ids": pb.TokenIds(ids=[3] * 64)},
        grpc.StatusCode.OUT_OF_RANGE,
        "prompt.token_ids.ids",
        "at most 63 tokens, got 64",
    ),
    "target prefix of a decoder-only model": (
        {"target_prefix": "b"},
        grpc.StatusCode.INVALID_ARGUMENT,
        "target_prefix",
        "must be empty, as fake is decoder-only, got 'b'",
    ),
    "unknown model": ({"model": "unknown"}, grpc.StatusCode.NOT_FOUND, "", "model: 'unknown' is not served"),
    "long request id": ({"request_id": "x" * 129}, grpc.StatusCode.INVALID_ARGUMENT, "request_id", "128 characters"),
    "control characters": ({"request_id": "a\nb"}, grpc.StatusCode.INVALID_ARGUMENT, "request_id", "printable"),
    "NaN temperature": (
        {"sampling": pb.SamplingParams(temperature=math.nan)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.temperature",
        "must be finite and at least 0, got nan",
    ),
    "infinite temperature": (
        {"sampling": pb.SamplingParams(temperature=math.inf)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.temperature",
        "got inf",
    ),
    "negative temperature": (
        {"sampling": pb.SamplingParams(temperature=-0.5)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.temperature",
        "got -0.5",
    ),
    "top_p 0": (
        {"sampling": pb.SamplingParams(top_p=0.0)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.top_p",
        "must be above 0 and at most 1, got 0.0",
    ),
    "top_p above 1": (
        {"sampling": pb.SamplingParams(top_p=1.5)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.top_p",
        "got 1.5",
    ),
    "NaN top_p": (
        {"sampling": pb.SamplingParams(top_p=math.nan)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.top_p",
        "got nan",
    ),
    "negative top_k": (
        {"sampling": pb.SamplingParams(top_k=-1)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.top_k",
        "got -1",
    ),
    "min_p above 1": (
        {"sampling": pb.SamplingParams(min_p=1.01)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.min_p",
        "from 0 to 1",
    ),
    "n 0": (
        {"sampling": pb.SamplingParams(n=0)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.n",
        f"from 1 to {SLOTS}, got 0",
    ),
    "more outputs than slots": (
        {"sampling": pb.SamplingParams(n=SLOTS + 1)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.n",
        f"from 1 to {SLOTS}, got {SLOTS + 1}",
    ),
    "no beams": (
        {"sampling": None, "beam_search": pb.BeamSearchParams()},
        grpc.StatusCode.INVALID_ARGUMENT,
        "beam_search.beam_size",
        f"from 1 to {SLOTS}, got 0",
    ),
    "beams beside sampling": (
        {"sampling": pb.SamplingParams(temperature=0.0), "beam_search": pb.BeamSearchParams(beam_size=2)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.temperature",
        "must not be set with beam_search, got 0.0",
    ),
    "beams with stop texts": (
        {"sampling": None, "beam_search": pb.BeamSearchParams(beam_size=2), "stop": ["a"]},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.stop",
        "must be empty with beam_search, got ['a']",
    ),
    "max_tokens 0": ({"max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, "stopping.max_tokens", "got 0"),
    "negative max_tokens": ({"max_tokens": -3}, grpc.StatusCode.INVALID_ARGUMENT, "stopping.max_tokens", "got -3"),
    "absurd max_tokens": (
        {"max_tokens": 2**31 - 1},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.max_tokens",
        "must be from 1 to 65536, got 2147483647",
    ),
    "negative min_tokens": ({"min_tokens": -1}, grpc.StatusCode.INVALID_ARGUMENT, "stopping.min_tokens", "got -1"),
    "min_tokens above max_tokens": (
        {"min_tokens": 4, "max_tokens": 3},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.min_tokens",
        "must be from 0 to stopping.max_tokens, which is 3, got 4",
    ),
    "min_tokens where every token ends the output": (
        {"min_tokens": 1, "stop_token_ids": [3], "sampling": pb.SamplingParams(allowed_token_ids=[3, 2])},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.min_tokens",
        "every allowed token ends the output, got 1",
    ),
    "min_tokens where every token of the vocabulary ends the output": (
        {"min_tokens": 1, "stop_token_ids": range(32)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.min_tokens",
        "every allowed token ends the output, got 1",
    ),
    "bias of an unknown token": (
        {"sampling": pb.SamplingParams(logit_bias={3: 1.0, 32: 1.0})},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.logit_bias[32]",
        "below the vocabulary's size 32, got 32",
    ),
    "excessive bias": (
        {"sampling": pb.SamplingParams(logit_bias={3: 101.0})},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.logit_bias[3]",
        "must be from -100 to 100, got 101.0",
    ),
    "too many biases": (
        {"sampling": pb.SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0))},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.logit_bias",
        "at most 300 entries, got 301",
    ),
    "unknown allowed token": (
        {"sampling": pb.SamplingParams(allowed_token_ids=[3, 32])},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.allowed_token_ids[1]",
        "below the vocabulary's size 32, got 32",
    ),
    "more allowed tokens than there are": (
        {"sampling": pb.SamplingParams(allowed_token_ids=[3] * 33)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.allowed_token_ids",
        "at most 32 entries, as many as the vocabulary, got 33",
    ),
    "repetition_penalty 0": (
        {"sampling": pb.SamplingParams(repetition_penalty=0.0)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.repetition_penalty",
        "must be above 0 and at most 2, got 0.0",
    ),
    "too many stops": (
        {"stop": TOO_MANY},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.stop",
        "at most 16 entries, got",
    ),
    "empty stop": ({"stop": ["a", ""]}, grpc.StatusCode.INVALID_ARGUMENT, "stopping.stop[1]", "from 1 to 256"),
    "long stop": ({"stop": ["a" * 257]}, grpc.StatusCode.INVALID_ARGUMENT, "stopping.stop[0]", "from 1 to 256"),
    "stop token out of range": (
        {"stop_token_ids": [3, 32]},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.stop_token_ids",
        "below the vocabulary's size 32, got 32",
    ),
    "too many stop tokens": (
        {"stop_token_ids": [3] * 65},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.stop_token_ids",
        "at most 64 entries",
    ),
    "too many logprobs": (
        {"response": pb.ResponseOptions(logprobs=21)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "response.logprobs",
        "from 0 to 20, got 21",
    ),
    "negative logprobs": (
        {"response": pb.ResponseOptions(logprobs=-1)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "response.logprobs",
        "got -1",
    ),
    "too many prompt logprobs": (
        {"response": pb.ResponseOptions(prompt_logprobs=21)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "response.prompt_logprobs",
        "from 0 to 20, got 21",
    ),
    "NaN timeout": ({"timeout_seconds": math.nan}, grpc.StatusCode.INVALID_ARGUMENT, "timeout_seconds", "got nan"),
    "negative timeout": ({"timeout_seconds": -1}, grpc.StatusCode.INVALID_ARGUMENT, "timeout_seconds", "got -1.0"),
}


@pytest.mark.parametrize(("fields", "code", "field", "words"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
async def test_bad_input_is_refused_with_path_value_and_limit_and_touches_no_slot(
    fields: dict[str, Any], code: grpc.StatusCode, field: str, words: str
) -> None:
    runner = FakeRunner(SLOTS)
    async with running(runner=runner) as server:
        batches = len(runner.batches)
        text = fields.get("text", "ab")
        message = generate_request(**fields) if text is not None else generate_request(token_ids=None)
        for call in (
            server.generation.Generate(message),
            server.generation.GenerateStream(pb.GenerateStreamRequest.FromString(message.SerializeToString())),
        ):
            error = await status_of(call)
            assert error.code() is code
            assert words in str(error.details())
            if field:
                assert str(error.details()).startswith(f"{field}: ")
                request = error_details_pb2.BadRequest()
                assert rich_details(error)[0].Unpack(request)
                assert [violation.field for violation in request.field_violations] == [field]
        assert len(runner.batches) == batches
        assert (await server.generation.Generate(generate_request(max_tokens=1))).outputs


async def test_model_may_be_left_out_only_where_one_is_served() -> None:
    both = [served_model("one"), served_model("two")]
    async with running(both) as server:
        error = await status_of(server.generation.Generate(generate_request()))
        answers = [await server.generation.Generate(generate_request(model=model.name)) for model in both]
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "one, two" in str(error.details())
    assert [answer.model for answer in answers] == ["one", "two"]


BAD_SCORES: dict[str, tuple[pb.ScoreRequest, bool, grpc.StatusCode, str]] = {
    "no prompt": (pb.ScoreRequest(target_text="a"), False, grpc.StatusCode.INVALID_ARGUMENT, "prompt: must be set"),
    "one token": (
        pb.ScoreRequest(token_ids=pb.TokenIds(ids=[5])),
        False,
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt.token_ids.ids: must have at least 2 tokens",
    ),
    "no target for a source": (
        pb.ScoreRequest(text="a"),
        True,
        grpc.StatusCode.INVALID_ARGUMENT,
        "target: must be set, as fake is an encoder-decoder",
    ),
    "unknown token": (
        pb.ScoreRequest(text="a", target_token_ids=pb.TokenIds(ids=[3, 32])),
        True,
        grpc.StatusCode.INVALID_ARGUMENT,
        "target.target_token_ids.ids[1]: must be below",
    ),
    "no room": (
        pb.ScoreRequest(text="ab", target_text="c" * 62),
        False,
        grpc.StatusCode.OUT_OF_RANGE,
        "target.target_text: must have at most 61 tokens",
    ),
}


@pytest.mark.parametrize(("request_", "encoder_decoder", "code", "words"), BAD_SCORES.values(), ids=BAD_SCORES.keys())
async def test_bad_score_is_refused_by_its_field_and_counted(
    request_: pb.ScoreRequest, encoder_decoder: bool, code: grpc.StatusCode, words: str
) -> None:
    async with running([served_model(encoder_decoder=encoder_decoder)]) as server:
        error = await status_of(server.generation.Score(request_))
        assert sum(server.ended().values()) == 1
    assert error.code() is code
    assert str(error.details()).startswith(words)


async def test_message_over_the_limit_is_refused_and_the_next_request_served() -> None:
    async with running(max_message_bytes=2048) as server:
        error = await status_of(server.generation.Generate(generate_request("a" * 5000)))
        assert (await server.generation.Generate(generate_request())).outputs
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


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
