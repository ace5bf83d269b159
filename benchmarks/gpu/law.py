"""Whether the time of a prompt grows as attention's law says: quadratic fits of prefill seconds to the longest prompts.

The engine's seconds from a prompt's arrival to its first token, one prompt at a time, in chunks; the fit and what
speaks against it are the load test's (`loadtest.fit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines import make_engine
from benchmarks.gpu.results import Scribe
from benchmarks.gpu.speed import engine_limits, prefill_seconds
from loadtest.fit import Examination, examine

NAME = "law"
_QUADRATIC = 2
_SAMPLES = 5


def run(bench: Bench, scribe: Scribe) -> None:
    """The stage's model."""
    plan, name, config = bench.plan, bench.stage.model, bench.timed
    graphs = bench.workshop.graphs(name, config, plan.timed_precision)
    engine = make_engine(graphs, engine_limits(graphs, plan, 1))
    samples: list[tuple[float, float]] = []
    for length in plan.law_lengths:
        repeats = 1 if plan.is_quick else _SAMPLES
        samples += [(length, seconds) for seconds in prefill_seconds(engine, config, length, repeats)]
        # Known at once, should a longer prompt not come to its end.
        scribe.note("seconds", samples)
        scribe.say(f"{name}: {length} tokens in {samples[-1][1]:.3f} s")
    found = examine(samples, _QUADRATIC)
    scribe.add("fits", {"model": name, "precision": str(plan.timed_precision), **describe(found, samples)})
    if not plan.is_quick:
        text = "; ".join(found.objections) or f"attention overtakes the rest at {found.crossover:,.0f} tokens"
        what = f"{name}: prompts up to {found.longest:,.0f} tokens take quadratic time"
        scribe.claim(what, text, holds=found.holds)


def describe(found: Examination, samples: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """A fit as figures; a crossover that never comes is None."""
    return {
        "samples": samples,
        "coefficients": list(found.curve.coefficients),
        "intervals": [[interval.low, interval.high] for interval in found.intervals],
        "crossover": found.crossover if found.crossover < float("inf") else None,
        "bic": list(found.bic),
        "leading_share": found.leading_share,
        "next_share": found.next_share,
        "misfit": found.misfit,
        "extrapolation_error": found.extrapolation_error,
        "objections": list(found.objections),
    }
