"""How order enters a model that would otherwise see a set: sinusoids, a learned table, rotations.

The first two are added to token vectors, the third turns queries and keys. Tables are computed in float64 and rounded
once, so that an angle of thousands of radians is still right to the last float32 bit. Angles are radians.

Sources: sinusoids, Vaswani et al. (2017), section 3.5; rotations, Su et al., "RoFormer" (2021).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig, Positions


def sinusoidal_table(length: int, d_model: int) -> Tensor:
    """The paper's PE(i, 2j) = sin(i / 10000^(2j/d)), PE(i, 2j+1) = cos(the same).

    Returns:
        `[length, d_model] float32`, sines at even and cosines at odd columns.
    """
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
    angles = torch.outer(torch.arange(length, dtype=torch.float64), 10000.0**-exponents)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()


def rotary_tables(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of i / theta^(2j/D), position i by pair j.

    Returns:
        Two `[length, head_dim / 2] float32`, as ONNX's GroupQueryAttention takes them.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float64), theta**-exponents)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x_j, x_{j + D/2}) by its position's angle: the rotate-half convention of Llama.

    ONNX's GroupQueryAttention calls it `rotary_interleaved=0`. Dot products of rotated queries and keys depend on
    positions only through their difference.

    Args:
        x: `[..., S, D]`.
        cos: broadcastable to `[..., S, D / 2]`.
        sin: as `cos`.

    Returns:
        `[..., S, D]` in x's dtype; under autocast the turning itself is done in the tables' float32.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class SinusoidalPositions(nn.Module):
    """`sinusoidal_table` as a module: looked up, never trained, never saved."""

    def __init__(self, length: int, d_model: int) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", sinusoidal_table(length, d_model), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        """`[...] int64` → `[..., d]`."""
        return F.embedding(position_ids, self.table)


class RotaryPositions(nn.Module):
    """`rotary_tables` as a module; `cos` and `sin` are `[length, head_dim / 2]`, never trained, never saved."""

    def __init__(self, length: int, head_dim: int, theta: float) -> None:
        super().__init__()
        cos, sin = rotary_tables(length, head_dim, theta)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turns queries or keys `[B, H, S, D]` standing at positions 0…S-1."""
        position_ids = torch.arange(x.shape[-2], device=x.device)
        return rotate(x, self.cos[position_ids], self.sin[position_ids])


def make_added_positions(config: ModelConfig, length: int) -> nn.Module | None:
    """What maps position ids `[...]` to vectors `[..., d]` to be added to the tokens', or None for rotary models."""
    if config.positions is Positions.SINUSOIDAL:
        return SinusoidalPositions(length, config.d_model)
    if config.positions is Positions.LEARNED:
        return nn.Embedding(length, config.d_model)
    return None


def make_rotary_positions(config: ModelConfig, length: int) -> RotaryPositions | None:
    """What turns queries and keys, or None for models that add their positions."""
    if config.positions is Positions.ROTARY:
        return RotaryPositions(length, config.head_dim, config.rope_theta)
    return None
