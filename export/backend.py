"""The seams of a graph: `Graph` names its inputs and outputs, `AttentionBackend` computes its attention.

Every score that a model may be configured with has one backend: `export.dot` writes scaled dot products with fused
operators, `export.additive` writes additive scores with standard ones. A third is a module like these and a row in
`export.graphs`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from model.nn.attention import CrossAttention, SelfAttention
from model.nn.transformer import Decoder, EncoderDecoder
from model.spec.artifact import TensorSpec
from model.spec.config import ModelConfig

Buffers = tuple[Tensor, Tensor]
"""A layer's keys and values, `[B, Hkv, capacity, D]` each."""

Feeds = Mapping[str, Tensor]
"""A graph's inputs by name, as its signature in `model.spec.artifact` lists them."""

Signature = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
"""A graph's inputs and outputs, in order."""


class Graph(nn.Module):
    """A torch module that becomes an ONNX file; tensors go in and out in the order of its signature."""

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.inputs, self.outputs = signature

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Input tensors → output tensors, both in the order of the signature."""
        fetches = self.compute({spec.name: tensor for spec, tensor in zip(self.inputs, tensors, strict=True)})
        return tuple(fetches[spec.name] for spec in self.outputs)

    @abstractmethod
    def compute(self, feeds: Feeds) -> Mapping[str, Tensor]:
        """Inputs by name → outputs by name."""


class DecoderAttention(Protocol):
    """The attention of one decoding step; what all layers share is computed once, in the constructor."""

    def attend_self(self, module: SelfAttention, x: Tensor, past: Buffers) -> tuple[Tensor, Buffers]:
        """New tokens `[B, S, d]` and the cache → joined heads `[B, S, H * D]` and the extended cache."""
        ...

    def attend_cross(self, module: CrossAttention, x: Tensor, cross: Buffers) -> tuple[Tensor, Buffers]:
        """The same over a source's keys and values, which are returned unchanged."""
        ...


class EncoderAttention(Protocol):
    """The attention of an encoder over right-padded sources."""

    def attend(self, module: SelfAttention, x: Tensor) -> Tensor:
        """`[B, S, d]`, bidirectional → joined heads `[B, S, H * D]`, undefined past each source's length."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """How one kind of score is computed in a graph.

    Two rules hold for every backend. K/V past a row's length may hold any value, NaN included, without effect. And
    apart from the batch dimension, every shape that a row's computation depends on is its own: the capacity of its
    buffers may decide what is computed, the longest row of its batch may not (batch invariance).

    Attributes:
        unsupported: why the operators cannot compute a model; empty when they can.
        in_decoder: a model and the inputs of `decoder_signature` → one step's attention.
        in_encoder: a model and the inputs of `encoder_signature` → one batch's attention.
    """

    unsupported: Callable[[ModelConfig], list[str]]
    in_decoder: Callable[[Decoder, Feeds], DecoderAttention]
    in_encoder: Callable[[EncoderDecoder, Feeds], EncoderAttention]
