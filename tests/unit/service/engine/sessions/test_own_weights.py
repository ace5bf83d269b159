"""Weights in memory of one's own: what a graph reads of a file, once it has run, is not the file's any more."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from model.onnx_weights import external_tensors
from service.engine.sessions.own_weights import OwnWeights
from service.errors import StartupError

PAGE = mmap.PAGESIZE
LARGE = 64 * PAGE  # bytes
NAMES = ("read", "copied", "small")


def put(folder: Path, data: str = "w.data") -> Path:
    """A graph with three tensors in a file, the last of a few bytes."""
    sizes = (LARGE // 4, LARGE // 4, 3)
    numbers = np.arange(sum(sizes), dtype=np.float32)
    (folder / "w.data").write_bytes(numbers.tobytes())
    offset, initializers = 0, []
    for name, size in zip(NAMES, sizes, strict=True):
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[size], data_location=TensorProto.EXTERNAL)
        for key, value in (("location", data), ("offset", str(offset)), ("length", str(4 * size))):
            tensor.external_data.add(key=key, value=value)
        initializers.append(tensor)
        offset += 4 * size
    inline = helper.make_tensor("inline", TensorProto.FLOAT, [1], [1.0])
    graph = helper.make_graph([], "g", [], [], [*initializers, inline])
    onnx.save(helper.make_model(graph), folder / "g.onnx")
    return folder / "g.onnx"


def place_of(weights: OwnWeights, name: str) -> str:
    """The file that an array lies in; empty where it lies in memory of the process."""
    place = weights.arrays[name].ctypes.data + PAGE
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= place < int(end, 16):
            return (*line.split(maxsplit=5), "")[5]
    raise AssertionError(name)


def resident(weights: OwnWeights, name: str) -> bool:
    """Whether an array lies in memory of the process, and not in a file."""
    return not place_of(weights, name)


COPIED = pytest.mark.parametrize("is_copied", [False, True], ids=["mapped", "copied"])


@COPIED
def test_what_was_read_is_the_process_own_and_the_rest_stays_in_the_file(tmp_path: Path, *, is_copied: bool) -> None:
    weights = OwnWeights(put(tmp_path), is_copied=is_copied)
    expected = {name: array.copy() for name, array in weights.arrays.items()}
    weights.forget()
    _ = weights.arrays["read"][LARGE // 8]
    weights.own()
    assert resident(weights, "read")
    assert place_of(weights, "copied") == str(tmp_path / "w.data")
    assert {name: array.tolist() for name, array in weights.arrays.items()} == {
        name: array.tolist() for name, array in expected.items()
    }
    (tmp_path / "w.data").write_bytes(b"")
    for name in ("read", "small"):
        assert weights.arrays[name].tolist() == expected[name].tolist()


def test_a_second_time_copies_nothing(tmp_path: Path) -> None:
    weights = OwnWeights(put(tmp_path))
    weights.forget()
    weights.own()
    (tmp_path / "w.data").write_bytes(b"")
    weights.own()


@COPIED
@pytest.mark.parametrize("data", [b"", b"x" * (2 * LARGE + 12)])
def test_a_file_that_changed_before_it_was_copied_is_refused(tmp_path: Path, data: bytes, *, is_copied: bool) -> None:
    weights = OwnWeights(put(tmp_path), is_copied=is_copied)
    weights.forget()
    (tmp_path / "w.data").write_bytes(data)
    with pytest.raises(StartupError, match="has changed while it was loaded"):
        weights.own()


_READ_AFTER_TRUNCATION = """
import os, pathlib, sys
from service.engine.sessions.own_weights import OwnWeights
from service.errors import StartupError
path = pathlib.Path(sys.argv[1])
kept = path.with_name("w.data").read_bytes()
weights = OwnWeights(path, is_copied=True)
os.truncate(path.with_name("w.data"), 0)
for _ in range(2):
    assert b"".join(array.tobytes() for array in weights.arrays.values()) == kept
    weights.forget()
try:
    weights.own()
except StartupError as error:
    sys.exit(str(error))
"""


def test_a_copy_is_read_after_its_file_was_truncated(tmp_path: Path) -> None:
    # In a process that may die of it.
    command = [sys.executable, "-c", _READ_AFTER_TRUNCATION, str(put(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert done.stderr.strip().endswith("w.data has changed while it was loaded")


def test_the_memory_of_a_copy_is_given_back_once_what_was_read_is_the_process_own(tmp_path: Path) -> None:
    weights = OwnWeights(put(tmp_path), is_copied=True)
    (file,) = weights._files.values()
    memory = os.dup(file._source.fileno())
    try:
        assert os.fstat(memory).st_size == (tmp_path / "w.data").stat().st_size
        weights.own()
        assert os.fstat(memory).st_size == 0
    finally:
        os.close(memory)


def test_a_file_that_is_truncated_while_it_is_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, send = put(tmp_path), os.sendfile

    def cut(*given: int) -> int:
        os.truncate(tmp_path / "w.data", LARGE)
        return send(*given)

    monkeypatch.setattr(os, "sendfile", cut)
    with pytest.raises(StartupError, match="has changed while it was loaded"):
        OwnWeights(path, is_copied=True)


def test_a_file_that_is_shorter_than_the_graph_says_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path)
    (tmp_path / "w.data").write_bytes(b"1234")
    with pytest.raises(StartupError, match="buffer"):
        OwnWeights(path)


def test_weights_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "w.data").write_bytes(bytes(2 * LARGE + 12))
    with pytest.raises(StartupError, match="leaves the artifact's folder"):
        OwnWeights(put(tmp_path / "inner", "../w.data"))


def test_places_of_weights_are_those_that_onnx_reads(tmp_path: Path) -> None:
    found = external_tensors(put(tmp_path).read_bytes())
    assert [(each.name, each.data_type, each.shape, each.file, each.offset) for each in found] == [
        ("read", 1, (LARGE // 4,), "w.data", 0),
        ("copied", 1, (LARGE // 4,), "w.data", LARGE),
        ("small", 1, (3,), "w.data", 2 * LARGE),
    ]


@pytest.mark.parametrize(
    "data", [b"\x3a", b"\x3a\x05ab", b"\xff" * 12, b"\x38\x01", b"\x3b", b"garbage", b"\x3a\x02\x2a\x09"]
)
def test_bytes_that_are_no_graph_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        external_tensors(data)


def test_any_cut_of_a_graph_is_read_or_refused(tmp_path: Path) -> None:
    whole = put(tmp_path).read_bytes()
    for end in range(len(whole)):
        try:
            found = external_tensors(whole[:end])
        except ValueError:
            continue
        assert len(found) <= len(NAMES)
