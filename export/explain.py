"""The torch module that becomes explain.onnx: the attention weights of every head and layer over one whole sequence.

The fused operators of the decoder and encoder graphs do not return attention weights. Here attention is written out in
standard operators, and its softmax is the output. The last layer ends at its softmax.

The graph reads the decoder's and encoder's weights, rounded where theirs are; its file holds none. It has no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from export.additive import additive_scores
from export.backend import Feeds, Graph
from model.nn.attention import (
    AdditiveScore,
    CrossAttention,
    SelfAttention,
    attention_weights,
    causal_mask,
    dot_scores,
    join_heads,
    split_heads,
    window_mask,
)
from model.nn.positions import RotaryPositions, rotate
from model.nn.transformer import Decoder, Encoder, EncoderDecoder
from model.spec.artifact import AttentionKind, KVPrecision, attention_output, explain_signature


def unsupported(kv_precision: KVPrecision) -> list[str]:
    """Why a model can have no explain graph beside K/V of this precision; empty when it can."""
    if kv_precision is not KVPrecision.FP32:
        # The decoder attends to rounded keys; the graph would show the weights of unrounded ones.
        return [f"an explain graph is for {KVPrecision.FP32} K/V, asked for is {kv_precision}"]
    return []


class ExplainGraph(Graph):
    """One whole sequence in, with its source where there is one; every attention matrix out."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(explain_signature(model.config))
        self.model = model

    def compute(self, feeds: Feeds) -> Mapping[str, Tensor]:
        """See `Graph`."""
        fetches: dict[str, Tensor] = {}
        model = self.model
        memory = _encode(model.encoder, feeds["source_ids"], fetches) if isinstance(model, EncoderDecoder) else None
        length = feeds["input_ids"].shape[1]
        position_ids = torch.arange(length)[None]
        hidden = model.embed(feeds["input_ids"], position_ids)
        rotations = _rotations(model.rotary, position_ids)
        for index, layer in enumerate(model.layers):
            attention = _Attention(fetches, index, rotations, _decoder_mask(length, model.config.window(index)), memory)
            hidden = layer(hidden, attention.attend_self, None if memory is None else attention.attend_cross)
        return fetches


Rotations = tuple[Tensor, Tensor]
"""Cosines and sines for each position, `[1, S, D / 2]` each."""


def _encode(encoder: Encoder, source_ids: Tensor, fetches: dict[str, Tensor]) -> Tensor:
    """Source `[1, S]` → memory `[1, S, d]`."""
    rotations = _rotations(encoder.rotary, torch.arange(source_ids.shape[1])[None])
    hidden = encoder.embedding(source_ids)
    for index, layer in enumerate(encoder.layers):
        hidden = layer(hidden, _Attention(fetches, index, rotations, None, None).attend_self)
    memory: Tensor = encoder.final_norm(hidden)
    return memory


def _decoder_mask(length: int, window: int) -> Tensor:
    """The causal mask of a decoder layer `[S, S]`, limited to the last `window` positions where there is a window."""
    mask = causal_mask(length)
    return mask & window_mask(length, window) if window else mask


def _rotations(rotary: RotaryPositions | None, position_ids: Tensor) -> Rotations | None:
    return None if rotary is None else (F.embedding(position_ids, rotary.cos), F.embedding(position_ids, rotary.sin))


@dataclass(frozen=True, slots=True)
class _Attention:
    """One layer's attention: the decoder's with a causal mask, the encoder's without."""

    fetches: dict[str, Tensor]
    index: int
    rotations: Rotations | None
    mask: Tensor | None
    memory: Tensor | None

    def attend_self(self, module: SelfAttention, x: Tensor) -> Tensor:
        """`[1, S, d]` → joined heads `[1, S, H * D]`."""
        q, k, v = module.split(module.project(x))
        if self.rotations is not None:
            q, k = rotate(q, *self.rotations), rotate(k, *self.rotations)
        kind = AttentionKind.ENCODER if self.mask is None else AttentionKind.DECODER
        return self._attend(kind, module, (q, k, v), self.mask)

    def attend_cross(self, module: CrossAttention, x: Tensor) -> Tensor:
        """`[1, S, d]` → joined heads `[1, S, H * D]`."""
        if self.memory is None:
            raise ValueError("cross-attention needs the encoder's memory")
        q = split_heads(module.project_query(x), module.head_dim)
        return self._attend(AttentionKind.CROSS, module, (q, *module.project_memory(self.memory)), None)

    def _attend(
        self,
        kind: AttentionKind,
        module: SelfAttention | CrossAttention,
        parts: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        q, k, v = parts
        if (group := q.shape[1] // k.shape[1]) > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        score = module.score
        scores = additive_scores(score.vector, q, k) if isinstance(score, AdditiveScore) else dot_scores(q, k)
        weights = attention_weights(scores, mask)
        self.fetches[attention_output(kind, self.index)] = weights[0]
        return join_heads(weights @ v)
