"""What the host costs in a decode step: seconds between two runs of the graph, beside the seconds that it runs.

    python -m benchmarks run host ARTIFACT [--batches 1,8,32] [--prompt 128] [--new 64]

The engine alone, without transport, on the artifact's device; all greedy requests arrive before the first step. Counted
are steps in which every request decodes; figures are medians (`StepStats`). Decoder-only artifacts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frame.engine import checked_step, greedy_request, load_engine
from benchmarks.frame.scenario import Run, Scenario, Settings, option
from model.spec.artifact import read_manifest
from service.engine.engine import Engine
from service.engine.scheduler import EngineLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings(Settings):
    """What is measured; lengths in tokens."""

    artifact: Path = option(text="folder that `python -m export` wrote")  # noqa: RUF009 (a field)
    batches: tuple[int, ...] = option((1, 8, 32), "requests at once", least=1, quick=(1, 4))
    prompt: int = option(128, "tokens of each prompt", least=1, quick=8)
    new: int = option(64, "tokens of each answer", least=3, quick=8)


def measure(settings: HostSettings, _: Run) -> dict[str, Any]:
    """Every batch on one engine."""
    limits = EngineLimits(max_batch_size=max(settings.batches))
    engine = load_engine(settings.artifact, limits, settings.threads)
    vocab_size = read_manifest(settings.artifact).config.vocab_size
    found = {str(batch): steps(engine, vocab_size, batch, settings) for batch in settings.batches}
    return {"artefact": str(settings.artifact), "threads": settings.threads, "batches": found}


def steps(engine: Engine, vocab_size: int, batch: int, settings: HostSettings) -> dict[str, float]:
    """Medians of the steps in which all requests of a batch decode."""
    rng = np.random.default_rng(batch)
    for number in range(batch):
        prompt = rng.integers(0, vocab_size, settings.prompt).tolist()
        engine.add_request(greedy_request(f"{batch}-{number}", prompt, settings.new))
    seconds = []
    while engine.has_work:
        stats = checked_step(engine).stats
        if stats.num_rows == stats.num_tokens == batch and stats.host_seconds is not None:
            seconds.append((stats.run_seconds, stats.host_seconds))
    run, host = (statistics.median(each) for each in zip(*seconds, strict=True))
    return {"run_seconds": run, "host_seconds": host, "host_share": host / (run + host)}


SCENARIO = Scenario(__name__, HostSettings, measure)
