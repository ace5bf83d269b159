"""A transformer's configuration as plain data: sizes, positions, norms, activations, special tokens.

The trainer, the exporter and the server all read it. Validation collects every problem and raises once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from model.spec.fields import coerce_enums, from_json_values, to_json_values

MAX_LAYERS = 4096
"""The limit of each stack."""


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
    """Position encoding: added sinusoids, a learned table, or rotations of queries and keys (Su et al., 2021).

    `sinusoidal` alternates sines and cosines, as the paper's text; `sinusoidal-halves` has all sines first, as Marian
    (Junczys-Dowmunt et al., 2018) and the paper's code.
    """

    SINUSOIDAL = "sinusoidal"
    SINUSOIDAL_HALVES = "sinusoidal-halves"
    LEARNED = "learned"
    ROTARY = "rotary"


class RopeScaling(StrEnum):
    """How rotations are slowed down for contexts longer than the training's.

    `linear` divides all angles (Chen et al., 2023), `llama3` those of long wavelengths (Llama Team, 2024), `yarn`
    interpolates over the pairs and also scales queries and keys (Peng et al., 2023).
    """

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


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
    """The feed-forward non-linearity; `gelu` is the tanh approximation, `swiglu` gates with silu (Shazeer, 2020)."""

    RELU = "relu"
    GELU = "gelu"
    GELU_EXACT = "gelu-exact"
    SILU = "silu"
    SWIGLU = "swiglu"


class LayerType(StrEnum):
    """The range of a decoder layer's self-attention: all earlier tokens, or a sliding window."""

    FULL = "full"
    SLIDING = "sliding"


_ENUMS: Mapping[str, type[StrEnum]] = {
    "architecture": Architecture,
    "positions": Positions,
    "rope_scaling": RopeScaling,
    "attention_score": AttentionScore,
    "norm": Norm,
    "norm_placement": NormPlacement,
    "activation": Activation,
}

_SCALED_BY_WAVELENGTH = (RopeScaling.LLAMA3, RopeScaling.YARN)
_SINUSOIDS = (Positions.SINUSOIDAL, Positions.SINUSOIDAL_HALVES)
_POSITIVE = (
    "norm_epsilon",
    "rope_low_frequency_factor",
    "rope_high_frequency_factor",
    "rope_beta_fast",
    "rope_beta_slow",
    "rope_attention_factor",
)

MAX_ADDITIVE_CONTEXT = 512
"""Additive scores look at every query and key together, `[B, H, S, T, D]`: D times the memory of dot products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One transformer.

    Lengths are in tokens. `context` bounds the decoder's positions (prompt and output together for a
    decoder-only model, start token and output for an encoder-decoder); `source_context` bounds the encoder's.
    Zero means "derived": `num_kv_heads` = `num_heads`, `head_dim` = `d_model` / `num_heads`,
    `source_vocab_size` = `vocab_size`, `source_context` = `context`.

    `tie_embeddings` makes the target's token table the output head; `share_embeddings` makes it the source's table too,
    if both vocabularies have the same size. Different tokenizers of the same size must not share.

    `attention_bias` applies to all projections around attention; `attention_output_bias` can exclude the output's.
    `query_key_norm` normalizes each head's queries and keys before rotation (RMSNorm; Henry et al., 2020),
    `embedding_norm` the embeddings with their positions; `logits_bias` is added to the logits.

    A query of a sliding layer attends to the last `sliding_window` tokens, itself included (Beltagy et al., 2020).
    `layer_types` has each decoder layer's type; empty means that all are sliding, or full if `sliding_window` is 0. The
    `rope_` fields: `model.nn.positions.rotary_frequencies`.

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
    rope_scaling: RopeScaling = RopeScaling.NONE
    rope_factor: float = 1.0
    rope_original_context: int = 0
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 4.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    rope_attention_factor: float = 1.0
    sliding_window: int = 0
    layer_types: tuple[str, ...] = ()
    query_key_norm: bool = False
    norm: Norm = Norm.RMS
    norm_placement: NormPlacement = NormPlacement.PRE
    norm_epsilon: float = 1e-5
    activation: Activation = Activation.SWIGLU
    attention_bias: bool = False
    attention_output_bias: bool = True
    mlp_bias: bool = False
    tie_embeddings: bool = True
    share_embeddings: bool = True
    scale_embeddings: bool = False
    embedding_norm: bool = False
    logits_bias: bool = False
    dropout: float = 0.0
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        # Relations between sizes are meaningful only if every size is valid by itself.
        alone = coerce_enums(self, _ENUMS) + self._coerce_layer_types() + self._size_problems()
        rest = self._number_problems()
        if alone:
            raise ConfigError(alone + rest)
        problems = self._derive() + self._relation_problems() + rest
        if problems:
            raise ConfigError(problems)

    def _coerce_layer_types(self) -> list[str]:
        # JSON has a list or a single name.
        given: Any = self.layer_types
        given = (given,) if isinstance(given, str) else tuple(given)
        unknown = [value for value in given if value not in tuple(LayerType)]
        if unknown:
            return [f"layer_types has {value!r}, must be of {', '.join(LayerType)}" for value in dict.fromkeys(unknown)]
        object.__setattr__(self, "layer_types", tuple(map(LayerType, given)))
        return []

    def _size_problems(self) -> list[str]:
        needed = ("vocab_size", "context", "d_model", "num_layers", "num_heads", "d_ff")
        derived = (
            *("num_kv_heads", "head_dim", "num_encoder_layers", "source_vocab_size", "source_context"),
            *("rope_original_context", "sliding_window"),
        )
        return [
            *(f"{name} is {size}, must be at least 1" for name in needed if (size := getattr(self, name)) < 1),
            *(f"{name} is {size}, must not be negative" for name in derived if (size := getattr(self, name)) < 0),
            # Readers list layers one by one, so their number bounds work and memory.
            *(
                f"{name} is {size}, must be at most {MAX_LAYERS}"
                for name in ("num_layers", "num_encoder_layers")
                if (size := getattr(self, name)) > MAX_LAYERS
            ),
        ]

    def _number_problems(self) -> list[str]:
        problems = []
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 1.0):
            problems.append(f"rope_theta is {self.rope_theta}, must be finite and above 1")
        if not (math.isfinite(self.rope_factor) and self.rope_factor >= 1.0):
            problems.append(f"rope_factor is {self.rope_factor}, must be finite and at least 1")
        problems += [
            f"{name} is {value}, must be finite and positive"
            for name in _POSITIVE
            if not (math.isfinite(value := getattr(self, name)) and value > 0.0)
        ]
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}, must be in [0, 1)")
        problems += [
            f"{name} is {token}, must be in [0, {self.vocab_size})"
            for name in ("pad_id", "bos_id", "eos_id")
            if not 0 <= (token := getattr(self, name)) < self.vocab_size
        ]
        return problems

    def _derive(self) -> list[str]:
        """Fills in the sizes left at zero; returns the problems."""
        problems = []
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.head_dim and self.d_model % self.num_heads:
            problems.append(f"d_model {self.d_model} is not a multiple of num_heads {self.num_heads}")
        elif not self.head_dim:
            object.__setattr__(self, "head_dim", self.d_model // self.num_heads)
        if self.rope_scaling in _SCALED_BY_WAVELENGTH and not self.rope_original_context:
            object.__setattr__(self, "rope_original_context", self.context)
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
        if self.positions in _SINUSOIDS and self.d_model % 2:
            problems.append(f"d_model {self.d_model} is odd, sinusoidal positions come in pairs")
        return [*problems, *self._rope_problems(), *self._window_problems()]

    def _rope_problems(self) -> list[str]:
        problems = []
        if self.rope_scaling is not RopeScaling.NONE and self.positions is not Positions.ROTARY:
            problems.append(f"rope_scaling is {self.rope_scaling}, positions are {self.positions} and turn nothing")
        if self.rope_scaling is RopeScaling.NONE and self.rope_factor != 1.0:
            problems.append(f"rope_factor is {self.rope_factor}, rope_scaling is {self.rope_scaling}")
        low, high = self.rope_low_frequency_factor, self.rope_high_frequency_factor
        if self.rope_scaling is RopeScaling.LLAMA3 and low >= high:
            problems.append(f"rope_low_frequency_factor is {low}, must be below rope_high_frequency_factor {high}")
        slow, fast = self.rope_beta_slow, self.rope_beta_fast
        if self.rope_scaling is RopeScaling.YARN and slow > fast:
            problems.append(f"rope_beta_slow is {slow}, must be at most rope_beta_fast {fast}")
        if self.rope_scaling is not RopeScaling.YARN and self.rope_attention_factor != 1.0:
            problems.append(f"rope_attention_factor is {self.rope_attention_factor}, only yarn scaling has one")
        return problems

    def _window_problems(self) -> list[str]:
        problems = []
        if self.layer_types and len(self.layer_types) != self.num_layers:
            problems.append(f"layer_types has {len(self.layer_types)} entries, there are {self.num_layers} layers")
        if LayerType.SLIDING in self.layer_types and not self.sliding_window:
            problems.append("layer_types has sliding layers, sliding_window is 0")
        if self.sliding_window and self.is_encoder_decoder:
            problems.append(f"sliding_window is {self.sliding_window}, only decoder-only models have one")
        if self.sliding_window and self.attention_score is AttentionScore.ADDITIVE:
            problems.append(f"sliding_window is {self.sliding_window}, additive scores have none")
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
    def family(self) -> Architecture:
        """What it reads and writes: the architecture."""
        return self.architecture

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether there is an encoder, which every decoder layer attends to."""
        return self.architecture is Architecture.ENCODER_DECODER

    def window(self, layer: int) -> int:
        """The sliding window of a decoder layer in tokens; 0 if it attends to all."""
        is_sliding = not self.layer_types or self.layer_types[layer] == LayerType.SLIDING
        return self.sliding_window if is_sliding else 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 self-attention K/V per decoder position, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 4

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return to_json_values(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Builds from JSON.

        Raises:
            ConfigError: listing every problem.
        """
        return from_json_values(cls, values, ConfigError)
