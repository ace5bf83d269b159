"""The slot table: which owner has which row of the KV buffers, in plain ints.

Rows in use are always `0 … n-1`: a decode step is a prefix view of every buffer, without a gather. When an owner
leaves, the last row moves to its place.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Move:
    """Row `source` must be copied to row `target`."""

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
        """An owner's slot.

        Raises:
            KeyError: when it has none.
        """
        return self._places[owner]

    @property
    def num_free(self) -> int:
        """Free slots."""
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
        """Gives a taken slot and its contents to another owner.

        Raises:
            ValueError: when that has one.
        """
        self._seat(owner, slot)
        del self._places[self._owners[slot]]
        self._owners[slot] = owner

    def remove(self, slot: int) -> Move | None:
        """Frees `slot`; returns the move that keeps the table dense, None if it was the last row.

        Raises:
            IndexError: when the slot is free.
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
        """Asserts that every owner has one slot."""
        if len(self._owners) > self.capacity:
            raise AssertionError(f"{len(self._owners)} slots taken of {self.capacity}")
        if len(set(self._owners)) != len(self._owners):
            raise AssertionError(f"an owner holds two slots: {self._owners}")
        if self._places != {owner: slot for slot, owner in enumerate(self._owners)}:
            raise AssertionError(f"the index does not match the slots: {self._places}")

    def _seat(self, owner: Owner, slot: int) -> None:
        if owner in self._places:
            raise ValueError(f"{owner} has slot {self._places[owner]} already")
        self._places[owner] = slot
