"""The machine of a measurement: its processor and caches, and the load of other processes (Linux only)."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TICKS = "/proc/stat"
_CACHES = "/sys/devices/system/cpu/cpu0/cache"
_OF_A_CACHE = ("level", "type", "size")


def describe() -> dict[str, Any]:
    """Processor name, number of cores, and whether they have AMX, as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    has_amx = any("amx_int8" in line.split() for line in lines if line.startswith("flags"))
    return {"processor": names[0] if names else platform.processor(), "cores": os.cpu_count(), "amx": has_amx}


def caches() -> list[int]:
    """Bytes of the data caches that one core uses, ascending by level; empty if unknown."""
    found = {}
    for folder in Path(_CACHES).glob("index*"):
        try:
            level, kind, size = ((folder / name).read_text(encoding="ascii").strip() for name in _OF_A_CACHE)
            if kind != "Instruction":
                found[int(level)] = int(size.removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue
    return [found[level] for level in sorted(found)]


def watch_others() -> Callable[[], float | None]:
    """Returns a function that measures the share of the machine that other processes have taken since.

    It excludes this process and its ended children, so call it when all children have ended. None if unknown.
    """
    before, began = _seconds(), time.monotonic()

    def share() -> float | None:
        after, seconds = _seconds(), time.monotonic() - began
        if before is None or after is None:
            return None
        others = (after[0] - before[0]) - (after[1] - before[1])
        return max(0.0, others) / (seconds * (os.cpu_count() or 1))

    return share


def _seconds() -> tuple[float, float] | None:
    """Busy seconds of all processors since boot, stolen time included, and those of this process and its children."""
    try:
        fields = [int(field) for field in Path(_TICKS).read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = fields
    worked = (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")
    return worked, sum(os.times()[:4])
