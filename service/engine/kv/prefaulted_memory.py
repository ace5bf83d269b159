"""Pre-faulted memory for copies of K/V: arrays whose pages are touched while the engine is idle.

Every whole chunk of a prompt is copied to the prefix cache. Touching new memory takes the system 0.1 ms/MB, and 2 ms/MB
and more in a virtual machine whose host has to find it: up to a tenth of the chunk's computing time. Arrays of dropped
copies are reused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from service.engine.kv.pages import Pages

Array = npt.NDArray[Any]

# Touched per call: a request that arrives meanwhile waits for it.
_STEP_BYTES = 4 << 20


class PrefaultedMemory:
    """A pool of touched arrays of one shape.

    Args:
        shape: of an array.
        dtype: of its elements.
        num_bytes: the most that the pool holds; less than one array is none.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, num_bytes: int) -> None:
        self._shape = shape
        self._dtype = np.dtype(dtype)
        size = math.prod(shape) * self._dtype.itemsize
        self._max_arrays = num_bytes // size if size else 0
        self._arrays: list[Array] = []
        # The array in progress, and how many of its elements are touched.
        self._begun: Array | None = None
        self._num_touched = 0

    @property
    def num_bytes(self) -> int:
        """Bytes in the pool, the array in progress included."""
        return sum(array.nbytes for array in self._arrays) + (0 if self._begun is None else self._begun.nbytes)

    def prefault(self) -> bool:
        """Touches a few megabytes; returns whether there is more to touch.

        Raises:
            MemoryError: when the system refuses.
        """
        if self._begun is None:
            if len(self._arrays) >= self._max_arrays:
                return False
            self._begun, self._num_touched = Pages(self._shape, self._dtype, is_sparse=False).array, 0
        elements = self._begun.reshape(-1)
        end = self._num_touched + _STEP_BYTES // self._dtype.itemsize
        elements[self._num_touched : end] = 0
        self._num_touched = end
        if end < len(elements):
            return True
        self._arrays.append(self._begun)
        self._begun = None
        return len(self._arrays) < self._max_arrays

    def take(self, shape: tuple[int, ...]) -> Array:
        """An array with undefined contents: from the pool if it has one of this shape, else newly allocated.

        Raises:
            MemoryError: when the system refuses.
        """
        if shape == self._shape and self._arrays:
            return self._arrays.pop()
        return Pages(shape, self._dtype, is_sparse=False).array

    def give_back(self, array: Array) -> None:
        """Returns an array of `take` to the pool if it has room, else to the system."""
        num_arrays = len(self._arrays) + (self._begun is not None)
        if array.shape == self._shape and num_arrays < self._max_arrays:
            self._arrays.append(array)
