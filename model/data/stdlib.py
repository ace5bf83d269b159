"""The source of the running Python's standard library, split by module so that held-out modules are unseen.

Held-out modules are for the final test, a few more for validation; neither is trained on. The library's content differs
by Python version and distribution. The split therefore follows a hash of each module's name, and a run should record
the version and a hash of the texts.

A module is a top-level name with everything under it; a near copy (`_pyio` of `io`, `posixpath` of `ntpath`) has the
side of its original. Left out: test suites, `encodings`, `lib2to3`, `idlelib` and `pydoc_data` (mostly tables),
installed packages and build-time configuration.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from model.data.corpus import Document, Side

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
# A large held-out package would dominate the score; many small modules represent the library.
_MAX_SCORED_BYTES = 48 * 1024


class Split(NamedTuple):
    """The three parts, each in the order of its files' paths inside the library, which are the documents' names."""

    training: tuple[Document, ...]
    validation: tuple[Document, ...]
    held_out: tuple[Document, ...]


def split(root: Path | None = None) -> Split:
    """Reads the library in `root`, by default the running Python's, and splits it by module.

    Raises:
        FileNotFoundError: when a part would be empty, as where the library has no source files.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    modules = _read_modules(root)
    sides: dict[Side, list[Document]] = {side: [] for side in Side}
    for name, files in modules.items():
        sides[_side(name, files)].extend(files)
    if not all(sides.values()):
        raise FileNotFoundError(f"{root} holds too little Python source to train on: is the standard library zipped?")
    return Split(*(tuple(sorted(sides[side])) for side in (Side.TRAINING, Side.VALIDATION, Side.TEST)))


def _read_modules(root: Path) -> dict[str, list[Document]]:
    """Files by module, without empty files and those that are not UTF-8."""
    modules = defaultdict(list)
    for folder, subfolders, names in os.walk(root):
        # Installed packages may lie under the library and be many times its size.
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
                modules[module_of(parts[0].removesuffix(".py"))].append(Document("/".join(parts), text))
    return modules


def module_of(name: str) -> str:
    """The module of a top-level name: `_pyio` and `_io` belong to `io`, `posixpath` to `ntpath`."""
    return _NEAR_COPIES.get(name, name.strip("_").removeprefix("py").strip("_"))


def _side(module: str, files: list[Document]) -> Side:
    if sum(len(file.text.encode()) for file in files) > _MAX_SCORED_BYTES:
        return Side.TRAINING
    digest = hashlib.sha256(module.encode()).digest()
    if int.from_bytes(digest[:4], "big") % _HELD_OUT_SHARE == 0:
        return Side.TEST
    # Other bytes of the hash: remainders of one number by 8 and by 16 are not independent.
    return Side.VALIDATION if int.from_bytes(digest[4:8], "big") % _VALIDATION_SHARE == 0 else Side.TRAINING
