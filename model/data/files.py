"""Files of training data: which files a path stands for, and their text as strict UTF-8.

A byte that is not valid UTF-8 stops the run with its position, and so does a NUL, which a text never contains. Standard
library only.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

_BYTE_ORDER_MARK = "\ufeff"


class DataError(ValueError):
    """Missing or damaged data: one line that names the file, and the line number where possible."""


class DataFile(NamedTuple):
    """A file to read. `name` is its path inside the given folder, with forward slashes, or its own name."""

    path: Path
    name: str
    in_folder: bool


def find(paths: Sequence[str], suffixes: Collection[str] = ()) -> list[DataFile]:
    """The files that paths stand for: files themselves, folders recursively in the order of their names.

    A file given by name is taken regardless of its name. In a folder, hidden files, hidden folders and files without
    one of `suffixes` (if there are any) are skipped; links to folders are not followed. Duplicates are removed.

    Raises:
        DataError: naming a path that is missing, a folder without such a file, or one that cannot be read.
    """
    found: dict[Path, DataFile] = {}
    for given in paths:
        root = Path(given)
        if root.is_dir():
            files = _walk(root, suffixes)
            if not files:
                raise DataError(f"{given}: no {' or '.join(sorted(suffixes)) or 'file'} in this folder")
        elif root.exists():
            files = [DataFile(root, root.name, in_folder=False)]
        else:
            raise DataError(f"{given}: no such file or folder")
        for file in files:
            found.setdefault(file.path.resolve(), file)
    return list(found.values())


def read_bytes(path: Path) -> bytes:
    """A whole file.

    Raises:
        DataError: naming the file, when it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def decode(path: Path, data: bytes, encoding: str = "utf-8") -> str:
    """The text of a file's bytes, without a byte order mark.

    Raises:
        DataError: naming file, line and offset of the first invalid byte.
    """
    if (nul := data.find(0)) >= 0:
        raise DataError(f"{path}:{_line_of(nul, data)}: NUL at offset {nul}: not a text in UTF-8")
    try:
        return data.decode(encoding).removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{_line_of(error.start, data)}: byte 0x{data[error.start]:02x} at offset {error.start} "
            f"is not valid {encoding.upper()}"
        ) from error
    except (LookupError, UnicodeError) as error:
        raise DataError(f"{path}: {encoding!r} is no known encoding of texts") from error


def read_text(path: Path) -> str:
    """A whole file as strict UTF-8, line ends unchanged.

    Raises:
        DataError: as `read_bytes` and `decode`.
    """
    return decode(path, read_bytes(path))


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """The numbered lines of a file from 1 on, without their ends: line feeds, with or without a carriage return.

    Raises:
        DataError: as `read_text`.
    """
    lines = read_text(path).split("\n")
    if not lines[-1]:
        lines.pop()
    return [(number, line.removesuffix("\r")) for number, line in enumerate(lines, start=1)]


def _line_of(offset: int, data: bytes) -> int:
    return data.count(b"\n", 0, offset) + 1


def _walk(root: Path, suffixes: Collection[str]) -> list[DataFile]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from error

    files = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if name.startswith(".") or (suffixes and path.suffix not in suffixes) or not path.is_file():
                continue
            files.append(DataFile(path, path.relative_to(root).as_posix(), in_folder=True))
    return sorted(files, key=lambda file: file.name)
