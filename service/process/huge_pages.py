"""Asks the C library for memory in huge pages, which can only be set before a process starts.

Every decoding step reads all weights and all K/V once, and in pages of 4 KiB half of what that costs beyond the
reading itself is the processor's looking up of addresses. glibc asks Linux for pages of 2 MiB when its tunable
`glibc.malloc.hugetlb` is 1, and reads the tunable when a process starts: so the server replaces itself, once.
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
    """Starts this process's command anew, under the same id, with memory in huge pages.

    Returns where that is done already, was decided otherwise, or would bring nothing.
    """
    wanted = environment_for_huge_pages(os.environ, _c_library(), _setting())  # noqa: TID251 (handed on whole)
    if wanted is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], dict(wanted))  # noqa: S606 (ourselves)


def environment_for_huge_pages(environ: Mapping[str, str], c_library: str, setting: str) -> Mapping[str, str] | None:
    """The environment to start with; None when this process need not be started anew.

    Args:
        environ: of this process; a tunable that it already names, with whatever value, is left alone.
        c_library: its name and version; others than glibc know no tunables.
        setting: what Linux says of huge pages, its choice in brackets: `always` needs no asking, `never` ignores it.
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
