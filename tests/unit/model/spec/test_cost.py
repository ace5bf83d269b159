"""Cost: figures that papers print, or worked by hand, or counted pair by pair. tests/parity asks the real models."""

from __future__ import annotations

from typing import Any

import pytest

from model.spec import cost
from model.spec.config import ModelConfig
from model.training.presets import PRESETS, resolve


def decoder_only(**overrides: Any) -> ModelConfig:
    fields = {"vocab_size": 10, "context": 32, "d_model": 8, "num_layers": 2, "num_heads": 2, "d_ff": 16}
    return ModelConfig(**{"architecture": "decoder-only", "activation": "relu", **fields, **overrides})


def encoder_decoder(**overrides: Any) -> ModelConfig:
    return decoder_only(**{"architecture": "encoder-decoder", "num_encoder_layers": 3, **overrides})


def test_gpt2_has_the_parameters_that_its_paper_is_known_for():
    assert cost.num_parameters(resolve("gpt2-124m").model) == 124_439_808


def test_paper_base_model_has_the_65_million_of_its_table_within_the_vocabulary_it_left_open():
    config = resolve("paper").model
    assert cost.num_parameters(config) == 63_045_632
    assert cost.num_embedding_parameters(config) == 37000 * 512
    # 6 encoder layers of 4d² + 8d² weights and 6 decoder layers of 8d² + 8d², and their biases and norms.
    assert cost.num_parameters(config) - 37000 * 512 == pytest.approx(168 * 512**2, rel=2e-3)


def test_embeddings_are_tables_learned_positions_and_a_head_of_its_own():
    assert cost.num_embedding_parameters(decoder_only()) == 10 * 8
    assert cost.num_embedding_parameters(decoder_only(positions="learned")) == (10 + 32) * 8
    assert cost.num_embedding_parameters(decoder_only(tie_embeddings=False)) == 2 * 10 * 8
    assert cost.num_embedding_parameters(encoder_decoder()) == 10 * 8
    assert cost.num_embedding_parameters(encoder_decoder(share_embeddings=False)) == 2 * 10 * 8
    assert cost.num_embedding_parameters(encoder_decoder(tie_embeddings=False)) == 3 * 10 * 8
    assert cost.num_embedding_parameters(encoder_decoder(source_vocab_size=12)) == (10 + 12) * 8
    learned = encoder_decoder(positions="learned", source_context=20)
    assert cost.num_embedding_parameters(learned) == (10 + 32 + 20) * 8


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("source_length", [1, 5])
def test_pairs_are_those_that_a_mask_lets_meet(length, source_length):
    own = sum(1 for query in range(length) for key in range(length) if key <= query)
    assert cost.attended_pairs(decoder_only(), length) == 2 * own
    assert cost.computed_pairs(decoder_only(), length) == 2 * length**2
    sources = 3 * source_length**2
    cross = 2 * length * source_length
    assert cost.attended_pairs(encoder_decoder(), length, source_length) == 2 * own + cross + sources
    assert cost.computed_pairs(encoder_decoder(), length, source_length) == 2 * length**2 + cross + sources


@pytest.mark.parametrize("length", [1, 4, 5, 9])
def test_pairs_of_a_window_are_those_within_it(length):
    mixed = decoder_only(sliding_window=4, layer_types=("sliding", "full"))
    seen = sum(1 for query in range(length) for key in range(length) if query - 4 < key <= query)
    own = length * (length + 1) // 2
    assert cost.attended_pairs(mixed, length) == seen + own
    assert cost.attended_pairs(decoder_only(sliding_window=4), length) == 2 * seen
    assert cost.computed_pairs(mixed, length) == 2 * length**2


def test_operations_of_a_small_model_by_hand():
    # A layer: 4·8·8 weights of attention and 2·8·16 of the feed-forward network; the head: 10·8.
    flops = cost.forward_flops(decoder_only(), 5)
    assert flops.linear == 2 * 5 * (2 * (256 + 256) + 80)
    # Scores and weighted values, 8 channels each, for 25 pairs in 2 layers.
    assert flops.attention == 2 * 2 * 8 * 25 * 2
    assert flops.total == flops.linear + flops.attention


@pytest.mark.parametrize("name", [name for name in PRESETS if isinstance(resolve(name).model, ModelConfig)])
def test_attention_overtakes_the_rest_at_the_crossover_and_not_before(name):
    config = resolve(name).model
    length = cost.crossover_length(config)

    def flops(tokens: int) -> cost.Flops:
        return cost.forward_flops(config, tokens, tokens if config.is_encoder_decoder else 0)

    assert flops(length).attention >= flops(length).linear
    assert flops(length - 1).attention < flops(length - 1).linear


def test_kv_holds_keys_and_values_of_both_sides_in_every_decoder_layer():
    grouped = decoder_only(num_kv_heads=1)
    # Keys and values, 2 layers, 1 head of 4 channels, 4 bytes.
    assert cost.kv_bytes(grouped, 10) == 10 * 2 * 2 * 1 * 4 * 4
    assert cost.kv_bytes(encoder_decoder(), 10, 7) == (10 + 7) * 2 * 2 * 8 * 4


@pytest.mark.parametrize("function", [cost.forward_flops, cost.attended_pairs, cost.computed_pairs, cost.kv_bytes])
def test_lengths_that_a_model_has_no_use_for_are_refused(function):
    with pytest.raises(ValueError, match="length is 0"):
        function(decoder_only(), 0)
    with pytest.raises(ValueError, match="source_length is 3, a decoder-only model has no source"):
        function(decoder_only(), 4, 3)
    with pytest.raises(ValueError, match="source_length is 0, an encoder-decoder needs"):
        function(encoder_decoder(), 4)


def test_summary_says_what_the_functions_say():
    lines = cost.summary(decoder_only(d_model=512, context=1024, num_heads=8, d_ff=2048, vocab_size=32000)).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["parameters", "forward", "training", "K/V cache", "crossover"]
    # 16,384,000 in the table, 2 · 12 · 512² in the layers, 5 norms of 512.
    assert lines[0].endswith(" 22,678,016, 16,384,000 of them embeddings (72%)")
    # 2 · 22.675 M weights; 4 · 512 · 1024 · 2 for the pairs of one query.
    assert "49.5 MFLOP a token at a context of 1,024: linear 45.4 MFLOP, attention 4.19 MFLOP (8%)" in lines[1]
    assert "149 MFLOP" in lines[2]
    assert "8 KiB a token, at full length 8 MiB (float32)" in lines[3]
    # 45,350,912 / 4096.
    assert "11,072 tokens" in lines[4]


def test_summary_of_an_encoder_decoder_counts_its_source():
    text = cost.summary(encoder_decoder(source_context=16, d_model=32))
    assert "a target token at 16 source and 32 target tokens" in text
    assert "512 bytes a token, at full length 24 KiB, 8 KiB of them the source's" in text
    assert "tokens on either side" in text
