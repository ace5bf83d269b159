"""ONNX Runtime, wrapped: the only file that imports it, and what plugs into it.

Knows files, names, dtypes and arrays; not what a graph computes. NumPy arrays are bound without a copy, so that a
caller writes inputs through its own arrays and finds outputs in them.
"""

from __future__ import annotations

import contextlib
import io
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from model import kernels
from model.spec.artifact import GraphSpec, TensorSpec
from service.engine.sessions.cuda import EXTRA, PROVIDER_LIBRARY, CudaError, CudaRuntime, cuda_runtime, find_problem
from service.engine.sessions.own_weights import OwnWeights
from service.errors import OnwardError, StartupError

Array = npt.NDArray[Any]

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int8)": "int8",
}
_CUDA = "CUDAExecutionProvider"
_UNRECORDED = -1
# By name: bfloat16 is none of NumPy's types, so it goes by its number in ONNX.
_ELEMENT_TYPES: Mapping[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": 16,
    "int64": np.int64,
    "int32": np.int32,
}
_ITEM_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}
SHAPE_OPERATORS = frozenset({"Cast", "Concat", "Range", "Shape", "Squeeze", "Unsqueeze"})
"""What a graph may have on the processor though it is for a device: arithmetic of shapes, which is done there."""
# What addresses of tensors behind each other are multiples of: cache lines and all that kernels read at once.
_ALIGNMENT = 256
# Everything below "error" is advice about graph optimisation.
_LOG_ERRORS = 3

# ONNX Runtime has one set of threads a process to share, and does not tell whether it has it.
_SHARING = threading.Event()


class GraphError(OnwardError):
    """ONNX Runtime refused to run a graph; its own words are the message, for the log and nobody else."""


class DeviceLost(BaseException):
    """The device computes nothing any more in this process, whoever asks for it and whatever is asked.

    No `Exception`, so that nobody who tells one bad step from the next takes it for one: it ends the thread that steps.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How a graph runs. `intra_op_threads` 0 is one for each physical core.

    `allow_spinning` keeps threads busy between operators: faster on a machine of one's own, wasteful on a shared one.
    `stop_spinning` ends that when a run ends, so that the threads of another graph or provider find the cores free.
    Where the process has threads to share (`share_threads`), none of these three matters.
    `map_weights` leaves weights as they are in the file, instead of laying them out anew in memory for fast products of
    many rows: the graph loads in no time, and is slower to run.
    `copies_weights` loads and proves the graph from a copy of its weights in memory, as a file that is truncated
    meanwhile would end the process: for one that serves.
    `own_kernels` computes the project's own operators by its own kernels, where they are built for this machine
    (`model.kernels`), and not by the standard operators that they stand for. `tells_operators` has a session on the CPU
    provider know what it is computed by (`GraphSession.operators`). `profile` is where what each operator takes is
    written down: a path without its end, to which ONNX Runtime adds one (`GraphSession.end_profile`).
    """

    intra_op_threads: int = 0
    allow_spinning: bool = True
    stop_spinning: bool = False
    map_weights: bool = False
    copies_weights: bool = False
    own_kernels: bool = True
    tells_operators: bool = False
    profile: Path | None = None


@dataclass(frozen=True, slots=True)
class Cuda:
    """The first CUDA device.

    `records` says whether runs that have a number are recorded and repeated; nothing of such a graph may stay on the
    processor, of another the arithmetic of shapes (`SHAPE_OPERATORS`). `max_bytes` is how much of the device's
    memory the graph may take, weights and what lives within its runs, K/V aside; None sets no limit.
    """

    records: bool
    max_bytes: int | None = None


class GraphSession:
    """One loaded graph, on the CPU provider unless another one is given.

    Args:
        folder: the artifact.
        spec: the graph's file in it, and the signature it must have.
        options: threads.
        cuda: given, computes the graph on a CUDA device, and on nothing else.

    Raises:
        StartupError: when the file cannot be loaded or has another signature, or the device is not to be had.
    """

    def __init__(
        self,
        folder: Path,
        spec: GraphSpec,
        options: SessionOptions,
        cuda: Cuda | None = None,
    ) -> None:
        path = folder / spec.file
        self._session = _load(path, options) if cuda is None else _load_on_cuda(path, options, cuda)
        self._records = cuda is not None and cuda.records
        problems = [
            *_differences(spec.file, "inputs", spec.inputs, self._session.get_inputs()),
            *_differences(spec.file, "outputs", spec.outputs, self._session.get_outputs()),
        ]
        if problems:
            raise StartupError([f"{folder}: {problem}" for problem in problems])

    def own_weights(self) -> None:
        """Makes the graph independent of its files: after its first run, and before another thread runs it.

        Raises:
            StartupError: when a file has changed since it was opened.
        """
        # Other providers than the CPU's take what they want of the file as they load it.
        if (weights := getattr(self._session, "onward_weights", None)) is not None:
            weights.own()

    def run(self, feeds: Mapping[str, Array], names: Sequence[str] | None = None) -> list[Array]:
        """Runs with inputs copied in and outputs freshly allocated: those of `names`, or all in the graph's order.

        Raises:
            GraphError: when the run fails.
        """
        try:
            outputs: list[Array] = self._session.run(names, dict(feeds))
        except Exception as error:
            raise GraphError(str(error)) from error
        return outputs

    def bind(self, inputs: Mapping[str, Bindable], outputs: Mapping[str, Bindable]) -> Binding:
        """A run that reads and writes the given arrays, which must be C-contiguous and stay where they are."""
        return Binding(self._session, inputs, outputs, records=self._records)

    @property
    def operators(self) -> frozenset[str]:
        """What kernels it is computed by, as far as the session was to tell (`SessionOptions.tells_operators`).

        As "Name", and with the domain before it where that is not ONNX's: an operator of the project's own for which
        there is no kernel is not among them, but what it stands for is.
        """
        parts = self._session.get_provider_graph_assignment_info()
        return frozenset(
            f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type)
            for part in parts
            for node in part.get_nodes()
        )

    def end_profile(self) -> Path:
        """Ends what `SessionOptions.profile` began; where it lies, as ONNX Runtime's JSON."""
        return Path(self._session.end_profiling())

    @property
    def input_names(self) -> tuple[str, ...]:
        """The graph's inputs, in its order."""
        return tuple(node.name for node in self._session.get_inputs())


class DeviceTensor:
    """Numbers that stay at one place on a device, for graphs to read and write in place.

    Args:
        shape: of all of them.
        dtype: "float32", "float16", "bfloat16", "int64", "int32" or "uint8".
        device: "cpu" or "cuda", the first of its kind. On the CPU they are zeros at first, elsewhere anything.

    Attributes:
        address: where the first of them is.

    Raises:
        StartupError: when there is no such device or not so much memory.
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
            self._runtime = _cuda_runtime()
            self.address = self._runtime.allocate(self.num_bytes)
        except CudaError as error:
            raise StartupError([f"{dtype}{list(shape)} on {device}: {error}"]) from error
        # A process that ends gives everything back by itself, and the library may be gone by then.
        weakref.finalize(self, self._runtime.free, self.address).atexit = False

    def read(self) -> Array:
        """A copy of the numbers, on this host; not of bfloat16, which NumPy has no type for."""
        values = np.empty(self.shape, self.dtype)
        self.read_into(values)
        return values

    def read_into(self, values: Array) -> None:
        """Copies the first numbers to a C-contiguous array of this host, as many as it has room for."""
        _check_fits(values, self.num_bytes)
        if self._runtime is None:
            values.reshape(-1).view(np.uint8)[:] = self._bytes[: values.nbytes]
        else:
            self._runtime.read(self.address, values)

    def write(self, values: Array) -> None:
        """Copies numbers of this shape and type there."""
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
    """A tensor that lies in the memory of another, `offset` bytes from its beginning."""

    owner: DeviceTensor
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def device(self) -> str:
        """Where it is."""
        return self.owner.device

    @property
    def address(self) -> int:
        """Where its first number is."""
        return self.owner.address + self.offset


class DevicePack:
    """Small tensors behind each other in one piece of a device's memory, so that one copy moves all of them.

    Args:
        specs: shapes and dtypes by name.
        device: as for `DeviceTensor`.

    Attributes:
        arrays: this host's side, by name: what `write` sends, and where `read` puts what it finds.
        views: the device's side, by name.
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
        """Sends all that is in `arrays`."""
        self._tensor.write(self._host)

    def read(self) -> None:
        """Fetches all there is to `arrays`."""
        self._tensor.read_into(self._host)


Bindable = Array | DeviceTensor | DeviceView
"""What a graph can be tied to: memory of this host, or of a device."""


def host_array(shape: Sequence[int], dtype: str, device: str) -> Array:
    """An array of this host in memory that a device reaches without a detour.

    Raises:
        StartupError: when there is not so much of it.
    """
    if device == "cpu":
        return np.zeros(shape, dtype)
    try:
        pinned = _cuda_runtime().pinned(math.prod(shape) * _ITEM_BYTES[dtype])
    except CudaError as error:
        raise StartupError([f"{dtype}{list(shape)} for {device}: {error}"]) from error
    array: Array = pinned.view(dtype).reshape(shape)
    return array


def _check_fits(values: Array, num_bytes: int) -> None:
    if not values.flags.c_contiguous or values.nbytes > num_bytes:
        raise ValueError(f"{values.nbytes} bytes are to be copied at once, of a tensor of {num_bytes}")


class Binding:
    """A graph with its inputs and outputs tied to arrays; run it as often as you like.

    Single tensors can be tied anew between runs, as when a length changes. An output that is tied to nothing is lost.
    """

    def __init__(
        self, session: Any, inputs: Mapping[str, Bindable], outputs: Mapping[str, Bindable], *, records: bool = False
    ) -> None:
        self._session = session
        self._records = records
        self._binding = session.io_binding()
        # ONNX Runtime sees addresses: these keep the memory behind them alive.
        self._values: dict[str, tuple[Bindable, Any]] = {}
        self._shared: dict[int, Any] = {}
        self.bind_inputs(inputs)
        # What is read and written in place is one tensor under two names.
        self._shared = {id(array): value for array, value in self._values.values()}
        self.bind_outputs(outputs)
        self._shared = {}

    def bind_inputs(self, inputs: Mapping[str, Bindable]) -> None:
        """Ties inputs to other arrays, of other shapes if need be."""
        for name, array in inputs.items():
            if isinstance(array, DeviceTensor | DeviceView):
                self._values[name] = (array, None)
                self._binding.bind_input(name, *_placed(array))
            else:
                self._binding.bind_ortvalue_input(name, self._wrap(name, array))

    def bind_outputs(self, outputs: Mapping[str, Bindable]) -> None:
        """Ties outputs to other arrays, of the shapes that they will have."""
        for name, array in outputs.items():
            if isinstance(array, DeviceTensor | DeviceView):
                self._values[name] = (array, None)
                self._binding.bind_output(name, *_placed(array))
            else:
                self._binding.bind_ortvalue_output(name, self._wrap(name, array))

    def run(self, number: int | None = None) -> None:
        """Runs the graph; what it writes is there when this returns.

        Args:
            number: by which a device that records runs knows this one, with these shapes and places; None, or a
                device that does not, runs it as any other.

        Raises:
            GraphError: when the run fails; the bound outputs are undefined then.
        """
        try:
            self._session.run_with_iobinding(self._binding, _run_options(number) if self._records else None)
        except Exception as error:
            raise GraphError(str(error)) from error

    def _wrap(self, name: str, array: Array) -> Any:
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not contiguous: binding it would copy")
        value = self._shared.get(id(array))
        if value is None:
            value = ort.OrtValue.ortvalue_from_numpy(array)
        self._values[name] = (array, value)
        return value


def _placed(tensor: DeviceTensor | DeviceView) -> tuple[str, int, Any, list[int], int]:
    """Device, its number, type of the numbers, shape and address, as ONNX Runtime asks for them."""
    return tensor.device, 0, _ELEMENT_TYPES[tensor.dtype], list(tensor.shape), tensor.address


def share_threads(count: int) -> None:
    """Sets up the threads of all sessions that will be: once a process, and for good.

    Threads spin when their run is over, as the next is near. Those of another session take the cores from it then, and
    an encoder behind a decoder takes up to several times as long; threads that all share are found where they spin.

    Args:
        count: of threads; 0 is one for each physical core.

    Raises:
        StartupError: when they are set up already.
    """
    try:
        ort.set_global_thread_pool_sizes(count, 1)
    except Exception as error:
        raise StartupError([f"ONNX Runtime's threads: {error}"]) from error
    _SHARING.set()


def _load(path: Path, options: SessionOptions) -> Any:
    # Builds of ONNX Runtime report on sessions to its makers; what is served here is nobody else's business.
    ort.disable_telemetry_events()
    settings = ort.SessionOptions()
    settings.log_severity_level = _LOG_ERRORS
    # Where the process has threads to share, ONNX Runtime lets no session have its own.
    settings.use_per_session_threads = not _SHARING.is_set()
    if settings.use_per_session_threads:
        settings.intra_op_num_threads = options.intra_op_threads
    settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(options.allow_spinning)))
    settings.add_session_config_entry("session.force_spinning_stop", str(int(options.stop_spinning)))
    settings.add_session_config_entry("session.disable_prepacking", str(int(options.map_weights)))
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", str(int(options.tells_operators)))
    if options.profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(options.profile)
    try:
        if options.own_kernels and (library := kernels.library()) is not None:
            settings.register_custom_ops_library(str(library))
        weights = OwnWeights(path, is_copied=options.copies_weights)
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in weights.arrays.items()}
        for name, value in values.items():
            settings.add_initializer(name, value)
        if options.copies_weights:
            # Folding constants would read them in the file all the same. By itself, this would copy every one.
            settings.add_external_initializers(list(values), list(values.values()))
        session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    except StartupError:
        raise
    except Exception as error:
        raise StartupError([f"{path}: {error}"]) from error
    # ONNX Runtime only knows where they are: they live as long as the session.
    session.onward_weights, session.onward_values = weights, values
    weights.forget()
    return session


def find_cuda_problem() -> str | None:
    """Why no graph can run on a CUDA device here, in words for an operator; None where one can be tried."""
    _preload()
    folder = Path(ort.__file__).parent / "capi"
    # It registers the provider once that can be loaded: what it names as available says nothing of why it is not.
    if not (folder / PROVIDER_LIBRARY).exists():
        return f"this onnxruntime has no {_CUDA}: install the extra `{EXTRA}` in the place of `cpu`"
    return find_problem(folder, _cuda_runtime)


def cuda_free_bytes() -> int:
    """Bytes of the first CUDA device that nobody has taken.

    Raises:
        StartupError: when there is no such device.
    """
    if problem := find_cuda_problem():
        raise StartupError([problem])
    try:
        return _cuda_runtime().free_bytes()
    except CudaError as error:
        raise StartupError([str(error)]) from error


def require_alive(device: str, cause: Exception) -> None:
    """Tells what a run failed of from the end of the device itself, after which every other run would fail as well.

    Args:
        device: where it ran, "cpu" or "cuda".
        cause: what it failed with.

    Raises:
        DeviceLost: when the device does not answer.
    """
    if device == "cpu":
        return
    try:
        _cuda_runtime().synchronize()
    except CudaError as error:
        raise DeviceLost(f"{error}; it failed with: {cause}") from cause


@cache
def _cuda_runtime() -> CudaRuntime:
    _preload()
    return cuda_runtime(ort.cuda_version)


def _preload() -> None:
    """Loads CUDA and cuDNN from their wheels, where these are installed: the loader does not look there."""
    # What it cannot find it prints, which whoever needs it says better.
    with contextlib.redirect_stdout(io.StringIO()):
        ort.preload_dlls()


def cuda_provider_options(cuda: Cuda) -> dict[str, str]:
    """What ONNX Runtime's CUDA provider is told."""
    # Exactly what is asked for: by powers of two it would take up to twice as much, which K/V could have.
    options = {"device_id": "0", "arena_extend_strategy": "kSameAsRequested"}
    options["enable_cuda_graph"] = str(int(cuda.records))
    if cuda.max_bytes is not None:
        options["gpu_mem_limit"] = str(cuda.max_bytes)
    return options


def _load_on_cuda(path: Path, options: SessionOptions, cuda: Cuda) -> Any:
    """A session on the CUDA provider; where that does not work, an error and not the CPU provider in its place."""
    if problem := find_cuda_problem():
        raise StartupError([f"{path}: {problem}"])
    ort.disable_telemetry_events()
    settings = ort.SessionOptions()
    settings.log_severity_level = _LOG_ERRORS
    settings.use_per_session_threads = not _SHARING.is_set()
    if settings.use_per_session_threads:
        settings.intra_op_num_threads = options.intra_op_threads
    # What the processor has to do is over in no time: nothing is gained by waiting for it awake.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Weights stay for good: apart from what comes and goes, though the limit counts them all the same.
    settings.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    # Of each shape it would ask for all that a run needs in one piece, and shapes are as many as steps with prompts.
    settings.enable_mem_pattern = False
    # ONNX Runtime has the CPU provider behind every other, and lets it have whatever the others lack.
    wish = "disable_cpu_ep_fallback" if cuda.records else "record_ep_graph_assignment_info"
    settings.add_session_config_entry(f"session.{wish}", "1")
    try:
        session = ort.InferenceSession(
            str(path), settings, providers=[(_CUDA, cuda_provider_options(cuda))], enable_fallback=0
        )
    except Exception as error:
        raise StartupError([f"{path}: {error}"]) from error
    if _CUDA not in session.get_providers():
        raise StartupError([f"{path}: {_CUDA} does not start: see the log for the library or driver that it lacks"])
    if left := [] if cuda.records else _left_over(session):
        raise StartupError([f"{path}: {_CUDA} has no kernel for {', '.join(left)}"])
    return session


def _left_over(session: Any) -> list[str]:
    """The operators that another provider than CUDA's would compute, those on shapes aside."""
    others = (part for part in session.get_provider_graph_assignment_info() if part.ep_name != _CUDA)
    names = {str(node.op_type) for part in others for node in part.get_nodes()}
    return sorted(names - SHAPE_OPERATORS)


def _run_options(number: int | None) -> Any:
    settings = ort.RunOptions()
    settings.add_run_config_entry("gpu_graph_id", str(_UNRECORDED if number is None else number))
    return settings


def _differences(file: str, kind: str, expected: Sequence[TensorSpec], actual: Sequence[Any]) -> list[str]:
    """How a graph's own inputs or outputs differ from the manifest's, by name, dtype and rank."""
    want = {spec.name: (spec.dtype, len(spec.shape)) for spec in expected}
    have = {node.name: (_DTYPES.get(node.type, node.type), len(node.shape)) for node in actual}
    return [
        f"{file} {kind}: {name} is {have.get(name, 'absent')}, the manifest says {want.get(name, 'absent')}"
        for name in sorted(want.keys() | have.keys())
        if want.get(name) != have.get(name)
    ]
