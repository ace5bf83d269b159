"""CUDA's runtime library by ctypes: memory of the first device, and why there is none.

The inputs, outputs and K/V of ONNX Runtime's graphs are allocated here, so that every byte is accounted for. A copy has
ended when its call returns. Knows neither graphs nor ONNX Runtime.
"""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from service.errors import OnwardError

Bytes = npt.NDArray[np.uint8]

EXTRA = "gpu"
"""The extra with ONNX Runtime for CUDA, CUDA's libraries and cuDNN, without the driver."""
PROVIDER_LIBRARY = "libonnxruntime_providers_cuda.so"
"""ONNX Runtime's CUDA provider."""

_BRIDGE = "libonnxruntime_providers_shared.so"
_DRIVER = "libcuda.so.1"
_TO_DEVICE, _TO_HOST = 1, 2
_DEFAULT_STREAM = 0


class CudaError(OnwardError):
    """An error of the library, with its message."""


class CudaRuntime:
    """The first device, through `libcudart`. All methods raise CudaError when the library reports an error."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def count_devices(self) -> int:
        """Number of devices; raises CudaError when there are none, or no driver."""
        count = ctypes.c_int()
        self._call("cudaGetDeviceCount", ctypes.byref(count))
        return count.value

    def synchronize(self) -> None:
        """Waits for all work of the device; raises CudaError when it has failed, or is recording a CUDA graph."""
        self._call("cudaDeviceSynchronize")

    def free_bytes(self) -> int:
        """Free bytes of the device's memory."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, num_bytes: int) -> int:
        """Allocates device memory and returns its address."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value or 0

    def free(self, address: int) -> None:
        """Frees memory of `allocate`."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def write(self, address: int, values: npt.NDArray[Any]) -> None:
        """Copies a C-contiguous array to the device."""
        self._copy(address, values.ctypes.data, values.nbytes, _TO_DEVICE)
        # CUDA's pages disagree whether a copy of up to 64 KiB to the device may return before it has ended, and ONNX
        # Runtime's stream does not wait for the default one: a graph must not read what was there before.
        self._call("cudaStreamSynchronize", ctypes.c_void_p(_DEFAULT_STREAM))

    def read(self, address: int, values: npt.NDArray[Any]) -> None:
        """Fills a C-contiguous array from the device."""
        self._copy(values.ctypes.data, address, values.nbytes, _TO_HOST)

    def pinned(self, num_bytes: int) -> Bytes:
        """Pinned host memory, `[num_bytes]`, freed with its last view."""
        return np.asarray(_Pinned(self, num_bytes))

    def allocate_pinned(self, num_bytes: int) -> int:
        """Allocates pinned memory and returns its address; see `pinned`."""
        address = ctypes.c_void_p()
        self._call("cudaMallocHost", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value or 0

    def free_pinned(self, address: int) -> None:
        """Frees memory of `allocate_pinned`."""
        self._call("cudaFreeHost", ctypes.c_void_p(address))

    def _copy(self, target: int, source: int, num_bytes: int, kind: int) -> None:
        size = ctypes.c_size_t(num_bytes)
        self._call("cudaMemcpy", ctypes.c_void_p(target), ctypes.c_void_p(source), size, ctypes.c_int(kind))

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            # Clears the error, which the next call would report as its own.
            self._library.cudaGetLastError()
            raise CudaError(f"{name}: {self._library.cudaGetErrorString(code).decode()}")


class _Pinned:
    """Pinned memory as NumPy's array interface; arrays of it keep it alive."""

    def __init__(self, runtime: CudaRuntime, num_bytes: int) -> None:
        # NumPy refuses a null address.
        size = max(num_bytes, 1)
        address = runtime.allocate_pinned(size)
        self.__array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        weakref.finalize(self, runtime.free_pinned, address).atexit = False


def cuda_runtime(version: str) -> CudaRuntime:
    """CUDA's runtime library of a version such as "13.0".

    Raises:
        CudaError: when it cannot be loaded.
    """
    name = f"libcudart.so.{version.partition('.')[0]}"
    try:
        return CudaRuntime(ctypes.CDLL(name))
    except OSError as error:
        raise CudaError(_describe(str(error))) from error


def find_problem(
    folder: Path, runtime: Callable[[], CudaRuntime], load: Callable[[Path], None] | None = None
) -> str | None:
    """Why ONNX Runtime cannot compute on a CUDA device here, naming a missing library; None if it can.

    Args:
        folder: of ONNX Runtime's own libraries.
        runtime: loads CUDA's.
        load: loads a library or raises OSError; default: the system's loader.
    """
    try:
        for name in (_BRIDGE, PROVIDER_LIBRARY):
            (load or _load)(folder / name)
        runtime().count_devices()
    except OSError as error:
        return _describe(str(error))
    except CudaError as error:
        return str(error)
    return None


def _load(path: Path) -> None:
    if path.name != _BRIDGE:
        ctypes.CDLL(str(path))
    elif path.exists():
        # The provider finds ONNX Runtime through the bridge's symbols, so they must be global.
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _describe(complaint: str) -> str:
    """The loader's error, with what to do about it."""
    missing = re.match(r"(\S+): cannot open shared object file", complaint)
    if missing is None:
        return complaint
    if missing[1] == _DRIVER:
        return f"{_DRIVER} is missing: NVIDIA's driver brings it, and `docker run --gpus all` hands it to a container"
    return f"{missing[1]} is missing: the extra `{EXTRA}` brings CUDA's libraries and cuDNN"
