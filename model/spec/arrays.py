"""Writes .npz files, and reads untrusted ones: checks sizes before unpacking, and never unpickles.

An archive of a few kilobytes can unpack to terabytes, and a header can claim a shape that its data do not have. So the
directory, every member's size and every array's header are checked first.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from model.spec.reading import check_size, open_regular

MAX_MEMBERS = 1 << 13
MAX_INDEX_BYTES = 4 << 20
_MAX_ENTRY_BYTES = 256  # a member's entry in the directory: 46, its name, and sizes of 64 bits
_MAX_HEADER_BYTES = 1 << 12
# The end record of an archive without a comment: signature, disks, members, the directory's size and place. A 64-bit
# archive has a locator before it.
_END = struct.Struct("<4s4H2LH")
_END_SIGNATURE, _LOCATOR_SIGNATURE = b"PK\5\6", b"PK\6\7"
_LOCATOR_BYTES = 20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def save_arrays(path: Path, arrays: Mapping[str, npt.NDArray[np.generic]], index: Any, **others: Any) -> None:
    """Writes arrays, the JSON `index` and JSON of other names, nothing pickled."""
    texts = {name: json.dumps(value).encode() for name, value in {"index": index, **others}.items()}
    encoded = {name: np.frombuffer(text, dtype=np.uint8) for name, text in texts.items()}
    with path.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **encoded, **arrays)


class ArrayFile:
    """An open .npz file, a context manager; `max_bytes` limits its packed and its unpacked size.

    Raises:
        ValueError: when it is no such archive, or too large.
        OSError: when it cannot be read.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._stream = open_regular(path)
        try:
            check_size(os.fstat(self._stream.fileno()).st_size, max_bytes)
            _check_directory(self._stream)
            self._archive = zipfile.ZipFile(self._stream)
            members = self._archive.infolist()
            if len(members) > MAX_MEMBERS:
                raise ValueError(f"has {len(members)} members, must have at most {MAX_MEMBERS}")
            if any(member.compress_type not in _METHODS for member in members):
                raise ValueError("a member is neither stored nor deflated")
            if (unpacked := sum(member.file_size for member in members)) > max_bytes:
                raise ValueError(f"unpacks to {unpacked} bytes, must be at most {max_bytes}")
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._archive.close()
        self._stream.close()

    def shape(self, name: str, kind: Any, num_axes: int) -> tuple[int, ...]:
        """The shape of the array `name`, read from its header.

        Raises:
            KeyError: when there is none.
            ValueError: when its type is not of `kind` (as in `np.integer`), it has not `num_axes` axes, or its data's
                length contradicts its header.
        """
        member = self._archive.getinfo(f"{name}.npy")
        with self._archive.open(member) as stream:
            shape, dtype = _read_header(stream)
            if not np.issubdtype(dtype, kind) or len(shape) != num_axes:
                raise ValueError(f"{name} is {dtype}{list(shape)}, must be {kind.__name__} with {num_axes} axes")
            num_bytes = stream.tell() + dtype.itemsize * math.prod(shape)
            if member.file_size != num_bytes:
                raise ValueError(f"{name} has {member.file_size} bytes, its header says {num_bytes}")
        return shape

    def read(self, name: str, kind: Any, num_axes: int) -> npt.NDArray[Any]:
        """Unpacks an array; arguments and errors as in `shape`."""
        self.shape(name, kind, num_axes)
        with self._archive.open(f"{name}.npy") as stream:
            array: npt.NDArray[Any] = npy.read_array(stream, allow_pickle=False)
        return array

    def __contains__(self, name: str) -> bool:
        return f"{name}.npy" in self._archive.NameToInfo

    def read_index(self) -> Any:
        """The JSON in the byte array "index", which describes the other arrays; errors as in `read_json`."""
        return self.read_json("index")

    def read_json(self, name: str) -> Any:
        """The JSON in a byte array.

        Raises:
            KeyError: when there is none.
            ValueError: when it is no JSON, or larger than `MAX_INDEX_BYTES`.
        """
        (num_bytes,) = self.shape(name, np.uint8, 1)
        check_size(num_bytes, MAX_INDEX_BYTES)
        return json.loads(self.read(name, np.uint8, 1).tobytes())


def _check_directory(stream: BinaryIO) -> None:
    """Refuses a directory with too many members: `zipfile` makes an object of each."""
    num_bytes = os.fstat(stream.fileno()).st_size
    stream.seek(max(0, num_bytes - _END.size - _LOCATOR_BYTES))
    tail = stream.read()
    end = tail[-_END.size :]
    if len(end) < _END.size or not end.startswith(_END_SIGNATURE) or tail.startswith(_LOCATOR_SIGNATURE):
        raise ValueError("is no archive, or one with a comment or of 64 bits")
    if (directory_bytes := _END.unpack(end)[5]) > MAX_MEMBERS * _MAX_ENTRY_BYTES:
        raise ValueError(
            f"has a directory of {directory_bytes} bytes, must be at most {MAX_MEMBERS * _MAX_ENTRY_BYTES}"
        )


def _read_header(stream: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array; leaves the stream at its data."""
    version = npy.read_magic(stream)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"an array is of format {version}")
    shape, _, dtype = read(stream, max_header_size=_MAX_HEADER_BYTES)
    return shape, dtype
