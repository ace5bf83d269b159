"""Atomic writes of one file, and nearly atomic ones of several that belong together.

Files are written into a hidden staging folder, flushed to the disk, and then renamed into their places. A full disk
leaves every old file as it was; a killed process leaves a mixture only if it dies between two renames.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

_STAGING = ".staging-"


class StagedFiles:
    """Staged files of one folder, which is made if missing; a context manager that removes uncommitted files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._staged: list[Path] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)

    def add(self, name: str, write: Callable[[Path], object]) -> Path:
        """Calls `write` with the staged path of file `name` and flushes it to the disk; returns the path."""
        path = self._staging / name
        path.touch()
        mode = path.stat().st_mode
        write(path)
        # A library may write through a temporary file that only its owner can read.
        path.chmod(mode)
        _flush(path)
        self._staged.append(path)
        return path

    def commit(self) -> None:
        """Renames all files into their places, in the order of `add`."""
        for path in self._staged:
            path.replace(self._folder / path.name)
        self._staged.clear()
        # The renames are durable only once the folder is flushed.
        _flush(self._folder)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes or replaces one file; its folder is made if missing."""
    with StagedFiles(path.parent) as files:
        files.add(path.name, lambda staged: staged.write_bytes(data))
        files.commit()


def remove_leftovers(folder: Path) -> None:
    """Removes staging folders of killed processes."""
    for path in folder.glob(f"{_STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
