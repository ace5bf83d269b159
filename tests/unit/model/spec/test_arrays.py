"""Archives of arrays: nothing of one is unpacked before its size is known to be the right one."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.spec.arrays import MAX_MEMBERS, ArrayFile
from model.spec.reading import UnfitFile, open_regular, read_bytes

MOST = 1 << 20


def header(shape: tuple[int, ...], descr: str = "<i8") -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def write(path: Path, method: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_come_back_as_they_were_saved(tmp_path: Path, save: Callable[..., None]) -> None:
    ids, matrix = np.arange(5), np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    save(tmp_path / "a.npz", ids=ids, matrix=matrix, empty=np.empty(0, np.int64), index=np.frombuffer(b"[1]", np.uint8))
    with ArrayFile(tmp_path / "a.npz", MOST) as arrays:
        assert arrays.shape("matrix", np.floating, 2) == (2, 3)
        assert arrays.read("matrix", np.floating, 2).tolist() == matrix.tolist()
        assert arrays.read("ids", np.integer, 1).tolist() == ids.tolist()
        assert arrays.read("empty", np.integer, 1).shape == (0,)
        assert arrays.read_index() == [1]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (header((1 << 40,)) + bytes(8), "header says"),
        (header((1,)) + bytes(1 << 16), "header says"),
        (header((0,)) + bytes(8), "header says"),
        (header((-1,)) + bytes(8), "header says|shape"),
        (header((1 << 62, 1 << 62)), "2 axes|must be integer with 1 axes"),
        (header((1,), "|O") + bytes(8), "is object"),
        (header((1,), "<f8") + bytes(8), "is float64"),
        (b"\x93NUMPY\x09\x00" + bytes(64), "format|magic"),
        (b"", "EOF|magic|reading"),
    ],
)
def test_an_array_that_is_not_what_its_header_says_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    with (
        ArrayFile(write(tmp_path / "a.npz", array=data), MOST) as arrays,
        pytest.raises(ValueError, match=problem),
    ):
        arrays.read("array", np.integer, 1)


def test_an_archive_that_unpacks_to_too_much_is_refused_unopened(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"unpacks to {MOST + 1} bytes"):
        ArrayFile(write(tmp_path / "a.npz", array=bytes(MOST + 1)), MOST)


def test_sizes_in_the_directory_that_are_lies_unpack_no_more_than_they_claim(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", array=header((1,)) + bytes(MOST))
    data = bytearray(path.read_bytes())
    place = data.index(b"PK\x01\x02") + 24
    data[place : place + 4] = struct.pack("<L", len(header((1,))) + 8)
    path.write_bytes(data)
    with ArrayFile(path, MOST) as arrays, pytest.raises(zipfile.BadZipFile, match="CRC"):
        arrays.read("array", np.integer, 1)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_ways_of_packing_are_refused(tmp_path: Path, method: int) -> None:
    with pytest.raises(ValueError, match="neither stored nor deflated"):
        ArrayFile(write(tmp_path / "a.npz", method, array=header((0,))), MOST)


def _many(path: Path) -> None:
    write(path, zipfile.ZIP_STORED, **{f"{number}": b"" for number in range(MAX_MEMBERS + 1)})


def _long_directory(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(64):
            archive.writestr(f"{number}".zfill(60_000), b"")


def _with_comment(path: Path) -> None:
    with zipfile.ZipFile(write(path, array=b""), "a") as archive:
        archive.comment = b"PK"


def _of_64_bits(path: Path) -> None:
    whole = write(path, array=b"").read_bytes()
    end = len(whole) - 22
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, end, 0)
    path.write_bytes(whole[:end] + record + struct.pack("<4sLQL", b"PK\6\7", 0, end, 1) + whole[end:])


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (_many, f"has {MAX_MEMBERS + 1} members|directory of"),
        (_long_directory, "directory of"),
        (_with_comment, "no archive"),
        (_of_64_bits, "no archive"),
        (lambda path: path.write_bytes(b"PK"), "no archive"),
    ],
)
def test_a_directory_that_is_too_long_or_elsewhere_is_not_read(
    tmp_path: Path, spoil: Callable[[Path], Any], problem: str
) -> None:
    spoil(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=problem):
        ArrayFile(tmp_path / "a.npz", 16 * MOST)


def test_no_descriptor_stays_open_after_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"none")
    before = set(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        with pytest.raises(ValueError, match="no archive"):
            ArrayFile(tmp_path / "a.npz", MOST)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_pipe_that_takes_the_place_of_a_file_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, stat = tmp_path / "file", Path.stat
    file.write_bytes(b"regular")

    def stat_and_replace(path: Path, **given: Any) -> os.stat_result:
        found = stat(path, **given)
        if path == file:
            file.unlink()
            os.mkfifo(file)
        return found

    monkeypatch.setattr(Path, "stat", stat_and_replace)
    with pytest.raises(UnfitFile, match="is a pipe, must be a regular file"):
        open_regular(file)


def test_a_file_is_read_whole_up_to_its_limit_and_not_beyond(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    assert read_bytes(tmp_path / "file", 4) == b"1234"
    with pytest.raises(UnfitFile, match="has 4 bytes, must have at most 3"):
        read_bytes(tmp_path / "file", 3)
