"""Tensors at fixed addresses that graphs read and write in place: on a CUDA device, or on the CPU for tests.

Knows shapes, dtypes and addresses; no graphs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from service.engine.sessions import cuda_provider
from service.engine.sessions.cuda import CudaError, CudaRuntime
from service.errors import StartupError

Array = npt.NDArray[Any]

_ITEM_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}
# A multiple of cache lines and of the widest vector loads.
_ALIGNMENT = 256


class DeviceTensor:
    """Memory of one tensor. On the CPU it is zeroed, on a device undefined.

    Args:
        shape: dimensions.
        dtype: "float32", "float16", "bfloat16", "int64", "int32" or "uint8".
        device: "cpu" or "cuda", the first of its kind.

    Raises:
        StartupError: when the device is missing or out of memory.
    """

    def __init__(self, shape: Sequence[int], dtype: str, device: str) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self.num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
        self._runtime: CudaRuntime | None = None
        if device == "cpu":
            self._bytes = np.zeros(self.num_bytes, np.uint8)
            self.address: int = self._bytes.ctypes.data
            return
        try:
            self._runtime = cuda_provider.runtime()
            self.address = self._runtime.allocate(self.num_bytes)
        except CudaError as error:
            raise StartupError([f"{dtype}{list(shape)} on {device}: {error}"]) from error
        # Not at exit: the process frees everything, and the library may be unloaded by then.
        weakref.finalize(self, self._runtime.free, self.address).atexit = False

    def read(self) -> Array:
        """A copy in host memory; not for bfloat16, which NumPy lacks."""
        values = np.empty(self.shape, self.dtype)
        self.read_into(values)
        return values

    def read_into(self, values: Array) -> None:
        """Fills a C-contiguous host array with the first `values.nbytes` bytes."""
        _check_fits(values, self.num_bytes)
        if self._runtime is None:
            values.reshape(-1).view(np.uint8)[:] = self._bytes[: values.nbytes]
        else:
            self._runtime.read(self.address, values)

    def write(self, values: Array) -> None:
        """Copies a host array of this shape to the tensor."""
        if values.shape != self.shape:
            raise ValueError(f"values have shape {list(values.shape)}, the tensor has {list(self.shape)}")
        values = np.ascontiguousarray(values)
        _check_fits(values, self.num_bytes)
        if self._runtime is None:
            self._bytes[: values.nbytes] = values.reshape(-1).view(np.uint8)
        else:
            self._runtime.write(self.address, values)


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A tensor inside the memory of another, `offset` bytes from its start."""

    owner: DeviceTensor
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def device(self) -> str:
        """The owner's device."""
        return self.owner.device

    @property
    def address(self) -> int:
        """Address of the first element."""
        return self.owner.address + self.offset


Bindable = Array | DeviceTensor | DeviceView
"""What a graph's input or output can be bound to: host or device memory."""


class DevicePack:
    """Small tensors in one allocation, so that one copy transfers all of them.

    Args:
        specs: shapes and dtypes by name.
        device: as for `DeviceTensor`.

    Attributes:
        arrays: the host side, by name: sent by `write`, filled by `read`.
        views: the device side, by name.
    """

    def __init__(self, specs: Mapping[str, tuple[tuple[int, ...], str]], device: str) -> None:
        offsets: dict[str, int] = {}
        num_bytes = 0
        for name, (shape, dtype) in specs.items():
            offsets[name] = num_bytes
            num_bytes += -(-math.prod(shape) * _ITEM_BYTES[dtype] // _ALIGNMENT) * _ALIGNMENT
        self._tensor = DeviceTensor([num_bytes], "uint8", device)
        self._host = host_array([num_bytes], "uint8", device)
        self.views = {
            name: DeviceView(self._tensor, offsets[name], shape, dtype) for name, (shape, dtype) in specs.items()
        }
        self.arrays: dict[str, Array] = {
            name: self._host[offsets[name] :][: math.prod(shape) * _ITEM_BYTES[dtype]].view(dtype).reshape(shape)
            for name, (shape, dtype) in specs.items()
        }

    def write(self) -> None:
        """Copies `arrays` to the device."""
        self._tensor.write(self._host)

    def read(self) -> None:
        """Copies from the device to `arrays`."""
        self._tensor.read_into(self._host)


def host_array(shape: Sequence[int], dtype: str, device: str) -> Array:
    """A host array, in pinned memory if `device` is a CUDA device.

    Raises:
        StartupError: when pinned memory is exhausted.
    """
    if device == "cpu":
        return np.zeros(shape, dtype)
    try:
        pinned = cuda_provider.runtime().pinned(math.prod(shape) * _ITEM_BYTES[dtype])
    except CudaError as error:
        raise StartupError([f"{dtype}{list(shape)} for {device}: {error}"]) from error
    array: Array = pinned.view(dtype).reshape(shape)
    return array


def _check_fits(values: Array, num_bytes: int) -> None:
    if not values.flags.c_contiguous or values.nbytes > num_bytes:
        raise ValueError(f"cannot copy {values.nbytes} bytes at once, the tensor has {num_bytes}")
