"""Requests that wait for a place: the more urgent first. Knows no slots, no memory and no clock.

Among requests of one priority, the earliest deadline goes first, but nobody waits for ever: a request is *due* at its
deadline or `patience` after its arrival, whichever is sooner, and who is due first goes first. A request without a
deadline counts as one whose patience ends. As nobody's deadline lies before its arrival,

    b overtakes a  ⟹  arrival(b) ≤ due(b) ≤ due(a) ≤ arrival(a) + patience

so that a request is overtaken, among equals, only by those that arrive within its patience; whoever comes later goes
behind it, whatever its deadline. Being static, the order is kept without sorting, and one that comes back after a
preemption is where it was before. The rule is earliest deadline first (Liu and Layland, 1973) with a bound on waiting.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from service.engine.sequence import SequenceGroup
from service.engine.types import GenerationRequest


def due_time(request: GenerationRequest, patience: float | None) -> float:
    """When a request's turn should have come.

    Args:
        request: whose.
        patience: seconds for which equals with earlier deadlines may overtake it; None lets nobody overtake, so that
            all are due alike and go in the order in which they were queued.
    """
    if patience is None:
        return 0.0
    bound = request.arrival_time + patience
    return bound if request.deadline is None else min(request.deadline, bound)


class WaitingQueue:
    """A queue by `SequenceGroup.rank`.

    A list in order: what an insertion moves is a few pointers, and there are as many as the operator lets wait.
    """

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """The next one first."""
        return iter(self._groups)

    def __contains__(self, group: SequenceGroup) -> bool:
        index = self._place(group)
        return index < len(self._groups) and self._groups[index] is group

    @property
    def first(self) -> SequenceGroup | None:
        """Whose turn it is."""
        return self._groups[0] if self._groups else None

    def add(self, group: SequenceGroup) -> None:
        """Puts a request where it belongs."""
        self._groups.insert(self._place(group), group)

    def remove(self, group: SequenceGroup) -> None:
        """Takes a request out.

        Raises:
            ValueError: when it does not wait.
        """
        if group not in self:
            raise ValueError(f"request {group.request_id} does not wait")
        del self._groups[self._place(group)]

    def _place(self, group: SequenceGroup) -> int:
        return bisect.bisect_left(self._groups, group.rank, key=lambda other: other.rank)
