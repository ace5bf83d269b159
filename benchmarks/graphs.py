"""How long one step of a decoder graph takes: artifacts side by side, by our kernels and by standard operators.

    python -m benchmarks.graphs ARTEFACT... [--threads N] [--rounds N] [--prefill TOKENS:CHUNK...]
        [--decode ROWS:PAST...] [--variants kernels standard plain] [--profile]

`kernels` computes the project's own operators by its kernels (docs/kernels.md), `standard` by the operators that they
stand for, `plain` likewise without ONNX Runtime's flash attention. Each system takes its turn in every round, in an
order drawn anew, so that what else the machine does falls on all alike; the figure is the median of the rounds in
milliseconds. With one thread it is the thread's own CPU time, which a busy machine disturbs least, with more the time
on the clock. Decoder-only artifacts; K/V is random. With `--profile` it also lists what operators take of it, by
ONNX Runtime's own profiler in runs of their own, which it slows down a little. Progress goes to stderr; the last line
of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from model import kernels
from model.spec import artifact
from model.spec.artifact import DECODER, ArtifactError, Manifest
from model.spec.config import Positions
from service.engine.sessions.device_memory import Array
from service.engine.sessions.session import Binding, GraphSession, SessionOptions

NO_FLASH = "ORT_GQA_DISABLE_FLASH_ATTENTION"
"""What ONNX Runtime 1.31 reads when a session is created, and has no session option for."""

_VARIANTS = ("kernels", "standard", "plain")
_REPEATS = 4  # decoding steps are short
Timed = Callable[[], float]


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; 0, or 2 when an artifact cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graphs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifacts", type=Path, nargs="+", metavar="ARTEFACT")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prefill", type=_pair, nargs="*", default=[(512, 256), (1024, 256)], metavar="TOKENS:CHUNK")
    parser.add_argument("--decode", type=_pair, nargs="*", default=[(1, 128), (8, 128), (32, 128)], metavar="ROWS:PAST")
    parser.add_argument("--variants", nargs="+", choices=_VARIANTS, default=list(_VARIANTS))
    parser.add_argument("--profile", action="store_true", help="tell what operators take")
    given = parser.parse_args(arguments)
    if "kernels" in given.variants and not kernels.operators():
        print(f"no kernels to time: {kernels.why_not() or 'this processor can run none'}", file=sys.stderr)
        return 2
    rows = max((rows for rows, _ in given.decode), default=1)
    capacity = max([past + 1 for _, past in given.decode] + [tokens for tokens, _ in given.prefill], default=1)
    graphs: dict[str, Graph] = {}
    try:
        for folder in given.artifacts:
            manifest = artifact.load(folder)
            for variant in given.variants:
                graphs[f"{folder} {variant}"] = Graph(folder, manifest, given.threads, rows, capacity, variant)
    except (ArtifactError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    found, shares = {}, {}
    for kind, cases in (("prefill", given.prefill), ("decode", given.decode)):
        for first, second in cases:
            case = f"{kind} {first}:{second}"
            runs = {name: getattr(graph, kind)(first, second) for name, graph in graphs.items()}
            found[case] = figures = measure(runs, given.rounds)
            print(f"{case} {figures}", file=sys.stderr, flush=True)
            if given.profile:
                sizes = given.threads, rows, capacity
                shares[case] = figures_by_operator = {
                    f"{folder} {variant}": profile(folder, sizes, variant, (kind, first, second), given.rounds)
                    for folder in given.artifacts
                    for variant in given.variants
                }
                print(f"{case} {figures_by_operator}", file=sys.stderr, flush=True)
    told = {"threads": given.threads, "rounds": given.rounds, "milliseconds": found}
    print(json.dumps(told | ({"operators": shares} if given.profile else {})))
    return 0


def profile(
    folder: Path, sizes: tuple[int, int, int], variant: str, case: tuple[str, int, int], rounds: int
) -> dict[str, float]:
    """Median milliseconds by operator, and `between` them, of what `case` is: a prompt, or a step of decoding.

    Args:
        folder: the artifact.
        sizes: threads, rows and capacity, as `Graph` has them.
        variant: as `Graph` has it.
        case: the name of a method of `Graph`, and what it is given.
        rounds: how often, after one that does not count.
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
        num_runs: how many runs of the graph make one of what is told.
        num_warming: how many of these at the start do not count.
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


def measure(runs: Mapping[str, Timed], rounds: int) -> dict[str, float]:
    """Median milliseconds by name, after one turn that does not count."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    names, order = list(runs), random.Random(0)  # noqa: S311 (not for secrets)
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            times[name].append(runs[name]())
    return {name: round(1e3 * statistics.median(seconds), 2) for name, seconds in times.items()}


class Graph:
    """One decoder, loaded, with buffers of its own.

    Args:
        folder: a decoder-only artifact.
        manifest: its manifest.
        threads: within an operator.
        rows: how many sequences decode together at most.
        capacity: how long one may be.
        variant: "kernels", "standard" or "plain", as above.
        profile: where a profile of all runs goes, if one is wanted; see `end_profile`.

    Raises:
        ValueError: when the model is an encoder-decoder, or its context is shorter than `capacity`.
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
            # Other graphs' threads must not be found spinning on the cores.
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
        """Where the profile of all runs so far lies."""
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
    environ = os.environ  # noqa: TID251 — a library's own switch, not our configuration
    before = environ.pop(NO_FLASH, None)
    environ.update({} if allowed else {NO_FLASH: "1"})
    try:
        yield
    finally:
        environ.pop(NO_FLASH, None)
        environ.update({} if before is None else {NO_FLASH: before})


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    return int(first), int(second)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
