"""How a model is trained, as plain data. Standard library only; knows nothing of models, data or torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from model.fields import field_problems, to_json_values


class TrainConfigError(ValueError):
    """A training configuration is invalid; `problems` lists everything that is wrong with it."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("invalid training configuration: " + "; ".join(problems))


class OptimizerName(StrEnum):
    """AdamW for all parameters, or Muon for the layers' matrices and AdamW for the rest."""

    ADAMW = "adamw"
    MUON = "muon"


class TrainPrecision(StrEnum):
    """The arithmetic of matrix products; weights and optimiser state are float32 always. `auto` asks the machine."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run. A run is so many steps, not so many seconds, so that it repeats.

    Attributes:
        steps: updates of the weights.
        batch_tokens: tokens per step, padding included; source and target together for an encoder-decoder.
        row_tokens: tokens in a row of a decoder-only model's batch; 0 is the whole context.
        long_fraction: share of the steps, the last ones, whose rows are as long as the context.
        num_examples: examples drawn, with replacement, from a source that could go on making them.
        optimizer: who moves the matrices.
        learning_rate: AdamW's peak.
        matrix_learning_rate: Muon's peak.
        warmup_fraction: share of the steps over which the rates rise; a cosine to zero follows.
        weight_decay: decoupled, per unit of learning rate.
        momentum: Muon's.
        beta2: decay of AdamW's second moment.
        gradient_clip: bound on the norm of all gradients together.
        precision: see `TrainPrecision`.
        seed: fixes weights, data order and dropout.
        log_every: steps between points of the learning curve.
        evaluate_every: steps between scores on held-out data; 0 is at the end only.
        checkpoint_every: steps between files to resume from; 0 writes none.

    Raises:
        TrainConfigError: listing every invalid field.
    """

    steps: int
    batch_tokens: int
    row_tokens: int = 0
    long_fraction: float = 0.0
    num_examples: int = 0
    optimizer: OptimizerName = OptimizerName.MUON
    learning_rate: float = 2e-3
    matrix_learning_rate: float = 2e-2
    warmup_fraction: float = 0.05
    weight_decay: float = 0.0
    momentum: float = 0.95
    beta2: float = 0.95
    gradient_clip: float = 1.0
    precision: TrainPrecision = TrainPrecision.AUTO
    seed: int = 0
    log_every: int = 20
    evaluate_every: int = 0
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        problems = []
        kinds: dict[str, type[StrEnum]] = {"optimizer": OptimizerName, "precision": TrainPrecision}
        for name, kind in kinds.items():
            value = getattr(self, name)
            try:
                # Configuration files hold strings; the instance is still being made, so nothing sees the change.
                object.__setattr__(self, name, kind(value))
            except ValueError:
                problems.append(f"{name} is {value!r}, must be one of {', '.join(kind)}")
        rules: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
            (("steps", "batch_tokens", "log_every"), lambda value: value >= 1, "at least 1"),
            (
                ("row_tokens", "num_examples", "seed", "evaluate_every", "checkpoint_every", "weight_decay"),
                lambda value: 0 <= value < math.inf,
                "finite and not negative",
            ),
            (
                ("learning_rate", "matrix_learning_rate", "gradient_clip"),
                lambda value: 0 < value < math.inf,
                "finite and positive",
            ),
            (("long_fraction", "warmup_fraction"), lambda value: 0 <= value <= 1, "in [0, 1]"),
            (("momentum", "beta2"), lambda value: 0 <= value < 1, "in [0, 1)"),
        )
        for names, holds, wanted in rules:
            problems += [
                f"{name} is {getattr(self, name)}, must be {wanted}" for name in names if not holds(getattr(self, name))
            ]
        if problems:
            raise TrainConfigError(problems)

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rates rise."""
        return round(self.warmup_fraction * self.steps)

    @property
    def long_steps(self) -> int:
        """Steps at the end whose rows fill the context."""
        return round(self.long_fraction * self.steps)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return to_json_values(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Builds from JSON; unknown, missing and wrongly typed fields are all reported at once.

        Raises:
            TrainConfigError: listing every problem.
        """
        problems = field_problems(cls, values)
        if problems:
            raise TrainConfigError(problems)
        return cls(**values)
