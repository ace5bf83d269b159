"""C++ kernels of the project's own ONNX operators: the sources, and the library built from them.

`python -m model.kernels` builds the library, for x86-64. At run time it registers the operators that the processor
supports. ONNX Runtime runs all others by their function bodies of standard operators, slower (`export.operators`).

The library lies beside its sources, and its name has their digest, so a stale library is never loaded. Standard library
only.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
"""The folder of the sources."""

# GCC's libraries are linked statically: the library runs where they are missing or older. Sources set their targets by
# pragmas, so that one library runs on all x86-64 processors. Without contraction, bits do not depend on the compiler's
# choice of fused operations. The last two warnings are false alarms in GCC's own headers.
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
"""The compiler's flags, besides input and output."""

_MACHINES = frozenset({"x86_64", "amd64"})
_DIGITS = 12
_CPU_INFO = Path("/proc/cpuinfo")


@cache
def library() -> Path | None:
    """The kernels' library; None if it is not built from these sources. Cached for the process."""
    return library_in(FOLDER)


def why_not() -> str | None:
    """The reason that there is no library, for an operator; None if there is one."""
    if not is_for_this_machine():
        return f"they are for x86-64, and this machine is {platform.machine()}"
    if library() is None:
        return f"they are not built in {FOLDER}: `python -m model.kernels` does it"
    return None


def operators() -> tuple[str, ...]:
    """The operators whose kernels this processor supports; empty if there is no library.

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


def has_tiles() -> bool:
    """Whether the kernels multiply many rows, and attend in long chunks, in the tile registers of AMX.

    Raises:
        OSError: when the library cannot be loaded.
    """
    path = library()
    return path is not None and bool(ctypes.CDLL(str(path)).OnwardHasTiles())


@cache
def arithmetic(onnxruntime: str) -> str:
    """Identifies what decides the bits of a graph that the kernels compute: kernels, ONNX Runtime's version, processor.

    Empty without kernels: by standard operators alone, bits depend on the batch.
    """
    path = library()
    if path is None or not operators():
        return ""
    text = _CPU_INFO.read_text(encoding="utf-8", errors="replace") if _CPU_INFO.exists() else ""
    features = sorted({line for line in text.splitlines() if re.match(r"(model name|vendor_id|flags)\b", line)})
    processor = hashlib.sha256("\n".join(features).encode()).hexdigest()[:_DIGITS]
    return f"{path.stem} onnxruntime-{onnxruntime} processor-{processor}"


def is_for_this_machine() -> bool:
    """Whether the kernels support this machine's architecture."""
    return platform.machine().lower() in _MACHINES


def library_in(folder: Path) -> Path | None:
    """As `library`, for another folder and not cached."""
    if not is_for_this_machine():
        return None
    path = folder / library_name(folder)
    return path if path.is_file() else None


def library_name(folder: Path) -> str:
    """The file name of a folder's library, with a digest of its sources and the flags."""
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for path in sorted([*sources(folder), *folder.glob("*.h")]):
        digest.update(f"\0{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return f"libonward-{digest.hexdigest()[:_DIGITS]}.so"


def sources(folder: Path) -> list[Path]:
    """The files to compile, in order, and the linker's list of exported symbols."""
    return [*sorted(folder.glob("*.cc")), *folder.glob("exports.ld")]
