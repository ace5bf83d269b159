"""CUDA without a device: `libcudart` on host memory, and ONNX Runtime sessions that compute on the CPU provider."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from model.spec.artifact import Manifest
from service.engine.types import GenerationRequest, SamplingParams, StoppingParams
from tests.fakes import drain

PROVIDER = "CUDAExecutionProvider"


class HostLibrary:
    """`libcudart` for a device of `num_bytes` in this host's memory; every call takes what C would take.

    A copy to the device ends as late as CUDA allows: when the default stream is waited for, or copies back.
    """

    def __init__(self, num_bytes: int = 1 << 20) -> None:
        self.num_bytes = num_bytes
        self.device: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.copies: list[tuple[int, int]] = []
        self._underway: list[tuple[int, bytes]] = []
        self.num_cleared = 0
        # What the device answers when it is asked whether it works.
        self.health = 0
        self.threads: set[str] = set()

        class Describe:
            restype: Any = None

            def __call__(self, code: int) -> bytes:
                return {
                    2: b"out of memory",
                    100: b"no CUDA-capable device is detected",
                    700: b"an illegal memory access was encountered",
                }[code]

        self.cudaGetErrorString = Describe()

    @property
    def taken(self) -> dict[int, Any]:
        return self.device | self.pinned

    def cudaGetDeviceCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    def cudaMemGetInfo(self, free: Any, total: Any) -> int:  # noqa: N802
        self._note_thread()
        free._obj.value, total._obj.value = self.num_bytes - sum(map(len, self.device.values())), self.num_bytes
        return 0

    def cudaMalloc(self, address: Any, num_bytes: ctypes.c_size_t) -> int:  # noqa: N802
        if num_bytes.value + sum(map(len, self.device.values())) > self.num_bytes:
            return 2
        return self._take(self.device, address, num_bytes)

    def cudaMallocHost(self, address: Any, num_bytes: ctypes.c_size_t) -> int:  # noqa: N802
        return self._take(self.pinned, address, num_bytes)

    def cudaFree(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        self._note_thread()
        del self.device[address.value or 0]
        return 0

    def cudaFreeHost(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        self._note_thread()
        del self.pinned[address.value or 0]
        return 0

    def cudaDeviceSynchronize(self) -> int:  # noqa: N802
        self._end_copies()
        return self.health

    def cudaStreamSynchronize(self, stream: ctypes.c_void_p) -> int:  # noqa: N802
        assert not stream.value
        self._note_thread()
        self._end_copies()
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.num_cleared += 1
        return self.health

    def cudaMemcpy(  # noqa: N802
        self, target: ctypes.c_void_p, source: ctypes.c_void_p, num_bytes: ctypes.c_size_t, kind: ctypes.c_int
    ) -> int:
        self._note_thread()
        on_device, on_host = (target, source) if kind.value == 1 else (source, target)
        assert kind.value in (1, 2)
        assert on_host.value not in self.device
        assert num_bytes.value <= len(self.device[on_device.value or 0])
        if kind.value == 1:
            self._underway.append((target.value or 0, ctypes.string_at(source, num_bytes.value)))
        else:
            self._end_copies()
            ctypes.memmove(target, source, num_bytes.value)
        self.copies.append((kind.value, num_bytes.value))
        return 0

    def _end_copies(self) -> None:
        for target, values in self._underway:
            ctypes.memmove(target, values, len(values))
        self._underway.clear()

    def _take(self, memory: dict[int, Any], address: Any, num_bytes: ctypes.c_size_t) -> int:
        self._note_thread()
        block = (ctypes.c_char * num_bytes.value)()
        address._obj.value = ctypes.addressof(block)
        memory[ctypes.addressof(block)] = block
        return 0

    def _note_thread(self) -> None:
        self.threads.add(threading.current_thread().name)


@dataclasses.dataclass
class Recorded:
    """How sessions were made, by file, by which numbers they were run, and on which threads."""

    providers: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    fallbacks: dict[str, Any] = dataclasses.field(default_factory=dict)
    numbers: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    bound: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    shapes: list[tuple[str, dict[str, tuple[int, ...]]]] = dataclasses.field(default_factory=list)
    num_recorded: int = 0
    threads: set[str] = dataclasses.field(default_factory=set)
    lacking: frozenset[str] = frozenset()
    """Operators for which CUDA has no kernel."""
    complaint: str = ""
    """What a run fails with, if it is to fail."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The nodes of a graph that one provider computes."""

    ep_name: str
    nodes: list[Any]

    def get_nodes(self) -> list[Any]:
        return self.nodes


class SessionDouble:
    """An ONNX Runtime session that claims to be on CUDA and computes on the CPU provider.

    A recorded run must repeat the addresses, shapes and host values of its recording, on the same thread.
    """

    recorded: Recorded

    def __init__(self, path: str, settings: Any, providers: list[Any], enable_fallback: int = 1) -> None:
        self.name = Path(path).name
        self.recorded.threads.add(threading.current_thread().name)
        self.recorded.providers[self.name] = providers
        self.recorded.settings[self.name] = settings
        self.recorded.fallbacks[self.name] = enable_fallback
        self._recorded: dict[str, tuple[int, dict[str, Any]]] = {}
        mine = ort.SessionOptions()
        mine.intra_op_num_threads = 1
        mine.log_severity_level = 3
        mine.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        self._session = ort.InferenceSession(path, mine, providers=["CPUExecutionProvider"])

    def get_providers(self) -> list[str]:
        return [PROVIDER, "CPUExecutionProvider"]

    def get_provider_graph_assignment_info(self) -> list[Part]:
        nodes = [node for part in self._session.get_provider_graph_assignment_info() for node in part.get_nodes()]
        here = {"Shape", *self.recorded.lacking}
        return [
            Part(PROVIDER, [node for node in nodes if node.op_type not in here]),
            Part("CPUExecutionProvider", [node for node in nodes if node.op_type in here]),
        ]

    def io_binding(self) -> Any:
        return BindingDouble(self._session.io_binding(), self.recorded.bound.setdefault(self.name, set()))

    def run_with_iobinding(self, binding: BindingDouble, options: Any = None) -> None:
        number = "none" if options is None else options.get_run_config_entry("gpu_graph_id")
        self.recorded.threads.add(threading.current_thread().name)
        self.recorded.numbers.append((self.name, number))
        self.recorded.shapes.append((self.name, binding.shapes()))
        if self.recorded.complaint:
            raise RuntimeError(self.recorded.complaint)
        if number not in ("none", "-1"):
            self._hold_to(number, binding.repeated())
        self._session.run_with_iobinding(binding.real)

    def _hold_to(self, number: str, found: dict[str, Any]) -> None:
        thread = threading.get_ident()
        if number not in self._recorded:
            self.recorded.num_recorded += 1
            on_host = {name for name, (device, *_) in found.items() if device == "cpu"}
            assert on_host <= {"attention_metadata", "source_attention_metadata"}, "a device repeats no copy to a host"
        assert self._recorded.setdefault(number, (thread, found)) == (thread, found), f"run {number} has changed"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class BindingDouble:
    """Binds device memory as what it is here: memory of this host."""

    def __init__(self, real: Any, on_device: set[str]) -> None:
        self.real = real
        self._on_device = on_device
        self._placed: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        self._values: dict[str, Any] = {}

    def bind_input(self, name: str, device: str, *where: Any) -> None:
        self._place(name, device, *where)
        self.real.bind_input(name, "cpu", *where)

    def bind_output(self, name: str, device: str, *where: Any) -> None:
        self._place(name, device, *where)
        self.real.bind_output(name, "cpu", *where)

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self._values[name] = value
        self.real.bind_ortvalue_input(name, value)

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self._values[name] = value
        self.real.bind_ortvalue_output(name, value)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        placed = {name: shape for name, (_, _, shape) in self._placed.items()}
        return placed | {name: tuple(value.shape()) for name, value in self._values.items()}

    def repeated(self) -> dict[str, Any]:
        """What a recorded run depends on."""
        given = {
            name: ("cpu", value.data_ptr(), tuple(value.shape()), value.numpy().tolist())
            for name, value in self._values.items()
        }
        return {**self._placed, **given}

    def _place(self, name: str, device: str, number: int, dtype: Any, shape: Sequence[int], address: int) -> None:
        assert (device, number) == ("cuda", 0)
        self._on_device.add(name)
        self._placed[name] = device, address, tuple(shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def answers(engine: Any, manifest: Manifest) -> list[tuple[Any, ...]]:
    config = manifest.config
    draw = np.random.default_rng(2)
    limit = config.source_vocab_size if config.is_encoder_decoder else config.vocab_size
    for number, sampling in enumerate(
        [SamplingParams(temperature=0.0), SamplingParams(top_k=5, seed=1), SamplingParams(top_p=0.9, seed=2)] * 2
    ):
        engine.add_request(
            GenerationRequest(
                request_id=f"r{number}",
                model="tiny",
                prompt_token_ids=tuple(draw.integers(3, limit, 9 + 7 * number).tolist()),
                sampling=sampling,
                stopping=StoppingParams(max_tokens=6 + number, ignore_eos=True),
            )
        )
    events = [event for output in drain(engine) for event in output.events]
    assert all(event.error is None for event in events)
    return [(event.request_id, event.token_id, event.finish_reason) for event in events]
