"""What the stages of the check share: the plan, models and their graphs, what was found before, and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.plan import Plan
from benchmarks.gpu.results import Journal
from benchmarks.gpu.stages import Stage
from model.spec.config import ModelConfig

if TYPE_CHECKING:
    from benchmarks.gpu.workshop import Workshop


@dataclass(frozen=True, slots=True)
class Bench:
    """What a stage is given.

    Args:
        stage: which it is.
        plan: sizes.
        open_workshop: for models and graphs; the same one every time, made when it is wanted.
        journal: what earlier stages found.
        folder: for files in passing.
        corpus: gettext catalogs to learn to translate from.
        ends: when the time is up, by `clock`.
        clock: seconds.
    """

    stage: Stage
    plan: Plan
    open_workshop: Callable[[], Workshop]
    journal: Journal
    folder: Path
    corpus: Path
    ends: float
    clock: Callable[[], float] = time.monotonic

    @property
    def device(self) -> str:
        """By torch's name, which is ONNX Runtime's as well."""
        return str(self.plan.device)

    @property
    def workshop(self) -> Workshop:
        """Models and graphs."""
        return self.open_workshop()

    @property
    def proven(self) -> ModelConfig:
        """The stage's model, one of those whose answers are checked: the plan's, and what was brought along."""
        known = self.plan.proven.get(self.stage.model)
        return known or self.workshop.brought(self.stage.model)

    @property
    def timed(self) -> ModelConfig:
        """The stage's model, one of those whose speed is measured."""
        return self.plan.timed[self.stage.model]

    @property
    def seconds_left(self) -> float:
        """Of the time that there is; what would not end in it is left out."""
        return self.ends - self.clock()
