"""The source of the running Python's own standard library, split so that held-out modules are unseen files.

Held-out modules are for the test of a finished model; a few more, for validation, score a run under way. Neither is
ever trained on.

Nothing is downloaded: whoever can run this has the text. What the library holds differs by Python version and by
distribution (some ship parts of it separately), so the split goes by a hash of each module's name, not by its place in
a list, and a run should record the version and a hash of what it read.

A module is a top-level name with everything under it; a near copy of a module (`_pyio` of `io`, `posixpath` of
`ntpath`) stays on its side. Left out: test suites, `encodings`, `lib2to3`, `idlelib` and `pydoc_data` (mostly tables),
and what is no part of the library proper (installed packages, build-time configuration). Knows nothing of tokens,
batches or models.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from model.data.corpus import Side

SOURCE = f"standard library of {platform.python_implementation()} {platform.python_version()}"

_LEFT_OUT = frozenset(
    {
        *("test", "tests", "encodings", "lib2to3", "idlelib", "pydoc_data"),
        *("site-packages", "dist-packages", "lib-dynload", "__pycache__"),
    }
)
_LEFT_OUT_PREFIXES = ("_sysconfigdata", "config-")
_NEAR_COPIES = {"cProfile": "profile", "posixpath": "ntpath"}
_HELD_OUT_SHARE = 8
_VALIDATION_SHARE = 16
# A large package, held out, would make the score its own; many small modules make it the library's.
_MAX_SCORED_BYTES = 48 * 1024


class SourceFile(NamedTuple):
    """One file: its path inside the library, with forward slashes, and its text, line ends as they are."""

    path: str
    text: str


class Split(NamedTuple):
    """The three parts, each in the order of its paths."""

    training: tuple[SourceFile, ...]
    validation: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def split(root: Path | None = None) -> Split:
    """Reads the library and splits it by module.

    Args:
        root: the library's folder, the running Python's when None.

    Raises:
        FileNotFoundError: when a part would be empty, as where the library is not there as source files.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    modules = _read_modules(root)
    sides: dict[Side, list[SourceFile]] = {side: [] for side in Side}
    for name, files in modules.items():
        sides[_side(name, files)].extend(files)
    if not all(sides.values()):
        raise FileNotFoundError(f"{root} holds too little Python source to train on: is the standard library zipped?")
    return Split(*(tuple(sorted(sides[side])) for side in (Side.TRAINING, Side.VALIDATION, Side.TEST)))


def _read_modules(root: Path) -> dict[str, list[SourceFile]]:
    """Files by module; those that are not UTF-8, or empty, are left out."""
    modules = defaultdict(list)
    for folder, subfolders, names in os.walk(root):
        # Pruning matters: installed packages may lie under the library and be many times its size.
        subfolders[:] = sorted(name for name in subfolders if name not in _LEFT_OUT)
        for name in sorted(names):
            path = Path(folder, name)
            parts = path.relative_to(root).parts
            if path.suffix != ".py" or parts[0].startswith(_LEFT_OUT_PREFIXES):
                continue
            try:
                text = path.read_bytes().decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text:
                modules[module_of(parts[0].removesuffix(".py"))].append(SourceFile("/".join(parts), text))
    return modules


def module_of(name: str) -> str:
    """The module that a top-level name belongs to: `_pyio` and `_io` to `io`, `posixpath` to `ntpath`."""
    return _NEAR_COPIES.get(name, name.strip("_").removeprefix("py").strip("_"))


def _side(module: str, files: list[SourceFile]) -> Side:
    if sum(len(file.text.encode()) for file in files) > _MAX_SCORED_BYTES:
        return Side.TRAINING
    digest = hashlib.sha256(module.encode()).digest()
    if int.from_bytes(digest[:4], "big") % _HELD_OUT_SHARE == 0:
        return Side.TEST
    # Other bytes of the hash: the remainders of one number by eight and by sixteen are not independent.
    return Side.VALIDATION if int.from_bytes(digest[4:8], "big") % _VALIDATION_SHARE == 0 else Side.TRAINING
