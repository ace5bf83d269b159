"""Which requests run out of time: a heap, so that a step asks the next one only, however many wait.

Knows no clock; times are `time.monotonic()` seconds. Touched by the scheduler alone.
"""

from __future__ import annotations

import heapq
import itertools

from service.engine.sequence import SequenceGroup

# Below this many entries it is not worth asking which of them are stale.
_MIN_STALE = 64


class Deadlines:
    """The deadlines of live requests; those without one are never noted."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceGroup]] = []
        self._arrivals = itertools.count()
        self._members: set[SequenceGroup] = set()

    def add(self, group: SequenceGroup) -> None:
        """Notes a group's deadline, if it has one."""
        if (deadline := group.request.deadline) is not None:
            self._members.add(group)
            heapq.heappush(self._heap, (deadline, next(self._arrivals), group))

    def discard(self, group: SequenceGroup) -> None:
        """Forgets a group that is over."""
        self._members.discard(group)
        if len(self._heap) > 2 * len(self._members) + _MIN_STALE:
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapq.heapify(self._heap)

    def take_expired(self, now: float) -> list[SequenceGroup]:
        """Takes out the requests whose time is up, the earliest deadline first."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, _, group = heapq.heappop(self._heap)
            if group in self._members:
                self._members.remove(group)
                expired.append(group)
        return expired
