"""Seconds of one step of a decoder graph: artifacts side by side, by our kernels and by standard operators.

`kernels` computes the project's own operators by its kernels (docs/learn/kernels.md), `standard` by standard operators
in their bodies, `plain` likewise without ONNX Runtime's flash attention. Figures are medians of interleaved rounds in
milliseconds: with one thread the thread's CPU time, which a busy machine disturbs least, with more the wall clock.
Decoder-only artifacts; K/V is random. `--profile` adds milliseconds by operator, from ONNX Runtime's profiler in runs
of their own.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frame.errors import ArgumentError
from benchmarks.frame.rounds import say, shuffled
from benchmarks.frame.scenario import Run, Scenario, Settings, option
from model import kernels
from model.spec import artifact
from model.spec.artifact import DECODER, ArtifactError, Manifest
from model.spec.config import Positions
from service.engine.sessions.device_memory import Array
from service.engine.sessions.session import Binding, GraphSession, SessionOptions

NO_FLASH = "ORT_GQA_DISABLE_FLASH_ATTENTION"
"""ONNX Runtime 1.31 reads it when it creates a session; there is no session option."""

_VARIANTS = ("kernels", "standard", "plain")
_REPEATS = 4  # decoding steps are short
Timed = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphsSettings(Settings):
    """What is timed: prompts as TOKENS:CHUNK, decode steps as ROWS:PAST."""

    precision: str = option("")
    artifacts: tuple[Path, ...] = option(text="decoder-only artifacts")
    threads: int = option(1, "within an operator", least=1)
    rounds: int = option(7, "of all graphs", least=1, quick=1)
    prefill: tuple[str, ...] = option(("512:256", "1024:256"), "TOKENS:CHUNK", spaced=True)
    decode: tuple[str, ...] = option(("1:128", "8:128", "32:128"), "ROWS:PAST", spaced=True)
    variants: tuple[str, ...] = option(_VARIANTS, "of each artifact", choices=_VARIANTS, spaced=True)
    profile: bool = option(False, "list operators' milliseconds")  # noqa: FBT003


def measure(settings: GraphsSettings, _: Run) -> dict[str, Any]:
    """Every case on every graph.

    Raises:
        ArgumentError: if an artifact cannot be timed.
    """
    if "kernels" in settings.variants and not kernels.operators():
        raise ArgumentError(f"no kernels to time: {kernels.why_not() or 'this processor can run none'}")
    cases = [(kind, *_pair(text)) for kind in ("prefill", "decode") for text in getattr(settings, kind)]
    rows = max((first for kind, first, _ in cases if kind == "decode"), default=1)
    capacity = max((second + 1 if kind == "decode" else first for kind, first, second in cases), default=1)
    graphs: dict[str, Graph] = {}
    try:
        for folder in settings.artifacts:
            manifest = artifact.load(folder)
            for variant in settings.variants:
                graphs[f"{folder} {variant}"] = Graph(folder, manifest, settings.threads, rows, capacity, variant)
    except (ArtifactError, ValueError) as error:
        raise ArgumentError(str(error)) from error
    found, shares = {}, {}
    for kind, first, second in cases:
        case = f"{kind} {first}:{second}"
        runs = {name: getattr(graph, kind)(first, second) for name, graph in graphs.items()}
        found[case] = time_all(runs, settings.rounds)
        say(f"{case} {found[case]}")
        if settings.profile:
            sizes = settings.threads, rows, capacity
            shares[case] = {
                f"{folder} {variant}": profile(folder, sizes, variant, (kind, first, second), settings.rounds)
                for folder in settings.artifacts
                for variant in settings.variants
            }
            say(f"{case} {shares[case]}")
    return {"milliseconds": found, **({"operators": shares} if settings.profile else {})}


def profile(
    folder: Path, sizes: tuple[int, int, int], variant: str, case: tuple[str, int, int], rounds: int
) -> dict[str, float]:
    """Median milliseconds by operator, and `between` them, of a case.

    Args:
        folder: the artifact.
        sizes: threads, rows and capacity, as `Graph` has them.
        variant: as `Graph` has it.
        case: a method of `Graph` and its arguments.
        rounds: after a warm-up.
    """
    kind, first, second = case
    with tempfile.TemporaryDirectory() as scratch:
        graph = Graph(folder, artifact.load(folder), *sizes, variant, Path(scratch) / "profile")
        run = getattr(graph, kind)(first, second)
        for _ in range(rounds + 1):
            run()
        events = json.loads(graph.end_profile().read_bytes())
    num_runs = len(range(0, first, second)) if kind == "prefill" else 1
    return by_operator(events, num_runs, _REPEATS if kind == "decode" else 1)


def by_operator(events: Sequence[Mapping[str, Any]], num_runs: int, num_warming: int) -> dict[str, float]:
    """Median milliseconds by operator of a profile, the most first.

    Args:
        events: as ONNX Runtime writes them, in microseconds.
        num_runs: runs of the graph for each case.
        num_warming: of these at the start do not count.
    """
    runs = sorted((each["ts"], each["dur"]) for each in events if each["name"] == "model_run")
    nodes = sorted(
        (each["ts"], each["dur"], each["args"]["op_name"])
        for each in events
        if each["cat"] == "Node" and each["name"].endswith("_kernel_time")
    )
    times: dict[str, list[float]] = defaultdict(lambda: [0.0] * (len(runs) // num_runs))
    next_node = 0
    for index, (began, duration) in enumerate(runs):
        number, left = index // num_runs, duration
        while next_node < len(nodes) and nodes[next_node][0] < began + duration:
            _, taken, operator = nodes[next_node]
            times[operator][number] += taken
            left -= taken
            next_node += 1
        times["between"][number] += left
    medians = {name: statistics.median(each[num_warming:]) / 1e3 for name, each in times.items()}
    return {name: round(medians[name], 3) for name in sorted(medians, key=medians.__getitem__, reverse=True)}


def time_all(runs: Mapping[str, Timed], rounds: int) -> dict[str, float]:
    """Median milliseconds by name, after a warm-up."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in shuffled(runs, number):
            times[name].append(runs[name]())
    return {name: round(1e3 * statistics.median(seconds), 2) for name, seconds in times.items()}


class Graph:
    """A decoder with buffers of its own.

    Args:
        folder: a decoder-only artifact.
        manifest: its manifest.
        threads: within an operator.
        rows: sequences that decode together at most.
        capacity: tokens of a sequence at most.
        variant: "kernels", "standard" or "plain", as above.
        profile: file for a profile of all runs, see `end_profile`.

    Raises:
        ValueError: if the model is an encoder-decoder, or its context is shorter than `capacity`.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        threads: int,
        rows: int,
        capacity: int,
        variant: str,
        profile: Path | None = None,
    ) -> None:
        config = manifest.config
        if config.is_encoder_decoder or config.context < capacity:
            raise ValueError(f"{folder}: needs a decoder-only model with a context of {capacity} or more")
        with _flash_attention(variant != "plain"):
            # Other graphs' threads must not spin on the cores.
            own_kernels = variant == "kernels"
            options = SessionOptions(
                intra_op_threads=threads, stop_spinning=True, own_kernels=own_kernels, profile=profile
            )
            self._session = GraphSession(folder, manifest.graphs[DECODER], options)
        self._config = config
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        rng = np.random.default_rng(0)
        shape = (rows, config.num_kv_heads, capacity, config.head_dim)
        dtype = np.dtype(manifest.kv_cache.precision.dtype)
        row = (rng.integers(-100, 100, shape[1:]) * (1 if dtype == np.int8 else 0.01)).astype(dtype)
        names = [f"{part}_{layer}" for layer in range(config.num_layers) for part in ("key", "value")]
        self._buffers = {name: np.tile(row, (rows, 1, 1, 1)) for name in names}
        self._logits = np.zeros((rows, config.vocab_size), np.float32)

    def prefill(self, tokens: int, chunk: int) -> Timed:
        """A prompt of one sequence, in chunks."""
        bounds = range(0, tokens, chunk)
        bindings = [self._bind(1, start, min(chunk, tokens - start)) for start in bounds]
        return lambda: self._time(bindings)

    def decode(self, rows: int, past: int) -> Timed:
        """One token for each of several sequences of equal length."""
        bindings = [self._bind(rows, past, 1)] * _REPEATS
        return lambda: self._time(bindings) / _REPEATS

    def end_profile(self) -> Path:
        """The profile of all runs so far."""
        return self._session.end_profile()

    def _time(self, bindings: Sequence[Binding]) -> float:
        began = self._clock()
        for binding in bindings:
            binding.run()
        return self._clock() - began

    def _bind(self, rows: int, past: int, count: int) -> Binding:
        ids = np.random.default_rng(past).integers(0, self._config.vocab_size, (rows, count))
        inputs: dict[str, Array] = {
            "input_ids": ids,
            "seqlens_k": np.full(rows, past + count - 1, np.int32),
            "total_sequence_length": np.array(past + count, np.int32),
            "logits_indices": np.arange(1, rows + 1) * count - 1,
        }
        if self._config.positions is not Positions.ROTARY:
            inputs["position_ids"] = np.tile(np.arange(past, past + count), (rows, 1))
        outputs: dict[str, Array] = {"logits": self._logits[:rows]}
        for name, buffer in self._buffers.items():
            inputs[f"past_{name}"] = outputs[f"present_{name}"] = buffer[:rows]
        return self._session.bind(inputs, outputs)


@contextmanager
def _flash_attention(allowed: bool) -> Iterator[None]:  # noqa: FBT001 (it has no other argument)
    environ = os.environ  # noqa: TID251 (a library's switch)
    before = environ.pop(NO_FLASH, None)
    environ.update({} if allowed else {NO_FLASH: "1"})
    try:
        yield
    finally:
        environ.pop(NO_FLASH, None)
        environ.update({} if before is None else {NO_FLASH: before})


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    if not (first.isdecimal() and second.isdecimal()):
        raise ArgumentError(f"is {text!r}, must be two whole numbers as 1:128")
    return int(first), int(second)


SCENARIO = Scenario(__name__, GraphsSettings, measure)
