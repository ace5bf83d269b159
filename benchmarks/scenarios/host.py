"""What the host costs in a decode step: seconds between two runs of the graph, beside the seconds that it runs.

    python -m benchmarks run host [--model llama-110m | --artifact DIR] [--batches 1,8,32] [--prompt 128] [--new 64]

The engine alone, without transport, on the artifact's device; all greedy requests arrive before the first step. Counted
are steps in which every request decodes; figures are medians (`StepStats`). Decoder-only artifacts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frame.engine import checked_step, greedy_request, load_engine
from benchmarks.frame.rounds import interleaved
from benchmarks.frame.scenario import ModelSettings, Run, Scenario, option
from benchmarks.frame.statistics import bootstrap
from model.spec.artifact import read_manifest
from service.engine.engine import Engine
from service.engine.scheduler import EngineLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings(ModelSettings):
    """What is measured; lengths in tokens."""

    artifact: str = option("", "folder that `python -m export` wrote, instead of the model's")
    batches: tuple[int, ...] = option((1, 8, 32), "requests at once", least=1, quick=(1, 4))
    prompt: int = option(128, "tokens of each prompt", least=1, quick=8)
    new: int = option(64, "tokens of each answer", least=3, quick=8)
    rounds: int = option(5, "of all batches", least=1, quick=1)


def measure(settings: HostSettings, run: Run) -> dict[str, Any]:
    """Every batch on one engine, in rounds."""
    limits = EngineLimits(max_batch_size=max(settings.batches))
    given = Path(settings.artifact) if settings.artifact else None
    folder = given or run.subject(settings, limits.max_batch_size).folder
    engine = load_engine(folder, limits, settings.threads)
    vocab_size = read_manifest(folder).config.vocab_size
    rounds: dict[int, list[dict[str, float]]] = {batch: [] for batch in settings.batches}
    for number, batch in interleaved(settings.rounds, settings.batches, settings.seed):
        rounds[batch].append(steps(engine, vocab_size, batch, settings, number))
    return {"batches": {str(batch): judge(each) for batch, each in rounds.items()}}


def judge(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians over the rounds, and the interval of the host's share."""
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    shares = [each["host_share"] for each in rounds]
    return {**found, "host_share_by_round": shares, "host_share_interval": bootstrap(statistics.median, shares)}


def steps(engine: Engine, vocab_size: int, batch: int, settings: HostSettings, number: int = 0) -> dict[str, float]:
    """Medians of the steps in which all requests of a batch decode."""
    rng = np.random.default_rng((batch, number))
    for row in range(batch):
        prompt = rng.integers(0, vocab_size, settings.prompt).tolist()
        engine.add_request(greedy_request(f"{batch}-{row}", prompt, settings.new))
    seconds = []
    while engine.has_work:
        stats = checked_step(engine).stats
        if stats.num_rows == stats.num_tokens == batch and stats.host_seconds is not None:
            seconds.append((stats.run_seconds, stats.host_seconds))
    run, host = (statistics.median(each) for each in zip(*seconds, strict=True))
    return {"run_seconds": run, "host_seconds": host, "host_share": host / (run + host)}


SCENARIO = Scenario(__name__, HostSettings, measure)
