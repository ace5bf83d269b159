"""CUDA's runtime library through a fake of it, which keeps the device's memory on this host and remembers who has what.

What the real one does is for a machine that has it.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.engine.sessions import cuda_provider
from service.engine.sessions.cuda import CudaError, CudaRuntime, find_problem
from service.engine.sessions.device_memory import DevicePack, DeviceTensor, host_array
from service.errors import StartupError


class FakeLibrary:
    """`libcudart` as far as it is used: every call takes what C would take."""

    def __init__(self, num_bytes: int = 1 << 20) -> None:
        self.num_bytes = num_bytes
        self.device: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.copies: list[tuple[int, int]] = []
        self.num_cleared = 0

        def describe(code: int) -> bytes:
            return {2: b"out of memory", 100: b"no CUDA-capable device is detected"}[code]

        self.cudaGetErrorString: Callable[[int], bytes] = _with_restype(describe)

    def cudaGetDeviceCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.num_cleared += 1
        return 0

    def cudaMemGetInfo(self, free: Any, total: Any) -> int:  # noqa: N802
        free._obj.value = self.num_bytes - sum(map(len, self.device.values()))
        total._obj.value = self.num_bytes
        return 0

    def cudaMalloc(self, address: Any, num_bytes: ctypes.c_size_t) -> int:  # noqa: N802
        if num_bytes.value + sum(map(len, self.device.values())) > self.num_bytes:
            return 2
        address._obj.value = _take(self.device, num_bytes.value)
        return 0

    def cudaMallocHost(self, address: Any, num_bytes: ctypes.c_size_t) -> int:  # noqa: N802
        address._obj.value = _take(self.pinned, num_bytes.value)
        return 0

    def cudaFree(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        del self.device[address.value or 0]
        return 0

    def cudaFreeHost(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        del self.pinned[address.value or 0]
        return 0

    def cudaMemcpy(  # noqa: N802
        self, target: ctypes.c_void_p, source: ctypes.c_void_p, num_bytes: ctypes.c_size_t, kind: ctypes.c_int
    ) -> int:
        on_device, on_host = (target, source) if kind.value == 1 else (source, target)
        assert kind.value in (1, 2)
        assert on_device.value in self.device
        assert on_host.value not in self.device
        assert num_bytes.value <= len(self.device[on_device.value])
        ctypes.memmove(target, source, num_bytes.value)
        self.copies.append((kind.value, num_bytes.value))
        return 0


def _with_restype(function: Callable[[int], bytes]) -> Callable[[int], bytes]:
    class Function:
        restype: Any = None

        def __call__(self, code: int) -> bytes:
            return function(code)

    return Function()


def _take(memory: dict[int, Any], num_bytes: int) -> int:
    block = (ctypes.c_char * num_bytes)()
    address = ctypes.addressof(block)
    memory[address] = block
    return address


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    runtime = CudaRuntime(fake)
    monkeypatch.setattr(cuda_provider, "runtime", lambda: runtime)
    return fake


def test_a_tensor_on_the_device_holds_what_was_written_until_it_is_gone(library: FakeLibrary) -> None:
    tensor = DeviceTensor([3, 4], "float32", "cuda")
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor.write(values)
    assert tensor.address in library.device
    np.testing.assert_array_equal(tensor.read(), values)
    first = np.zeros((2, 4), np.float32)
    tensor.read_into(first)
    np.testing.assert_array_equal(first, values[:2])
    assert library.copies == [(1, 48), (2, 48), (2, 32)]
    del tensor
    gc.collect()
    assert not library.device


def test_a_tensor_takes_what_its_numbers_take_and_no_more(library: FakeLibrary) -> None:
    runtime = CudaRuntime(library)
    before = runtime.free_bytes()
    tensors = [DeviceTensor([7, 5], dtype, "cuda") for dtype in ("bfloat16", "float16", "float32", "int64", "int32")]
    assert before - runtime.free_bytes() == 35 * (2 + 2 + 4 + 8 + 4)
    assert {tensor.address for tensor in tensors} == library.device.keys()


def test_memory_that_the_device_does_not_have_is_refused_with_the_librarys_words(library: FakeLibrary) -> None:
    with pytest.raises(StartupError, match=r"float32\[1048576\] on cuda: cudaMalloc: out of memory"):
        DeviceTensor([1 << 20], "float32", "cuda")
    assert library.num_cleared == 1, "whoever asks next must not find it"


def test_a_tensor_takes_no_other_shape_and_gives_no_more_than_it_has() -> None:
    tensor = DeviceTensor([3], "int32", "cpu")
    with pytest.raises(ValueError, match=r"values have shape \[4\], the tensor has \[3\]"):
        tensor.write(np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="cannot copy 16 bytes at once, the tensor has 12"):
        tensor.read_into(np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="at once"):
        tensor.read_into(np.zeros((3, 2), np.int32)[:, 0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_pack_moves_all_its_tensors_in_one_copy_each_way(device: str, library: FakeLibrary) -> None:
    specs = {"a": ((3,), "int64"), "b": ((2, 5), "int32"), "c": ((4,), "float32")}
    pack = DevicePack(specs, device)
    for name, (shape, dtype) in specs.items():
        assert (pack.arrays[name].shape, pack.arrays[name].dtype) == (shape, dtype)
        assert (pack.views[name].shape, pack.views[name].dtype, pack.views[name].device) == (shape, dtype, device)
        pack.arrays[name][...] = np.arange(np.prod(shape)).reshape(shape) + len(name)
    addresses = [view.address for view in pack.views.values()]
    assert [address - addresses[0] for address in addresses] == [0, 256, 512], "nothing lies over another"
    kept = {name: array.copy() for name, array in pack.arrays.items()}
    pack.write()
    for name, view in pack.views.items():
        there = np.frombuffer(ctypes.string_at(view.address, kept[name].nbytes), view.dtype).reshape(view.shape)
        np.testing.assert_array_equal(there, kept[name])
        pack.arrays[name].fill(0)
    pack.read()
    for name, array in pack.arrays.items():
        np.testing.assert_array_equal(array, kept[name])
    if device == "cuda":
        assert library.copies == [(1, 768), (2, 768)]
        assert len(library.device) == len(library.pinned) == 1


def test_pinned_memory_lives_as_long_as_any_view_of_it(library: FakeLibrary) -> None:
    array = host_array([5, 3], "float32", "cuda")
    assert array.ctypes.data in library.pinned
    array[...] = 2.5
    part = array[1:, 2]
    del array
    gc.collect()
    assert len(library.pinned) == 1
    assert part.tolist() == [2.5] * 4
    del part
    gc.collect()
    assert not library.pinned


# Why there is no device


def loading(problems: dict[str, str]) -> Callable[[Path], None]:
    def load(path: Path) -> None:
        if path.name in problems:
            raise OSError(problems[path.name])

    return load


PROVIDER = "libonnxruntime_providers_cuda.so"


@pytest.mark.parametrize(
    ("complaint", "told"),
    [
        (
            "libcudnn.so.9: cannot open shared object file: No such file or directory",
            "libcudnn.so.9 is missing: the extra `gpu` brings CUDA's libraries and cuDNN",
        ),
        (
            "libcuda.so.1: cannot open shared object file: No such file or directory",
            "libcuda.so.1 is missing: NVIDIA's driver brings it, and `docker run --gpus all` hands it to a container",
        ),
        ("/x/y.so: undefined symbol: cublasLtCreate", "/x/y.so: undefined symbol: cublasLtCreate"),
    ],
)
def test_a_library_that_is_missing_is_named_with_what_brings_it(complaint: str, told: str) -> None:
    asked: list[str] = []

    def runtime() -> CudaRuntime:
        asked.append("devices")
        return CudaRuntime(FakeLibrary())

    assert find_problem(Path("/ort"), runtime, loading({PROVIDER: complaint})) == told
    assert not asked


def test_a_machine_without_a_device_says_so() -> None:
    fake = FakeLibrary()
    fake.cudaGetDeviceCount = lambda count: 100  # type: ignore[method-assign]
    problem = find_problem(Path("/ort"), lambda: CudaRuntime(fake), loading({}))
    assert problem == "cudaGetDeviceCount: no CUDA-capable device is detected"


def test_libraries_are_loaded_in_the_order_in_which_they_need_each_other_and_then_nothing_is_wrong() -> None:
    loaded: list[Path] = []
    assert find_problem(Path("/ort"), lambda: CudaRuntime(FakeLibrary()), loaded.append) is None
    assert loaded == [Path("/ort/libonnxruntime_providers_shared.so"), Path("/ort") / PROVIDER]


def test_a_runtime_library_that_is_not_there_is_named() -> None:
    from service.engine.sessions.cuda import cuda_runtime

    with pytest.raises(CudaError, match=r"libcudart\.so\.7 is missing: the extra `gpu` brings"):
        cuda_runtime("7.5")
