"""Which row of the KV buffers belongs to whom, in plain ints.

Rows in use are always `0 … n-1`, so that a decode step is a prefix view of every buffer and no gather is needed. When
an owner leaves, the last row takes its place: `remove` says which contents have to move and moves nothing itself.
Knows nothing of sequences, tokens or tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Move:
    """The contents of row `source` belong in row `target` from now on."""

    source: int
    target: int


class SlotTable(Generic[Owner]):
    """A dense table of at most `capacity` owners, indexed by slot."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, must be at least 1")
        self.capacity = capacity
        self._owners: list[Owner] = []
        self._places: dict[Owner, int] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __getitem__(self, slot: int) -> Owner:
        return self._owners[slot]

    def __iter__(self) -> Iterator[Owner]:
        """Owners in slot order."""
        return iter(self._owners)

    def slot_of(self, owner: Owner) -> int:
        """Where an owner sits.

        Raises:
            KeyError: when it has no slot.
        """
        return self._places[owner]

    @property
    def num_free(self) -> int:
        """How many more owners fit."""
        return self.capacity - len(self._owners)

    def append(self, owner: Owner) -> int:
        """Gives `owner` the next slot.

        Raises:
            IndexError: when the table is full.
            ValueError: when it has one.
        """
        if not self.num_free:
            raise IndexError(f"all {self.capacity} slots are taken")
        self._seat(owner, len(self._owners))
        self._owners.append(owner)
        return len(self._owners) - 1

    def replace(self, slot: int, owner: Owner) -> None:
        """Gives a taken slot, and what is in it, to another owner.

        Raises:
            ValueError: when that has one.
        """
        self._seat(owner, slot)
        del self._places[self._owners[slot]]
        self._owners[slot] = owner

    def remove(self, slot: int) -> Move | None:
        """Frees `slot`; the move that keeps the table dense, None when the last row left.

        Raises:
            IndexError: when nobody owns the slot.
        """
        if not 0 <= slot < len(self._owners):
            raise IndexError(f"slot {slot} is free, {len(self._owners)} are taken")
        del self._places[self._owners[slot]]
        last = self._owners.pop()
        if slot == len(self._owners):
            return None
        self._owners[slot] = last
        self._places[last] = slot
        return Move(source=len(self._owners), target=slot)

    def check_invariants(self) -> None:
        """Asserts that nobody owns two slots and that no more are taken than there are.

        Raises:
            AssertionError: saying what broke.
        """
        if len(self._owners) > self.capacity:
            raise AssertionError(f"{len(self._owners)} slots taken of {self.capacity}")
        if len(set(self._owners)) != len(self._owners):
            raise AssertionError(f"an owner holds two slots: {self._owners}")
        if self._places != {owner: slot for slot, owner in enumerate(self._owners)}:
            raise AssertionError(f"owners are not where they are looked for: {self._places}")

    def _seat(self, owner: Owner, slot: int) -> None:
        if owner in self._places:
            raise ValueError(f"{owner} has slot {self._places[owner]} already")
        self._places[owner] = slot
