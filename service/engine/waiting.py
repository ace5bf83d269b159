"""Requests that wait for a place: the more urgent first, then in the order of arrival. Knows no slots and no memory."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from service.engine.sequence import SequenceGroup


class WaitingQueue:
    """A queue by `SequenceGroup.rank`. One that comes back after a preemption is where it was before.

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
