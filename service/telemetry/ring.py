"""The last rows of a table, in memory that is taken at once and for good: it grows for long names alone.

Numbers and short names lie packed, in half of what they would take as Python's objects. Rows that were kept as such
would also stand between whatever else lives and dies meanwhile, and keep its memory from going back.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence

Row = tuple[float | int | str | None, ...]
Names = tuple[str | None, ...]

_CODES = {"int": "q", "float": "d", "float | None": "d"}
_NAME_BYTES = 40
"""Longer names, in UTF-8, are kept as they come."""


class Rows:
    """A copy of a ring's rows, oldest first; they are unpacked when they are iterated over.

    Args:
        packing: of a row.
        num_names: how many of its columns are names.
        packed: all rows.
        long_names: the names of those rows, by their numbers, that had no room for them.
    """

    def __init__(self, packing: struct.Struct, num_names: int, packed: bytes, long_names: Mapping[int, Names]) -> None:
        self._packing = packing
        self._num_names = num_names
        self._packed = packed
        self._long_names = long_names

    def __len__(self) -> int:
        return len(self._packed) // self._packing.size

    def __iter__(self) -> Iterator[Row]:
        for index, values in enumerate(self._packing.iter_unpack(self._packed)):
            names = self._long_names.get(index) or (name.decode() or None for name in values[: self._num_names])
            # NaN, which is not itself, stands for None.
            yield (*names, *(None if value != value else value for value in values[self._num_names :]))


class Ring:
    """Remembers so many rows, and forgets the oldest; a row has its names first, then its numbers.

    Args:
        num_kept: rows; 0 remembers nothing.
        num_names: how many columns hold None, or text that is not empty.
        types: of the other columns: `"int"`, within 64 bits, or `"float"` or `"float | None"`, which must not be NaN.
    """

    def __init__(self, num_kept: int, num_names: int, types: Sequence[str]) -> None:
        self._num_kept = num_kept
        self._num_names = num_names
        # With its length before each name.
        self._packing = struct.Struct(f"={f'{1 + _NAME_BYTES}p' * num_names}{''.join(_CODES[each] for each in types)}")
        # Not zeros, which the system only promises until they are written to.
        self._packed = bytearray(b"\xff") * (num_kept * self._packing.size)
        self._long_names: dict[int, Names] = {}
        self.num_added = 0
        """Rows since the beginning, those that are forgotten included."""

    def append(self, names: Names, numbers: Sequence[float | None]) -> None:
        """Adds a row, in the place of the oldest when there is no other."""
        if not self._num_kept:
            return
        place = self.num_added % self._num_kept
        encoded = [name.encode() if name else b"" for name in names]
        if max(map(len, encoded)) > _NAME_BYTES:
            self._long_names[place] = names
            encoded = [b""] * len(names)
        elif self._long_names:
            self._long_names.pop(place, None)
        if None in numbers:
            numbers = [math.nan if value is None else value for value in numbers]
        self._packing.pack_into(self._packed, place * self._packing.size, *encoded, *numbers)
        self.num_added += 1

    def last(self, count: int | None = None) -> Rows:
        """A copy of the last rows, all that are kept or `count` of them at most."""
        kept = min(self.num_added, self._num_kept)
        count = kept if count is None else min(count, kept)
        stop = self.num_added % self._num_kept if self._num_kept else 0
        # Below zero it is counted from the end.
        start = stop - count
        size, packed = self._packing.size, memoryview(self._packed)
        begin, end = start * size, stop * size
        copied = packed[begin:end] if start >= 0 else b"".join((packed[begin:], packed[:end]))
        numbers = {(place - start) % self._num_kept: names for place, names in self._long_names.items()}
        long_names = {number: names for number, names in numbers.items() if number < count}
        return Rows(self._packing, self._num_names, bytes(copied), long_names)
