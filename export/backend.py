"""What a graph asks of its attention, and what it is given: the seam between the graphs and the operators.

Every score that a model may be configured with has one backend: `export.dot` writes scaled dot products with fused
operators, `export.additive` additive scores with standard ones. A third is a module like these and a row in
`export.graphs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model.nn.attention import CrossAttention, SelfAttention
from model.nn.transformer import Decoder, EncoderDecoder
from model.spec.config import ModelConfig

Buffers = tuple[Tensor, Tensor]
"""A layer's keys and values, `[B, Hkv, capacity, D]` each."""

Feeds = Mapping[str, Tensor]
"""A graph's inputs by name, as its signature in `model.spec.artifact` lists them."""


class DecoderAttention(Protocol):
    """The attention of one decoding step; what all its layers need is derived once, when it is made."""

    def attend_self(self, module: SelfAttention, x: Tensor, past: Buffers) -> tuple[Tensor, Buffers]:
        """New tokens `[B, S, d]` and the cache → joined heads `[B, S, H * D]` and the cache with them in place."""
        ...

    def attend_cross(self, module: CrossAttention, x: Tensor, cross: Buffers) -> tuple[Tensor, Buffers]:
        """The same over a source's keys and values, which come back as they were."""
        ...


class EncoderAttention(Protocol):
    """The attention of an encoder over right-padded sources."""

    def attend(self, module: SelfAttention, x: Tensor) -> Tensor:
        """`[B, S, d]`, both ways → joined heads `[B, S, H * D]`, meaningless past each source's length."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """How one kind of score is computed in a graph.

    Two rules hold for all. K/V past a row's length may be anything, NaN included, and is not felt. And the batch
    dimension apart, every shape that a row meets is its own affair: the capacity of its buffers may decide what is
    computed, the longest row of its batch may not.

    Attributes:
        unsupported: why the operators cannot compute a model; empty when they can.
        in_decoder: from a model and the inputs of `decoder_signature` to one step's attention.
        in_encoder: from a model and the inputs of `encoder_signature` to one batch's.
    """

    unsupported: Callable[[ModelConfig], list[str]]
    in_decoder: Callable[[Decoder, Feeds], DecoderAttention]
    in_encoder: Callable[[EncoderDecoder, Feeds], EncoderAttention]
