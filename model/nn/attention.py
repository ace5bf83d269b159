"""Attention as the paper writes it, and its projections.

`attend` computes softmax(QKᵀ/√d_k)V step by step: the oracle for every other formulation. `attend_fused` is the same
function through torch's fused kernel, for training. Both are pure. The weights are in `SelfAttention` and
`CrossAttention`, which training, the reference decoder and the exported graphs share; each brings its own computation
from queries, keys and values to an output.

A score is `dot_scores`, the paper's, or `AdditiveScore`, the older one, which has no fused kernel.

Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2; additive scores: Bahdanau et al. (2015);
grouped queries: Ainslie et al. (2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.spec.config import AttentionScore, ModelConfig

Score = Callable[[Tensor, Tensor], Tensor]
"""The score of each query and key: `[B, H, S, D]` and `[B, H, T, D]` → `[B, H, S, T]`."""


def dot_scores(q: Tensor, k: Tensor, *, scale: float | None = None) -> Tensor:
    """Scaled dot products QKᵀ/√d_k: `[B, H, S, D]` and `[B, H, T, D]` → `[B, H, S, T]`.

    d_k is the width of one head: a dot product of d_k unit-variance terms has variance d_k. `scale` replaces 1/√d_k.
    """
    return q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)


class AdditiveScore(nn.Module):
    """Additive scores vᵀtanh(q + k), one v for each head: Bahdanau et al.'s v_aᵀtanh(W_a s_{i-1} + U_a h_j).

    W_a and U_a are the ordinary projections, so `vector` `[H, D]` is the only new weight. `[B, H, S, T, D]` is
    materialized, so `MAX_ADDITIVE_CONTEXT` bounds the lengths. There is no 1/√D, as tanh bounds each term by ±v.

    Source: Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate" (2015), equation 6
    and appendix A.1.2.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(config.num_heads, config.head_dim))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """`[B, H, S, D]` and `[B, H, T, D]` → `[B, H, S, T]`."""
        return torch.einsum("bhstd,hd->bhst", torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)), self.vector)


def make_score(config: ModelConfig) -> Score:
    """The configuration's score; a module if it has weights."""
    return AdditiveScore(config) if config.attention_score is AttentionScore.ADDITIVE else dot_scores


class Attend(Protocol):
    """From queries, keys and values to the attention's output, as `attend` and `attend_fused`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        score: Score = dot_scores,
    ) -> Tensor:
        """Shapes and meaning as in `attend`."""
        ...


def attention_weights(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax of the scores `[B, H, S, T]`, exactly zero where masked, even for a NaN score.

    The boolean mask is broadcastable to `[B, H, S, T]`, True where the query may attend. A row without any True is NaN.
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    score: Score = dot_scores,
) -> Tensor:
    """The paper's equation 1, softmax(QKᵀ/√d_k)V, for any score: slow and simple.

    Args:
        q: `[B, H, S, D]`.
        k: `[B, Hkv, T, D]`; each key head serves H/Hkv consecutive query heads.
        v: `[B, Hkv, T, D]`.
        mask: boolean, broadcastable to `[B, H, S, T]`, True where the query may attend.
        is_causal: query i also attends to no key after i; S must equal T.
        score: the score of H query heads and as many key heads.

    Returns:
        `[B, H, S, D]`.
    """
    return attend_and_weigh(q, k, v, mask, is_causal=is_causal, score=score)[0]


def attend_and_weigh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    score: Score = dot_scores,
) -> tuple[Tensor, Tensor]:
    """The output of `attend` `[B, H, S, D]`, and its weights `[B, H, S, T]`."""
    if is_causal:
        causal = causal_mask(k.shape[-2], device=k.device)
        mask = causal if mask is None else mask & causal
    if (group := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    weights = attention_weights(score(q, k), mask)
    return weights @ v, weights


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    score: Score = dot_scores,
) -> Tensor:
    """`attend` through torch's fused kernel: the same values up to rounding, without the S×T matrix in memory.

    For training. With a score other than scaled dot products this is `attend` itself. Graphs are exported from
    `attend`: the fused kernel's ONNX operator accepts no mask that broadcasts its query axis, as `padding_mask`.
    """
    if score is not dot_scores:
        return attend(q, k, v, mask, is_causal=is_causal, score=score)
    if is_causal and mask is not None:
        mask, is_causal = mask & causal_mask(k.shape[-2], device=k.device), False
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)


def causal_mask(length: int, *, device: torch.device | None = None) -> Tensor:
    """`[T, T]` boolean, True on and below the diagonal: position i attends to j ≤ i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def window_mask(length: int, window: int, *, device: torch.device | None = None) -> Tensor:
    """`[T, T]` boolean, False for keys `window` or more positions before the query; not causal by itself."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1 - window)


def padding_mask(lengths: Tensor, length: int) -> Tensor:
    """`[B, 1, 1, S]` boolean, True at a row's first `lengths[b]` positions; `lengths` is `[B]`, each in 1…S."""
    return (torch.arange(length, device=lengths.device) < lengths[:, None])[:, None, None, :]


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """`[B, S, H * D]` → `[B, H, S, D]`."""
    batch, length, _ = x.shape
    return x.reshape(batch, length, -1, head_dim).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """`[B, H, S, D]` → `[B, S, H * D]`: the paper's Concat(head_1, …, head_h)."""
    return x.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """The weights of one self-attention: W^Q, W^K, W^V fused into `qkv`, W^O as `output`, and the `score`'s if any.

    `qkv` packs all query heads, then all key heads, then all value heads. `query_norm` and `key_norm` are RMSNorms over
    a head's width, None without `query_key_norm`; `window` is the sliding window in tokens, 0 for none.
    """

    def __init__(self, config: ModelConfig, window: int = 0) -> None:
        super().__init__()
        self.window = window
        self.head_dim = config.head_dim
        self.query_width = config.num_heads * config.head_dim
        self.kv_width = config.num_kv_heads * config.head_dim
        width = self.query_width + 2 * self.kv_width
        self.qkv = nn.Linear(config.d_model, width, bias=config.attention_bias)
        self.query_norm = _make_head_norm(config)
        self.key_norm = _make_head_norm(config)
        self.output = nn.Linear(self.query_width, config.d_model, bias=_has_output_bias(config))
        self.score = make_score(config)

    def project(self, x: Tensor) -> Tensor:
        """`[B, S, d]` → packed `[B, S, (H + 2 Hkv) * D]`, not yet rotated."""
        packed: Tensor = self.qkv(x)
        return packed

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output of `project` → q `[B, H, S, D]`, k and v `[B, Hkv, S, D]`; q and k normed if configured."""
        q, k, v = self.unpack(packed)
        return split_heads(q, self.head_dim), split_heads(k, self.head_dim), split_heads(v, self.head_dim)

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same with joined heads: q `[B, S, H * D]`, k and v `[B, S, Hkv * D]`."""
        q, k, v = torch.split(packed, [self.query_width, self.kv_width, self.kv_width], dim=-1)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = (
                norm(part.reshape(*part.shape[:-1], -1, self.head_dim)).flatten(-2)
                for norm, part in ((self.query_norm, q), (self.key_norm, k))
            )
        return q, k, v

    def merge(self, y: Tensor) -> Tensor:
        """Joined heads `[B, S, H * D]` times W^O → `[B, S, d]`."""
        merged: Tensor = self.output(y)
        return merged


class CrossAttention(nn.Module):
    """The weights of one cross-attention: `query` for the decoder, `key_value` (keys, then values) for the memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.d_model, query_width, bias=config.attention_bias)
        self.key_value = nn.Linear(config.d_model, 2 * kv_width, bias=config.attention_bias)
        self.output = nn.Linear(query_width, config.d_model, bias=_has_output_bias(config))
        self.score = make_score(config)

    def project_query(self, x: Tensor) -> Tensor:
        """`[B, S, d]` → `[B, S, H * D]`."""
        query: Tensor = self.query(x)
        return query

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Memory `[B, S, d]` → k and v, each `[B, Hkv, S, D]`: computed once per source."""
        k, v = self.key_value(memory).chunk(2, dim=-1)
        return split_heads(k, self.head_dim), split_heads(v, self.head_dim)

    def merge(self, y: Tensor) -> Tensor:
        """Joined heads `[B, S, H * D]` times W^O → `[B, S, d]`."""
        merged: Tensor = self.output(y)
        return merged


def _make_head_norm(config: ModelConfig) -> nn.RMSNorm | None:
    return nn.RMSNorm(config.head_dim, eps=config.norm_epsilon) if config.query_key_norm else None


def _has_output_bias(config: ModelConfig) -> bool:
    return config.attention_bias and config.attention_output_bias
