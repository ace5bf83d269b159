"""Scaled dot products in a graph: ONNX Runtime's fused attention around the model's own projections.

    decoder, to itself      GroupQueryAttention on packed Q, K, V: rotates, appends to the cache in place, attends. One
                            operator for whole prompts, chunks and ragged decoding. With normed queries and keys, the
                            same on separate Q, K, V
    decoder, to the source  GroupQueryAttention again, without new keys and with the source's K/V as its past
    encoder, to itself      MultiHeadAttention, whose flash variant does not store the scores of a whole source. It has
                            no mask; an extra dimension of every head carries one

The operators are symbolic: they exist in the exported graph, and return zeros when run in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.onnx.ops import symbolic_multi_out

from export.backend import AttentionBackend, Buffers, Feeds
from model.nn.attention import CrossAttention, SelfAttention
from model.nn.positions import RotaryPositions
from model.nn.transformer import Decoder, EncoderDecoder
from model.spec.config import ModelConfig, Positions

_HEAD_DIM_MULTIPLE = 8
_ROTARY_HEAD_DIM_MULTIPLE = 16
# Added to a score, it makes the weight exactly zero without an infinity.
_NEVER = -1e9


def unsupported(config: ModelConfig) -> list[str]:
    """Why GroupQueryAttention cannot compute heads of this width; empty if it can."""
    rotary = config.positions is Positions.ROTARY
    multiple = _ROTARY_HEAD_DIM_MULTIPLE if rotary else _HEAD_DIM_MULTIPLE
    if config.head_dim % multiple:
        kind = " with rotary positions" if rotary else ""
        return [f"head_dim is {config.head_dim}, must be a multiple of {multiple}{kind}: GroupQueryAttention needs it"]
    return []


class DotDecoderAttention:
    """One step's attention to the cache and to the source; an `export.backend.DecoderAttention`."""

    def __init__(self, model: Decoder, feeds: Feeds) -> None:
        self._config = model.config
        self._rotary = model.rotary
        self._seqlens_k = feeds["seqlens_k"]
        self._total_sequence_length = feeds["total_sequence_length"]
        if model.config.is_encoder_decoder:
            # These are passed as the operator's `seqlens_k` and `total_sequence_length`; nothing is appended.
            lengths = feeds["source_lengths"]
            width = model.config.num_kv_heads * model.config.head_dim
            self._no_keys = feeds["cross_key_0"].new_zeros(lengths.shape[0], 0, width)
            self._last_position, self._longest = lengths - 1, lengths.max()

    def attend_self(self, module: SelfAttention, x: Tensor, past: Buffers) -> tuple[Tensor, Buffers]:
        """See `DecoderAttention`."""
        packed = module.project(x)
        operands = (packed, None, None) if module.query_norm is None else module.unpack(packed)
        y, key, value = group_query_attention(
            self._config,
            operands,
            past,
            self._seqlens_k,
            self._total_sequence_length,
            self._rotary,
            window=module.window,
        )
        return y, (key, value)

    def attend_cross(self, module: CrossAttention, x: Tensor, cross: Buffers) -> tuple[Tensor, Buffers]:
        """See `DecoderAttention`."""
        operands = (module.project_query(x), self._no_keys, self._no_keys)
        y, key, value = group_query_attention(self._config, operands, cross, self._last_position, self._longest, None)
        return y, (key, value)


class DotEncoderAttention:
    """A batch's attention to itself; an `export.backend.EncoderAttention`."""

    def __init__(self, model: EncoderDecoder, feeds: Feeds) -> None:
        self._config = model.config
        self._rotary = model.encoder.rotary
        positions = torch.arange(feeds["source_ids"].shape[1])
        is_padding = positions >= feeds["source_lengths"].long()[:, None]
        self._penalties = torch.where(is_padding, _NEVER, 0.0)

    def attend(self, module: SelfAttention, x: Tensor) -> Tensor:
        """See `EncoderAttention`."""
        q, k, v = module.unpack(module.project(x))
        if self._rotary is not None:
            q = rotary_embedding(q, self._rotary, self._config.num_heads)
            k = rotary_embedding(k, self._rotary, self._config.num_kv_heads)
        return padded_attention(self._config, q, k, v, self._penalties)


def group_query_attention(
    config: ModelConfig,
    operands: tuple[Tensor, Tensor | None, Tensor | None],
    past: tuple[Tensor, Tensor],
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    rotary: RotaryPositions | None,
    *,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`com.microsoft.GroupQueryAttention`: causal attention over a cache that it extends in place.

    Args:
        config: head counts and sizes.
        operands: Q `[B, S, H * D]` and new K and V `[B, S, Hkv * D]` each, or `[B, 0, Hkv * D]` to append nothing; or
            all packed, `[B, S, (H + 2 Hkv) * D]`, and two Nones.
        past: key and value buffers `[B, Hkv, capacity, D]`.
        seqlens_k: `[B] int32`, each row's cached and new tokens together, minus one.
        total_sequence_length: `[] int32`, the largest of those plus one.
        rotary: rotates queries and new keys; None to rotate neither.
        window: how many tokens a query attends to, itself included; 0 all.

    Returns:
        The output `[B, S, H * D]` and the two buffers.
    """
    query = operands[0]
    inputs = [*operands, *past, seqlens_k, total_sequence_length]
    if rotary is not None:
        inputs += [rotary.cos, rotary.sin]
    attributes: dict[str, Any] = {
        "num_heads": config.num_heads,
        "kv_num_heads": config.num_kv_heads,
        "do_rotary": int(rotary is not None),
    }
    if window:
        attributes["local_window_size"] = window
    output, key, value = symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs,
        attributes,
        dtypes=(query.dtype,) * 3,
        shapes=((*query.shape[:2], config.num_heads * config.head_dim), past[0].shape, past[1].shape),
        version=1,
    )
    return output, key, value


def padded_attention(config: ModelConfig, q: Tensor, k: Tensor, v: Tensor, penalties: Tensor) -> Tensor:
    """`com.microsoft.MultiHeadAttention`, bidirectional, over right-padded rows.

    Every query gets a 1 as its last number and every key its penalty, so that the penalty is added to their product. A
    mask input would make the operator store all scores: 4 H S² bytes per row.

    Args:
        config: head counts and sizes.
        q: `[B, S, H * D]`.
        k: `[B, S, Hkv * D]`.
        v: as `k`.
        penalties: `[B, S]`, 0 for keys to attend to, else so low that the weight is exactly 0.

    Returns:
        `[B, S, H * D]`, undefined past each length.
    """
    heads, groups = config.num_heads, config.num_heads // config.num_kv_heads
    size = q.shape[:2]
    query = torch.cat([q.view(*size, heads, -1), q.new_ones(()).expand(*size, heads, 1)], dim=-1).flatten(-2)
    keys, values = (x.view(*size, config.num_kv_heads, -1).repeat_interleave(groups, dim=2) for x in (k, v))
    key = torch.cat([keys, penalties[:, :, None, None].expand(*size, heads, 1)], dim=-1).flatten(-2)
    (output,) = symbolic_multi_out(
        "com.microsoft::MultiHeadAttention",
        (query, key, values.flatten(-2)),
        {"num_heads": heads, "scale": config.head_dim**-0.5},
        dtypes=(q.dtype,),
        shapes=(q.shape,),
        version=1,
    )
    return output


def rotary_embedding(x: Tensor, rotary: RotaryPositions, num_heads: int) -> Tensor:
    """`com.microsoft.RotaryEmbedding`: rotates `[B, S, num_heads * D]` by positions 0…S-1."""
    first_position = torch.zeros(1, dtype=torch.int64)
    (output,) = symbolic_multi_out(
        "com.microsoft::RotaryEmbedding",
        (x, first_position, rotary.cos, rotary.sin),
        {"num_heads": num_heads},
        dtypes=(x.dtype,),
        shapes=(x.shape,),
        version=1,
    )
    return output


DOT = AttentionBackend(unsupported, DotDecoderAttention, DotEncoderAttention)
"""Any model whose head width is a multiple of the operators'."""
