"""What a transformer is, as plain data: sizes, positions, norms, activations, special tokens.

Knows nothing of torch, ONNX or training; the trainer, the exporter and the server all read this one record.
Validation collects every problem and raises once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from model.fields import coerce_enums, from_json_values, to_json_values


class ConfigError(ValueError):
    """A model configuration is invalid; `problems` lists everything that is wrong with it."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("invalid model configuration: " + "; ".join(problems))


class Architecture(StrEnum):
    """The two families of "Attention Is All You Need" (Vaswani et al., 2017)."""

    DECODER_ONLY = "decoder-only"
    ENCODER_DECODER = "encoder-decoder"


class Positions(StrEnum):
    """How order enters: added sinusoids, a learned table, or rotations of queries and keys (Su et al., 2021)."""

    SINUSOIDAL = "sinusoidal"
    LEARNED = "learned"
    ROTARY = "rotary"


class AttentionScore(StrEnum):
    """How a query scores a key: QKᵀ/√d_k (Vaswani et al., 2017) or vᵀtanh(q + k) (Bahdanau et al., 2015)."""

    DOT = "dot"
    ADDITIVE = "additive"


class Norm(StrEnum):
    """LayerNorm (Ba et al., 2016) or RMSNorm (Zhang and Sennrich, 2019)."""

    LAYER = "layernorm"
    RMS = "rmsnorm"


class NormPlacement(StrEnum):
    """`pre`: x + f(norm(x)), with a norm after the last layer. `post`: norm(x + f(x)), the paper's."""

    PRE = "pre"
    POST = "post"


class Activation(StrEnum):
    """The feed-forward non-linearity; `gelu` is the tanh approximation, `swiglu` gates (Shazeer, 2020)."""

    RELU = "relu"
    GELU = "gelu"
    SWIGLU = "swiglu"


_ENUMS: Mapping[str, type[StrEnum]] = {
    "architecture": Architecture,
    "positions": Positions,
    "attention_score": AttentionScore,
    "norm": Norm,
    "norm_placement": NormPlacement,
    "activation": Activation,
}

MAX_ADDITIVE_CONTEXT = 512
"""Additive scores look at every query and key together, `[B, H, S, T, D]`: D times the memory of dot products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One transformer.

    Lengths are in tokens. `context` bounds the decoder's positions (prompt and output together for a
    decoder-only model, start token and output for an encoder-decoder); `source_context` bounds the encoder's.
    Zero stands for "derived": `num_kv_heads` = `num_heads`, `head_dim` = `d_model` / `num_heads`,
    `source_vocab_size` = `vocab_size`, `source_context` = `context`.

    `tie_embeddings` makes the output head the target's token table; `share_embeddings` makes that table the source's
    too, where both vocabularies are equally large. Two tokenizers that happen to be equally large must not share.

    Raises:
        ConfigError: listing every invalid field.
    """

    architecture: Architecture
    vocab_size: int
    context: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    num_kv_heads: int = 0
    head_dim: int = 0
    num_encoder_layers: int = 0
    source_vocab_size: int = 0
    source_context: int = 0
    positions: Positions = Positions.ROTARY
    attention_score: AttentionScore = AttentionScore.DOT
    rope_theta: float = 10000.0
    norm: Norm = Norm.RMS
    norm_placement: NormPlacement = NormPlacement.PRE
    norm_epsilon: float = 1e-5
    activation: Activation = Activation.SWIGLU
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = True
    share_embeddings: bool = True
    scale_embeddings: bool = False
    dropout: float = 0.0
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        # Relations between sizes mean something only once every size is valid by itself.
        alone = coerce_enums(self, _ENUMS) + self._size_problems()
        rest = self._number_problems()
        if alone:
            raise ConfigError(alone + rest)
        problems = self._derive() + self._relation_problems() + rest
        if problems:
            raise ConfigError(problems)

    def _size_problems(self) -> list[str]:
        needed = ("vocab_size", "context", "d_model", "num_layers", "num_heads", "d_ff")
        derived = ("num_kv_heads", "head_dim", "num_encoder_layers", "source_vocab_size", "source_context")
        return [
            *(f"{name} is {size}, must be at least 1" for name in needed if (size := getattr(self, name)) < 1),
            *(f"{name} is {size}, must not be negative" for name in derived if (size := getattr(self, name)) < 0),
        ]

    def _number_problems(self) -> list[str]:
        problems = []
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 1.0):
            problems.append(f"rope_theta is {self.rope_theta}, must be finite and above 1")
        if not (math.isfinite(self.norm_epsilon) and self.norm_epsilon > 0.0):
            problems.append(f"norm_epsilon is {self.norm_epsilon}, must be finite and positive")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}, must be in [0, 1)")
        problems += [
            f"{name} is {token}, must be in [0, {self.vocab_size})"
            for name in ("pad_id", "bos_id", "eos_id")
            if not 0 <= (token := getattr(self, name)) < self.vocab_size
        ]
        return problems

    def _derive(self) -> list[str]:
        """Fills in the sizes left at zero; returns the problems.

        Done here, once, so that every reader sees numbers and never a zero that means something; the instance is still
        under construction, so nothing observes the change.
        """
        problems = []
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.head_dim and self.d_model % self.num_heads:
            problems.append(f"d_model {self.d_model} is not a multiple of num_heads {self.num_heads}")
        elif not self.head_dim:
            object.__setattr__(self, "head_dim", self.d_model // self.num_heads)
        if self.is_encoder_decoder:
            if not self.source_vocab_size:
                object.__setattr__(self, "source_vocab_size", self.vocab_size)
            if not self.source_context:
                object.__setattr__(self, "source_context", self.context)
        return problems

    def _relation_problems(self) -> list[str]:
        problems = []
        if self.is_encoder_decoder:
            if not self.num_encoder_layers:
                problems.append("num_encoder_layers is 0, an encoder-decoder needs at least 1")
            if self.pad_id >= self.source_vocab_size:
                problems.append(f"pad_id is {self.pad_id}, sources have ids in [0, {self.source_vocab_size})")
        else:
            problems += [
                f"{name} is {size}, a decoder-only model has none"
                for name in ("num_encoder_layers", "source_vocab_size", "source_context")
                if (size := getattr(self, name))
            ]
        if self.num_heads % self.num_kv_heads:
            problems.append(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.positions is Positions.ROTARY and self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd, rotary positions turn pairs")
        if self.attention_score is AttentionScore.ADDITIVE:
            problems += self._additive_problems()
        if self.positions is Positions.SINUSOIDAL and self.d_model % 2:
            problems.append(f"d_model {self.d_model} is odd, sinusoidal positions come in pairs")
        return problems

    def _additive_problems(self) -> list[str]:
        problems = [
            f"{name} is {length}, additive scores allow at most {MAX_ADDITIVE_CONTEXT}"
            for name in ("context", "source_context")
            if (length := getattr(self, name)) > MAX_ADDITIVE_CONTEXT
        ]
        if self.positions is Positions.ROTARY:
            problems.append(
                "positions is rotary, additive scores need sinusoidal or learned: only a dot product sees rotations"
            )
        return problems

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a source is encoded first and attended to by every decoder layer."""
        return self.architecture is Architecture.ENCODER_DECODER

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 self-attention K/V that one decoder position holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 4

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return to_json_values(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Builds from JSON; unknown, missing and wrongly typed fields are all reported at once.

        Raises:
            ConfigError: listing every problem.
        """
        return from_json_values(cls, values, ConfigError)
