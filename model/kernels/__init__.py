"""Kernels of the project's own ONNX operators, in C++: the sources, and where to find what is built of them.

`python -m model.kernels` builds them, for x86-64. Which of them a processor can run the library finds out by itself.
Operators of a graph without a kernel, and all of them where the library is not built, are computed by the standard
operators that they stand for, only slower (`export.operators`).

The library lies beside its sources and is named after them, so that one of other sources is never taken for it. Knows
nothing of ONNX Runtime, and needs the standard library alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
"""Where the sources are."""

# The library carries what it needs of GCC's, so that it runs where there is no GCC, or an older one's libraries.
# What a source needs of newer processors it says itself, so that one library runs on all of them. Products and sums are
# rounded each by itself where the source does not say otherwise. The last two are false alarms of GCC's own headers.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-static-libgcc",
    "-static-libstdc++",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
"""What a compiler is told, besides its input and output."""

_MACHINES = frozenset({"x86_64", "amd64"})
_DIGITS = 12


@cache
def library() -> Path | None:
    """The kernels' library; None where it is not built of these very sources. A process keeps what it found first."""
    return library_in(FOLDER)


def why_not() -> str | None:
    """Why there is no library, in words for an operator; None where there is one."""
    if not is_for_this_machine():
        return f"they are for x86-64, and this machine is {platform.machine()}"
    if library() is None:
        return f"they are not built in {FOLDER}: `python -m model.kernels` does it"
    return None


def operators() -> tuple[str, ...]:
    """The operators that the library has kernels for which this processor can run; none where there is no library.

    Raises:
        OSError: when it cannot be loaded.
    """
    path = library()
    if path is None:
        return ()
    ask = ctypes.CDLL(str(path)).OnwardOperators
    ask.restype = ctypes.c_char_p
    names: bytes = ask()
    return tuple(names.decode("ascii").split(",")) if names else ()


def is_for_this_machine() -> bool:
    """Whether there are kernels for this kind of processor at all."""
    return platform.machine().lower() in _MACHINES


def library_in(folder: Path) -> Path | None:
    """As `library`, for sources elsewhere and as they are now."""
    if not is_for_this_machine():
        return None
    path = folder / library_name(folder)
    return path if path.is_file() else None


def library_name(folder: Path) -> str:
    """The file name of what a folder's sources are built to: a digest of all that they are and are compiled with."""
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for path in sorted([*sources(folder), *folder.glob("*.h")]):
        digest.update(f"\0{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return f"libonward-{digest.hexdigest()[:_DIGITS]}.so"


def sources(folder: Path) -> list[Path]:
    """The files that are compiled, in order, and the linker's list of what the library exports."""
    return [*sorted(folder.glob("*.cc")), *folder.glob("exports.ld")]
