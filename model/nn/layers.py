"""The blocks between embedding and logits: norms, feed-forward networks, residual branches, encoder and decoder layers.

A layer receives its attention as an argument, so training, the reference decoder and the exported graphs share this
code. All operations after the last attention are per token: with `select`, a layer computes them only for the tokens
whose output is needed.

Dropout is on each branch before it is added, as in the paper (section 5.4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from model.nn.attention import CrossAttention, SelfAttention
from model.spec.config import Activation, ModelConfig, Norm, NormPlacement

AttendSelf = Callable[[SelfAttention, Tensor], Tensor]
"""From a module and its input `[B, S, d]` to the joined heads' output `[B, S, H * D]`, before W^O."""
AttendCross = Callable[[CrossAttention, Tensor], Tensor]
"""The same for cross-attention; the callable holds the memory."""
Select = Callable[[Tensor], Tensor]
"""Selects tokens: `[B, S, w]` → `[1, n, w]`, or packed tokens `[T, w]` → `[n, w]`."""


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.RELU: F.relu,
    Activation.GELU: partial(F.gelu, approximate="tanh"),
    Activation.GELU_EXACT: F.gelu,
    Activation.SILU: F.silu,
}


def make_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm γ(x - μ)/√(σ² + ε) + β, or RMSNorm γx/√(mean(x²) + ε), over the last axis."""
    if config.norm is Norm.LAYER:
        return nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
    return nn.RMSNorm(config.d_model, eps=config.norm_epsilon)


class FeedForward(nn.Module):
    """FFN(x) = f(xW_1 + b_1)W_2 + b_2, with f = max(0, ·) as in the paper, or a smooth activation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activate = _ACTIVATIONS[config.activation]
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.mlp_bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., d]` → `[..., d]`."""
        out: Tensor = self.down(self.activate(self.up(x)))
        return out


class GatedFeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): (silu(xW_gate) ⊙ xW_up)W_down, gate and up fused in `gate_up`, gate first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=config.mlp_bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., d]` → `[..., d]`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


def make_feed_forward(config: ModelConfig) -> nn.Module:
    """The feed-forward network for the configuration's activation."""
    return GatedFeedForward(config) if config.activation is Activation.SWIGLU else FeedForward(config)


class Residual(nn.Module):
    """A branch around a sublayer: x + f(norm(x)) when the norm goes before, norm(x + f(x)) when after (the paper's)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.placement = config.norm_placement
        self.norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], select: Select | None = None) -> Tensor:
        """`[B, S, d]` → `[B, S, d]`, or the selected tokens; the sublayer must select its output itself."""
        kept = x if select is None else select(x)
        if self.placement is NormPlacement.PRE:
            out: Tensor = kept + self.dropout(sublayer(self.norm(x)))
        else:
            out = self.norm(kept + self.dropout(sublayer(x)))
        return out


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network, each in a residual branch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.self_attention_residual = Residual(config)
        self.feed_forward = make_feed_forward(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, x: Tensor, attend_self: AttendSelf) -> Tensor:
        """`[B, S, d]` → `[B, S, d]`."""
        module = self.self_attention
        x = self.self_attention_residual(x, lambda y: module.merge(attend_self(module, y)))
        out: Tensor = self.feed_forward_residual(x, self.feed_forward)
        return out


class DecoderLayer(nn.Module):
    """Self-attention, in an encoder-decoder also cross-attention, then a feed-forward network."""

    def __init__(self, config: ModelConfig, window: int = 0) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config, window)
        self.self_attention_residual = Residual(config)
        self.cross_attention = CrossAttention(config) if config.is_encoder_decoder else None
        self.cross_attention_residual = Residual(config) if config.is_encoder_decoder else None
        self.feed_forward = make_feed_forward(config)
        self.feed_forward_residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        attend_self: AttendSelf,
        attend_cross: AttendCross | None = None,
        select: Select | None = None,
    ) -> Tensor:
        """`[B, S, d]` → `[B, S, d]`, or the selected tokens.

        Raises:
            ValueError: unless `attend_cross` is given exactly if the layer has cross-attention.
        """
        own, cross, residual = self.self_attention, self.cross_attention, self.cross_attention_residual
        if (cross is None) != (attend_cross is None):
            raise ValueError("attend_cross goes with a layer that has cross-attention, and with no other")

        def selected(y: Tensor) -> Tensor:
            return y if select is None else select(y)

        if cross is None or residual is None or attend_cross is None:
            x = self.self_attention_residual(x, lambda y: own.merge(selected(attend_self(own, y))), select)
        else:
            x = self.self_attention_residual(x, lambda y: own.merge(attend_self(own, y)))
            x = residual(x, lambda y: cross.merge(selected(attend_cross(cross, y))), select)
        out: Tensor = self.feed_forward_residual(x, self.feed_forward)
        return out
