"""Builds the kernels' library by one call of a C++ compiler.

The library is replaced atomically, so builds may run concurrently with each other and with servers.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from model.kernels import FLAGS, FOLDER, library_name, sources

COMPILERS = ("g++", "c++")
"""Names of the compiler, tried in this order. It must be GCC: clang has another pragma for targets."""

_LIBRARIES = "libonward-*.so"
_MAX_LINES = 20


class BuildError(Exception):
    """The library was not built: a one-line `summary` with advice, and the last lines of the compiler's output."""

    def __init__(self, summary: str, details: str = "") -> None:
        super().__init__("\n".join(filter(None, (summary, details))))
        self.summary = summary


@dataclass(frozen=True, slots=True)
class Built:
    """A library, its compiler, and the compiler's warnings."""

    path: Path
    compiler: str
    warnings: str


def build(compiler: str | None = None, folder: Path = FOLDER) -> Built:
    """Compiles a folder's sources, and removes older libraries.

    Args:
        compiler: a name on PATH or a path; default: the first of `COMPILERS` on PATH.
        folder: holds the sources and the library.

    Raises:
        BuildError: when there is no compiler, or it fails, or the folder cannot be written.
    """
    found = find_compiler(compiler)
    paths = sources(folder)
    if not paths:
        raise BuildError(f"{folder} has no sources (*.cc): install the project anew")
    target = folder / library_name(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as work:
            made = Path(work) / target.name
            warnings = _compile(found, paths, made)
            if library_name(folder) != target.name:
                raise BuildError(f"the sources in {folder} changed while they were compiled: build again")
            made.replace(target)
        for other in folder.glob(_LIBRARIES):
            if other != target:
                other.unlink(missing_ok=True)
    except OSError as error:
        raise BuildError(
            f"{folder} cannot be written ({error.strerror}): build as its owner, or install into a writable folder"
        ) from error
    return Built(target, found, warnings)


def find_compiler(wanted: str | None = None) -> str:
    """The path of the wanted C++ compiler, or of the first of `COMPILERS` on PATH.

    Raises:
        BuildError: when there is none.
    """
    for name in COMPILERS if wanted is None else (wanted,):
        if path := shutil.which(name):
            return path
    if wanted is not None:
        raise BuildError(f"--compiler is {wanted!r}, must be a program that can be run")
    raise BuildError(
        f"no C++ compiler is on PATH ({', '.join(COMPILERS)}): install one, as by `apt-get install g++`, or name it by "
        "--compiler"
    )


def _compile(compiler: str, paths: list[Path], made: Path) -> str:
    """Compiles to `made`; returns the compiler's warnings."""
    command = [compiler, *FLAGS, "-o", str(made), *map(str, paths)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603
    except OSError as error:
        raise BuildError(f"{compiler} cannot be run ({error.strerror}): name another by --compiler") from error
    if done.returncode != 0 or not made.is_file():
        words = (done.stderr or done.stdout).strip().splitlines()[-_MAX_LINES:]
        wrote = "" if done.returncode else " and wrote no library"
        advice = "the sources are for GCC, of which 12 is known to do; --compiler names another"
        raise BuildError(f"{compiler} ended with {done.returncode}{wrote}: {advice}", "\n".join(words))
    return done.stderr.strip()
