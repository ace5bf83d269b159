"""The torch module that becomes prefill.onnx: several tokens of one sequence, in standard operators throughout.

What the decoder's graph does with one fused operator over buffers in place is written out here, so that a provider that
knows neither can compile it: the K/V of the past come in, those of the new tokens go out, and attention is two products
and a softmax. Keys and values are not repeated for the query heads that share them; the heads of one group are a
dimension of their own instead.

Its weights are float32, whatever the decoder's are: a provider that gains by rounding does it by itself, on loading.

Knows the model's layers; not who runs the graph, nor where its K/V are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from export.backend import Feeds, Graph
from model.nn.attention import SelfAttention
from model.nn.positions import rotate
from model.nn.transformer import Decoder
from model.spec.artifact import KVPrecision, prefill_signature
from model.spec.config import Architecture, AttentionScore, ModelConfig

PREFILL_OPSET = 18
"""The oldest that PyTorch's exporter writes: norms come out as plain arithmetic, which every provider knows."""


def unsupported(config: ModelConfig, kv_precision: KVPrecision) -> list[str]:
    """Why a model can have no prefill graph over K/V of this precision; empty when it can."""
    problems = []
    if config.architecture is not Architecture.DECODER_ONLY:
        problems.append(f"a prefill graph is for decoder-only models, this one is {config.architecture}")
    if config.attention_score is not AttentionScore.DOT:
        problems.append(f"a prefill graph is for dot-product attention, this model's score is {config.attention_score}")
    if kv_precision is not KVPrecision.FP32:
        problems.append(f"a prefill graph is for {KVPrecision.FP32} K/V, asked for is {kv_precision}")
    return problems


class PrefillGraph(Graph):
    """New tokens and the K/V of those before in, the wanted logits and the new tokens' K/V out."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(prefill_signature(model.config))
        self.model = model

    def compute(self, feeds: Feeds) -> Mapping[str, Tensor]:
        """See `Graph`."""
        fetches: dict[str, Tensor] = {}
        config = self.model.config
        position_ids = feeds["position_ids"]
        hidden = self.model.embed(feeds["input_ids"], position_ids)
        num_keys = feeds["past_key_0"].shape[2] + position_ids.shape[1]
        # Of each query and key, how far behind the key lies.
        distances = position_ids[0, :, None] - torch.arange(num_keys)
        windows = {config.window(index) for index in range(config.num_layers)}
        masks = {window: _mask(distances, window) for window in sorted(windows)}
        rotary = self.model.rotary
        turns = (
            None if rotary is None else (F.embedding(position_ids, rotary.cos), F.embedding(position_ids, rotary.sin))
        )

        def wanted(x: Tensor) -> Tensor:
            return x.index_select(1, feeds["logits_indices"])

        for index, layer in enumerate(self.model.layers):
            attention = _Attention(config, index, feeds, fetches, masks[config.window(index)], turns)
            hidden = layer(hidden, attention.attend, select=wanted if index + 1 == config.num_layers else None)
        fetches["logits"] = self.model.unembed(self.model.final_norm(hidden).squeeze(0))
        return fetches


def _mask(distances: Tensor, window: int) -> Tensor:
    """What is added to scores `[Hkv, group, S, T]`: -inf for keys that come later, or lie before a window."""
    is_hidden = distances < 0
    if window:
        is_hidden = is_hidden | (distances >= window)
    return torch.zeros(is_hidden.shape).masked_fill(is_hidden, float("-inf"))


@dataclass(frozen=True, slots=True)
class _Attention:
    """One layer's: which past it reads, and where its new K/V go."""

    config: ModelConfig
    index: int
    feeds: Mapping[str, Tensor]
    fetches: dict[str, Tensor]
    mask: Tensor
    turns: tuple[Tensor, Tensor] | None

    def attend(self, module: SelfAttention, x: Tensor) -> Tensor:
        """`[1, S, d]` → joined heads `[1, S, H * D]`."""
        config, length = self.config, x.shape[1]
        q, key, value = module.split(module.project(x))
        if self.turns is not None:
            q, key = rotate(q, *self.turns), rotate(key, *self.turns)
        keys, values = self._append("key", key), self._append("value", value)
        grouped = q.reshape(config.num_kv_heads, -1, length, config.head_dim)
        scores = grouped @ keys.transpose(0, 1).transpose(-2, -1) * (1.0 / math.sqrt(config.head_dim)) + self.mask
        y = scores.softmax(dim=-1) @ values.transpose(0, 1)
        y = y.reshape(config.num_heads, length, config.head_dim).transpose(0, 1)
        return y.reshape(1, length, config.num_heads * config.head_dim)

    def _append(self, part: str, new: Tensor) -> Tensor:
        self.fetches[f"new_{part}_{self.index}"] = new
        return torch.cat((self.feeds[f"past_{part}_{self.index}"], new), dim=2)
