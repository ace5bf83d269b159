"""The check, cut into stages: each is a process of its own, so that none costs another more than its time.

A kernel that fails leaves its process without a device, and what it held of memory goes back with the process. Hence a
stage for each model, and where speed is measured for each system. The order is that of what matters: what is promised
comes first, so that whoever has the device for minutes has that.

Knows names and limits; neither how a stage is run nor what it finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.plan import Plan

CHECKPOINT = "checkpoint"
"""The folder, of models that were made before, that says there is one."""
PARTS = ("ceilings", "parity", "captured", "speed", "batches", "law", "small", "translation")
"""In the order in which they are run."""
NEEDED_FIRST: Mapping[str, tuple[str, ...]] = {"speed": ("ceilings",), "small": ("ceilings",)}
"""Parts that others compare with: run before them in the same run, asked for or not."""

OURS, GRAPH, TORCH, TRANSFORMERS = "onward", "onward-graph", "torch-cuda-graph", "transformers"
SYSTEMS = (OURS, TRANSFORMERS, TORCH, GRAPH)
"""Whose speed is measured, first those that promises are about."""
TRANSLATION = "translation"

_PER_MODEL = ("parity", "captured", "batches")
# At most, with the graphs of the model, which the first stage that wants them makes.
_SECONDS: Mapping[str, float] = {
    "ceilings": 60.0,
    "parity": 150.0,
    "captured": 150.0,
    "batches": 150.0,
    "law": 240.0,
    f"speed/{OURS}": 300.0,
    f"speed/{TRANSFORMERS}": 330.0,
    f"speed/{TORCH}": 120.0,
    f"speed/{GRAPH}": 240.0,
    f"small/{OURS}": 120.0,
    f"small/{TRANSFORMERS}": 240.0,
    f"small/{TORCH}": 90.0,
    f"small/{GRAPH}": 90.0,
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One process's work: a part, of which model, by which system; and the seconds that it has at most."""

    part: str
    model: str
    system: str
    seconds: float

    @property
    def name(self) -> str:
        """What it goes by in results and on the command line."""
        return "/".join(word for word in (self.part, self.model, self.system) if word)

    def answers_to(self, name: str) -> bool:
        """Whether a name is this stage's, or that of what it belongs to."""
        return self.name == name or self.name.startswith(f"{name}/")


def make_stages(plan: Plan, brought: Sequence[str], train_seconds: float) -> list[Stage]:
    """All there are, in order.

    Args:
        plan: which models.
        brought: names of models that were brought along and whose answers are checked as well.
        train_seconds: what the translation has.
    """
    proven = [*plan.proven, *brought]
    first, *others = plan.timed
    found = []
    for part in PARTS:
        if part in _PER_MODEL:
            found += [_stage(part, model) for model in proven]
        elif part == "law":
            found += [_stage(part, model) for model in plan.timed]
        elif part in ("speed", "small"):
            models = [first] if part == "speed" else others
            found += [_stage(part, model, system) for model in models for system in SYSTEMS]
        elif part == TRANSLATION:
            found.append(Stage(part, "", "", train_seconds))
        else:
            found.append(_stage(part))
    return found


def select(stages: Sequence[Stage], names: Sequence[str]) -> list[Stage]:
    """Those that were asked for by part or by name, and what they compare with; all if nothing was asked for.

    Raises:
        ValueError: when a name is nobody's.
    """
    for name in names:
        if not any(stage.answers_to(name) for stage in stages):
            known = ", ".join(dict.fromkeys([*(stage.part for stage in stages), *(stage.name for stage in stages)]))
            raise ValueError(f"--only has {name}, there are {known}")
    wanted = {stage.name for stage in stages if not names or any(map(stage.answers_to, names))}
    parts = {stage.part for stage in stages if stage.name in wanted}
    needed = {part for each in parts for part in NEEDED_FIRST.get(each, ())}
    return [stage for stage in stages if stage.name in wanted or stage.part in needed]


def brought_models(artifacts: Path | None, plan: Plan) -> list[str]:
    """Models that were made before and that no plan knows, such as trained ones."""
    if artifacts is None:
        return []
    known = plan.proven.keys() | plan.timed.keys()
    return sorted({path.parent.name for path in artifacts.glob(f"*/{CHECKPOINT}")} - known)


def _stage(part: str, model: str = "", system: str = "") -> Stage:
    return Stage(part, model, system, _SECONDS[f"{part}/{system}" if system else part])
