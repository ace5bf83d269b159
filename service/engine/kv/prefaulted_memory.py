"""Memory for copies of K/V that is there before it is wanted: finding it is done while nobody waits.

Every whole chunk of a prompt is copied for requests to come. Memory that no process has touched yet takes the system a
tenth of a millisecond for each megabyte, and where it is a virtual machine whose host has to find it first, two and
more: as much as a tenth of what a chunk takes to compute. What such copies leave is kept for others, up to a limit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from service.engine.kv.pages import Pages

Array = npt.NDArray[Any]

# Touched at once: whoever comes meanwhile waits for that.
_PIECE_BYTES = 4 << 20


class ReadyMemory:
    """Arrays of one shape, touched, which belong to nobody yet; of other shapes there is none.

    Args:
        shape: of an array.
        dtype: of its numbers.
        num_bytes: how much there may be at most; less than an array takes is none.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, num_bytes: int) -> None:
        self._shape = shape
        self._dtype = np.dtype(dtype)
        size = math.prod(shape) * self._dtype.itemsize
        self._most = num_bytes // size if size else 0
        self._arrays: list[Array] = []
        # Begun, and how many of its numbers are touched.
        self._begun: Array | None = None
        self._num_touched = 0

    @property
    def num_bytes(self) -> int:
        """How much there is, what is begun included."""
        return sum(array.nbytes for array in self._arrays) + (0 if self._begun is None else self._begun.nbytes)

    def prepare(self) -> bool:
        """Touches some megabytes of what may be made ready; whether there is more of it.

        Raises:
            MemoryError: when the system refuses.
        """
        if self._begun is None:
            if len(self._arrays) >= self._most:
                return False
            self._begun, self._num_touched = Pages(self._shape, self._dtype, is_sparse=False).array, 0
        numbers = self._begun.reshape(-1)
        end = self._num_touched + _PIECE_BYTES // self._dtype.itemsize
        numbers[self._num_touched : end] = 0
        self._num_touched = end
        if end < len(numbers):
            return True
        self._arrays.append(self._begun)
        self._begun = None
        return len(self._arrays) < self._most

    def take(self, shape: tuple[int, ...]) -> Array:
        """An array whose contents are undefined: a ready one where there is one of this shape, else one of new memory.

        Raises:
            MemoryError: when the system refuses.
        """
        if shape == self._shape and self._arrays:
            return self._arrays.pop()
        return Pages(shape, self._dtype, is_sparse=False).array

    def give_back(self, array: Array) -> None:
        """Takes back what `take` gave, whose contents nobody wants any more; it goes where there is no room for it."""
        num_there = len(self._arrays) + (self._begun is not None)
        if array.shape == self._shape and num_there < self._most:
            self._arrays.append(array)
