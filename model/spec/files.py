"""Writing files so that nobody ever meets half of one, and hardly ever some of several that belong together.

Files are written into a hidden folder beside their places, flushed to the disk, and renamed into them one right after
the other: a disk that fills up leaves every old file as it was, and a process that is killed leaves a mixture only if
it dies between two renames. Standard library only; knows nothing of what the files hold.
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
    """Files of one folder, written but not yet in their places; a context manager that removes what was not committed.

    Args:
        folder: made if missing.
    """

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
        """Writes one file and flushes it to the disk.

        Args:
            name: what it will be called.
            write: is given the path to write to.

        Returns:
            Where the file lies until `commit`.
        """
        path = self._staging / name
        path.touch()
        mode = path.stat().st_mode
        write(path)
        # A library that writes through a temporary file of its own may leave one that its owner alone can read.
        path.chmod(mode)
        _flush(path)
        self._staged.append(path)
        return path

    def commit(self) -> None:
        """Renames all files into their places, in the order in which they were added."""
        for path in self._staged:
            path.replace(self._folder / path.name)
        self._staged.clear()
        # The renames themselves are durable only once the folder is.
        _flush(self._folder)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes or replaces one file.

    Args:
        path: its folder is made if missing.
        data: all of it.
    """
    with StagedFiles(path.parent) as files:
        files.add(path.name, lambda staged: staged.write_bytes(data))
        files.commit()


def remove_leftovers(folder: Path) -> None:
    """Removes what a process that was killed while it wrote has left beside its files."""
    for path in folder.glob(f"{_STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
