"""Arrays in memory of their own, which goes back to the system when nobody wants it, whole or in part.

What the C library hands out stays with the process as often as not, and NumPy asks for its large arrays in huge pages,
of which one is taken whole for the first byte in it: a row of K/V with one token would cost what a full one does. Knows
Linux; elsewhere these are ordinary arrays, and nothing goes back before its time.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Smaller arrays are the C library's: a process may have some 65,000 mappings, and no more.
_MIN_MAPPED_BYTES = 1 << 17


class Pages:
    """Zeros, as `array`; untouched they cost address space only. The memory goes back once all views are gone.

    Args:
        shape: of the array.
        dtype: of the array.
        is_sparse: whether only parts will be written, or given back: memory comes in small pages then. In huge ones
            it comes several times faster, but not less than 2 MB at a time.

    Raises:
        MemoryError: when the system refuses.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, *, is_sparse: bool) -> None:
        self._mapping = _map(int(np.prod(shape)) * np.dtype(dtype).itemsize, is_sparse=is_sparse)
        self.array: Array = (
            np.zeros(shape, dtype) if self._mapping is None else np.frombuffer(self._mapping, dtype).reshape(shape)
        )

    def release(self, part: Array) -> None:
        """Gives back the whole pages under a contiguous view of `array`, whose contents are undefined afterwards."""
        if self._mapping is None or sys.platform != "linux":
            return
        address = part.ctypes.data - self.array.ctypes.data
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (address + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _map(num_bytes: int, *, is_sparse: bool) -> mmap.mmap | None:
    if sys.platform != "linux" or num_bytes < _MIN_MAPPED_BYTES:
        return None
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of memory: {error}") from error
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_NOHUGEPAGE if is_sparse else mmap.MADV_HUGEPAGE)
    return mapping
