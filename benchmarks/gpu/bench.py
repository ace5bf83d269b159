"""What the parts of the check share: the plan, models and their graphs, what was found before, and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.plan import Plan
from benchmarks.gpu.results import Journal
from model.config import ModelConfig

if TYPE_CHECKING:
    from benchmarks.gpu.workshop import Workshop


@dataclass(frozen=True, slots=True)
class Bench:
    """What every part is given.

    Args:
        plan: sizes.
        open_workshop: for models and graphs; the same one every time, made when it is wanted.
        journal: what earlier parts found.
        folder: for files in passing.
        corpus: gettext catalogs to learn to translate from.
        ends: when the time is up, by `clock`.
        clock: seconds.
    """

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

    def until(self, ends: float) -> Bench:
        """The same with another end."""
        return replace(self, ends=ends)

    @property
    def workshop(self) -> Workshop:
        """Models and graphs."""
        return self.open_workshop()

    @property
    def proven(self) -> dict[str, ModelConfig]:
        """Models whose answers are checked: the plan's, and what was brought along."""
        return {**self.plan.proven, **self.workshop.brought()}

    @property
    def seconds_left(self) -> float:
        """Of the time that there is; what would not end in it is left out."""
        return self.ends - self.clock()
