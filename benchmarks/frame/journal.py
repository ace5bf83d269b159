"""A journal: every measurement is a line of JSON on the disk before the next one begins, so that a run can resume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from benchmarks.frame.errors import ArgumentError

Entry = Mapping[str, Any]


class Journal:
    """A file whose first line holds the facts that all entries share. `entries` are those of this run and before."""

    def __init__(self, path: Path, entries: list[Entry]) -> None:
        self._path = path
        self.entries = entries

    @classmethod
    def open(cls, path: Path, head: Mapping[str, Any], *, resume: bool) -> Self:
        """Begins a journal, or resumes one with the same facts. A torn last line is dropped.

        The file is replaced as a whole: a kill meanwhile loses no measurement.

        Raises:
            ArgumentError: if there is nothing to resume, or it has other facts.
        """
        facts = json.loads(json.dumps(head, default=str))
        kept = []
        if resume:
            try:
                first, *entries = _read(path)
            except (OSError, ValueError) as error:
                raise ArgumentError(f"nothing to resume: {error}") from error
            if first != facts:
                raise ArgumentError(f"{path} is of other settings: run without --resume")
            kept = [entry for entry in entries if not _has_failed(entry)]
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.new")
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(each) + "\n" for each in (facts, *kept))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        return cls(path, kept)

    def record(self, entry: Entry) -> None:
        """Appends an entry; it is on the disk when this returns."""
        self.entries.append(entry)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _has_failed(value: object) -> bool:
    """Whether an entry, or a part of it, has an error: it is measured again."""
    if isinstance(value, Mapping):
        return "error" in value or any(map(_has_failed, value.values()))
    return isinstance(value, list) and any(map(_has_failed, value))


def _read(path: Path) -> list[Entry]:
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries
