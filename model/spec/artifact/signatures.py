"""The inputs and outputs that each graph of an artifact must have.

The exporter emits graphs with these signatures, `checks` verifies the manifest's, and the server's runners rely on
them.
"""

from __future__ import annotations

from model.spec.artifact.manifest import (
    DECODER,
    ENCODER,
    EXPLAIN,
    MOVE,
    AttentionKind,
    KVLayout,
    KVPrecision,
    Manifest,
    TensorSpec,
)
from model.spec.config import ModelConfig, Positions

Signature = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
"""A graph's inputs and its outputs, in order."""

MAX_CANDIDATES = 64
"""How many of the highest logits a paged graph returns separately."""


def graph_signatures(manifest: Manifest) -> dict[str, Signature]:
    """The signature of every graph that the manifest must list, optional graphs among them if it lists them."""
    config, kv = manifest.config, manifest.kv_cache
    if kv.layout is KVLayout.PAGED:
        signatures = {
            DECODER: paged_decoder_signature(config, kv.precision, kv.block_size),
            MOVE: paged_move_signature(config, kv.precision, kv.block_size),
        }
        if config.is_encoder_decoder:
            signatures[ENCODER] = paged_encoder_signature(config, kv.precision, kv.block_size)
    else:
        signatures = {DECODER: decoder_signature(config, kv.precision)}
        if config.is_encoder_decoder:
            signatures[ENCODER] = encoder_signature(config, kv.precision)
    if EXPLAIN in manifest.graphs:
        signatures[EXPLAIN] = explain_signature(config)
    return signatures


def decoder_signature(config: ModelConfig, kv_precision: KVPrecision = KVPrecision.FP32) -> Signature:
    """A CPU decoder over slots.

    `seqlens_k` is each row's past length plus its new tokens minus one; `total_sequence_length` the largest such
    value plus one; `logits_indices` selects flat positions of `[batch * sequence]` whose logits are returned. Caches
    are updated in place: each `present_*` is bound to the buffer of its `past_*`. An encoder-decoder also reads each
    row's cross-attention K/V, valid up to `source_lengths`, and decodes one token per row and step (`sequence` is 1);
    `cross_*_out` are the same buffers again, because the operator requires them as outputs.
    """
    kv = ("batch", config.num_kv_heads, "capacity", config.head_dim)
    cross = ("batch", config.num_kv_heads, "source_capacity", config.head_dim)
    sequence: int | str = 1 if config.is_encoder_decoder else "sequence"
    inputs = [
        *_token_inputs(config, ("batch", sequence)),
        TensorSpec("seqlens_k", "int32", ("batch",)),
        TensorSpec("total_sequence_length", "int32", ()),
        TensorSpec("logits_indices", "int64", ("num_logits",)),
        *_kv_tensors(config, "past_{part}_{layer}", kv_precision.dtype, kv),
    ]
    outputs = [_logits(config), *_kv_tensors(config, "present_{part}_{layer}", kv_precision.dtype, kv)]
    if config.is_encoder_decoder:
        inputs.append(TensorSpec("source_lengths", "int32", ("batch",)))
        inputs += _kv_tensors(config, "cross_{part}_{layer}", kv_precision.dtype, cross)
        outputs += _kv_tensors(config, "cross_{part}_out_{layer}", kv_precision.dtype, cross)
    return tuple(inputs), tuple(outputs)


def encoder_signature(config: ModelConfig, kv_precision: KVPrecision = KVPrecision.FP32) -> Signature:
    """An encoder for slots: right-padded sources in, every decoder layer's cross-attention K/V out."""
    cross = ("batch", config.num_kv_heads, "source", config.head_dim)
    return _SOURCES, tuple(_kv_tensors(config, "cross_{part}_{layer}", kv_precision.dtype, cross))


def paged_decoder_signature(config: ModelConfig, precision: KVPrecision, block_size: int) -> Signature:
    """A decoder over blocks.

    The tokens of all rows are packed, without padding. The lengths, tables and `attention_metadata` are the inputs of
    ONNX Runtime's `com.microsoft.PagedAttention`, by its names: row b feeds tokens
    `[cumulative_sequence_length[b], cumulative_sequence_length[b + 1])` after `past_seqlens[b]` others, whose K/V lie
    in the blocks `block_table[b]`; token t's own K/V are written to place `slot_mapping[t]`,
    `block * block_size + offset`, or nowhere if that is -1. `attention_metadata` holds upper bounds of the tokens that
    a row feeds and has, and a lower bound of the most that a row has; an operator may read it on the host. Caches are
    updated in place: each `*_cache_out_*` is bound to the buffer of its `*_cache_*`. Block 0 is scratch: its contents
    are undefined.

    An encoder-decoder finds its sources' K/V in the same caches, through `source_block_table`. The operator counts the
    tokens that a row feeds after those that it has, so `source_past_seqlens` are the sources' lengths minus the fed
    tokens, and a row may not feed more tokens than its source has. `source_attention_metadata` is as
    `attention_metadata`, for sources.

    `logits_indices` selects packed tokens whose logits are returned. `candidate_ids` are the highest, in descending
    order and the lowest id first among equals, with their `candidate_logits`; `log_normalizer` is the logarithm of the
    sum of all exponentials, or not finite if a logit is not. So few numbers need to leave a device.
    """
    candidates = ("num_logits", min(MAX_CANDIDATES, config.vocab_size))
    inputs = [
        *_token_inputs(config, ("num_tokens",)),
        TensorSpec("cumulative_sequence_length", "int32", ("num_boundaries",)),
        TensorSpec("past_seqlens", "int32", ("batch",)),
        TensorSpec("block_table", "int32", ("batch", "blocks_per_row")),
        TensorSpec("slot_mapping", "int32", ("num_tokens",)),
        TensorSpec("attention_metadata", "int32", (3,)),
        TensorSpec("logits_indices", "int64", ("num_logits",)),
    ]
    if config.is_encoder_decoder:
        inputs += [
            TensorSpec("source_past_seqlens", "int32", ("batch",)),
            TensorSpec("source_block_table", "int32", ("batch", "blocks_per_source")),
            TensorSpec("source_attention_metadata", "int32", (3,)),
        ]
    outputs = [
        _logits(config),
        TensorSpec("candidate_ids", "int64", candidates),
        TensorSpec("candidate_logits", "float32", candidates),
        TensorSpec("log_normalizer", "float32", ("num_logits",)),
    ]
    caches, updated = _block_caches(config, precision, block_size)
    return (*inputs, *caches), (*outputs, *updated)


def paged_encoder_signature(config: ModelConfig, precision: KVPrecision, block_size: int) -> Signature:
    """An encoder over blocks: right-padded sources in, their K/V written to the caches in place.

    `slot_mapping` is the place of each token's K/V, as in `paged_decoder_signature`; -1 for padding.
    """
    caches, updated = _block_caches(config, precision, block_size)
    return (*_SOURCES, TensorSpec("slot_mapping", "int32", ("batch", "source")), *caches), updated


def paged_move_signature(config: ModelConfig, precision: KVPrecision, block_size: int) -> Signature:
    """The graph that copies K/V within the caches, in place, on a device.

    Place `sources[i]`, `block * block_size + offset`, is copied to `targets[i]`. All are read before any is written,
    and targets must be distinct.
    """
    places = (TensorSpec(name, "int64", ("num_places",)) for name in ("sources", "targets"))
    caches, updated = _block_caches(config, precision, block_size)
    return (*places, *caches), updated


def explain_signature(config: ModelConfig) -> Signature:
    """An explain graph: one whole sequence in, every layer's attention weights out.

    Row i of a matrix is query i's distribution over the keys. There is no cache and no logit; an encoder-decoder's
    `input_ids` begin with the start token.
    """
    lengths = {
        AttentionKind.ENCODER: ("source", "source"),
        AttentionKind.DECODER: ("sequence", "sequence"),
        AttentionKind.CROSS: ("sequence", "source"),
    }
    inputs = [TensorSpec("input_ids", "int64", (1, "sequence"))]
    if config.is_encoder_decoder:
        inputs.append(TensorSpec("source_ids", "int64", (1, "source")))
    outputs = (
        TensorSpec(attention_output(kind, layer), "float32", (config.num_heads, *lengths[kind]))
        for kind, num_layers in attention_layers(config).items()
        for layer in range(num_layers)
    )
    return tuple(inputs), tuple(outputs)


def attention_layers(config: ModelConfig) -> dict[AttentionKind, int]:
    """The number of layers of each kind of attention that the model has."""
    if not config.is_encoder_decoder:
        return {AttentionKind.DECODER: config.num_layers}
    return {
        AttentionKind.ENCODER: config.num_encoder_layers,
        AttentionKind.DECODER: config.num_layers,
        AttentionKind.CROSS: config.num_layers,
    }


def attention_output(kind: AttentionKind, layer: int) -> str:
    """The name of an explain graph's output with one layer's weights."""
    return f"{kind}_attention_{layer}"


_SOURCES = (
    TensorSpec("source_ids", "int64", ("batch", "source")),
    TensorSpec("source_lengths", "int32", ("batch",)),
)


def _token_inputs(config: ModelConfig, shape: tuple[int | str, ...]) -> list[TensorSpec]:
    names = ["input_ids"] if config.positions is Positions.ROTARY else ["input_ids", "position_ids"]
    return [TensorSpec(name, "int64", shape) for name in names]


def _logits(config: ModelConfig) -> TensorSpec:
    return TensorSpec("logits", "float32", ("num_logits", config.vocab_size))


def _kv_tensors(config: ModelConfig, name: str, dtype: str, shape: tuple[int | str, ...]) -> list[TensorSpec]:
    """Each decoder layer's keys and values; `name` is a format string of `part` and `layer`."""
    return [
        TensorSpec(name.format(part=part, layer=layer), dtype, shape)
        for layer in range(config.num_layers)
        for part in ("key", "value")
    ]


def _block_caches(config: ModelConfig, precision: KVPrecision, block_size: int) -> Signature:
    """The caches over blocks, as inputs and as outputs in the same buffers."""
    shape = ("num_blocks", block_size, config.num_kv_heads, config.head_dim)
    names = ("{part}_cache_{layer}", "{part}_cache_out_{layer}")
    inputs, outputs = (tuple(_kv_tensors(config, name, precision.dtype, shape)) for name in names)
    return inputs, outputs
