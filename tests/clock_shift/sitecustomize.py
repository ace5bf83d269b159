"""Shifts `time.monotonic` in every Python process that starts with this folder on PYTHONPATH: see `tests.stress`.

Python imports a module of this name at its start, before asyncio, threading and queue take the clock from `time`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable


class _Shifted:
    """A clock and its distance from the real one. Unlike a function, it does not become a method on a class."""

    def __init__(self, clock: Callable[[], float], shift: float) -> None:
        self._clock = clock
        self._shift = shift

    def __call__(self) -> float:
        return self._clock() + self._shift


if _seconds := float(os.environ.get("ONWARD_CLOCK_SHIFT_SECONDS", "0")):
    time.monotonic = _Shifted(time.monotonic, _seconds)
    time.monotonic_ns = _Shifted(time.monotonic_ns, round(_seconds * 1e9))  # type: ignore[assignment]
