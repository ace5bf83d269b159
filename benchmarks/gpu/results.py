"""What a check found, on the disk as soon as it is known: a run that is broken off keeps all that it had.

One file, `gpu-check.json`, replaced whole after every figure. It holds an entry for each stage that was begun, by the
stage's name, `PART`, `PART/MODEL` or `PART/MODEL/SYSTEM`; what earlier runs left in it of other stages stays, so that
stages can be run one by one, each with the machine and the date it was run on. Several processes write it one after the
other, never two at a time. Knows no part in particular.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from model.spec.files import write_atomically

RESULTS = "gpu-check.json"
REST = "the rest"
"""What is left out of a stage that did not come to its end."""

Values = dict[str, Any]
Clock = Callable[[], float]


class Journal:
    """The file of results.

    Args:
        path: made on the first write; if it is there, what it holds of stages that are not run again is kept.

    Raises:
        ValueError: when there is a file that is not one of results.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages: dict[str, Values] = {}
        self.reload()

    def reload(self) -> None:
        """Reads what another process has written since."""
        if self.path.exists():
            self.stages = read(self.path)

    def put(self, name: str, stage: Values) -> None:
        """Writes a stage as it is now."""
        self.replace({**self.stages, name: stage})

    def replace(self, stages: dict[str, Values]) -> None:
        """Writes these stages in the place of all that there are."""
        self.stages = stages
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, (json.dumps({"stages": self.stages}, indent=1, allow_nan=False) + "\n").encode())


def read(path: Path) -> dict[str, Values]:
    """The stages in a file of results.

    Raises:
        ValueError: when it is not one.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or not isinstance(stages := values.get("stages"), dict):
        raise ValueError(f"{path} holds no results of this check")
    return stages


class Scribe:
    """Writes down what one stage finds, and tells whoever watches.

    A stage has figures by name; claims, each with what it came to and whether it holds; and a list of what could not be
    run and why. It passes when it ended, every claim holds and nothing is left out.

    Args:
        name: the stage's.
        journal: where it goes.
        facts: what it is run on, and how.
        clock: seconds.
    """

    def __init__(self, name: str, journal: Journal, facts: Mapping[str, Any], clock: Clock = time.monotonic) -> None:
        stage: Values = {
            **facts,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "is_complete": False,
            "claims": [],
            "left_out": [],
            "figures": {},
        }
        self._begin(name, journal, stage, clock)
        self._write()

    @classmethod
    def resume(cls, name: str, journal: Journal, clock: Clock = time.monotonic) -> Self:
        """One who goes on where another process has begun.

        Raises:
            KeyError: when none has.
        """
        scribe = cls.__new__(cls)
        scribe._begin(name, journal, journal.stages[name], clock)
        return scribe

    def _begin(self, name: str, journal: Journal, stage: Values, clock: Clock) -> None:
        self.name = name
        self._journal = journal
        self._clock = clock
        self._stage = stage
        self._began = clock() - stage["seconds"]

    @property
    def journal_path(self) -> Path:
        """Where it is written."""
        return self._journal.path

    @property
    def figures(self) -> Values:
        """What was found so far."""
        figures: Values = self._stage["figures"]
        return figures

    def say(self, text: str) -> None:
        """Tells whoever watches, and nobody else."""
        print(f"[{self._clock() - self._began:6.1f} s] {self.name}: {text}", file=sys.stderr, flush=True)

    def note(self, name: str, value: Any) -> None:
        """A figure, or several under one name."""
        self.figures[name] = value
        self._write()

    def add(self, name: str, value: Any) -> None:
        """One more of a list of figures."""
        self.figures.setdefault(name, []).append(value)
        self._write()

    def claim(self, text: str, found: str, *, holds: bool) -> None:
        """What was promised, what it came to, and whether that keeps the promise."""
        self._stage["claims"].append({"text": text, "found": found, "holds": bool(holds)})
        self.say(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}: {found}")
        self._write()

    def leave_out(self, what: str, why: str) -> None:
        """What was to be run and was not."""
        self._stage["left_out"].append({"what": what, "why": why})
        self.say(f"NOT RUN: {what}: {why}")
        self._write()

    def end(self) -> None:
        """The stage came to its end."""
        self._stage["is_complete"] = True
        self._write()

    @property
    def passed(self) -> bool:
        """Whether the stage is what it should be, as far as it has come."""
        return passed(self._stage)

    def _write(self) -> None:
        self._stage["seconds"] = round(self._clock() - self._began, 1)
        self._journal.put(self.name, self._stage)


def passed(stage: Mapping[str, Any]) -> bool:
    """Whether a stage, or a part, came to its end, left nothing out, and all that it claims holds."""
    return is_whole(stage) and all(claim["holds"] for claim in stage["claims"])


def is_whole(stage: Mapping[str, Any]) -> bool:
    """Whether it came to its end and left nothing out, whatever it found."""
    return bool(stage["is_complete"]) and not stage["left_out"]


def part_of(name: str) -> str:
    """The part that a stage belongs to."""
    return name.partition("/")[0]


def by_part(stages: Mapping[str, Values]) -> dict[str, Values]:
    """What the stages of each part come to together, in the order in which parts were begun.

    Lists of figures are put behind each other; a part is complete when all of its stages that were begun are.
    """
    parts: dict[str, Values] = {}
    for name, stage in stages.items():
        part = parts.setdefault(
            part_of(name),
            {"stages": {}, "claims": [], "left_out": [], "figures": {}, "is_complete": True, "is_quick": False},
        )
        part["stages"][name] = stage
        part["claims"] += stage["claims"]
        part["left_out"] += [{"stage": name, **each} for each in stage["left_out"]]
        part["is_complete"] &= bool(stage["is_complete"])
        part["is_quick"] |= bool(stage["is_quick"])
        for key, value in stage["figures"].items():
            known = part["figures"].get(key)
            part["figures"][key] = [*known, *value] if isinstance(known, list) and isinstance(value, list) else value
    return parts
