"""Reads untrusted files: regular files only, with a size limit.

A pipe, a socket or a device could block its reader forever, or never end.
"""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnfitFile(ValueError):
    """A file is not regular, or too large; the message does not name the path."""


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a regular file for reading; never blocks.

    Raises:
        UnfitFile: when it is something else.
        OSError: when it cannot be opened.
    """
    # Checked before opening, which alone can start a device, and after, as the file may have been replaced.
    _require_regular(path.stat())
    stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _require_regular(os.fstat(stream.fileno()))
    except UnfitFile:
        stream.close()
        raise
    return stream


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Reads a regular file.

    Raises:
        UnfitFile: when it is something else, or larger.
        OSError: when it cannot be read.
    """
    with open_regular(path) as stream:
        check_size(os.fstat(stream.fileno()).st_size, max_bytes)
        data = stream.read(max_bytes + 1)
    check_size(len(data), max_bytes)
    return data


def read_text(path: Path, max_bytes: int) -> str:
    """Reads a regular file in UTF-8; raises as `read_bytes`, and ValueError when it is not UTF-8."""
    return read_bytes(path, max_bytes).decode("utf-8")


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raises `UnfitFile` if a file is too large."""
    if num_bytes > max_bytes:
        raise UnfitFile(f"has {num_bytes} bytes, must have at most {max_bytes}")


def _require_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UnfitFile(f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'special')}, must be a regular file")
