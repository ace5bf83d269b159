"""The last rows of a table, in memory that is taken at once and for good: nothing grows while it fills.

Numbers lie packed, a fifth of what they would be as Python's objects. Rows that were kept as such would also stand
between whatever else lives and dies meanwhile, and keep its memory from going back.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

Row = tuple[float | int | str | None, ...]

_CODES = {"int": "q", "float": "d", "float | None": "d"}


class Rows:
    """A copy of a ring's rows, oldest first; they are unpacked when they are iterated over.

    Args:
        packing: of the numbers.
        names: of each row, one tuple for each column of names.
        numbers: of all rows, packed.
    """

    def __init__(self, packing: struct.Struct, names: Sequence[Sequence[str | None]], numbers: bytes) -> None:
        self._packing = packing
        self._names = names
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers) // self._packing.size

    def __iter__(self) -> Iterator[Row]:
        numbers = self._packing.iter_unpack(self._numbers)
        for names, values in zip(zip(*self._names, strict=True), numbers, strict=True):
            # NaN, which is not itself, stands for None.
            yield (*names, *(None if value != value else value for value in values))


class Ring:
    """Remembers as many rows as it is told, and forgets the oldest; a row has its names first, then its numbers.

    Args:
        num_kept: rows; 0 remembers nothing.
        num_names: how many columns hold text or None, which is not copied.
        types: of the other columns: `"int"`, within 64 bits, or `"float"` or `"float | None"`, which must not be NaN.
    """

    def __init__(self, num_kept: int, num_names: int, types: Sequence[str]) -> None:
        self._num_kept = num_kept
        self._packing = struct.Struct("=" + "".join(_CODES[each] for each in types))
        self._names: list[list[str | None]] = [[None] * num_kept for _ in range(num_names)]
        # Not zeros, which the system only promises until they are written to.
        self._numbers = bytearray(b"\xff") * (num_kept * self._packing.size)
        self.num_added = 0
        """Rows since the beginning, those that are forgotten included."""

    def append(self, names: Sequence[str | None], numbers: Sequence[float | None]) -> None:
        """Adds a row, in the place of the oldest when there is no other."""
        if not self._num_kept:
            return
        place = self.num_added % self._num_kept
        for kept, name in zip(self._names, names, strict=True):
            kept[place] = name
        if None in numbers:
            numbers = [math.nan if value is None else value for value in numbers]
        self._packing.pack_into(self._numbers, place * self._packing.size, *numbers)
        self.num_added += 1

    def last(self, count: int | None = None) -> Rows:
        """A copy of the last rows, all that are kept or `count` of them at most."""
        kept = min(self.num_added, self._num_kept)
        count = kept if count is None else min(count, kept)
        stop = self.num_added % self._num_kept if self._num_kept else 0
        # Below zero it is counted from the end.
        start = stop - count
        size, numbers = self._packing.size, memoryview(self._numbers)
        if start >= 0:
            names = [column[start:stop] for column in self._names]
            return Rows(self._packing, names, bytes(numbers[start * size : stop * size]))
        names = [column[start:] + column[:stop] for column in self._names]
        return Rows(self._packing, names, b"".join((numbers[start * size :], numbers[: stop * size])))
