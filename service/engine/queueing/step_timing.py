"""Durations of recent steps: how long the next one may take.

Reads no clock: callers pass `time.monotonic()` seconds.
"""

from __future__ import annotations

from collections import deque

# Enough to include a prompt's longest chunk, few enough to forget an outlier soon.
_NUM_STEPS = 16


class StepTiming:
    """Durations of recent steps, with everything between two of them: other models' steps and host work.

    Steps with prompts take many times as long as steps without, and may be rare. Each kind has a window of its own, so
    that many steps of one kind do not push out the other.
    """

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=_NUM_STEPS) for kind in (False, True)}
        self._began: float | None = None
        self._last_end: float | None = None

    @property
    def longest(self) -> float:
        """Seconds of the longest recent step; 0 before the first."""
        return max((seconds for kind in self._seconds.values() for seconds in kind), default=0.0)

    def begin(self, now: float) -> None:
        """Begins a step: it counts from the end of the last one, unless there was a pause."""
        self._began = now if self._last_end is None else self._last_end

    def end(self, now: float, *, has_prompts: bool, num_chunks: int = 1) -> None:
        """Ends the step; another follows at once unless `pause` is called.

        Where time matters a step has one chunk of a prompt: one of several counts as that part of its time.
        """
        if self._began is not None:
            self._seconds[has_prompts].append((now - self._began) / num_chunks)
        self._began, self._last_end = None, now

    def pause(self) -> None:
        """No step follows for now, or the current one failed."""
        self._began = self._last_end = None
