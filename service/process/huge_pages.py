"""Huge pages for the C library's memory, which must be requested before a process starts.

Every decoding step reads all weights and K/V once; with pages of 4 KiB, TLB misses slow that down. glibc requests pages
of 2 MiB if its tunable `glibc.malloc.hugetlb` is 1, and reads the tunable at process start: the server replaces itself,
once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.malloc.hugetlb"
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_huge_pages() -> None:
    """Restarts this process's command, under the same process id, with huge pages.

    Returns if the tunable is already set, or would have no effect.
    """
    wanted = environment_for_huge_pages(os.environ, _c_library(), _setting())  # noqa: TID251 (passed on whole)
    if wanted is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], dict(wanted))  # noqa: S606 (ourselves)


def environment_for_huge_pages(environ: Mapping[str, str], c_library: str, setting: str) -> Mapping[str, str] | None:
    """The environment to restart with; None for no restart.

    Args:
        environ: of this process; if it sets the tunable, to whatever value, there is no restart.
        c_library: name and version; only glibc has tunables.
        setting: Linux's setting, with its choice in brackets: `always` needs no request, `never` ignores it.
    """
    tunables = environ.get(_VARIABLE, "")
    is_named = any(tunable.partition("=")[0] == _TUNABLE for tunable in tunables.split(":"))
    if is_named or not c_library.startswith("glibc") or "[madvise]" not in setting:
        return None
    return {**environ, _VARIABLE: ":".join(part for part in (tunables, f"{_TUNABLE}=1") if part)}


def _c_library() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return ""


def _setting() -> str:
    try:
        return _SETTING.read_text(encoding="ascii")
    except OSError:
        return ""
