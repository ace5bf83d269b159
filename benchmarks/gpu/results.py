"""What a check found, on the disk as soon as it is known: a run that is broken off keeps all that it had.

One file, `gpu-check.json`, replaced whole after every figure. What earlier runs left in it of other parts stays, so
that parts can be run one by one, each with the machine and the date it was run on. Knows no part in particular.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model.files import write_atomically

RESULTS = "gpu-check.json"

Values = dict[str, Any]
Clock = Callable[[], float]


class Journal:
    """The file of results.

    Args:
        path: made on the first write; if it is there, what it holds of parts that are not run again is kept.

    Raises:
        ValueError: when there is a file that is not one of results.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: dict[str, Values] = {}
        if path.exists():
            self.parts = read(path)

    def put(self, name: str, part: Values) -> None:
        """Writes a part as it is now."""
        self.replace({**self.parts, name: part})

    def replace(self, parts: dict[str, Values]) -> None:
        """Writes these parts in the place of all that there are."""
        self.parts = parts
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, (json.dumps({"parts": self.parts}, indent=1, allow_nan=False) + "\n").encode())


def read(path: Path) -> dict[str, Values]:
    """The parts in a file of results.

    Raises:
        ValueError: when it is not one.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or not isinstance(parts := values.get("parts"), dict):
        raise ValueError(f"{path} holds no results of this check")
    return parts


class Scribe:
    """Writes down what one part finds, and tells whoever watches.

    A part has figures by name; claims, each with what it came to and whether it holds; and a list of what could not be
    run and why. It passes when it ended, every claim holds and nothing is left out.

    Args:
        name: the part's.
        journal: where it goes.
        facts: what it is run on, and how.
        clock: seconds.
    """

    def __init__(self, name: str, journal: Journal, facts: Mapping[str, Any], clock: Clock = time.monotonic) -> None:
        self.name = name
        self._journal = journal
        self._clock = clock
        self._began = clock()
        self._part: Values = {
            **facts,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "is_complete": False,
            "claims": [],
            "left_out": [],
            "figures": {},
        }
        self._write()

    @property
    def journal_path(self) -> Path:
        """Where it is written."""
        return self._journal.path

    @property
    def figures(self) -> Values:
        """What was found so far."""
        figures: Values = self._part["figures"]
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
        self._part["claims"].append({"text": text, "found": found, "holds": bool(holds)})
        self.say(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}: {found}")
        self._write()

    def leave_out(self, what: str, why: str) -> None:
        """What was to be run and was not."""
        self._part["left_out"].append({"what": what, "why": why})
        self.say(f"NOT RUN: {what}: {why}")
        self._write()

    def end(self) -> None:
        """The part came to its end."""
        self._part["is_complete"] = True
        self._write()

    @property
    def passed(self) -> bool:
        """Whether the part is what it should be, as far as it has come."""
        return passed(self._part)

    def _write(self) -> None:
        self._part["seconds"] = round(self._clock() - self._began, 1)
        self._journal.put(self.name, self._part)


def passed(part: Mapping[str, Any]) -> bool:
    """Whether a part came to its end, left nothing out, and all that it claims holds."""
    return bool(part["is_complete"]) and not part["left_out"] and all(claim["holds"] for claim in part["claims"])
