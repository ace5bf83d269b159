"""Arrays in memory of their own, which goes back to the system when nobody wants it, whole or in part.

What the C library hands out stays with the process as often as not, and NumPy asks for its large arrays in huge pages,
of which one is taken whole for the first byte in it. Here memory is mapped by the page, so that what is touched is what
is paid for. Knows Linux; elsewhere these are ordinary arrays, and nothing goes back before its time.
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
    """Zeros, as `array`; untouched they cost address space only.

    The memory goes back once `array` and all its views are gone.

    Raises:
        OSError: when there is no room.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._mapping = _map(int(np.prod(shape)) * np.dtype(dtype).itemsize)
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


def _map(num_bytes: int) -> mmap.mmap | None:
    if sys.platform != "linux" or num_bytes < _MIN_MAPPED_BYTES:
        return None
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping
