"""Memory limit, available and resident memory of this process, on Linux with control groups v1 or v2; else unknown.

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
    limits = [_machine_bytes(root, "MemTotal"), *_group_bytes(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may take, those it has included: `memory_limit`, less what other processes hold.

    None if unknown. Other processes in a control group of this one are not subtracted.
    """
    limit, free = memory_limit(root), _machine_bytes(root, "MemAvailable")
    if limit is None or free is None:
        return limit
    return min(limit, free + resident_bytes(root))


def resident_bytes(root: Path = Path("/")) -> int:
    """Resident bytes of this process, mapped files included; 0 if unknown."""
    fields = _read(root / "proc/self/statm").split()
    return int(fields[1]) * mmap.PAGESIZE if fields else 0


def _machine_bytes(root: Path, field: str) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _group_bytes(root: Path) -> list[int]:
    """The limits of the process's control groups and of those around them."""
    limits: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            # Above memory.high the kernel throttles the process instead of ending it.
            for file in ("memory.max", "memory.high"):
                limits += _limits(root / "sys/fs/cgroup", group, file)
        elif "memory" in controllers.split(","):
            limits += _limits(root / "sys/fs/cgroup/memory", group, "memory.limit_in_bytes")
    return limits


def _limits(top: Path, group: str, file: str) -> list[int]:
    folder = top / group.lstrip("/")
    texts = [_read(path / file).strip() for path in (folder, *folder.parents) if path.is_relative_to(top)]
    return [int(text) for text in texts if text.isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
