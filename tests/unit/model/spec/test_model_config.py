"""`ModelConfig`: what it refuses, all at once; what it derives; that JSON loses nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.spec.config import (
    MAX_ADDITIVE_CONTEXT,
    Activation,
    Architecture,
    AttentionScore,
    ConfigError,
    LayerType,
    ModelConfig,
    Norm,
    NormPlacement,
    Positions,
    RopeScaling,
)

DECODER_ONLY = {
    "architecture": "decoder-only",
    "vocab_size": 100,
    "context": 32,
    "d_model": 24,
    "num_layers": 2,
    "num_heads": 4,
    "d_ff": 48,
}
ENCODER_DECODER = DECODER_ONLY | {"architecture": "encoder-decoder", "num_encoder_layers": 3}
# Hypothesis must neither vary from run to run nor leave a database behind.
repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=60)


def problems_of(values: dict[str, object]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(values)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


@st.composite
def valid_configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads, group, half_head = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 16))
    is_pair = draw(st.booleans())
    vocab_size = draw(st.integers(3, 50_000))
    source_vocab_size = draw(st.integers(0, 500)) if is_pair else 0
    token = st.integers(0, vocab_size - 1)
    score = draw(st.sampled_from(AttentionScore))
    is_additive = score is AttentionScore.ADDITIVE
    return ModelConfig(
        architecture=Architecture.ENCODER_DECODER if is_pair else Architecture.DECODER_ONLY,
        vocab_size=vocab_size,
        context=draw(st.integers(1, MAX_ADDITIVE_CONTEXT if is_additive else 8192)),
        d_model=2 * kv_heads * group * half_head,
        num_layers=(layers := draw(st.integers(1, 8))),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((0, 2 * half_head, 64))),
        d_ff=draw(st.integers(1, 4096)),
        num_encoder_layers=draw(st.integers(1, 8)) if is_pair else 0,
        source_vocab_size=source_vocab_size,
        source_context=draw(st.integers(0, 500)) if is_pair else 0,
        positions=(
            positions := draw(st.sampled_from([kind for kind in Positions if kind != "rotary" or not is_additive]))
        ),
        attention_score=score,
        rope_theta=draw(st.floats(1.5, 1e6)),
        rope_scaling=(scaling := draw(st.sampled_from(RopeScaling)) if positions == "rotary" else RopeScaling.NONE),
        rope_factor=1.0 if scaling is RopeScaling.NONE else draw(st.floats(1.0, 64.0)),
        rope_original_context=draw(st.integers(0, 4096)),
        rope_truncate=draw(st.booleans()),
        rope_attention_factor=draw(st.floats(0.5, 2.0)) if scaling is RopeScaling.YARN else 1.0,
        sliding_window=(window := draw(st.integers(0, 64)) if not is_pair and not is_additive else 0),
        layer_types=tuple(draw(st.lists(st.sampled_from(LayerType), min_size=layers, max_size=layers)))
        if window and draw(st.booleans())
        else (),
        query_key_norm=draw(st.booleans()),
        norm=draw(st.sampled_from(Norm)),
        norm_placement=draw(st.sampled_from(NormPlacement)),
        norm_epsilon=draw(st.floats(1e-12, 1e-2)),
        activation=draw(st.sampled_from(Activation)),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        share_embeddings=draw(st.booleans()),
        scale_embeddings=draw(st.booleans()),
        embedding_norm=draw(st.booleans()),
        logits_bias=draw(st.booleans()),
        attention_output_bias=draw(st.booleans()),
        dropout=draw(st.floats(0.0, 1.0, exclude_max=True)),
        pad_id=draw(st.integers(0, min(vocab_size, source_vocab_size or vocab_size) - 1)),
        bos_id=draw(token),
        eos_id=draw(token),
    )


@repeatable
@given(valid_configs())
def test_a_config_survives_json(config: ModelConfig) -> None:
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@repeatable
@given(valid_configs())
def test_a_valid_config_has_no_size_left_to_derive(config: ModelConfig) -> None:
    assert config.num_kv_heads >= 1
    assert config.head_dim >= 1
    assert config.num_heads % config.num_kv_heads == 0
    if config.is_encoder_decoder:
        assert min(config.source_vocab_size, config.source_context, config.num_encoder_layers) >= 1


@repeatable
@given(
    st.dictionaries(
        st.sampled_from((*DECODER_ONLY, "num_kv_heads", "head_dim", "positions", "dropout", "pad_id", "unknown")),
        st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text("rmslayer1", max_size=8),
    )
)
def test_any_json_object_is_a_config_or_a_config_error(changes: dict[str, object]) -> None:
    try:
        config = ModelConfig.from_dict(DECODER_ONLY | changes)
    except ConfigError as error:
        outcome: object = error.problems
    else:
        outcome = ModelConfig.from_dict(config.to_dict()) == config
    assert outcome


def test_sizes_left_out_are_derived() -> None:
    config = ModelConfig.from_dict(ENCODER_DECODER)
    assert (config.num_kv_heads, config.head_dim) == (4, 6)
    assert (config.source_vocab_size, config.source_context) == (100, 32)


def test_additive_scores_have_no_use_for_an_even_head() -> None:
    changes = {"attention_score": "additive", "positions": "sinusoidal", "d_model": 28}
    assert ModelConfig.from_dict(DECODER_ONLY | changes).head_dim == 7


def test_the_padding_must_be_a_token_of_sources_too() -> None:
    assert problems_of(ENCODER_DECODER | {"source_vocab_size": 8, "pad_id": 8}) == (
        "pad_id is 8, sources have ids in [0, 8)",
    )


def test_every_invalid_value_is_reported_at_once() -> None:
    wrong = {
        "architecture": "recurrent",
        "positions": "absolute",
        "attention_score": "cosine",
        "norm": "batchnorm",
        "norm_placement": "sandwich",
        "activation": "tanh",
        "rope_scaling": "su",
        "rope_original_context": -1,
        "sliding_window": -1,
        "vocab_size": 0,
        "context": -1,
        "d_model": 0,
        "num_layers": 0,
        "num_heads": 0,
        "d_ff": 0,
        "num_kv_heads": -1,
        "head_dim": -1,
        "num_encoder_layers": -1,
        "source_vocab_size": -1,
        "source_context": -1,
        "rope_theta": float("nan"),
        "norm_epsilon": 0.0,
        "dropout": 1.0,
        "pad_id": -1,
        "bos_id": 100,
        "eos_id": 1000,
    }
    problems = problems_of(DECODER_ONLY | wrong)
    assert {problem.split()[0] for problem in problems} == set(wrong)
    assert len(problems) == len(wrong)


def test_every_broken_relation_is_reported_at_once() -> None:
    wrong = {"num_kv_heads": 3, "head_dim": 5, "source_context": 8, "num_encoder_layers": 1, "dropout": 2.0}
    problems = problems_of(DECODER_ONLY | wrong)
    assert problems == (
        "num_encoder_layers is 1, a decoder-only model has none",
        "source_context is 8, a decoder-only model has none",
        "num_heads 4 is not a multiple of num_kv_heads 3",
        "head_dim 5 is odd, rotary positions turn pairs",
        "dropout is 2.0, must be in [0, 1)",
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"d_model": 30}, "d_model 30 is not a multiple of num_heads 4"),
        ({"num_kv_heads": 8}, "num_heads 4 is not a multiple of num_kv_heads 8"),
        (
            {"d_model": 25, "head_dim": 6, "positions": "sinusoidal"},
            "d_model 25 is odd, sinusoidal positions come in pairs",
        ),
        ({"architecture": "encoder-decoder"}, "num_encoder_layers is 0, an encoder-decoder needs at least 1"),
        (
            {"attention_score": "additive"},
            "positions is rotary, additive scores need sinusoidal or learned: only a dot product sees rotations",
        ),
        (
            {"attention_score": "additive", "positions": "learned", "context": 513},
            "context is 513, additive scores allow at most 512",
        ),
        (
            ENCODER_DECODER | {"attention_score": "additive", "positions": "learned", "source_context": 600},
            "source_context is 600, additive scores allow at most 512",
        ),
        ({"rope_theta": float("inf")}, "rope_theta is inf, must be finite and above 1"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0, must be finite and above 1"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon is nan, must be finite and positive"),
        ({"dropout": float("nan")}, "dropout is nan, must be in [0, 1)"),
        ({"dropout": -0.1}, "dropout is -0.1, must be in [0, 1)"),
        ({"attention_score": "cosine"}, "attention_score is 'cosine', must be one of dot, additive"),
        ({"eos_id": 100}, "eos_id is 100, must be in [0, 100)"),
        ({"rope_factor": 2.0}, "rope_factor is 2.0, rope_scaling is none"),
        ({"rope_scaling": "linear", "rope_factor": 0.5}, "rope_factor is 0.5, must be finite and at least 1"),
        (
            {"rope_scaling": "linear", "positions": "learned"},
            "rope_scaling is linear, positions are learned and turn nothing",
        ),
        (
            {"rope_scaling": "llama3", "rope_low_frequency_factor": 4.0},
            "rope_low_frequency_factor is 4.0, must be below rope_high_frequency_factor 4.0",
        ),
        (
            {"rope_scaling": "yarn", "rope_beta_slow": 33.0},
            "rope_beta_slow is 33.0, must be at most rope_beta_fast 32.0",
        ),
        ({"rope_attention_factor": 1.5}, "rope_attention_factor is 1.5, only yarn scaling has one"),
        ({"rope_beta_fast": 0.0}, "rope_beta_fast is 0.0, must be finite and positive"),
        ({"sliding_window": -1}, "sliding_window is -1, must not be negative"),
        ({"layer_types": ["full"]}, "layer_types has 1 entries, there are 2 layers"),
        ({"layer_types": ["full", "sliding"]}, "layer_types has sliding layers, sliding_window is 0"),
        ({"layer_types": ["full", "odd"]}, "layer_types has 'odd', must be of full, sliding"),
        (
            ENCODER_DECODER | {"sliding_window": 4},
            "sliding_window is 4, only decoder-only models have one",
        ),
        (
            {"sliding_window": 4, "attention_score": "additive", "positions": "learned"},
            "sliding_window is 4, additive scores have none",
        ),
        (
            {"d_model": 25, "head_dim": 6, "positions": "sinusoidal-halves"},
            "d_model 25 is odd, sinusoidal positions come in pairs",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_value_and_limit(changes: dict[str, object], problem: str) -> None:
    assert problems_of(DECODER_ONLY | changes) == (problem,)


def test_json_of_wrong_form_is_reported_field_by_field() -> None:
    values = DECODER_ONLY | {"vocab_size": "100", "d_ff": True, "dropout": None, "tie_embeddings": 1, "heads": 4}
    values["layer_types"] = [1]
    del values["context"]
    assert set(problems_of(values)) == {
        "unknown field 'heads'",
        "context is missing",
        "vocab_size is '100', must be int",
        "d_ff is True, must be int",
        "dropout is None, must be float",
        "tie_embeddings is 1, must be bool",
        "layer_types is [1], must be a string or a list of strings",
    }


def test_a_whole_number_may_stand_for_a_float() -> None:
    assert ModelConfig.from_dict(DECODER_ONLY | {"rope_theta": 500000}).rope_theta == 500000.0


def test_layers_are_alike_unless_they_are_told_apart() -> None:
    plain = ModelConfig.from_dict(DECODER_ONLY)
    assert [plain.window(index) for index in range(2)] == [0, 0]
    everywhere = ModelConfig.from_dict(DECODER_ONLY | {"sliding_window": 5})
    assert [everywhere.window(index) for index in range(2)] == [5, 5]
    mixed = ModelConfig.from_dict(DECODER_ONLY | {"sliding_window": 5, "layer_types": ["full", "sliding"]})
    assert [mixed.window(index) for index in range(2)] == [0, 5]


def test_what_scaling_stretches_is_the_context_unless_it_is_told() -> None:
    yarn = {"rope_scaling": "yarn", "rope_factor": 2.0}
    assert ModelConfig.from_dict(DECODER_ONLY | yarn).rope_original_context == 32
    assert ModelConfig.from_dict(DECODER_ONLY | yarn | {"rope_original_context": 16}).rope_original_context == 16


def test_kv_bytes_count_keys_and_values_of_every_layer() -> None:
    config = ModelConfig.from_dict(DECODER_ONLY | {"num_kv_heads": 2, "head_dim": 8})
    assert config.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
