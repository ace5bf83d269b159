"""CUDA's runtime library, on a double of it in host memory, and tensors on a device."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from service.engine.sessions import cuda_provider
from service.engine.sessions.cuda import CudaError, CudaRuntime, find_problem
from service.engine.sessions.device_memory import DevicePack, DeviceTensor, host_array
from service.errors import StartupError
from tests.cuda_double import HostLibrary


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> HostLibrary:
    fake = HostLibrary()
    runtime = CudaRuntime(fake)
    monkeypatch.setattr(cuda_provider, "runtime", lambda: runtime)
    return fake


def test_device_tensor_holds_what_was_written_and_frees_its_memory(library: HostLibrary) -> None:
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


def test_device_tensor_takes_the_bytes_of_its_elements(library: HostLibrary) -> None:
    runtime = CudaRuntime(library)
    before = runtime.free_bytes()
    tensors = [DeviceTensor([7, 5], dtype, "cuda") for dtype in ("bfloat16", "float16", "float32", "int64", "int32")]
    assert before - runtime.free_bytes() == 35 * (2 + 2 + 4 + 8 + 4)
    assert {tensor.address for tensor in tensors} == library.device.keys()


def test_device_tensor_beyond_the_devices_memory_is_refused_with_the_librarys_message(library: HostLibrary) -> None:
    with pytest.raises(StartupError, match=r"float32\[1048576\] on cuda: cudaMalloc: out of memory"):
        DeviceTensor([1 << 20], "float32", "cuda")
    assert library.num_cleared == 1, "the next call must not report it"


def test_device_tensor_refuses_other_shapes_and_reads_beyond_its_end() -> None:
    tensor = DeviceTensor([3], "int32", "cpu")
    with pytest.raises(ValueError, match=r"values have shape \[4\], the tensor has \[3\]"):
        tensor.write(np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="cannot copy 16 bytes at once, the tensor has 12"):
        tensor.read_into(np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="at once"):
        tensor.read_into(np.zeros((3, 2), np.int32)[:, 0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_device_pack_transfers_all_tensors_in_one_copy_each_way(device: str, library: HostLibrary) -> None:
    specs = {"a": ((3,), "int64"), "b": ((2, 5), "int32"), "c": ((4,), "float32")}
    pack = DevicePack(specs, device)
    for name, (shape, dtype) in specs.items():
        assert (pack.arrays[name].shape, pack.arrays[name].dtype) == (shape, dtype)
        assert (pack.views[name].shape, pack.views[name].dtype, pack.views[name].device) == (shape, dtype, device)
        pack.arrays[name][...] = np.arange(np.prod(shape)).reshape(shape) + len(name)
    addresses = [view.address for view in pack.views.values()]
    assert [address - addresses[0] for address in addresses] == [0, 256, 512], "nothing lies over another"
    sent = {name: array.copy() for name, array in pack.arrays.items()}
    pack.write()
    for name, view in pack.views.items():
        there = np.frombuffer(ctypes.string_at(view.address, sent[name].nbytes), view.dtype).reshape(view.shape)
        np.testing.assert_array_equal(there, sent[name])
        pack.arrays[name].fill(0)
    pack.read()
    for name, array in pack.arrays.items():
        np.testing.assert_array_equal(array, sent[name])
    if device == "cuda":
        assert library.copies == [(1, 768), (2, 768)]
        assert len(library.device) == len(library.pinned) == 1


def test_pinned_memory_lives_as_long_as_its_views(library: HostLibrary) -> None:
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
    ("error", "problem"),
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
def test_a_missing_library_is_named_with_its_source(error: str, problem: str) -> None:
    asked: list[str] = []

    def runtime() -> CudaRuntime:
        asked.append("devices")
        return CudaRuntime(HostLibrary())

    assert find_problem(Path("/ort"), runtime, loading({PROVIDER: error})) == problem
    assert not asked


def test_a_missing_device_is_reported() -> None:
    fake = HostLibrary()
    fake.cudaGetDeviceCount = lambda count: 100  # type: ignore[method-assign]
    problem = find_problem(Path("/ort"), lambda: CudaRuntime(fake), loading({}))
    assert problem == "cudaGetDeviceCount: no CUDA-capable device is detected"


def test_libraries_are_loaded_in_the_order_of_their_dependencies() -> None:
    loaded: list[Path] = []
    assert find_problem(Path("/ort"), lambda: CudaRuntime(HostLibrary()), loaded.append) is None
    assert loaded == [Path("/ort/libonnxruntime_providers_shared.so"), Path("/ort") / PROVIDER]


def test_a_missing_runtime_library_is_named() -> None:
    from service.engine.sessions.cuda import cuda_runtime

    with pytest.raises(CudaError, match=r"libcudart\.so\.7 is missing: the extra `gpu` brings"):
        cuda_runtime("7.5")


def test_a_failed_run_loses_the_device_only_if_it_does_not_answer(library: HostLibrary) -> None:
    cause = RuntimeError("CUDA failure")
    for device in ("cpu", "cuda"):
        cuda_provider.require_alive(device, cause)
    library.health = 700
    cuda_provider.require_alive("cpu", cause)
    with pytest.raises(cuda_provider.DeviceLost, match=r"illegal memory access .* it failed with: CUDA failure"):
        cuda_provider.require_alive("cuda", cause)
