"""Weights that no longer depend on their files once a model runs.

ONNX Runtime by itself maps weights from their file for the model's life: writing to the file changes the model, and
truncating it ends the process with SIGBUS. Here the mapping is ours. While a graph is loaded, most weights are
prepacked into other memory; after its first run, `own` copies in place what was still read from the mapping. A run
executes every node, so weights that the first run did not read are never read: they stay mapped and cost no memory.

Before `own`, truncating would still end the process. A process that serves therefore reads the file into memory first,
and loads and proves the graph from that copy (`is_copied`), which takes the file's size until `own` frees it.

Linux only; elsewhere weights stay mapped.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from model.onnx_weights import ExternalTensor, external_tensors
from model.spec.artifact import MAX_OTHER_BYTES
from model.spec.reading import open_regular, read_bytes
from service.errors import StartupError

BFLOAT16_BITS = np.uint16
"""The type of arrays in bfloat16, which NumPy lacks; no other weights have it."""
_DTYPES: Mapping[int, Any] = {
    1: np.float32,
    2: np.uint8,
    3: np.int8,
    6: np.int32,
    7: np.int64,
    10: np.float16,
    16: BFLOAT16_BITS,
}
# Smaller tensors share pages with others, and are always copied.
_SMALL_BYTES = 1 << 16
_STEP_BYTES = 1 << 24
_IS_LINUX = sys.platform == "linux"
_PRESENT = np.uint64(1 << 63)


class OwnWeights:
    """The weights of one graph.

    Args:
        path: the graph.
        is_copied: copies files before reading them, for a process that serves.

    Attributes:
        arrays: mapped weights by name; those in bfloat16 as `BFLOAT16_BITS`.

    Raises:
        StartupError: when a file cannot be read, is shorter than the graph says, or changes while it is copied.
    """

    def __init__(self, path: Path, *, is_copied: bool = False) -> None:
        self._is_copied = is_copied and _IS_LINUX
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self._files: dict[str, _MappedFile] = {}
        try:
            for tensor in external_tensors(read_bytes(path, MAX_OTHER_BYTES)):
                if tensor.data_type in _DTYPES:
                    self.arrays[tensor.name] = self._file(path.parent, tensor.file).add(tensor)
        except (OSError, ValueError) as error:
            raise StartupError([f"{path}: {error}"]) from error

    def forget(self) -> None:
        """Resets which pages count as read; after loading, which has prepacked its share."""
        for file in self._files.values():
            file.forget()

    def own(self) -> None:
        """Copies weights that were read since `forget`; before another thread runs the graph, and only once.

        Raises:
            StartupError: when a file has changed since it was opened.
        """
        for file in self._files.values():
            file.own()

    def _file(self, folder: Path, name: str) -> _MappedFile:
        if name not in self._files:
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"weights are in {name}, which leaves the artifact's folder")
            self._files[name] = _MappedFile(path, is_copied=self._is_copied)
        return self._files[name]


class _MappedFile:
    """A private mapping of a file, or of a copy of it in memory that no other process can truncate."""

    def __init__(self, path: Path, *, is_copied: bool) -> None:
        self._path = path
        self._stream = open_regular(path)
        weakref.finalize(self, self._stream.close)
        self._state = self._look()
        self._source = self._copy_whole() if is_copied else self._stream
        weakref.finalize(self, self._source.close)
        self._map = mmap.mmap(self._source.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._ranges: list[tuple[int, int]] = []

    def add(self, tensor: ExternalTensor) -> npt.NDArray[Any]:
        dtype, count = _DTYPES[tensor.data_type], math.prod(tensor.shape)
        array = np.frombuffer(self._map, dtype, count, tensor.offset) if count else np.empty(0, dtype)
        begin, end = tensor.offset, tensor.offset + array.nbytes
        self._ranges.append((begin, end))
        if end - begin > _SMALL_BYTES and _IS_LINUX:
            # The kernel faults in neighboring pages, but not across mappings with other flags: so reading a neighbor
            # does not count for this tensor. Weights are of no use in a core dump either.
            first, last = _inner_pages(begin, end)
            self._map.madvise(mmap.MADV_DONTDUMP, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
        return array.reshape(tensor.shape)

    def forget(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def own(self) -> None:
        if self._stream.closed or not _IS_LINUX:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        present = _present_pages(address, len(self._map))
        rest = 0
        for begin, end in _joined(self._read_ranges(present)):
            self._map_file(address, rest, begin)
            self._copy(address, begin, end)
            rest = end
        self._map_file(address, rest, len(self._map))
        if self._look() != self._state:
            raise self._change()
        if self._source is not self._stream:
            os.ftruncate(self._source.fileno(), 0)  # no longer mapped, but the mapping keeps it open
            self._source.close()
        self._stream.close()

    def _read_ranges(self, present: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
        """Ranges of tensors that are small or were read, in whole pages."""
        for begin, end in self._ranges:
            first, last = _inner_pages(begin, end)
            if end - begin <= _SMALL_BYTES or present[first:last].any():
                yield (first - 1) * mmap.PAGESIZE, (last + 1) * mmap.PAGESIZE

    def _copy(self, address: int, begin: int, end: int) -> None:
        """Replaces a part of the mapping by private memory with the same contents."""
        self._place(address, begin, end, mmap.MAP_ANONYMOUS, -1)
        view = memoryview(self._map)
        for place in range(begin, min(end, len(view)), _STEP_BYTES):
            piece = view[place : min(end, place + _STEP_BYTES)]
            if os.preadv(self._source.fileno(), [piece], place) != len(piece):
                raise self._change()

    def _map_file(self, address: int, begin: int, end: int) -> None:
        """Maps a part that no run reads from the file instead of the copy."""
        if self._source is not self._stream and begin < end:
            self._place(address, begin, end, 0, self._stream.fileno())

    def _place(self, address: int, begin: int, end: int, flags: int, descriptor: int) -> None:
        """Replaces whole pages: by the file from `begin` on, or by empty memory."""
        flags |= mmap.MAP_PRIVATE | _MAP_FIXED
        offset = 0 if descriptor < 0 else begin
        place, num_bytes = address + begin, end - begin
        if _mmap(place, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset) != place:
            raise StartupError([f"{self._path}: no memory for {num_bytes} bytes of weights"])

    def _copy_whole(self) -> BinaryIO:
        """A copy of the file in memory, by reading: truncating the file meanwhile raises an error.

        The file itself where RLIMIT_FSIZE forbids the copy, as Linux counts files in memory, too.
        """
        memory = os.fdopen(os.memfd_create("weights"), "w+b", buffering=0)
        num_bytes, done = self._state[0], 0
        try:
            while done < num_bytes:
                count = os.sendfile(memory.fileno(), self._stream.fileno(), done, min(num_bytes - done, _STEP_BYTES))
                if not count:
                    raise self._change()
                done += count
        except BaseException as error:
            memory.close()
            if isinstance(error, OSError) and error.errno == errno.EFBIG:
                return self._stream
            raise
        return memory

    def _change(self) -> StartupError:
        return StartupError([f"{self._path} has changed while it was loaded"])

    def _look(self) -> tuple[int, int]:
        status = os.fstat(self._stream.fileno())
        return status.st_size, status.st_mtime_ns


_MAP_FIXED = 0x10
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]


def _inner_pages(begin: int, end: int) -> tuple[int, int]:
    """The pages of a tensor without the first and the last, which others may share."""
    return begin // mmap.PAGESIZE + 1, -(-end // mmap.PAGESIZE) - 1


def _present_pages(address: int, num_bytes: int) -> npt.NDArray[np.bool_]:
    """Which pages of a mapping this process has read; all if the system does not say."""
    first, count = address // mmap.PAGESIZE, -(-num_bytes // mmap.PAGESIZE)
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
            entries = np.frombuffer(os.pread(pages.fileno(), 8 * count, 8 * first), np.uint64)
    except OSError:
        entries = np.empty(0, np.uint64)
    return (entries & _PRESENT) != 0 if len(entries) == count else np.ones(count, np.bool_)


def _joined(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges, merged where they touch."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
