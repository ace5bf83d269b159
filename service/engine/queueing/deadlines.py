"""Moments at which something happens to requests: a heap, so that a step asks the next one only, however many wait.

Knows no clock and not what happens then; times are `time.monotonic()` seconds. Touched by the scheduler alone.
"""

from __future__ import annotations

import heapq
import itertools

from service.engine.sequence import SequenceGroup

# Below this many entries it is not worth asking which of them are stale.
_MIN_STALE = 64


class Deadlines:
    """One moment for each of some live requests; those without one are never noted."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceGroup]] = []
        self._arrivals = itertools.count()
        self._members: set[SequenceGroup] = set()

    def __len__(self) -> int:
        return len(self._members)

    def add(self, group: SequenceGroup, moment: float | None) -> None:
        """Notes a group's moment, if it has one."""
        if moment is not None:
            self._members.add(group)
            heapq.heappush(self._heap, (moment, next(self._arrivals), group))

    def discard(self, group: SequenceGroup) -> None:
        """Forgets a group that is over, or that it no longer concerns."""
        self._members.discard(group)
        if len(self._heap) > 2 * len(self._members) + _MIN_STALE:
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapq.heapify(self._heap)

    def take_expired(self, now: float) -> list[SequenceGroup]:
        """Takes out the requests whose moment has come, the earliest first."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, _, group = heapq.heappop(self._heap)
            if group in self._members:
                self._members.remove(group)
                expired.append(group)
        return expired
