"""ONNX Runtime's CUDA provider: sessions on the first CUDA device, and why it cannot be used."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime as ort

from service.engine.sessions.cuda import EXTRA, PROVIDER_LIBRARY, CudaError, CudaRuntime, cuda_runtime, find_problem
from service.errors import StartupError

_CUDA = "CUDAExecutionProvider"
_UNRECORDED = -1
SHAPE_OPERATORS = frozenset({"Cast", "Concat", "Range", "Shape", "Squeeze", "Unsqueeze"})
"""Shape arithmetic, which the CUDA provider leaves to the CPU."""


class DeviceLost(BaseException):
    """The device fails every call from now on in this process.

    A `BaseException`, so that no handler of failed steps catches it: it ends the stepping thread.
    """


@dataclass(frozen=True, slots=True)
class Cuda:
    """A session on the first CUDA device.

    `records` captures runs that have a number as CUDA graphs and replays them; no operator of such a graph may run on
    the CPU, of others only `SHAPE_OPERATORS`. `max_bytes` limits the arena: weights and activations, without K/V. None
    is no limit.
    """

    records: bool
    max_bytes: int | None = None


def load(path: Path, settings: Any, cuda: Cuda) -> Any:
    """An `InferenceSession` on the CUDA provider, never on the CPU provider in its place.

    Adds to `settings`, an `onnxruntime.SessionOptions` with threads and log level.

    Raises:
        StartupError: when the provider does not start or lacks a kernel.
    """
    if problem := find_cuda_problem():
        raise StartupError([f"{path}: {problem}"])
    # CPU work is negligible here: spinning threads would waste cores.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Weights are never freed: kept apart from activations, they fragment nothing. The limit counts both.
    settings.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    # A memory pattern allocates all of a run in one block per shape, and steps with prompts have many shapes.
    settings.enable_mem_pattern = False
    # ONNX Runtime falls back to the CPU provider for any operator without a kernel.
    entry = "disable_cpu_ep_fallback" if cuda.records else "record_ep_graph_assignment_info"
    settings.add_session_config_entry(f"session.{entry}", "1")
    try:
        session = ort.InferenceSession(
            str(path), settings, providers=[(_CUDA, cuda_provider_options(cuda))], enable_fallback=0
        )
    except Exception as error:
        raise StartupError([f"{path}: {error}"]) from error
    if _CUDA not in session.get_providers():
        raise StartupError([f"{path}: {_CUDA} does not start: see the log for the library or driver that it lacks"])
    if missing := [] if cuda.records else _operators_elsewhere(session):
        raise StartupError([f"{path}: {_CUDA} has no kernel for {', '.join(missing)}"])
    return session


def run_options(number: int | None) -> Any:
    """Run options that record or replay run `number`; None runs unrecorded."""
    settings = ort.RunOptions()
    settings.add_run_config_entry("gpu_graph_id", str(_UNRECORDED if number is None else number))
    return settings


def cuda_provider_options(cuda: Cuda) -> dict[str, str]:
    """Options of ONNX Runtime's CUDA provider."""
    # Growing by powers of two would take up to twice the memory needed, which K/V could use.
    options = {"device_id": "0", "arena_extend_strategy": "kSameAsRequested"}
    options["enable_cuda_graph"] = str(int(cuda.records))
    if cuda.max_bytes is not None:
        options["gpu_mem_limit"] = str(cuda.max_bytes)
    return options


def find_cuda_problem() -> str | None:
    """Why no graph can run on a CUDA device here, for the operator; None where one can be tried."""
    _preload()
    folder = Path(ort.__file__).parent / "capi"
    # ONNX Runtime lists the provider as available only if it loads, without saying why not.
    if not (folder / PROVIDER_LIBRARY).exists():
        return f"this onnxruntime has no {_CUDA}: install the extra `{EXTRA}` in the place of `cpu`"
    return find_problem(folder, runtime)


def cuda_free_bytes() -> int:
    """Free bytes of the first CUDA device.

    Raises:
        StartupError: when there is no such device.
    """
    if problem := find_cuda_problem():
        raise StartupError([problem])
    try:
        return runtime().free_bytes()
    except CudaError as error:
        raise StartupError([str(error)]) from error


def require_alive(device: str, cause: Exception) -> None:
    """Checks after a run that failed with `cause` whether the device, "cpu" or "cuda", still works.

    Raises:
        DeviceLost: when the device does not answer.
    """
    if device == "cpu":
        return
    try:
        runtime().synchronize()
    except CudaError as error:
        raise DeviceLost(f"{error}; it failed with: {cause}") from cause


@cache
def runtime() -> CudaRuntime:
    """CUDA's runtime library, of the version that ONNX Runtime uses.

    Raises:
        CudaError: when it cannot be loaded.
    """
    _preload()
    return cuda_runtime(ort.cuda_version)


def _preload() -> None:
    """Loads CUDA and cuDNN from their wheels, which the dynamic loader does not search."""
    # It prints what it does not find; callers report that better.
    with contextlib.redirect_stdout(io.StringIO()):
        ort.preload_dlls()


def _operators_elsewhere(session: Any) -> list[str]:
    """Operators assigned to other providers, `SHAPE_OPERATORS` aside."""
    others = (part for part in session.get_provider_graph_assignment_info() if part.ep_name != _CUDA)
    names = {str(node.op_type) for part in others for node in part.get_nodes()}
    return sorted(names - SHAPE_OPERATORS)
