"""What a transformer costs, from its configuration alone: parameters, floating-point operations, K/V memory.

The law of attention in code: what is linear grows with the tokens, what attends grows with their pairs, and at some
length the second overtakes the first. Standard library only; the tests hold every figure to the real model.

Operations are those of matrix products, two for each multiply-add. Norms, softmax, activations, lookups and the tanh of
additive scores are left out, as is usual; they are of lower order in the width. Attention is counted as the formula is
written, over all pairs of a query and a key: a kernel that skips what the causal mask forbids does half of it, for long
texts, in self-attention (`attended_pairs` against `computed_pairs`).

Source of the convention: Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section 2.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from model.config import Activation, AttentionScore, ModelConfig, Norm, NormPlacement, Positions

BACKWARD_AND_FORWARD = 3
"""Training takes three times the forward operations: backwards each product becomes two, one for each factor."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations: `linear` in the number of tokens, `attention` in the number of their pairs."""

    linear: int
    attention: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.linear + self.attention


def num_parameters(config: ModelConfig) -> int:
    """How many trained numbers the model has, shared ones counted once."""
    layers = config.num_layers * _decoder_layer_parameters(config)
    layers += config.num_encoder_layers * _encoder_layer_parameters(config)
    if config.norm_placement is NormPlacement.PRE:
        layers += (2 if config.is_encoder_decoder else 1) * _norm_parameters(config)
    return num_embedding_parameters(config) + layers


def num_embedding_parameters(config: ModelConfig) -> int:
    """How many of them are in token tables, learned positions and an output head of its own."""
    tokens, positions = config.vocab_size, config.context
    if config.is_encoder_decoder:
        positions += config.source_context
        tokens += 0 if _shares_tokens(config) else config.source_vocab_size
    if not config.tie_embeddings:
        tokens += config.vocab_size
    return config.d_model * (tokens + (positions if config.positions is Positions.LEARNED else 0))


def causal_pairs(length: int, start: int = 0) -> int:
    """Pairs that `length` tokens form behind `start` others, each with all before it and with itself: one layer's."""
    return length * start + length * (length + 1) // 2


def attended_pairs(config: ModelConfig, length: int, source_length: int = 0) -> int:
    """Pairs of a query and a key that the masks let meet, over all layers, for each head.

    Args:
        config: the model.
        length: decoder tokens, at least 1.
        source_length: encoder tokens, at least 1 for an encoder-decoder and 0 for any other.

    Raises:
        ValueError: for lengths that the model has no use for.
    """
    return _pairs(config, length, source_length, causal_pairs(length))


def computed_pairs(config: ModelConfig, length: int, source_length: int = 0) -> int:
    """The same with the pairs that the causal mask throws away: what the formula, as written, multiplies."""
    return _pairs(config, length, source_length, length * length)


def forward_flops(config: ModelConfig, length: int, source_length: int = 0) -> Flops:
    """Operations of one pass over one whole sequence, logits at every position included.

    Args:
        config: the model.
        length: decoder tokens, at least 1.
        source_length: encoder tokens, at least 1 for an encoder-decoder and 0 for any other.

    Raises:
        ValueError: for lengths that the model has no use for.
    """
    _check_lengths(config, length, source_length)
    d, width = config.d_model, _query_width(config)
    per_target = config.num_layers * (_self_attention_weights(config) + _feed_forward_weights(config))
    per_target += d * config.vocab_size
    per_source = config.num_encoder_layers * (_self_attention_weights(config) + _feed_forward_weights(config))
    if config.is_encoder_decoder:
        per_target += config.num_layers * 2 * d * width
        per_source += config.num_layers * 2 * d * _kv_width(config)
    linear = 2 * (length * per_target + source_length * per_source)
    # One multiply-add a channel for the scores, another for the weighted sum of the values.
    return Flops(linear, 4 * width * computed_pairs(config, length, source_length))


def training_flops(config: ModelConfig, length: int, source_length: int = 0) -> Flops:
    """Operations of one pass forwards and backwards over one whole sequence; arguments as in `forward_flops`."""
    forward = forward_flops(config, length, source_length)
    return Flops(BACKWARD_AND_FORWARD * forward.linear, BACKWARD_AND_FORWARD * forward.attention)


def kv_bytes(config: ModelConfig, length: int, source_length: int = 0) -> int:
    """Bytes of float32 keys and values that one sequence holds while it is decoded, those of its source included."""
    _check_lengths(config, length, source_length)
    # Cross-attention keeps as much of a source token as self-attention of a target token.
    return (length + source_length) * config.kv_bytes_per_token


def crossover_length(config: ModelConfig) -> int:
    """From how many tokens on (in an encoder-decoder: of source and of target) attention takes half the operations."""
    source_length = 1 if config.is_encoder_decoder else 0
    once = forward_flops(config, 1, source_length)
    # Linear operations grow with n and attention's with n², so that one token tells both factors.
    return math.ceil(once.linear / once.attention)


def summary(config: ModelConfig) -> str:
    """The figures for people, a line each."""
    total, embeddings = num_parameters(config), num_embedding_parameters(config)
    flops = forward_flops(config, config.context, config.source_context)
    linear, attention = flops.linear / config.context, flops.attention / config.context
    lengths, token = f"a context of {config.context:,}", "token"
    overtakes = f"{crossover_length(config):,} tokens"
    cache = _bytes(kv_bytes(config, config.context, config.source_context))
    if config.is_encoder_decoder:
        lengths, token = f"{config.source_context:,} source and {config.context:,} target tokens", "target token"
        overtakes += " on either side"
        source = _bytes(config.source_context * config.kv_bytes_per_token)
        cache += f", {source} of them the source's"
    rows = {
        "parameters": f"{total:,}, {embeddings:,} of them embeddings ({embeddings / total:.0%})",
        "forward": f"{_flops(linear + attention)} a {token} at {lengths}: "
        f"linear {_flops(linear)}, attention {_flops(attention)} ({attention / (linear + attention):.0%})",
        "training": f"{_flops(BACKWARD_AND_FORWARD * (linear + attention))} a {token}, forwards and backwards",
        "K/V cache": f"{_bytes(config.kv_bytes_per_token)} a token, at full length {cache} (float32)",
        "crossover": f"attention overtakes the rest at {overtakes}",
    }
    return "\n".join(f"{name:<11} {text}" for name, text in rows.items())


def _check_lengths(config: ModelConfig, length: int, source_length: int) -> None:
    if length < 1:
        raise ValueError(f"length is {length}, must be at least 1")
    if config.is_encoder_decoder and source_length < 1:
        raise ValueError(f"source_length is {source_length}, an encoder-decoder needs at least 1")
    if not config.is_encoder_decoder and source_length:
        raise ValueError(f"source_length is {source_length}, a decoder-only model has no source")


def _pairs(config: ModelConfig, length: int, source_length: int, causal: int) -> int:
    _check_lengths(config, length, source_length)
    return (
        config.num_layers * (causal + length * source_length)
        + config.num_encoder_layers * source_length * source_length
    )


def _query_width(config: ModelConfig) -> int:
    return config.num_heads * config.head_dim


def _kv_width(config: ModelConfig) -> int:
    return config.num_kv_heads * config.head_dim


def _shares_tokens(config: ModelConfig) -> bool:
    return config.tie_embeddings and config.share_embeddings and config.source_vocab_size == config.vocab_size


def _self_attention_weights(config: ModelConfig) -> int:
    """W^Q, W^K, W^V and W^O; cross-attention has as many."""
    return config.d_model * (2 * _query_width(config) + 2 * _kv_width(config))


def _feed_forward_weights(config: ModelConfig) -> int:
    matrices = 3 if config.activation is Activation.SWIGLU else 2
    return matrices * config.d_model * config.d_ff


def _attention_parameters(config: ModelConfig) -> int:
    biases = _query_width(config) + 2 * _kv_width(config) + config.d_model if config.attention_bias else 0
    vector = _query_width(config) if config.attention_score is AttentionScore.ADDITIVE else 0
    return _self_attention_weights(config) + biases + vector


def _feed_forward_parameters(config: ModelConfig) -> int:
    widths = (2 if config.activation is Activation.SWIGLU else 1) * config.d_ff + config.d_model
    return _feed_forward_weights(config) + (widths if config.mlp_bias else 0)


def _norm_parameters(config: ModelConfig) -> int:
    return (2 if config.norm is Norm.LAYER else 1) * config.d_model


def _encoder_layer_parameters(config: ModelConfig) -> int:
    return _attention_parameters(config) + _feed_forward_parameters(config) + 2 * _norm_parameters(config)


def _decoder_layer_parameters(config: ModelConfig) -> int:
    cross = _attention_parameters(config) + _norm_parameters(config) if config.is_encoder_decoder else 0
    return _encoder_layer_parameters(config) + cross


def _flops(value: float) -> str:
    for unit, name in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 1e3:.3g} kFLOP"


def _bytes(value: int) -> str:
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power:
            return f"{value / (1 << power):.3g} {name}"
    return f"{value} bytes"
