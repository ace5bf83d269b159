"""The codec: how messages are decoded or refused, and how answers are encoded."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from model.spec.artifact import AttentionKind
from model.spec.chat import Message
from model.spec.generation import GenerationDefaults
from onward.v1 import generation_pb2 as pb
from service.config import RequestLimits
from service.engine.types import (
    BeamSearchParams,
    FinishReason,
    RequestTimings,
    SamplingParams,
    StoppingParams,
    StructuredOutput,
    StructureKind,
    TokenLogprobs,
)
from service.errors import InvalidRequest
from service.explain.explaining import AttentionMatrix, ExplainCall, Explanation
from service.generator import GenerateCall, Outcome
from service.repository.models import Conversation
from service.scoring import Score, ScoreCall
from service.transport import analysis_codec, codec
from service.transport.model_service import describe_capabilities

LIMITS = RequestLimits()
ONE_TOKEN = pb.TokenIds(ids=[7])


def decode(message: pb.GenerateRequest, limits: RequestLimits = LIMITS) -> GenerateCall:
    return codec.decode_generate(message, limits, new_id=lambda: "drawn")


def test_request_that_says_nothing_but_its_prompt_gets_the_documented_defaults() -> None:
    assert decode(pb.GenerateRequest(text="a")) == GenerateCall(
        request_id="drawn",
        model="",
        prompt="a",
        target_prefix="",
        sampling=SamplingParams(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=None,
            n=1,
            logit_bias=(),
            allowed_token_ids=(),
        ),
        stopping=StoppingParams(max_tokens=256, min_tokens=0),
        beam_search=None,
        logprobs=None,
        prompt_logprobs=None,
        wants_cost=False,
        priority=0,
        timeout_seconds=None,
        partial_on_deadline=False,
    )


def test_every_offered_field_is_read() -> None:
    message = pb.GenerateRequest(
        request_id="mine",
        model="m",
        token_ids=pb.TokenIds(ids=[4, 5]),
        target_prefix=" b",
        sampling=pb.SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            min_p=0.1,
            repetition_penalty=2.0,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            seed=2**64 - 1,
            n=3,
            logit_bias={9: -100.0, 3: 100.0},
            allowed_token_ids=[9, 3, 9],
        ),
        stopping=pb.StoppingParams(
            max_tokens=7,
            min_tokens=7,
            stop=["x", "y"],
            stop_token_ids=[8, 8],
            ignore_eos=True,
            include_stop_in_output=True,
        ),
        response=pb.ResponseOptions(logprobs=5, prompt_logprobs=3, cost=True),
        priority=-(2**31),
        timeout_seconds=2.5,
        partial_on_deadline=True,
    )
    assert decode(message) == GenerateCall(
        request_id="mine",
        model="m",
        prompt=(4, 5),
        target_prefix=" b",
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            min_p=0.1,
            repetition_penalty=2.0,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            seed=2**64 - 1,
            n=3,
            logit_bias=((3, 100.0), (9, -100.0)),
            allowed_token_ids=(9, 3, 9),
        ),
        stopping=StoppingParams(
            max_tokens=7,
            min_tokens=7,
            stop=("x", "y"),
            stop_token_ids=frozenset({8}),
            ignore_eos=True,
            include_stop_in_output=True,
        ),
        beam_search=None,
        logprobs=5,
        prompt_logprobs=3,
        wants_cost=True,
        priority=-(2**31),
        timeout_seconds=2.5,
        partial_on_deadline=True,
    )


def test_models_own_defaults_are_those_of_absent_fields_alone() -> None:
    own = GenerationDefaults(
        temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=30, length_penalty=2.0,
        no_repeat_ngram_size=3,
    )  # fmt: skip
    call = codec.decode_generate(pb.GenerateRequest(text="a"), LIMITS, own)
    assert call.sampling == SamplingParams(temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    assert call.stopping == StoppingParams(max_tokens=30)
    # Zero is a value, not an absent field.
    given = pb.SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    stopping = pb.StoppingParams(max_tokens=256)
    call = codec.decode_generate(pb.GenerateRequest(text="a", sampling=given, stopping=stopping), LIMITS, own)
    assert call.sampling == SamplingParams(temperature=0.0)
    assert call.stopping == StoppingParams(max_tokens=256)
    limits = RequestLimits(max_generated_tokens=7)
    assert codec.decode_generate(pb.GenerateRequest(text="a"), limits, own).stopping.max_tokens == 7
    beams = pb.BeamSearchParams(beam_size=2)
    call = codec.decode_generate(pb.GenerateRequest(text="a", beam_search=beams), LIMITS, own)
    assert call.beam_search == BeamSearchParams(beam_size=2, length_penalty=2.0, patience=None, no_repeat_ngram_size=3)
    # A request for beams cannot set `sampling`, so no default of it may apply.
    assert call.sampling == SamplingParams()
    beams = pb.BeamSearchParams(beam_size=2, length_penalty=1.0, no_repeat_ngram_size=0)
    call = codec.decode_generate(pb.GenerateRequest(text="a", beam_search=beams), LIMITS, own)
    assert call.beam_search == BeamSearchParams(beam_size=2, patience=None)


def test_beam_search_that_says_nothing_but_its_size_gets_the_documented_defaults() -> None:
    call = decode(pb.GenerateRequest(text="a", beam_search=pb.BeamSearchParams(beam_size=2)))
    assert call.beam_search == BeamSearchParams(
        beam_size=2, num_hypotheses=1, length_penalty=1.0, patience=None, no_repeat_ngram_size=0
    )
    assert call.sampling == SamplingParams()


def test_every_field_of_beam_search_is_read() -> None:
    beam_search = pb.BeamSearchParams(
        beam_size=16, num_hypotheses=16, length_penalty=-10.0, patience=1000.0, no_repeat_ngram_size=3
    )
    # Set, and empty: nothing in it was said.
    message = pb.GenerateRequest(text="a", beam_search=beam_search, sampling=pb.SamplingParams())
    assert decode(message).beam_search == BeamSearchParams(
        beam_size=16, num_hypotheses=16, length_penalty=-10.0, patience=1000.0, no_repeat_ngram_size=3
    )


def test_beams_may_be_stopped_by_tokens_and_lengths() -> None:
    stopping = pb.StoppingParams(max_tokens=7, min_tokens=2, stop_token_ids=[8], ignore_eos=True)
    message = pb.GenerateRequest(text="a", beam_search=pb.BeamSearchParams(beam_size=2), stopping=stopping)
    expected = StoppingParams(max_tokens=7, min_tokens=2, stop_token_ids=frozenset({8}), ignore_eos=True)
    assert decode(message).stopping == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"json_schema": "{}"}, StructuredOutput(StructureKind.JSON_SCHEMA, "{}")),
        ({"json": True}, StructuredOutput(StructureKind.JSON)),
        ({"regex": "a+"}, StructuredOutput(StructureKind.REGEX, "a+")),
        ({"grammar": "start: A"}, StructuredOutput(StructureKind.GRAMMAR, "start: A")),
        ({"choice": pb.Choices(texts=["a", "b"])}, StructuredOutput(StructureKind.CHOICE, ("a", "b"))),
    ],
)
def test_every_form_of_structured_output_is_read(fields: dict[str, Any], expected: StructuredOutput) -> None:
    message = pb.GenerateRequest(text="a", structured_output=pb.StructuredOutput(**fields))
    assert decode(message).structured_output == expected
    stream = pb.GenerateStreamRequest.FromString(message.SerializeToString())
    assert codec.decode_generate(stream, LIMITS).structured_output == expected


# Of requests with these fields, and the operator's limits changed so: how they are refused.
OPERATORS = {
    "max_outputs": 2,
    "max_beam_size": 3,
    "max_generated_tokens": 10,
    "max_logit_bias": 2,
    "max_logprobs": 4,
    "max_structured_output_bytes": 20,
}
BEAMS = pb.BeamSearchParams(beam_size=2)


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": pb.SamplingParams(**fields)}


def beams(**fields: Any) -> dict[str, Any]:
    return {"beam_search": pb.BeamSearchParams(**fields)}


def beside_beams(**fields: Any) -> dict[str, Any]:
    return {"beam_search": BEAMS, **sampling(**fields)}


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_output": pb.StructuredOutput(**fields)}


def stopping(**fields: Any) -> dict[str, Any]:
    return {"stopping": pb.StoppingParams(**fields)}


BIAS = "must be from -100 to 100"
PENALTY = "must be from -2 to 2"
EXCLUDED = "must not be set with beam_search"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty", "must be above 0 and at most 2"),
    (sampling(repetition_penalty=math.nan), "sampling.repetition_penalty", "must be above 0 and at most 2"),
    (sampling(repetition_penalty=2.1), "sampling.repetition_penalty", "must be above 0 and at most 2"),
    (sampling(presence_penalty=math.nan), "sampling.presence_penalty", PENALTY),
    (sampling(presence_penalty=-2.5), "sampling.presence_penalty", PENALTY),
    (sampling(frequency_penalty=2.5), "sampling.frequency_penalty", PENALTY),
    (sampling(logit_bias={7: math.inf}), "sampling.logit_bias[7]", BIAS),
    (sampling(logit_bias={0: 1.0, 7: -100.5}), "sampling.logit_bias[7]", BIAS),
    (sampling(logit_bias={1: 1.0, 2: 1.0, 3: 1.0}), "sampling.logit_bias", "must have at most 2 entries"),
    (sampling(n=0), "sampling.n", "must be from 1 to 2"),
    (sampling(n=3), "sampling.n", "must be from 1 to 2"),
    (beams(), "beam_search.beam_size", "must be from 1 to 3"),
    (beams(beam_size=4), "beam_search.beam_size", "must be from 1 to 3"),
    *(
        (
            beams(beam_size=2, num_hypotheses=number),
            "beam_search.num_hypotheses",
            "must be from 1 to beam_search.beam_size, which is 2",
        )
        for number in (0, 3)
    ),
    (beams(beam_size=2, length_penalty=math.nan), "beam_search.length_penalty", "must be from -10 to 10"),
    (beams(beam_size=2, length_penalty=-10.5), "beam_search.length_penalty", "must be from -10 to 10"),
    (beams(beam_size=2, patience=-0.5), "beam_search.patience", "must be from 0 to 1000"),
    (beams(beam_size=2, patience=1e308), "beam_search.patience", "must be from 0 to 1000"),
    (beams(beam_size=2, no_repeat_ngram_size=-1), "beam_search.no_repeat_ngram_size", "must be at least 0 (0 is off)"),
    (beside_beams(temperature=1.0), "sampling.temperature", EXCLUDED),
    (beside_beams(n=1), "sampling.n", EXCLUDED),
    (beside_beams(logit_bias={3: 1.0}), "sampling.logit_bias", EXCLUDED),
    (beside_beams(allowed_token_ids=[3]), "sampling.allowed_token_ids", EXCLUDED),
    ({"beam_search": BEAMS, **stopping(stop=["x"])}, "stopping.stop", "must be empty with beam_search"),
    (stopping(max_tokens=11), "stopping.max_tokens", "must be from 1 to 10"),
    (stopping(stop=["a", ""]), "stopping.stop[1]", "must have from 1 to 256 characters"),
    (stopping(stop=["a" * 257]), "stopping.stop[0]", "must have from 1 to 256 characters"),
    (stopping(stop=["a"] * 17), "stopping.stop", "must have at most 16 entries"),
    (stopping(stop_token_ids=[3] * 65), "stopping.stop_token_ids", "must have at most 64 entries"),
    (sampling(temperature=math.inf), "sampling.temperature", "must be finite and at least 0"),
    (sampling(temperature=-1.0), "sampling.temperature", "must be finite and at least 0"),
    (sampling(top_p=0.0), "sampling.top_p", "must be above 0 and at most 1"),
    (sampling(top_k=-1), "sampling.top_k", "must be at least 0 (0 is off)"),
    (sampling(min_p=1.01), "sampling.min_p", "must be from 0 to 1"),
    (
        stopping(max_tokens=5, min_tokens=-1),
        "stopping.min_tokens",
        "must be from 0 to stopping.max_tokens, which is 5",
    ),
    (stopping(max_tokens=5, min_tokens=6), "stopping.min_tokens", "must be from 0 to stopping.max_tokens, which is 5"),
    # The default, as the operator limits it.
    (stopping(min_tokens=11), "stopping.min_tokens", "must be from 0 to stopping.max_tokens, which is 10"),
    ({"response": pb.ResponseOptions(logprobs=5)}, "response.logprobs", "must be from 0 to 4"),
    ({"response": pb.ResponseOptions(prompt_logprobs=5)}, "response.prompt_logprobs", "must be from 0 to 4"),
    ({"timeout_seconds": 0.0}, "timeout_seconds", "must be finite and above 0"),
    ({"timeout_seconds": math.inf}, "timeout_seconds", "must be finite and above 0"),
    (structured(), "structured_output", "must have one of its fields set"),
    (structured(json=False), "structured_output.json", "must be true where it is set"),
    (structured(regex=""), "structured_output.regex", "must not be empty"),
    (structured(grammar="x" * 21), "structured_output.grammar", "must have at most 20 bytes"),
    (structured(choice=pb.Choices()), "structured_output.choice.texts", "must have at least 1 text"),
    (structured(choice=pb.Choices(texts=["a", ""])), "structured_output.choice.texts[1]", "must not be empty"),
    (structured(choice=pb.Choices(texts=["a" * 9] * 3)), "structured_output.choice", "must have at most 20 bytes"),
    (
        {**structured(json=True), "beam_search": BEAMS, **stopping(ignore_eos=True)},
        "stopping.ignore_eos",
        "must not be set with beam_search and structured_output",
    ),
]


@pytest.mark.parametrize(("fields", "field", "limit"), REFUSED)
def test_value_beyond_its_limit_is_refused_by_its_path(fields: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        decode(pb.GenerateRequest(text="a", **fields), RequestLimits(**OPERATORS))
    assert (refusal.value.field, refusal.value.limit) == (field, limit)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        (sampling(temperature=0.0), "sampling.temperature", 0.0),
        (sampling(seed=0), "sampling.seed", 0),
        (sampling(min_p=1.0), "sampling.min_p", 1.0),
        (sampling(logit_bias={1: 1.0, 2: 1.0}), "sampling.logit_bias", ((1, 1.0), (2, 1.0))),
        (beams(beam_size=2, length_penalty=0.0), "beam_search.length_penalty", 0.0),
        (beams(beam_size=2, patience=0.0), "beam_search.patience", 0.0),
        ({"response": pb.ResponseOptions(logprobs=0)}, "logprobs", 0),
        ({"response": pb.ResponseOptions(prompt_logprobs=0)}, "prompt_logprobs", 0),
        ({}, "stopping.max_tokens", 10),
    ],
)
def test_zero_and_limits_are_values(fields: dict[str, Any], name: str, value: object) -> None:
    call = decode(pb.GenerateRequest(text="a", **fields), RequestLimits(**OPERATORS))
    assert attrgetter(name)(call) == value


@pytest.mark.parametrize("has_chat", [False, True])
@pytest.mark.parametrize("is_encoder_decoder", [False, True])
def test_capabilities_deny_exactly_what_is_refused(is_encoder_decoder: bool, has_chat: bool) -> None:
    capabilities = describe_capabilities(
        is_encoder_decoder=is_encoder_decoder, has_chat=has_chat, explains=False, has_grammars=True
    )
    denied = {field.name for field in capabilities.DESCRIPTOR.fields if not getattr(capabilities, field.name)}
    # The codec accepts these fields, and the model refuses them.
    foreign = (set() if is_encoder_decoder else {"target_prefix"}) | (set() if has_chat else {"chat"})
    assert denied == {"explain"} | foreign


def test_conversation_is_a_prompt_of_messages() -> None:
    messages = [pb.ChatMessage(role="system", content=""), pb.ChatMessage(role="user", content="a")]
    prompt = decode(pb.GenerateRequest(chat=pb.Chat(messages=messages))).prompt
    assert prompt == Conversation((Message("system", ""), Message("user", "a")))
    with pytest.raises(InvalidRequest, match=r"prompt\.chat\.messages: must have at least 1 message"):
        decode(pb.GenerateRequest(chat=pb.Chat()))


@pytest.mark.parametrize(
    ("message", "prompt", "target"),
    [
        (pb.ScoreRequest(text="a"), "a", None),
        (pb.ScoreRequest(token_ids=ONE_TOKEN, target_text="b"), (7,), "b"),
        (pb.ScoreRequest(text="a", target_token_ids=ONE_TOKEN), "a", (7,)),
    ],
)
def test_score_request_is_read(message: pb.ScoreRequest, prompt: str | tuple[int, ...], target: Any) -> None:
    message.model = "m"
    expected = ScoreCall(request_id="drawn", model="m", prompt=prompt, target=target)
    assert analysis_codec.decode_score(message, new_id=lambda: "drawn") == expected


def test_score_is_spelled_token_by_token_and_has_no_bits_without_bytes() -> None:
    message = analysis_codec.encode_score(Score((3, 4), (math.log(0.5), math.log(0.125)), num_bytes=4))
    assert [(each.token_id, each.logprob) for each in message.tokens] == [(3, math.log(0.5)), (4, math.log(0.125))]
    assert (message.total_logprob, message.perplexity) == pytest.approx((math.log(1 / 16), 4.0))
    assert message.bits_per_byte == pytest.approx(1.0)
    assert not analysis_codec.encode_score(Score((2,), (-1.0,), num_bytes=0)).HasField("bits_per_byte")


def test_explain_request_is_read() -> None:
    message = pb.ExplainRequest(
        model="m", text="a", target_text="b", layers=[1, 0], heads=[2], kinds=[pb.ATTENTION_KIND_CROSS]
    )
    assert analysis_codec.decode_explain(message, new_id=lambda: "drawn") == ExplainCall(
        request_id="drawn",
        model="m",
        prompt="a",
        target="b",
        kinds=(AttentionKind.CROSS,),
        layers=(1, 0),
        heads=(2,),
        max_tokens=64,
    )
    assert analysis_codec.decode_explain(pb.ExplainRequest(text="a", max_tokens=3)).max_tokens == 3
    bare = analysis_codec.decode_explain(pb.ExplainRequest(token_ids=ONE_TOKEN))
    assert (bare.prompt, bare.target, bare.kinds, bare.layers, bare.heads) == ((7,), None, (), (), ())


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ScoreRequest(target_text="b"), "prompt"),
        (pb.ScoreRequest(text="a", target_token_ids=pb.TokenIds()), "target.target_token_ids.ids"),
        (pb.ExplainRequest(text="", target_text="b"), "prompt.text"),
        (pb.ExplainRequest(text="a", target_text=""), "target.target_text"),
        (pb.ExplainRequest(text="a", kinds=[pb.ATTENTION_KIND_CROSS, 0]), "kinds[1]"),
        (pb.ExplainRequest(text="a", max_tokens=0), "max_tokens"),
        (pb.ExplainRequest(text="a", kinds=[pb.ATTENTION_KIND_CROSS] * 4), "kinds"),
    ],
)
def test_request_to_score_or_explain_that_has_no_meaning_is_refused_by_its_field(message: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        (analysis_codec.decode_score if isinstance(message, pb.ScoreRequest) else analysis_codec.decode_explain)(
            message
        )
    assert refusal.value.field == field


def test_explanation_is_encoded_row_by_row() -> None:
    weights = np.array([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0]], np.float32)
    # As it comes from a graph: one head of many, and not in one piece.
    part = np.stack([weights.T, weights.T])[1].T
    matrix = AttentionMatrix(AttentionKind.CROSS, 1, 2, part)
    message = analysis_codec.encode_explanation(Explanation(("p",), ("t", "u"), ("d",), (matrix,)))
    (attention,) = message.attentions
    assert (attention.kind, attention.layer, attention.head) == (pb.ATTENTION_KIND_CROSS, 1, 2)
    assert (attention.rows, attention.columns) == (2, 3)
    assert list(attention.weights) == [1.0, 0.0, 0.0, 0.25, 0.75, 0.0]
    assert (message.prompt_tokens, message.target_tokens, message.decoder_tokens) == (["p"], ["t", "u"], ["d"])


def test_every_kind_of_attention_is_spelled_as_on_the_wire() -> None:
    assert set(analysis_codec.ATTENTION_KINDS) == set(AttentionKind)
    for kind, number in analysis_codec.ATTENTION_KINDS.items():
        assert pb.AttentionKind.Name(number) == f"ATTENTION_KIND_{kind.upper()}"


def test_error_never_echoes_a_long_value() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        decode(pb.GenerateRequest(text="a", request_id="x" * 100_000))
    assert len(str(refusal.value)) < 250


def test_stream_request_has_the_fields_and_numbers_of_the_unary_one() -> None:
    def shape(message: Any) -> list[tuple[str, int, int, str | None]]:
        return [
            (each.name, each.number, each.type, each.message_type and each.message_type.full_name)
            for each in message.DESCRIPTOR.fields
        ]

    assert shape(pb.GenerateStreamRequest) == shape(pb.GenerateRequest)
    oneofs = [
        [(each.name, [f.name for f in each.fields]) for each in message.DESCRIPTOR.oneofs]
        for message in (pb.GenerateRequest, pb.GenerateStreamRequest)
    ]
    assert oneofs[0] == oneofs[1]


def test_every_finish_reason_is_spelled_as_on_the_wire() -> None:
    assert set(codec.FINISH_REASONS) == set(FinishReason)
    for reason, number in codec.FINISH_REASONS.items():
        assert pb.FinishReason.Name(number) == f"FINISH_REASON_{reason.upper()}"
    assert set(codec.FINISH_REASONS.values()) == set(pb.FinishReason.values()) - {pb.FINISH_REASON_UNSPECIFIED}


def test_logprobs_pair_ids_with_values_best_first() -> None:
    message = codec.encode_logprobs(TokenLogprobs(-0.5, (9, 4), (-0.25, -0.5)))
    assert message.logprob == -0.5
    assert [(top.token_id, top.logprob) for top in message.top] == [(9, -0.25), (4, -0.5)]


def test_usage_counts_cached_tokens() -> None:
    timings = RequestTimings(arrival_time=0.0, scheduled_time=0.0, first_token_time=0.0, finished_time=0.0)
    outcome = Outcome(num_prompt_tokens=7, num_cached_tokens=4, num_generated_tokens=9, timings=timings)
    assert codec.encode_usage(outcome) == pb.Usage(prompt_tokens=7, cached_tokens=4, generated_tokens=9)


def test_matched_stop_is_text_or_token_or_nothing() -> None:
    assert codec.encode_matched_stop(None) is None
    assert codec.encode_matched_stop("x") == pb.MatchedStop(text="x")
    assert codec.encode_matched_stop(0) == pb.MatchedStop(token_id=0)


@pytest.mark.parametrize(
    ("scheduled", "first", "expected"),
    [
        (2.0, 5.0, pb.Timings(queue=1, prefill=3, decode=4, time_to_first_token=4, total=8)),
        (2.0, None, pb.Timings(queue=1, prefill=7, decode=0, total=8)),
        (None, None, pb.Timings(queue=8, prefill=0, decode=0, total=8)),
    ],
    ids=["complete", "ended in prefill", "ended in the queue"],
)
def test_timings_add_up_wherever_the_request_ended(
    scheduled: float | None, first: float | None, expected: pb.Timings
) -> None:
    timings = RequestTimings(arrival_time=1.0, scheduled_time=scheduled, first_token_time=first, finished_time=9.0)
    assert codec.encode_timings(timings) == expected
