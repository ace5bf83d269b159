"""Cost model: parameters, floating-point operations, K/V memory and requests' work, from the configuration alone.

Linear operations grow with the tokens, attention's with pairs of tokens, which dominate from some length on.

Operations are those of matrix products, two per multiply-add. Norms, softmax, activations, lookups and the tanh of
additive scores are omitted, as is usual: they are of lower order in the width. Attention is counted over all pairs of a
query and a key (`computed_pairs`); a kernel that skips masked pairs does about half of it in self-attention
(`attended_pairs`).

A request is counted as it is served (`request_work`): with a K/V cache, its prompt in chunks, then a token at a time;
what follows the last layer's attention only for tokens whose logits are needed. Its attention operations exclude
padding, which is counted separately, in pairs.

Source of the convention: Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section 2.1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from model.spec.config import Activation, AttentionScore, ModelConfig, Norm, NormPlacement, Positions

BACKWARD_AND_FORWARD = 3
"""Operations of training per operation of a forward pass: the backward pass has two products for each one."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations: `linear` in the number of tokens, `attention` in the number of their pairs."""

    linear: int
    attention: int

    @property
    def total(self) -> int:
        """The sum of both."""
        return self.linear + self.attention


def num_parameters(config: ModelConfig) -> int:
    """The number of trained parameters, shared ones counted once."""
    layers = config.num_layers * _decoder_layer_parameters(config)
    layers += config.num_encoder_layers * _encoder_layer_parameters(config)
    norms_per_stack = (config.norm_placement is NormPlacement.PRE) + config.embedding_norm
    norms = (1 + config.is_encoder_decoder) * norms_per_stack * _norm_parameters(config)
    return num_embedding_parameters(config) + layers + norms + config.vocab_size * config.logits_bias


def num_embedding_parameters(config: ModelConfig) -> int:
    """Parameters in token tables, learned positions and an untied output head."""
    tokens, positions = config.vocab_size, config.context
    if config.is_encoder_decoder:
        positions += config.source_context
        tokens += 0 if _shares_tokens(config) else config.source_vocab_size
    if not config.tie_embeddings:
        tokens += config.vocab_size
    return config.d_model * (tokens + (positions if config.positions is Positions.LEARNED else 0))


def causal_pairs(length: int, start: int = 0, window: int = 0) -> int:
    """Pairs of a causal layer in which `length` tokens after `start` others attend to all up to themselves.

    With a `window`, each attends to the last `window` tokens.
    """
    growing = min(length, max(0, window - start)) if window else length
    return growing * start + growing * (growing + 1) // 2 + (length - growing) * window


def attended_pairs(config: ModelConfig, length: int, source_length: int = 0) -> int:
    """Unmasked pairs of a query and a key, over all layers, per head.

    Args:
        config: the model.
        length: decoder tokens, at least 1.
        source_length: encoder tokens, at least 1 for an encoder-decoder, else 0.

    Raises:
        ValueError: for invalid lengths.
    """
    own = sum(causal_pairs(length, window=config.window(layer)) for layer in range(config.num_layers))
    return _pairs(config, length, source_length, own)


def computed_pairs(config: ModelConfig, length: int, source_length: int = 0) -> int:
    """Pairs as `attended_pairs`, masked ones included."""
    return _pairs(config, length, source_length, config.num_layers * length * length)


def forward_flops(config: ModelConfig, length: int, source_length: int = 0) -> Flops:
    """Operations of a forward pass over one whole sequence with all logits; arguments as in `attended_pairs`."""
    _check_lengths(config, length, source_length)
    linear = length * (_target_token_flops(config) + _wanted_token_flops(config))
    linear += source_length * _source_token_flops(config)
    return Flops(linear, pair_flops(config) * computed_pairs(config, length, source_length))


def pair_flops(config: ModelConfig) -> int:
    """Operations per pair of a query and a key in one layer, over all heads."""
    # One multiply-add per channel for the scores, another for the weighted sum of the values.
    return 4 * _query_width(config)


def kv_bytes(config: ModelConfig, length: int, source_length: int = 0) -> int:
    """Bytes of float32 K/V of one sequence, its source's included."""
    _check_lengths(config, length, source_length)
    # Cross-attention caches as much per source token as self-attention per target token.
    return (length + source_length) * config.kv_bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """The lengths of a request that its cost depends on, in tokens.

    Attributes:
        prompt_tokens: the decoder's prompt, or an encoder-decoder's start token and target prefix.
        generated_tokens: tokens chosen per output row; in a beam search, the number of steps per beam.
        source_tokens: the encoder's; 0 for a decoder-only model.
        cached_tokens: cache hits: tokens of the prompt, or all or none of the source.
        chunk: chunked prefill ends chunks at its multiples; None computes a prompt as one chunk.
        merged_chunks: whole chunks that are one run, at most, as of a prompt alone.
        padded_prompt_tokens: the padded length of the prompt's first chunk; None without padding.
        padded_source_tokens: the same for the source.
        scores_prompt: whether logits are needed at every position of the prompt, not only after its chunks.

    Raises:
        ValueError: naming an invalid number.
    """

    prompt_tokens: int
    generated_tokens: tuple[int, ...]
    source_tokens: int = 0
    cached_tokens: int = 0
    chunk: int | None = None
    merged_chunks: int = 1
    padded_prompt_tokens: int | None = None
    padded_source_tokens: int | None = None
    scores_prompt: bool = False

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}, must be at least 1")
        if not self.generated_tokens or min(self.generated_tokens) < 0:
            problem = "must have an entry of at least 0 for each row"
            raise ValueError(f"generated_tokens is {self.generated_tokens}, {problem}")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}, must be at least 1")
        if self.source_tokens and self.cached_tokens not in (0, self.source_tokens):
            raise ValueError(f"cached_tokens is {self.cached_tokens}, a source is cached as a whole or not at all")
        if not self.source_tokens and not 0 <= self.cached_tokens < self.prompt_tokens:
            limit = f"must be at least 0 and below the {self.prompt_tokens} of the prompt"
            raise ValueError(f"cached_tokens is {self.cached_tokens}, {limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWork:
    """The work of one phase of a request, by graph. Padding is counted in `num_padded_*` only.

    A step computes a chunk of a prompt or one token per row. A chunk of one token is computed as a decode row. Pairs
    are one layer's, per head, with the window given if any; `num_padded_pairs` are the decoder's. `kv_token_steps` is
    the number of cached decoder tokens over all rows, summed over the steps; `kv_source_token_steps` the same for the
    source.
    """

    num_steps: int = 0
    num_logits: int = 0
    num_encoder_runs: int = 0
    num_encoder_tokens: int = 0
    num_encoder_pairs: int = 0
    num_padded_encoder_pairs: int = 0
    num_prefill_runs: int = 0
    num_prefill_tokens: int = 0
    num_prefill_pairs: int = 0
    num_padded_pairs: int = 0
    num_decode_steps: int = 0
    num_decode_rows: int = 0
    num_decode_pairs: int = 0
    kv_token_steps: int = 0
    kv_source_token_steps: int = 0


@dataclass(frozen=True, slots=True)
class RequestWork:
    """The work until a request's first token is chosen, and after that."""

    prefill: PhaseWork
    decode: PhaseWork


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """The cost of a request. Pairs are over all layers, per head; operations exclude padding."""

    attended_pairs: int
    padded_pairs: int
    linear_flops: int
    attention_flops: int
    kv_byte_steps: int


def request_work(shape: RequestShape, window: int = 0) -> RequestWork:
    """The work of a request, with the pairs of a decoder layer that has this `window`."""
    return RequestWork(_prefill_work(shape, window), _decode_work(shape, window))


def request_cost(config: ModelConfig, shape: RequestShape, kv_token_bytes: int | None = None) -> RequestCost:
    """The cost of a request. `kv_token_bytes` are the K/V bytes per token, by default float32's.

    A sliding window does not reduce the cached tokens.
    """
    work = request_work(shape)
    phases = (work.prefill, work.decode)
    pairs = config.num_encoder_layers * sum(phase.num_encoder_pairs for phase in phases)
    padded = config.num_encoder_layers * sum(phase.num_padded_encoder_pairs for phase in phases)
    for window, num_layers in Counter(map(config.window, range(config.num_layers))).items():
        seen = request_work(shape, window)
        for phase in (seen.prefill, seen.decode):
            pairs += num_layers * (phase.num_prefill_pairs + phase.num_decode_pairs)
            padded += num_layers * phase.num_padded_pairs
    token_bytes = config.kv_bytes_per_token if kv_token_bytes is None else kv_token_bytes
    held = sum(phase.kv_token_steps + phase.kv_source_token_steps for phase in phases) * token_bytes
    return RequestCost(
        attended_pairs=pairs,
        padded_pairs=padded,
        linear_flops=sum(linear_flops(config, phase) for phase in phases),
        attention_flops=pair_flops(config) * pairs,
        kv_byte_steps=held,
    )


def linear_flops(config: ModelConfig, work: PhaseWork) -> int:
    """Linear operations of one phase of a request."""
    tokens = (work.num_prefill_tokens + work.num_decode_rows) * _target_token_flops(config)
    wanted = work.num_logits * _wanted_token_flops(config)
    return tokens + work.num_encoder_tokens * _source_token_flops(config) + wanted


def prompt_linear_flops(config: ModelConfig, length: int) -> int:
    """Linear operations of a decoder-only model's whole prompt with the logits of its last token."""
    return linear_flops(config, PhaseWork(num_prefill_tokens=length, num_logits=1))


def crossover_length(config: ModelConfig) -> int:
    """The length, of source and target alike, from which attention takes half of the operations."""
    once = forward_flops(config, 1, int(config.is_encoder_decoder))
    # Linear operations are proportional to n and attention's to n², so one token gives both factors.
    return math.ceil(once.linear / once.attention)


def summary(config: ModelConfig) -> str:
    """The figures for people, one per line."""
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
    """All pairs, with `causal` ones in the decoder's self-attention."""
    _check_lengths(config, length, source_length)
    cross = config.num_layers * length * source_length
    return causal + cross + config.num_encoder_layers * source_length * source_length


def _prefill_work(shape: RequestShape, window: int) -> PhaseWork:
    """One row, until its prompt is computed."""
    source, prompt = shape.source_tokens, shape.prompt_tokens
    first = 0 if source else shape.cached_tokens
    chunk = shape.chunk or prompt
    ends = [*range((first // chunk + 1) * chunk, prompt, chunk), prompt]
    if shape.merged_chunks > 1:
        ends = _merge_chunks(first, ends, chunk, shape.merged_chunks)
    starts = [first, *ends[:-1]]
    singles = [end for start, end in zip(starts, ends, strict=True) if end - start == 1]
    longer = [(end - start, start) for start, end in zip(starts, ends, strict=True) if end - start > 1]
    beginning = ends[0] if first == 0 else 0
    padded = shape.padded_prompt_tokens if beginning > 1 and shape.padded_prompt_tokens else beginning
    is_encoded = bool(source) and not shape.cached_tokens
    padded_source = shape.padded_source_tokens or source
    return PhaseWork(
        num_steps=len(ends),
        # Of longer chunks only the prompt's last one needs logits.
        num_logits=prompt - first if shape.scores_prompt else len(singles) + (ends[-1] - starts[-1] > 1),
        num_encoder_runs=int(is_encoded),
        num_encoder_tokens=source * is_encoded,
        num_encoder_pairs=source**2 * is_encoded,
        num_padded_encoder_pairs=(padded_source**2 - source**2) * is_encoded,
        num_prefill_runs=len(longer),
        num_prefill_tokens=sum(length for length, _ in longer),
        num_prefill_pairs=sum(causal_pairs(length, start, window) + source * length for length, start in longer),
        num_padded_pairs=causal_pairs(padded, window=window) - causal_pairs(beginning, window=window),
        num_decode_steps=len(singles),
        num_decode_rows=len(singles),
        num_decode_pairs=sum(causal_pairs(1, end - 1, window) + source for end in singles),
        kv_token_steps=sum(ends),
        kv_source_token_steps=source * len(ends),
    )


def _merge_chunks(first: int, ends: Sequence[int], chunk: int, most: int) -> list[int]:
    """The ends of runs, where at most so many whole chunks are one."""
    found: list[int] = []
    num_whole = 0
    for start, end in zip([first, *ends], ends, strict=False):
        is_whole = end - start == chunk
        if is_whole and 0 < num_whole < most:
            found[-1], num_whole = end, num_whole + 1
        else:
            found.append(end)
            num_whole = int(is_whole)
    return found


def _decode_work(shape: RequestShape, window: int) -> PhaseWork:
    """All rows: each feeds every token that it has chosen, except the last."""
    fed = [max(count - 1, 0) for count in shape.generated_tokens]
    own = sum(causal_pairs(count, shape.prompt_tokens, window) for count in fed)
    # A fed token attends to all cached ones and itself, unless they lie before a window.
    held = sum(causal_pairs(count, shape.prompt_tokens) for count in fed)
    cross = shape.source_tokens * sum(fed)
    return PhaseWork(
        num_steps=max(fed),
        num_logits=sum(fed),
        num_decode_steps=max(fed),
        num_decode_rows=sum(fed),
        num_decode_pairs=own + cross,
        kv_token_steps=held,
        kv_source_token_steps=cross,
    )


def _target_token_flops(config: ModelConfig) -> int:
    """Linear operations of a decoder token, up to the last layer's attention."""
    weights = _self_attention_weights(config) + _feed_forward_weights(config)
    if config.is_encoder_decoder:
        weights += 2 * config.d_model * _query_width(config)
    return 2 * (config.num_layers * weights - _last_weights(config))


def _wanted_token_flops(config: ModelConfig) -> int:
    """Linear operations of a decoder token from there to its logits."""
    return 2 * (_last_weights(config) + config.d_model * config.vocab_size)


def _last_weights(config: ModelConfig) -> int:
    """Weights after the decoder's last attention (the cross-attention if there is one): W^O and the feed-forward's."""
    return config.d_model * _query_width(config) + _feed_forward_weights(config)


def _source_token_flops(config: ModelConfig) -> int:
    """Linear operations of a source token, its K/V for every decoder layer included."""
    encoder = config.num_encoder_layers * (_self_attention_weights(config) + _feed_forward_weights(config))
    return 2 * (encoder + config.num_layers * 2 * config.d_model * _kv_width(config))


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
    output_bias = config.d_model if config.attention_output_bias else 0
    biases = _query_width(config) + 2 * _kv_width(config) + output_bias if config.attention_bias else 0
    vector = _query_width(config) if config.attention_score is AttentionScore.ADDITIVE else 0
    return _self_attention_weights(config) + biases + vector


def _feed_forward_parameters(config: ModelConfig) -> int:
    widths = (2 if config.activation is Activation.SWIGLU else 1) * config.d_ff + config.d_model
    return _feed_forward_weights(config) + (widths if config.mlp_bias else 0)


def _norm_parameters(config: ModelConfig) -> int:
    return (2 if config.norm is Norm.LAYER else 1) * config.d_model


def _encoder_layer_parameters(config: ModelConfig) -> int:
    norms = 2 * _norm_parameters(config) + 2 * config.head_dim * config.query_key_norm
    return _attention_parameters(config) + _feed_forward_parameters(config) + norms


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
