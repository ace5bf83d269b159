"""A recurrent encoder-decoder's configuration as plain data, and which configuration a JSON object is.

Recurrent networks are trained, evaluated and compared with transformers; they are not exported (`NOT_EXPORTED`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from model.spec.config import MAX_LAYERS, Architecture, ConfigError, ModelConfig
from model.spec.fields import coerce_enums, from_json_values, to_json_values

RECURRENT = "recurrent"
"""`architecture` of these configurations."""

NOT_EXPORTED = (
    "architecture is recurrent: it cannot be exported or served. The engine computes many positions of a prompt in one "
    "run and batches requests at any position over cached keys and values; a recurrence computes one position after "
    "another from a state that replaces the last one"
)


class Cell(StrEnum):
    """The recurrence: Elman (1990) with tanh, Hochreiter and Schmidhuber (1997), or Cho et al. (2014)."""

    RNN = "rnn"
    LSTM = "lstm"
    GRU = "gru"

    @property
    def num_gates(self) -> int:
        """Products with the input, and with the state, in one step."""
        return {Cell.RNN: 1, Cell.LSTM: 4, Cell.GRU: 3}[self]

    @property
    def num_states(self) -> int:
        """Vectors that go from step to step: an LSTM has a memory beside its output."""
        return 2 if self is Cell.LSTM else 1


class Context(StrEnum):
    """What the decoder sees of a source: one fixed vector (Cho et al., 2014) or attention (Bahdanau et al., 2015)."""

    NONE = "none"
    ADDITIVE = "additive"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig:
    """One recurrent encoder-decoder: `num_encoder_layers` bidirectional layers, `num_layers` decoding ones.

    `hidden` units in each direction; `d_model` is the width of token vectors, which are also the output head. The
    other fields are `ModelConfig`'s. `num_encoder_layers` 0 means as many as `num_layers`.

    Raises:
        ConfigError: listing every invalid field.
    """

    vocab_size: int
    context: int
    d_model: int
    hidden: int
    architecture: str = RECURRENT
    cell: Cell = Cell.GRU
    attention: Context = Context.ADDITIVE
    num_layers: int = 1
    num_encoder_layers: int = 0
    source_vocab_size: int = 0
    source_context: int = 0
    share_embeddings: bool = True
    dropout: float = 0.0
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        problems = coerce_enums(self, {"cell": Cell, "attention": Context})
        if self.architecture != RECURRENT:
            problems.append(f"architecture is {self.architecture!r}, must be {RECURRENT}")
        for name in ("vocab_size", "context", "d_model", "hidden", "num_layers"):
            if (size := getattr(self, name)) < 1:
                problems.append(f"{name} is {size}, must be at least 1")
        for name in ("num_encoder_layers", "source_vocab_size", "source_context"):
            if (size := getattr(self, name)) < 0:
                problems.append(f"{name} is {size}, must not be negative")
        for name in ("num_layers", "num_encoder_layers"):
            if (size := getattr(self, name)) > MAX_LAYERS:
                problems.append(f"{name} is {size}, must be at most {MAX_LAYERS}")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}, must be in [0, 1)")
        for name, derived in _DERIVED.items():
            if not getattr(self, name):
                object.__setattr__(self, name, getattr(self, derived))
        for name in ("pad_id", "bos_id", "eos_id"):
            if not 0 <= (token := getattr(self, name)) < self.vocab_size:
                problems.append(f"{name} is {token}, must be in [0, {self.vocab_size})")
        if self.pad_id >= self.source_vocab_size:
            problems.append(f"pad_id is {self.pad_id}, sources have ids in [0, {self.source_vocab_size})")
        if problems:
            raise ConfigError(problems)

    @property
    def family(self) -> Architecture:
        """Reads pairs, as a transformer of this family."""
        return Architecture.ENCODER_DECODER

    @property
    def is_encoder_decoder(self) -> bool:
        """True."""
        return True

    @property
    def shares_tokens(self) -> bool:
        """Whether source and target have one token table."""
        return self.share_embeddings and self.source_vocab_size == self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return to_json_values(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RecurrentConfig:
        """Builds from JSON.

        Raises:
            ConfigError: listing every problem.
        """
        return from_json_values(cls, values, ConfigError)


_DERIVED = {"num_encoder_layers": "num_layers", "source_vocab_size": "vocab_size", "source_context": "context"}

NetworkConfig = ModelConfig | RecurrentConfig
"""Whatever the trainer trains."""


def config_kind(values: Mapping[str, Any]) -> type[ModelConfig] | type[RecurrentConfig]:
    """The configuration's class, by `architecture`."""
    return RecurrentConfig if values.get("architecture") == RECURRENT else ModelConfig


def num_parameters(config: RecurrentConfig) -> int:
    """The number of trained parameters, shared ones counted once."""
    width, hidden, layers = config.d_model, config.hidden, config.num_layers
    encoder = _cell_parameters(config, width) + (config.num_encoder_layers - 1) * _cell_parameters(config, 2 * hidden)
    decoder = _cell_parameters(config, width + 2 * hidden) + (layers - 1) * _cell_parameters(config, hidden)
    first = config.cell.num_states * layers * hidden * (hidden + 1)
    attention = hidden * (3 * hidden + 1) if config.attention is Context.ADDITIVE else 0
    readout = width * (width + 3 * hidden + 1)
    tokens = width * (config.vocab_size + (0 if config.shares_tokens else config.source_vocab_size))
    return tokens + 2 * encoder + first + attention + decoder + readout


def summary(config: RecurrentConfig) -> str:
    """The figures for people, one per line."""
    state = config.cell.num_states * config.num_layers * config.hidden
    seen = "one vector of it" if config.attention is Context.NONE else "additive attention over its positions"
    return (
        f"parameters  {num_parameters(config):,}: {config.num_encoder_layers} bidirectional and {config.num_layers} "
        f"decoding layers of {config.cell}\n"
        f"source      {seen}\n"
        f"state       {state} numbers a sequence, at any length"
    )


def _cell_parameters(config: RecurrentConfig, inputs: int) -> int:
    return config.cell.num_gates * config.hidden * (inputs + config.hidden + 2)
