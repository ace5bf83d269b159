"""Training configuration as plain data. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from model.spec.fields import coerce_enums, from_json_values, to_json_values


class TrainConfigError(ValueError):
    """Invalid training configuration; `problems` lists every reason."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("invalid training configuration: " + "; ".join(problems))


class OptimizerName(StrEnum):
    """AdamW for all parameters, or Muon for the layers' matrices and AdamW for the rest."""

    ADAMW = "adamw"
    MUON = "muon"


class Schedule(StrEnum):
    """The learning rate after warm-up: half a cosine to zero, the inverse square root of the step, or constant.

    `noam` is the paper's schedule: Vaswani et al. (2017), section 5.3.
    """

    COSINE = "cosine"
    NOAM = "noam"
    CONSTANT = "constant"


class TrainDevice(StrEnum):
    """The device of the updates; `auto` takes a CUDA device if there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class TrainPrecision(StrEnum):
    """The arithmetic of matrix products; weights and optimizer state are always float32. `auto` asks the device."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Parallelism(StrEnum):
    """What processes under `torchrun` do: average the gradients of whole copies, or shard the weights."""

    DDP = "ddp"
    FSDP = "fsdp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run. Its length is in steps, not seconds, so that it is reproducible.

    Attributes:
        steps: updates of the weights.
        batch_tokens: tokens of a batch with padding; source and target together for an encoder-decoder.
        gradient_accumulation: batches per update, over all processes together; an update is the same for any.
        row_tokens: tokens in a row of a decoder-only model's batch; 0 is the whole context.
        long_fraction: share of the steps, at the end, whose rows are as long as the context.
        optimizer: see `OptimizerName`.
        learning_rate: AdamW's peak.
        matrix_learning_rate: Muon's peak.
        schedule: see `Schedule`.
        warmup_fraction: share of the steps over which the rates rise.
        weight_decay: decoupled, per unit of learning rate.
        momentum: Muon's.
        beta2: decay of AdamW's second moment.
        epsilon: AdamW's.
        label_smoothing: share of each label's probability that is spread over the vocabulary.
        gradient_clip: bound on the norm of all gradients together.
        device: see `TrainDevice`.
        precision: see `TrainPrecision`.
        parallelism: see `Parallelism`.
        seed: of weights, data order and dropout.
        log_every: steps between points of the learning curve.
        evaluate_every: steps between validation scores; 0 is at the end only.
        checkpoint_every: steps between checkpoints; 0 is at the end only.
        patience: scores in a row without a new best before the run stops early; 0 is never.

    Raises:
        TrainConfigError: listing every invalid field.
    """

    steps: int
    batch_tokens: int
    gradient_accumulation: int = 1
    row_tokens: int = 0
    long_fraction: float = 0.0
    optimizer: OptimizerName = OptimizerName.MUON
    learning_rate: float = 2e-3
    matrix_learning_rate: float = 2e-2
    schedule: Schedule = Schedule.COSINE
    warmup_fraction: float = 0.05
    weight_decay: float = 0.0
    momentum: float = 0.95
    beta2: float = 0.95
    epsilon: float = 1e-8
    label_smoothing: float = 0.0
    gradient_clip: float = 1.0
    device: TrainDevice = TrainDevice.AUTO
    precision: TrainPrecision = TrainPrecision.AUTO
    parallelism: Parallelism = Parallelism.DDP
    seed: int = 0
    log_every: int = 20
    evaluate_every: int = 0
    checkpoint_every: int = 500
    patience: int = 0

    def __post_init__(self) -> None:
        problems = coerce_enums(self, _ENUMS)
        for names, holds, wanted in _RULES:
            problems += [
                f"{name} is {getattr(self, name)}, must be {wanted}" for name in names if not holds(getattr(self, name))
            ]
        if self.patience > 0 and self.evaluate_every == 0:
            problems.append(f"patience is {self.patience}, evaluate_every must then be at least 1")
        if self.schedule is Schedule.NOAM and self.warmup_steps < 1:
            problems.append(f"warmup_fraction is {self.warmup_fraction}, schedule noam needs at least one step of it")
        if problems:
            raise TrainConfigError(problems)

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rates rise."""
        return round(self.warmup_fraction * self.steps)

    @property
    def long_steps(self) -> int:
        """Steps at the end whose rows are as long as the context."""
        return round(self.long_fraction * self.steps)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return to_json_values(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Builds from JSON.

        Raises:
            TrainConfigError: listing every unknown, missing or invalid field.
        """
        return from_json_values(cls, values, TrainConfigError)


_ENUMS: Mapping[str, type[StrEnum]] = {
    "optimizer": OptimizerName,
    "schedule": Schedule,
    "device": TrainDevice,
    "precision": TrainPrecision,
    "parallelism": Parallelism,
}

_RULES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (("steps", "batch_tokens", "gradient_accumulation", "log_every"), lambda value: value >= 1, "at least 1"),
    (
        ("row_tokens", "seed", "evaluate_every", "checkpoint_every", "patience", "weight_decay"),
        lambda value: 0 <= value < math.inf,
        "finite and not negative",
    ),
    (
        ("learning_rate", "matrix_learning_rate", "gradient_clip", "epsilon"),
        lambda value: 0 < value < math.inf,
        "finite and positive",
    ),
    (("long_fraction", "warmup_fraction"), lambda value: 0 <= value <= 1, "in [0, 1]"),
    (("momentum", "beta2", "label_smoothing"), lambda value: 0 <= value < 1, "in [0, 1)"),
)
