"""Waiting requests in the order of their turns. Knows no slots, no memory and no clock.

The higher priority goes first. Among equals it is earliest deadline first (Liu and Layland, 1973) with a bound on
waiting: a request is *due* at its deadline or `patience` after its arrival, whichever is sooner. No deadline lies
before its request's arrival, so

    b overtakes a  ⟹  arrival(b) ≤ due(b) ≤ due(a) ≤ arrival(a) + patience

and a request is overtaken, among equals, only by those that arrive within its patience. The order is static: it is
kept without sorting, and a preempted request returns to its place.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from service.engine.sequence import SequenceGroup
from service.engine.types import GenerationRequest


def due_time(request: GenerationRequest, patience: float | None) -> float:
    """When a request is due; 0 for all with a `patience` of None, so that they go in the order of arrival."""
    if patience is None:
        return 0.0
    bound = request.arrival_time + patience
    return bound if request.deadline is None else min(request.deadline, bound)


class WaitingQueue:
    """A list in the order of `SequenceGroup.rank`: an insertion moves a few pointers."""

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    @property
    def first(self) -> SequenceGroup | None:
        """The next request to admit."""
        return self._groups[0] if self._groups else None

    def add(self, group: SequenceGroup) -> None:
        """Inserts a request at its place."""
        self._groups.insert(self._place(group), group)

    def discard(self, group: SequenceGroup) -> bool:
        """Removes a request; returns whether it waited."""
        index = self._place(group)
        is_waiting = self._groups[index : index + 1] == [group]
        if is_waiting:
            del self._groups[index]
        return is_waiting

    def _place(self, group: SequenceGroup) -> int:
        return bisect.bisect_left(self._groups, group.rank, key=lambda other: other.rank)
