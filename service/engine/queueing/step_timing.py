"""How long steps lately took, from end to end: what a request must expect of the next one.

Knows no clock; times are `time.monotonic()` seconds. Touched by the scheduler alone.
"""

from __future__ import annotations

from collections import deque

# Enough to have seen a prompt's dearest chunk, few enough to forget a hiccup soon.
_NUM_STEPS = 16


class Pace:
    """The durations of recent steps, with everything between two of them: other models' steps, the host's work.

    Steps with prompts in them take many times as long as those without, and may be rare. Each kind is remembered by
    itself, so that a long spell of one does not make the other a surprise.
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
        """A step begins: counted from the last one's end, unless there was a pause."""
        self._began = now if self._last_end is None else self._last_end

    def end(self, now: float, *, has_prompts: bool) -> None:
        """The step that began is over; another follows at once, unless `pause` says otherwise."""
        if self._began is not None:
            self._seconds[has_prompts].append(now - self._began)
        self._began, self._last_end = None, now

    def pause(self) -> None:
        """No step follows for now, or the one that began came to nothing."""
        self._began = self._last_end = None
