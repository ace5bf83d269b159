"""Sessions of ONNX Runtime: one loaded graph, its bindings, and the CPU provider.

Knows files, names, dtypes and arrays; not what a graph computes. Arrays are bound without a copy: a caller writes
inputs to its own arrays and finds outputs in them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from model import kernels
from model.spec.artifact import GraphSpec, TensorSpec
from service.engine.sessions import cuda_provider
from service.engine.sessions.cuda_provider import Cuda
from service.engine.sessions.device_memory import Array, Bindable, DeviceTensor, DeviceView
from service.engine.sessions.own_weights import BFLOAT16_BITS, OwnWeights
from service.errors import OnwardError, StartupError

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int8)": "int8",
}
# NumPy has no bfloat16: 16 is its number in ONNX.
_ELEMENT_TYPES: Mapping[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": 16,
    "int64": np.int64,
    "int32": np.int32,
}
# Everything below "error" is advice about graph optimization.
_LOG_ERRORS = 3

# Set once the process has a global thread pool, which ONNX Runtime cannot be asked about.
_SHARING = threading.Event()


class GraphError(OnwardError):
    """ONNX Runtime failed to run a graph; its message is for the log alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How a graph is loaded and run.

    `intra_op_threads` 0 is one per physical core. `allow_spinning` keeps threads spinning between operators: faster on
    an idle machine, wasteful on a shared one. `stop_spinning` ends that after each run, which frees the cores for
    another graph's threads. These three have no effect after `share_threads`.

    `map_weights` uses weights as they are in the file, without prepacking: loads faster, runs slower. `copies_weights`
    loads and proves the graph from a copy of its weights in memory: for a process that serves, as truncating a mapped
    file would end it with SIGBUS. `own_kernels` uses the project's kernels where they are built (`model.kernels`), not
    the standard operators. `records_operators` enables `GraphSession.operators`. `profile` is the path prefix of a
    profile (`GraphSession.end_profile`).
    """

    intra_op_threads: int = 0
    allow_spinning: bool = True
    stop_spinning: bool = False
    map_weights: bool = False
    copies_weights: bool = False
    own_kernels: bool = True
    records_operators: bool = False
    profile: Path | None = None


class GraphSession:
    """One loaded graph.

    Args:
        folder: the artifact.
        spec: the graph's file, and the signature that it must have.
        options: threads and weights.
        cuda: the CUDA provider instead of the CPU's.

    Raises:
        StartupError: when the file cannot be loaded or has another signature, or the device cannot be used.
    """

    def __init__(self, folder: Path, spec: GraphSpec, options: SessionOptions, cuda: Cuda | None = None) -> None:
        path, settings = folder / spec.file, _settings(options)
        self._session = (
            _load_on_cpu(path, settings, options) if cuda is None else cuda_provider.load(path, settings, cuda)
        )
        self._records = cuda is not None and cuda.records
        problems = [
            *_differences(spec.file, "inputs", spec.inputs, self._session.get_inputs()),
            *_differences(spec.file, "outputs", spec.outputs, self._session.get_outputs()),
        ]
        if problems:
            raise StartupError([f"{folder}: {problem}" for problem in problems])

    def own_weights(self) -> None:
        """Makes the graph independent of its files: after its first run, before another thread runs it.

        Raises:
            StartupError: when a file has changed since it was opened.
        """
        # The CUDA provider copies all weights while loading.
        if (weights := getattr(self._session, "onward_weights", None)) is not None:
            weights.own()

    def run(self, feeds: Mapping[str, Array], names: Sequence[str] | None = None) -> list[Array]:
        """Runs with copied inputs and newly allocated outputs: those of `names`, or all in the graph's order.

        Raises:
            GraphError: when the run fails.
        """
        try:
            outputs: list[Array] = self._session.run(names, dict(feeds))
        except Exception as error:
            raise GraphError(str(error)) from error
        return outputs

    def bind(self, inputs: Mapping[str, Bindable], outputs: Mapping[str, Bindable]) -> Binding:
        """Binds inputs and outputs to C-contiguous arrays."""
        return Binding(self._session, inputs, outputs, records=self._records)

    @property
    def operators(self) -> frozenset[str]:
        """Operators that have kernels here, as "Name" or "domain.Name"; needs `SessionOptions.records_operators`.

        An operator of the project's own without a kernel is replaced by the standard operators of its body.
        """
        parts = self._session.get_provider_graph_assignment_info()
        return frozenset(
            f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type)
            for part in parts
            for node in part.get_nodes()
        )

    def end_profile(self) -> Path:
        """Ends profiling; returns the file of ONNX Runtime's JSON."""
        return Path(self._session.end_profiling())

    @property
    def input_names(self) -> tuple[str, ...]:
        """The graph's inputs, in its order."""
        return tuple(node.name for node in self._session.get_inputs())


class Binding:
    """A graph whose inputs and outputs are bound to arrays, for any number of runs.

    Single tensors can be rebound between runs. Outputs that are not bound are dropped.
    """

    def __init__(
        self, session: Any, inputs: Mapping[str, Bindable], outputs: Mapping[str, Bindable], *, records: bool = False
    ) -> None:
        self._session = session
        self._records = records
        self._binding = session.io_binding()
        # ONNX Runtime holds addresses only: these references keep the memory alive.
        self._values: dict[str, tuple[Bindable, Any]] = {}
        self._shared: dict[int, Any] = {}
        self.bind_inputs(inputs)
        # A tensor that is updated in place has two names and one OrtValue.
        self._shared = {id(array): value for array, value in self._values.values()}
        self.bind_outputs(outputs)
        self._shared = {}

    def bind_inputs(self, inputs: Mapping[str, Bindable]) -> None:
        """Rebinds inputs to other arrays, which may have other shapes."""
        for name, array in inputs.items():
            if isinstance(array, DeviceTensor | DeviceView):
                self._values[name] = (array, None)
                self._binding.bind_input(name, *_placed(array))
            else:
                self._binding.bind_ortvalue_input(name, self._wrap(name, array))

    def bind_outputs(self, outputs: Mapping[str, Bindable]) -> None:
        """Rebinds outputs to other arrays, of the shapes that the run will give."""
        for name, array in outputs.items():
            if isinstance(array, DeviceTensor | DeviceView):
                self._values[name] = (array, None)
                self._binding.bind_output(name, *_placed(array))
            else:
                self._binding.bind_ortvalue_output(name, self._wrap(name, array))

    def run(self, number: int | None = None) -> None:
        """Runs the graph to its end.

        Args:
            number: of the CUDA graph to record or replay, if the session records; shapes and addresses must be those
                of its first run. None runs unrecorded.

        Raises:
            GraphError: when the run fails; the outputs are undefined then.
        """
        try:
            self._session.run_with_iobinding(
                self._binding, cuda_provider.run_options(number) if self._records else None
            )
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


def arithmetic_of(options: SessionOptions) -> str:
    """What decides the bits of a graph on the CPU (`model.kernels.arithmetic`); empty where options change them."""
    # Without prepacking, products by `MatMulNBits` have other bits.
    is_usual = options.own_kernels and not options.map_weights
    return kernels.arithmetic(ort.__version__) if is_usual else ""


def share_threads(count: int) -> None:
    """Gives all later sessions of the process one thread pool, once and for good.

    Threads of separate pools spin on the cores that the next graph needs: an encoder after a decoder took several times
    as long.

    Args:
        count: of threads; 0 is one per physical core.

    Raises:
        StartupError: when it was called before.
    """
    try:
        ort.set_global_thread_pool_sizes(count, 1)
    except Exception as error:
        raise StartupError([f"ONNX Runtime's threads: {error}"]) from error
    _SHARING.set()


def _placed(tensor: DeviceTensor | DeviceView) -> tuple[str, int, Any, list[int], int]:
    """Device, device number, element type, shape and address, as ONNX Runtime takes them."""
    return tensor.device, 0, _ELEMENT_TYPES[tensor.dtype], list(tensor.shape), tensor.address


def _settings(options: SessionOptions) -> Any:
    """ONNX Runtime's own options, as far as all providers share them."""
    ort.disable_telemetry_events()
    settings = ort.SessionOptions()
    settings.log_severity_level = _LOG_ERRORS
    # With a global thread pool, ONNX Runtime refuses per-session threads.
    settings.use_per_session_threads = not _SHARING.is_set()
    if settings.use_per_session_threads:
        settings.intra_op_num_threads = options.intra_op_threads
    return settings


def _value(array: npt.NDArray[Any]) -> Any:
    if array.dtype == BFLOAT16_BITS:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ELEMENT_TYPES["bfloat16"])
    return ort.OrtValue.ortvalue_from_numpy(array)


def _load_on_cpu(path: Path, settings: Any, options: SessionOptions) -> Any:
    switches = {
        "intra_op.allow_spinning": options.allow_spinning,
        "force_spinning_stop": options.stop_spinning,
        "disable_prepacking": options.map_weights,
        "record_ep_graph_assignment_info": options.records_operators,
    }
    for name, is_on in switches.items():
        settings.add_session_config_entry(f"session.{name}", str(int(is_on)))
    if options.profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(options.profile)
    try:
        if options.own_kernels and (library := kernels.library()) is not None:
            settings.register_custom_ops_library(str(library))
        weights = OwnWeights(path, is_copied=options.copies_weights)
        values = {name: _value(array) for name, array in weights.arrays.items()}
        for name, value in values.items():
            settings.add_initializer(name, value)
        if options.copies_weights:
            # Constant folding reads the file otherwise. Without `add_initializer`, this would copy every weight.
            settings.add_external_initializers(list(values), list(values.values()))
        session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    except StartupError:
        raise
    except Exception as error:
        raise StartupError([f"{path}: {error}"]) from error
    # ONNX Runtime holds addresses only: the weights must live as long as the session.
    session.onward_weights, session.onward_values = weights, values
    weights.forget()
    return session


def _differences(file: str, kind: str, expected: Sequence[TensorSpec], actual: Sequence[Any]) -> list[str]:
    """How a graph's own inputs or outputs differ from the manifest's, by name, dtype and rank."""
    want = {spec.name: (spec.dtype, len(spec.shape)) for spec in expected}
    have = {node.name: (_DTYPES.get(node.type, node.type), len(node.shape)) for node in actual}
    return [
        f"{file} {kind}: {name} is {have.get(name, 'absent')}, the manifest says {want.get(name, 'absent')}"
        for name in sorted(want.keys() | have.keys())
        if want.get(name) != have.get(name)
    ]
