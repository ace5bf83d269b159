"""Whether captured decoding steps are the steps that they were captured from: the same bits in all that they put out.

Two pools of blocks get the same tokens, one by a graph that runs as any other, one by a graph that is captured in the
first step and repeated in all others; each step reads what the steps before it wrote. On a CPU nothing is captured.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.graph_steps import GraphSteps
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.results import Scribe
from benchmarks.gpu.workshop import Graphs
from service.engine.session import Array

NAME = "captured"
_SOURCE_LENGTH = 24
_RECORDED = 1


def run(bench: Bench, scribe: Scribe) -> None:
    """Every model in every precision."""
    plan = bench.plan
    for name, config in bench.proven.items():
        for precision in plan.precisions:
            graphs = bench.workshop.graphs(name, config, precision)
            eager, eager_seconds = take(graphs, plan, None)
            captured, captured_seconds = take(graphs, plan, _RECORDED)
            different = differing(eager, captured)
            figures = {
                "model": name,
                "precision": precision,
                "num_steps": len(eager),
                "num_rows": plan.rows,
                "different_steps": different,
                "eager_step_seconds": eager_seconds,
                "captured_step_seconds": captured_seconds,
            }
            scribe.add("steps", figures)
            found = f"{len(different)} of {len(eager)} steps differ"
            what = f"{name} {precision}: {len(eager)} captured steps of {plan.rows} rows have the bits of eager ones"
            scribe.claim(what, found if different else "all the same", holds=not different)


def take(graphs: Graphs, plan: Plan, number: int | None) -> tuple[list[dict[str, Array]], float]:
    """What steps put out that feed random tokens, and the median seconds of one, reading aside."""
    config = graphs.config
    draw = np.random.default_rng(23)
    sources: npt.NDArray[np.int64] | None = None
    if config.is_encoder_decoder:
        sources = draw.integers(3, config.source_vocab_size, (plan.rows, _SOURCE_LENGTH))
    steps = GraphSteps(graphs, plan.rows, plan.captured_steps, sources)
    found, seconds = [], []
    for position in range(plan.captured_steps):
        steps.feed(draw.integers(0, config.vocab_size, plan.rows).tolist(), position)
        began = time.perf_counter()
        steps.run(number)
        seconds.append(time.perf_counter() - began)
        found.append(steps.read())
    return found, statistics.median(seconds)


def differing(first: list[dict[str, Array]], second: list[dict[str, Array]]) -> list[int]:
    """Steps in which anything that was put out has other bits, or is no number."""
    return [
        index
        for index, (mine, theirs) in enumerate(zip(first, second, strict=True))
        if mine.keys() != theirs.keys()
        or any(values.tobytes() != theirs[name].tobytes() for name, values in mine.items())
        or not np.isfinite(mine["logits"]).all()
    ]
