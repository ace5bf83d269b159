"""Which sequences run out of time: a heap, so that a step asks the next one only, however many wait.

Knows no clock; times are `time.monotonic()` seconds. Touched by the scheduler alone.
"""

from __future__ import annotations

import heapq
import itertools

from service.engine.sequence import Sequence

# Below this many entries it is not worth asking which of them are stale.
_MIN_STALE = 64


class Deadlines:
    """The deadlines of live sequences; those without one are never noted."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._arrivals = itertools.count()
        self._members: set[Sequence] = set()

    def add(self, sequence: Sequence) -> None:
        """Notes a sequence's deadline, if it has one."""
        if (deadline := sequence.request.deadline) is not None:
            self._members.add(sequence)
            heapq.heappush(self._heap, (deadline, next(self._arrivals), sequence))

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence that is over."""
        self._members.discard(sequence)
        if len(self._heap) > 2 * len(self._members) + _MIN_STALE:
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapq.heapify(self._heap)

    def take_expired(self, now: float) -> list[Sequence]:
        """Takes out the sequences whose time is up, the earliest deadline first."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, _, sequence = heapq.heappop(self._heap)
            if sequence in self._members:
                self._members.remove(sequence)
                expired.append(sequence)
        return expired
