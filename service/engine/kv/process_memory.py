"""How much memory this process may use: the machine's, or its control group's if that is less; and how much it does.

The limit is needed because the kernel hands out more address space than there is memory, and ends the process once it
is touched. Knows Linux only; elsewhere nothing is known. Control groups of version 2.
"""

from __future__ import annotations

import mmap
from pathlib import Path


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that this process can ever have, None where the system does not say.

    Args:
        root: where `proc` and `sys` are found.
    """
    limits = [_machine_bytes(root / "proc/meminfo"), *_group_bytes(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def resident_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process occupies, mapped files included; 0 where the system does not say.

    Args:
        root: where `proc` is found.
    """
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
