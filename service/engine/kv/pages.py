"""Arrays in memory mappings of their own, which can be returned to the system whole or in part.

The C library often keeps freed memory, and NumPy allocates large arrays in huge pages, where one token would cost a row
of K/V as much as a full context. Linux only; elsewhere these are ordinary arrays, and `release` does nothing.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Linux's own number: `mmap` has no name for it. Untouched pages do not count as committed memory.
_MAP_NORESERVE = 0x4000
# Smaller arrays use the C library: a process may have some 65,000 mappings.
_MIN_MAPPED_BYTES = 1 << 17


class Pages:
    """A zeroed `array`; untouched pages cost address space only. Unmapped once all views are gone.

    Args:
        shape: of the array.
        dtype: of the array.
        is_sparse: whether parts stay unwritten or are released: uses small pages. Huge pages are faulted in several
            times faster, 2 MB at a time.

    Raises:
        MemoryError: when the system refuses.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, *, is_sparse: bool) -> None:
        self._mapping = _map(int(np.prod(shape)) * np.dtype(dtype).itemsize, is_sparse=is_sparse)
        self.array: Array = (
            np.zeros(shape, dtype) if self._mapping is None else np.frombuffer(self._mapping, dtype).reshape(shape)
        )

    def release(self, part: Array) -> None:
        """Returns the whole pages under a contiguous view of `array` to the system; its contents are undefined then."""
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
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if is_sparse else 0)
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of memory: {error}") from error
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_NOHUGEPAGE if is_sparse else mmap.MADV_HUGEPAGE)
    return mapping
