"""Requests that end by the clock: deadlines, latest starts, and ends that leave no time for another step.

Heaps, so that a step looks at the next moment only, however many requests wait. Reads no clock: callers pass
`time.monotonic()` seconds. The scheduler is the only user.
"""

from __future__ import annotations

import heapq
import itertools

from service.engine.queueing.step_timing import StepTiming
from service.engine.sequence import SequenceGroup

# Stale entries that a heap may hold before it is rebuilt, beside as many as it has live ones.
_MAX_STALE = 64


class MomentHeap:
    """At most one moment for each live request."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceGroup]] = []
        self._arrivals = itertools.count()
        self._members: set[SequenceGroup] = set()

    def __len__(self) -> int:
        return len(self._members)

    def add(self, group: SequenceGroup, moment: float | None) -> None:
        """Adds a request with its moment; one without a moment is ignored."""
        if moment is not None:
            self._members.add(group)
            heapq.heappush(self._heap, (moment, next(self._arrivals), group))

    def discard(self, group: SequenceGroup) -> None:
        """Removes a request, if it is there."""
        self._members.discard(group)
        if len(self._heap) > 2 * len(self._members) + _MAX_STALE:
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapq.heapify(self._heap)

    def take_expired(self, now: float) -> list[SequenceGroup]:
        """Removes and returns the requests whose moment has come, earliest first."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, _, group = heapq.heappop(self._heap)
            if group in self._members:
                self._members.remove(group)
                expired.append(group)
        return expired


class Deadlines:
    """The `deadline`, `start_by` and `end_by` of every live request, and how long steps take."""

    def __init__(self) -> None:
        self._deadlines, self._starts, self._ends = MomentHeap(), MomentHeap(), MomentHeap()
        self._timing = StepTiming()

    def add(self, group: SequenceGroup) -> None:
        """Adds a new request."""
        request = group.request
        self._deadlines.add(group, request.deadline)
        self._starts.add(group, request.start_by)
        self._ends.add(group, request.end_by)

    @property
    def need_short_steps(self) -> bool:
        """Whether a request must end in time for its answer, which a long step would make it end earlier."""
        return len(self._ends) > 0

    def mark_started(self, group: SequenceGroup) -> None:
        """Drops `start_by` of a request that is admitted."""
        self._starts.discard(group)

    def discard(self, group: SequenceGroup) -> None:
        """Removes a request that ends."""
        for heap in (self._deadlines, self._starts, self._ends):
            heap.discard(group)

    def begin_step(self, now: float) -> list[SequenceGroup]:
        """Starts timing a step; returns requests whose deadline or latest start has come."""
        self._timing.begin(now)
        expired = self._deadlines.take_expired(now)
        for group in expired:
            self._starts.discard(group)
        return expired + self._starts.take_expired(now)

    def end_step(self, now: float, *, has_prompts: bool, num_chunks: int) -> list[SequenceGroup]:
        """Records the duration of a step, with that many chunks in a run.

        Returns `end_by` requests that cannot afford another step.
        """
        self._timing.end(now, has_prompts=has_prompts, num_chunks=num_chunks)
        return self._ends.take_expired(now + self._timing.longest) if self.need_short_steps else []

    def pause(self) -> None:
        """No step follows for now, or the current one failed: the time until the next one is no step's."""
        self._timing.pause()
