"""Additive scores in a graph: standard operators, since ONNX Runtime has no fused attention for them.

    decoder, to itself      TensorScatter (opset 24) writes new keys and values into the buffers, in place where input
        and
                            output are one tensor; then masked attention over the whole buffer
    decoder, to the source  the same over the source's buffers, which Identity returns
    encoder, to itself      the same under a mask of lengths

Time and memory follow the capacity of the buffers, not the length of a row: batch invariance without an operator for
ragged rows requires it. A model whose scores would be too large is rejected.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.onnx.ops import symbolic

from export.backend import AttentionBackend, Buffers, Feeds
from model.nn.attention import (
    AdditiveScore,
    CrossAttention,
    SelfAttention,
    attend,
    join_heads,
    padding_mask,
    split_heads,
)
from model.nn.transformer import Decoder, EncoderDecoder
from model.spec.config import ModelConfig

# The paper's base model, 512 wide, over the longest supported context.
_MAX_SCORE_BYTES = 2**29


def unsupported(config: ModelConfig) -> list[str]:
    """Why one row's scores `[H, T, T, D] float32` over a whole prompt or source are too large; empty if they fit."""
    name = "source_context" if config.is_encoder_decoder else "context"
    length = config.source_context if config.is_encoder_decoder else config.context
    num_bytes = 4 * config.num_heads * length**2 * config.head_dim
    if num_bytes > _MAX_SCORE_BYTES:
        return [
            f"{name} is {length}, additive scores of {config.num_heads} heads of {config.head_dim} take {num_bytes} "
            f"bytes for each row, at most {_MAX_SCORE_BYTES}"
        ]
    return []


class AdditiveDecoderAttention:
    """One step's attention to the cache and to the source; an `export.backend.DecoderAttention`.

    Past a row's length, buffers hold stale values, possibly NaN. A mask removes them from the scores; the weighted sum
    needs zeros in their place, because zero times NaN is NaN.
    """

    def __init__(self, model: Decoder, feeds: Feeds) -> None:
        lengths = feeds["seqlens_k"].long() + 1
        num_new, capacity = feeds["input_ids"].shape[1], feeds["past_key_0"].shape[2]
        self._starts = lengths - num_new
        new_positions = self._starts[:, None] + torch.arange(num_new)
        self._is_visible = (torch.arange(capacity) <= new_positions[:, :, None])[:, None]
        self._is_written = padding_mask(lengths, capacity)
        if model.config.is_encoder_decoder:
            self._is_source = padding_mask(feeds["source_lengths"].long(), feeds["cross_key_0"].shape[2])

    def attend_self(self, module: SelfAttention, x: Tensor, past: Buffers) -> tuple[Tensor, Buffers]:
        """See `DecoderAttention`."""
        q, k, v = module.split(module.project(x))
        key, value = tensor_scatter(past[0], k, self._starts), tensor_scatter(past[1], v, self._starts)
        y = attend(q, key, _zeroed(value, self._is_written), self._is_visible, score=_score(module))
        return join_heads(y), (key, value)

    def attend_cross(self, module: CrossAttention, x: Tensor, cross: Buffers) -> tuple[Tensor, Buffers]:
        """See `DecoderAttention`."""
        q = split_heads(module.project_query(x), module.head_dim)
        key, value = cross
        y = attend(q, key, _zeroed(value, self._is_source), self._is_source, score=_score(module))
        return join_heads(y), cross


class AdditiveEncoderAttention:
    """A batch's attention to itself; an `export.backend.EncoderAttention`."""

    def __init__(self, _: EncoderDecoder, feeds: Feeds) -> None:
        self._mask = padding_mask(feeds["source_lengths"].long(), feeds["source_ids"].shape[1])

    def attend(self, module: SelfAttention, x: Tensor) -> Tensor:
        """See `EncoderAttention`."""
        q, k, v = module.split(module.project(x))
        return join_heads(attend(q, k, v, self._mask, score=_score(module)))


def additive_scores(vector: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """`AdditiveScore`, computed so that its bits do not depend on other rows.

    The sum over D is a product of one row `v` with a matrix whose columns are the keys. As a matrix times a column, or
    as ReduceSum, its order of addition would depend on how threads and vector lanes divide the batch.

    Args:
        vector: `[H, D]`.
        q: `[B, H, S, D]`.
        k: `[B, H, T, D]`.

    Returns:
        `[B, H, S, T]`.
    """
    met = torch.tanh(q.unsqueeze(-1) + k.transpose(-2, -1).unsqueeze(-3))
    return (vector[:, None, None] @ met).squeeze(-2)


def tensor_scatter(past: Tensor, update: Tensor, starts: Tensor) -> Tensor:
    """ONNX `TensorScatter`: `past` `[B, Hkv, capacity, D]` with `update` `[B, Hkv, S, D]` from each row's `starts` on.

    ONNX Runtime writes in place where `past` and the result are bound to the same memory; otherwise it copies.
    """
    written: Tensor = symbolic(
        "TensorScatter",
        (past, update, starts),
        {"axis": -2, "mode": "linear"},
        dtype=past.dtype,
        shape=past.shape,
        version=24,
    )
    return written


def _score(module: SelfAttention | CrossAttention) -> partial[Tensor]:
    if not isinstance(module.score, AdditiveScore):
        raise TypeError(f"{type(module).__name__} does not score additively")
    return partial(additive_scores, module.score.vector)


def _zeroed(value: Tensor, is_valid: Tensor) -> Tensor:
    """`value` `[B, Hkv, T, D]` with zeros where `is_valid` `[B, 1, 1, T]` is False."""
    return torch.where(is_valid.transpose(-2, -1), value, 0.0)


ADDITIVE = AttentionBackend(unsupported, AdditiveDecoderAttention, AdditiveEncoderAttention)
"""Any model whose scores fit; heads may have any width."""
