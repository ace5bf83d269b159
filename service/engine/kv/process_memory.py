"""Memory limit and resident memory of this process, on Linux with control groups v2; unknown elsewhere.

The kernel overcommits: a process that touches more than there is gets killed, so limits are checked up front.
"""

from __future__ import annotations

import mmap
from pathlib import Path


def memory_limit(root: Path = Path("/")) -> int | None:
    """The least of the machine's memory and the limits of all enclosing control groups, in bytes; None if unknown.

    Args:
        root: folder of `proc` and `sys`.
    """
    limits = [_machine_bytes(root / "proc/meminfo"), *_group_bytes(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def resident_bytes(root: Path = Path("/")) -> int:
    """Resident bytes of this process, mapped files included; 0 if unknown."""
    fields = _read(root / "proc/self/statm").split()
    return int(fields[1]) * mmap.PAGESIZE if fields else 0


def _machine_bytes(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _group_bytes(root: Path) -> list[int]:
    """The limits of the process's control group and of those around it."""
    group = next((line[3:] for line in _read(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), None)
    if group is None:
        return []
    top = root / "sys/fs/cgroup"
    folder = top / group.lstrip("/")
    texts = [_read(path / "memory.max").strip() for path in (folder, *folder.parents) if path.is_relative_to(top)]
    return [int(text) for text in texts if text.isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
