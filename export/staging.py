"""An atomic swap of an artifact folder: written beside its place, flushed to the disk, renamed when complete.

A reader sees a complete artifact or none. What a killed export left behind, the next export to the same place removes.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NEW = "new"
_OLD = "old"
_FILE_MODE = 0o666


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A folder beside `out` to fill; it replaces `out` if the block succeeds and is deleted if it raises."""
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}.export-"
    for stranded in out.parent.glob(f"{glob.escape(prefix)}*"):
        _clear(stranded, out)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=out.parent) as workshop, locked(Path(workshop)):
        folder, old = Path(workshop) / _NEW, Path(workshop) / _OLD
        folder.mkdir()
        yield folder
        # Libraries write weights with mode 0600; a server often runs as another user. The folder has the umask's mode.
        allowed = folder.stat().st_mode & _FILE_MODE
        for path in folder.iterdir():
            path.chmod(allowed)
        for path in (*folder.iterdir(), folder):
            _flush(path)
        if out.exists():
            out.rename(old)
        try:
            folder.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
        _flush(out.parent)


def _clear(workshop: Path, out: Path) -> None:
    """Removes the workshop of a killed export, after it restores an artifact that was set aside there."""
    try:
        with locked(workshop):
            if not out.exists() and (workshop / _OLD).is_dir():
                (workshop / _OLD).rename(out)
            shutil.rmtree(workshop)
    except BlockingIOError:  # that export is still running
        return


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a folder's lock, which the system releases when the process ends.

    Raises:
        BlockingIOError: when another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    """Writes a file's or folder's contents to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
