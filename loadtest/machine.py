"""The machine that a measurement runs on: what it is, and how much of it others took meanwhile.

Knows Linux; elsewhere others are unknown.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TICKS = "/proc/stat"


def describe() -> dict[str, Any]:
    """Processor and number of cores, as the system names and counts them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"processor": names[0] if names else platform.processor(), "cores": os.cpu_count()}


def watch_others() -> Callable[[], float | None]:
    """Begins to watch; what is returned tells the share of the machine that others have taken since.

    Ours are this process and its children that have ended by then, so ask when all have.
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
    """Seconds that all processors have worked since the start, those stolen by a host included; and those for us."""
    try:
        fields = [int(field) for field in Path(_TICKS).read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = fields
    worked = (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")
    return worked, sum(os.times()[:4])
