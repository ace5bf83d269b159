"""How fast, beside two others in the same run and beside what the device could do at most.

    onward               the engine: scheduler, graph, sampling, as a server has it, without transport
    onward-graph         its captured decoding graph alone, nothing read, nothing chosen
    torch-cuda-graph     plain torch, a step captured as a CUDA graph (`benchmarks.gpu.torch_loops`)
    transformers         `generate` with a static cache, compiled (`benchmarks.gpu.hf_loops`)

decode    so many sequences at once, tokens a second while all of them decode; prompts are random and all different
prefill   one prompt, tokens a second until its first token is chosen

Each system in a stage of its own, so that it finds the device as the others did. A share is that of the roofline
(`benchmarks.gpu.roofline`) under the ceilings that were measured before.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ceilings import DTYPES, ceilings_of
from benchmarks.gpu.clock import synchronize, wall_seconds
from benchmarks.gpu.engines import draw_prompt, greedy, make_engine
from benchmarks.gpu.graph_steps import GraphSteps
from benchmarks.gpu.hf_loops import TransformersDecode
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.promises import DECODE, PREFILL
from benchmarks.gpu.results import Scribe
from benchmarks.gpu.roofline import Ceilings, Work, decode_work, prefill_work
from benchmarks.gpu.stages import GRAPH, OURS, TORCH, TRANSFORMERS
from benchmarks.gpu.torch_loops import TorchDecode
from benchmarks.gpu.workshop import Graphs
from model.nn.transformer import DecoderOnly
from model.spec.artifact import Device
from model.spec.config import ModelConfig
from service.engine.engine import Engine
from service.engine.kv.budget import plan_kv_memory
from service.engine.scheduler import EngineLimits
from service.engine.types import StepStats

NAME = "speed"
_MULTIPLE = 64
_GRAPH_STEPS = 50
_SETTLING_STEPS = 4
_RECORDED = 1
_LEAST_SECONDS = 1e-9
_COMPILE_SECONDS = 45.0
"""About what compiling a step takes, for which the time must suffice."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one system took: seconds of a step, or of a prompt, one for each repeat; and where a step's time went."""

    seconds: list[float]
    graph_seconds: float | None = None
    host_seconds: float | None = None


def run(bench: Bench, scribe: Scribe) -> None:
    """The stage's model by the stage's system."""
    name, config = bench.stage.model, bench.timed
    table = _Table(scribe, name, config, bench.plan, ceilings_of(bench))
    _MEASURES[bench.stage.system](bench, table, name, config)


class _Table:
    """Rows of figures, each beside its roofline."""

    def __init__(self, scribe: Scribe, name: str, config: ModelConfig, plan: Plan, limit: Ceilings) -> None:
        self.scribe = scribe
        self._name = name
        self._config = config
        self._plan = plan
        self._limit = limit

    def add(self, system: str, metric: str, size: int, measured: Measured) -> None:
        """A row: `size` is how many sequences decode, or how long the prompt is."""
        seconds = statistics.median(measured.seconds)
        tokens = size / seconds
        best = self._work(metric, size).seconds(self._limit)
        self.scribe.add(
            "rows",
            {
                "model": self._name,
                "precision": str(self._plan.timed_precision),
                "system": system,
                "metric": metric,
                "size": size,
                "seconds": seconds,
                "each": measured.seconds,
                "tokens_per_second": tokens,
                "roofline": size / best,
                "share": best / seconds,
                "graph_seconds": measured.graph_seconds,
                "host_seconds": measured.host_seconds,
            },
        )
        what = f"batch {size}" if metric == DECODE else f"{size} tokens"
        share = f"{best / seconds:.2f} of the roofline"
        self.scribe.say(f"{self._name} {metric} {what}, {system}: {tokens:.0f} tokens/s, {share}")

    def _work(self, metric: str, size: int) -> Work:
        itemsize = DTYPES[self._plan.timed_precision].itemsize
        if metric == DECODE:
            return decode_work(self._config, size, self._plan.decode_prompt + self._plan.decode_new // 2, itemsize)
        return prefill_work(self._config, size, itemsize)


# Ours


def engine_limits(graphs: Graphs, plan: Plan, num_rows: int) -> EngineLimits:
    """Room for so many short sequences, or for one that fills the context."""
    whole = plan_kv_memory(graphs.manifest, 1, None)
    short = whole.row_bytes(plan.decode_prompt + plan.decode_new + 1, 0)
    return EngineLimits(
        max_batch_size=num_rows,
        prefill_chunk=plan.chunk,
        max_prefill_tokens=plan.chunk,
        # And for what is kept of the prompts before.
        kv_memory_bytes=2 * max(whole.num_bytes, num_rows * short),
    )


def _measure_graph(bench: Bench, table: _Table, name: str, config: ModelConfig) -> None:
    graphs = bench.workshop.graphs(name, config, bench.plan.timed_precision)
    for batch in bench.plan.batches:
        table.add(GRAPH, DECODE, batch, graph_steps(graphs, bench.plan, batch))


def _measure_engine(bench: Bench, table: _Table, name: str, config: ModelConfig) -> None:
    plan = bench.plan
    graphs = bench.workshop.graphs(name, config, plan.timed_precision)
    engine = make_engine(graphs, engine_limits(graphs, plan, max(plan.batches)))
    for batch in plan.batches:
        table.add(OURS, DECODE, batch, engine_steps(engine, config, plan, batch))
    for length in plan.prefill_lengths:
        table.add(OURS, PREFILL, length, Measured(prefill_seconds(engine, config, length, plan.repeats)))


def graph_steps(graphs: Graphs, plan: Plan, batch: int) -> Measured:
    """The captured graph by itself, at the middle of what the sequences come to."""
    middle = plan.decode_prompt + plan.decode_new // 2
    steps = GraphSteps(graphs, batch, middle + 1)
    steps.feed([0] * batch, middle)
    for _ in range(_SETTLING_STEPS):
        steps.run(_RECORDED)
    seconds = []
    for _ in range(plan.repeats):
        began = time.perf_counter()
        for _ in range(_GRAPH_STEPS):
            steps.run(_RECORDED)
        seconds.append((time.perf_counter() - began) / _GRAPH_STEPS)
    return Measured(seconds)


def engine_steps(engine: Engine, config: ModelConfig, plan: Plan, batch: int) -> Measured:
    """So many sequences at once: the mean step of each repeat, after one that does not count."""
    rounds = [_decode(engine, config, plan, batch, number) for number in range(plan.repeats + 1)][1:]
    stats = [step for each in rounds for step, _ in each]
    hosts = [step.host_seconds for step in stats if step.host_seconds is not None]
    return Measured(
        seconds=[statistics.fmean(seconds for _, seconds in each) for each in rounds],
        graph_seconds=statistics.median(step.run_seconds for step in stats),
        host_seconds=statistics.median(hosts) if hosts else None,
    )


def prefill_seconds(engine: Engine, config: ModelConfig, length: int, repeats: int) -> list[float]:
    """From a prompt's arrival to its first token, after one that does not count."""
    seconds = []
    for number in range(repeats + 1):
        prompt = draw_prompt(config.vocab_size, length, length, number)
        began = time.perf_counter()
        engine.add_request(greedy(f"p{length}-{number}", prompt, 1))
        while engine.has_work:
            _checked_step(engine)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _decode(engine: Engine, config: ModelConfig, plan: Plan, batch: int, seed: int) -> list[tuple[StepStats, float]]:
    """Steps in which all decode and nothing else happens, each with the seconds since the step before it ended."""
    for number in range(batch):
        prompt = draw_prompt(config.vocab_size, plan.decode_prompt, batch, number, seed)
        engine.add_request(greedy(f"d{batch}-{number}-{seed}", prompt, plan.decode_new))
    steps, ended = [], time.perf_counter()
    while engine.has_work:
        stats = _checked_step(engine)
        before, ended = ended, time.perf_counter()
        steps.append((stats, ended - before))
    full = [each for each in steps if each[0].num_decode_rows == batch and each[0].num_prefill_tokens == 0]
    # The first of them makes its bindings.
    if len(full) < 2:
        raise RuntimeError(f"of {len(steps)} steps {len(full)} have {batch} rows that decode, wanted are two or more")
    return full[1:]


def _checked_step(engine: Engine) -> StepStats:
    output = engine.step()
    for event in output.events:
        if event.error is not None:
            raise event.error
    return output.stats


# The others


def _measure_torch(bench: Bench, table: _Table, name: str, config: ModelConfig) -> None:
    plan, device = bench.plan, bench.device
    model = bench.workshop.on_device(name, config, DTYPES[plan.timed_precision])
    if not isinstance(model, DecoderOnly):
        raise TypeError(f"{name} is no decoder-only model")
    for batch in plan.batches:
        table.add(TORCH, DECODE, batch, Measured(torch_steps(model, plan, batch, device)))
    for length in plan.prefill_lengths:
        loop, prompt = TorchDecode(model, 1, length), _prompts(config, 1, length, device)
        table.add(TORCH, PREFILL, length, Measured(_repeated(partial(loop.prefill, prompt), device, plan.repeats)))


def torch_steps(model: DecoderOnly, plan: Plan, batch: int, device: str) -> list[float]:
    """The mean step of each repeat."""
    capacity = -(-(plan.decode_prompt + plan.decode_new) // _MULTIPLE) * _MULTIPLE
    loop, prompts = TorchDecode(model, batch, capacity), _prompts(model.config, batch, plan.decode_prompt, device)
    loop.prefill(prompts)
    loop.capture()
    seconds = []
    for _ in range(plan.repeats):
        loop.prefill(prompts)
        seconds.append(wall_seconds(partial(_steps, loop, plan.decode_new - 1), device) / (plan.decode_new - 1))
    return seconds


def _measure_transformers(bench: Bench, table: _Table, name: str, config: ModelConfig) -> None:
    plan, device = bench.plan, bench.device
    theirs = TransformersDecode(bench.workshop.on_device(name, config, DTYPES[plan.timed_precision]), device)
    table.scribe.note("transformers", theirs.version)
    for batch in plan.batches:
        if device == Device.CUDA and bench.seconds_left < _COMPILE_SECONDS:
            what = f"{name} {DECODE} batch {batch}, {TRANSFORMERS}"
            why = f"{bench.seconds_left:.0f} s left, compiling takes some {_COMPILE_SECONDS:g}"
            table.scribe.leave_out(what, why)
            continue
        table.add(TRANSFORMERS, DECODE, batch, _generate(theirs, config, plan, batch, device))
        theirs.forget()
    for length in plan.prefill_lengths:
        prompt = _prompts(config, 1, length, device)
        seconds = _repeated(partial(theirs.prefill, prompt), device, plan.repeats)
        table.add(TRANSFORMERS, PREFILL, length, Measured(seconds))


def _generate(theirs: TransformersDecode, config: ModelConfig, plan: Plan, batch: int, device: str) -> Measured:
    """The seconds of a step, with a cache that is kept or with one for each call, whichever is faster."""
    prompts = _prompts(config, batch, plan.decode_prompt, device)
    # As long as `generate` makes a cache for one token more, whose own K/V nobody reads: both ways run one graph.
    capacity, new = plan.decode_prompt + plan.decode_new, plan.decode_new + 1
    ways = [
        [_step_seconds(theirs, prompts, new, kept, device) for _ in range(plan.repeats + 1)][1:]
        for kept in (capacity, 0)
    ]
    return Measured(min(ways, key=statistics.median))


def _step_seconds(theirs: TransformersDecode, prompts: Tensor, new: int, capacity: int, device: str) -> float:
    """Of all tokens less those of the first alone, which is the prompt's; what must be compiled is before."""
    # What runs compiled has its memory where the call before had it, once there was one.
    theirs.generate(prompts, new, capacity)
    whole = wall_seconds(lambda: theirs.generate(prompts, new, capacity), device)
    first = wall_seconds(lambda: theirs.generate(prompts, 1, capacity), device)
    return max(whole - first, _LEAST_SECONDS) / (new - 1)


def _steps(loop: TorchDecode, num_steps: int) -> None:
    for _ in range(num_steps):
        loop.step()


def _repeated(call: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Seconds of several calls after one that does not count."""
    call()
    synchronize(device)
    return [wall_seconds(call, device) for _ in range(repeats)]


def _prompts(config: ModelConfig, batch: int, length: int, device: str) -> Tensor:
    rows = itertools.starmap(draw_prompt, ((config.vocab_size, length, batch, number) for number in range(batch)))
    return torch.tensor(list(rows), device=device)


_MEASURES: Mapping[str, Callable[[Bench, _Table, str, ModelConfig], None]] = {
    OURS: _measure_engine,
    TRANSFORMERS: _measure_transformers,
    TORCH: _measure_torch,
    GRAPH: _measure_graph,
}
