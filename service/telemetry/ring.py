"""A ring buffer of table rows in memory that is allocated once; only long names allocate more.

Numbers and short names are packed, in half the memory of Python objects. Long-lived row objects would also fragment the
heap and keep it from shrinking.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence

Row = tuple[float | int | str | None, ...]
Names = tuple[str | None, ...]

_CODES = {"int": "q", "float": "d", "float | None": "d"}
_NAME_BYTES = 40
"""Longer names, in UTF-8, are stored as Python objects."""


class Rows:
    """A copy of a ring's rows, oldest first, unpacked on iteration.

    Args:
        packing: a row's format.
        num_names: leading columns that are names.
        packed: all rows.
        long_names: by row number, names too long to be packed.
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
            # NaN, unequal to itself, stands for None.
            yield (*names, *(None if value != value else value for value in values[self._num_names :]))


class Ring:
    """Keeps the last rows. A row has its names first, then its numbers.

    Args:
        num_kept: rows; 0 keeps nothing.
        num_names: columns that hold None or text that is not empty.
        types: of the other columns: `"int"` (64 bits), or `"float"` or `"float | None"` (not NaN).
    """

    def __init__(self, num_kept: int, num_names: int, types: Sequence[str]) -> None:
        self._num_kept = num_kept
        self._num_names = num_names
        # `p`: a length byte before each name.
        self._packing = struct.Struct(f"={f'{1 + _NAME_BYTES}p' * num_names}{''.join(_CODES[each] for each in types)}")
        # Not zeros: the system would map the pages only when they are written.
        self._packed = bytearray(b"\xff") * (num_kept * self._packing.size)
        self._long_names: dict[int, Names] = {}
        self.num_added = 0
        """Rows ever added."""

    def append(self, names: Names, numbers: Sequence[float | None]) -> None:
        """Adds a row, which replaces the oldest one when the ring is full."""
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
        """A copy of the last rows, at most `count`."""
        kept = min(self.num_added, self._num_kept)
        count = kept if count is None else min(count, kept)
        stop = self.num_added % self._num_kept if self._num_kept else 0
        # Negative where the rows wrap around the end.
        start = stop - count
        size, packed = self._packing.size, memoryview(self._packed)
        begin, end = start * size, stop * size
        copied = packed[begin:end] if start >= 0 else b"".join((packed[begin:], packed[:end]))
        numbers = {(place - start) % self._num_kept: names for place, names in self._long_names.items()}
        long_names = {number: names for number, names in numbers.items() if number < count}
        return Rows(self._packing, self._num_names, bytes(copied), long_names)
