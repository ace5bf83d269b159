"""Position encodings: sinusoids and learned tables, added to token vectors, and rotations of queries and keys.

Tables are computed in float64 and rounded once, so an angle of thousands of radians is right to the last float32 bit;
always on the CPU, so that a model built on the meta device has them. Angles are in radians.

Sources: sinusoids, Vaswani et al. (2017), section 3.5; rotations, Su et al., "RoFormer" (2021).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.spec.config import ModelConfig, Positions, RopeScaling


def sinusoidal_table(length: int, d_model: int, *, interleaved: bool = True) -> Tensor:
    """The paper's PE(i, 2j) = sin(i / 10000^(2j/d)), PE(i, 2j+1) = cos(the same).

    Returns:
        `[length, d_model] float32`: sines in even and cosines in odd columns, or if not interleaved, sines in the first
        and cosines in the second half.
    """
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64, device="cpu") / d_model
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), 10000.0**-exponents)
    return torch.stack((angles.sin(), angles.cos()), dim=-1 if interleaved else -2).flatten(1).float()


def base_frequencies(head_dim: int, theta: float) -> Tensor:
    """The rotation of pair j per position: theta^(-2j/D), `[head_dim / 2] float64`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies: Tensor = theta**-exponents
    return frequencies


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """`base_frequencies`, slowed down by `rope_scaling`.

    * `linear`: all divided by `rope_factor`.
    * `llama3`: divided for wavelengths (positions per full turn) above `rope_original_context` /
      `rope_low_frequency_factor`, unchanged below `rope_original_context` / `rope_high_frequency_factor`, between them
      interpolated linearly in the frequency.
    * `yarn`: unchanged for pairs that turn more than `rope_beta_fast` times within `rope_original_context`, divided for
      those that turn less than `rope_beta_slow` times, between them interpolated linearly in j; the two bounds are
      rounded to whole pairs if `rope_truncate`.

    Sources: linear, Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation"
    (2023); llama3, "The Llama 3 Herd of Models" (2024) and its published code; yarn, Peng et al., "YaRN: Efficient
    Context Window Extension of Large Language Models" (2023), section 3.2 and appendix A.
    """
    frequencies = base_frequencies(config.head_dim, config.rope_theta)
    slowed = frequencies / config.rope_factor
    match config.rope_scaling:
        case RopeScaling.NONE:
            return frequencies
        case RopeScaling.LINEAR:
            return slowed
        case RopeScaling.LLAMA3:
            kept = _kept_by_llama3(config, frequencies)
        case RopeScaling.YARN:
            kept = _kept_by_yarn(config)
    return slowed + (frequencies - slowed) * kept


def _kept_by_llama3(config: ModelConfig, frequencies: Tensor) -> Tensor:
    """The weight of each unscaled frequency, in [0, 1]."""
    low, high = config.rope_low_frequency_factor, config.rope_high_frequency_factor
    turns = config.rope_original_context * frequencies / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def _kept_by_yarn(config: ModelConfig) -> Tensor:
    """The weight of each unscaled frequency, in [0, 1]."""

    def pair(num_turns: float) -> float:
        """The fractional pair that turns this often within the original context."""
        longest = config.rope_original_context / (num_turns * 2 * math.pi)
        return config.head_dim * math.log(longest) / (2 * math.log(config.rope_theta))

    first, last = pair(config.rope_beta_fast), pair(config.rope_beta_slow)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float64, device="cpu")
    # Bounds that meet would divide by zero.
    return 1 - ((pairs - first) / (last - first if last != first else 0.001)).clamp(0, 1)


def rotary_tables(length: int, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles, each `[length, D / 2] float32`, as ONNX's GroupQueryAttention takes them.

    `frequencies` are `[D / 2] float64` in radians per position; `factor` scales both tables, so the rotated vectors.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequencies)
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x_j, x_{j + D/2}) by its position's angle: the rotate-half convention of Llama.

    ONNX's GroupQueryAttention calls it `rotary_interleaved=0`. Dot products of rotated queries and keys depend on the
    difference of positions only.

    `x` is `[..., S, D]`, and so is the result, in x's dtype; `cos` and `sin` broadcast to `[..., S, D / 2]`. Under
    autocast the rotation is computed in the tables' float32.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class SinusoidalPositions(nn.Module):
    """`sinusoidal_table` as a module; not trained, not saved."""

    def __init__(self, length: int, d_model: int, *, interleaved: bool = True) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", sinusoidal_table(length, d_model, interleaved=interleaved), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        """`[...] int64` → `[..., d]`."""
        return F.embedding(position_ids, self.table)


class RotaryPositions(nn.Module):
    """`rotary_tables` as a module; `cos` and `sin` are `[length, head_dim / 2]`, not trained, not saved."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        super().__init__()
        cos, sin = rotary_tables(length, rotary_frequencies(config), config.rope_attention_factor)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotates queries or keys `[B, H, S, D]` at positions 0…S-1."""
        position_ids = torch.arange(x.shape[-2], device=x.device)
        return rotate(x, self.cos[position_ids], self.sin[position_ids])


def make_added_positions(config: ModelConfig, length: int) -> nn.Module | None:
    """A module from position ids `[...]` to added vectors `[..., d]`, or None for rotary models."""
    if config.positions in (Positions.SINUSOIDAL, Positions.SINUSOIDAL_HALVES):
        interleaved = config.positions is Positions.SINUSOIDAL
        return SinusoidalPositions(length, config.d_model, interleaved=interleaved)
    if config.positions is Positions.LEARNED:
        return nn.Embedding(length, config.d_model)
    return None


def make_rotary_positions(config: ModelConfig, length: int) -> RotaryPositions | None:
    """The rotation of queries and keys, or None for models that add their positions."""
    if config.positions is Positions.ROTARY:
        return RotaryPositions(config, length)
    return None
