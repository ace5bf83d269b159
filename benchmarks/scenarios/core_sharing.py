"""Weighted fair scheduling between models: one model's share of the cores beside another's prompts.

Over gRPC, on servers that serve one artifact under two names: "streams" decodes for a few clients, "prompts" prefills
long prompts for others, one token each and several in flight, so that both always have work. Three ways:

    alone      the streams without the prompts
    even       both, with equal weights
    favored    both, with --time-shares streams=3

A model's share is its seconds in graphs over those of both, from the server's metrics. (The scheduler counts the host's
work too, of which small models have relatively more.) Promise: within 5 points of the share by weight, 50 % and 75 %.
For comparison: the share if the models took turns step by step.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import time
from asyncio import Event
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.frame.models import METRICS, draw
from benchmarks.frame.rounds import interleaved
from benchmarks.frame.scenario import ModelSettings, Results, Run, Scenario, option
from benchmarks.frame.servers import read_metrics
from benchmarks.frame.statistics import percentiles
from benchmarks.frame.streams import Answer, connected, follow
from benchmarks.frame.tables import conditions, milliseconds, subject, table, verdict

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

STREAMS, PROMPTS = "streams", "prompts"
WEIGHTS: Mapping[str, float | None] = {"alone": None, "even": 1.0, "favored": 3.0}
"""The streams' weight beside 1, by way; None without prompts."""
TOLERANCE = 0.05
_RUNS = "onward_engine_run_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingSettings(ModelSettings):
    """What is measured; lengths in tokens. The `lead` does not count."""

    streams: int = option(4, "that run", least=1)
    stream_prompt: int = option(64)
    prompt: int = option(1024, "tokens of the other model's prompts", least=1)
    in_flight: int = option(4, "prompts at once", least=1)
    lead: float = option(3.0)
    seconds: float = option(20.0, "of a round", least=1.0, quick=5.0)
    repeats: int = option(5, "rounds", least=1, quick=1)
    ways: tuple[str, ...] = option(tuple(WEIGHTS))


@dataclass(frozen=True, slots=True)
class Runs:
    """A model's graph runs."""

    seconds: float = 0.0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """One way, once: its length, graph runs by model, and the streams' waits."""

    seconds: float
    runs: Mapping[str, Runs]
    waits: tuple[float, ...]


def measure(settings: SharingSettings, run: Run) -> dict[str, Any]:
    """A server for each way and round."""
    model = run.subject(settings, max(settings.streams, settings.in_flight))
    vocab_size, both = model.config.vocab_size, _two_names(model.folder, run.build / "scenarios" / "core_sharing")
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    rounds: dict[str, list[Round]] = {way: [] for way in settings.ways}
    for _, way in interleaved(settings.repeats, settings.ways, settings.seed):
        weight = WEIGHTS[way]
        shares = [] if weight is None else ["--time-shares", f"{STREAMS}={weight:g}"]
        with model.served(*METRICS, *shares, models=both) as server:
            has_prompts = weight is not None
            taken = _take(server.target, server.metrics, settings, vocab_size, source, has_prompts=has_prompts)
            rounds[way].append(asyncio.run(taken))
    return judge(rounds)


def judge(rounds: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """By way: medians over the rounds; the promise is about the worst."""
    ways = {way: _describe(WEIGHTS[way], each) for way, each in rounds.items()}
    errors = [abs(share - way["share_by_weight"]) for way in ways.values() for share in way["share_by_round"]]
    return {"ways": ways, "tolerance": TOLERANCE, "passed": max(errors, default=0.0) <= TOLERANCE}


def _describe(weight: float | None, rounds: Sequence[Round]) -> dict[str, Any]:
    shares = [_share(each.runs, lambda runs: runs.seconds) for each in rounds]
    waits = [wait for each in rounds for wait in each.waits]
    return {
        "share_by_weight": 1.0 if weight is None else weight / (weight + 1.0),
        "share": statistics.median(shares),
        "share_by_round": shares,
        "share_step_by_step": statistics.median(_share(each.runs, _mean_step) for each in rounds),
        "tokens_per_second": statistics.median(len(each.waits) / each.seconds for each in rounds),
        "wait_seconds": {**percentiles(waits, 50, 99), "max": max(waits)},
        "step_seconds": {
            model: statistics.median(_mean_step(each.runs.get(model, Runs())) for each in rounds)
            for model in (STREAMS, PROMPTS)
        },
    }


def _share(runs: Mapping[str, Runs], figure: Callable[[Runs], float]) -> float:
    """The streams' part of both models' figures."""
    streams, prompts = (figure(runs.get(model, Runs())) for model in (STREAMS, PROMPTS))
    return streams / (streams + prompts) if streams else 0.0


def _mean_step(runs: Runs) -> float:
    return runs.seconds / max(runs.num_steps, 1)


def _two_names(artifact: Path, folder: Path) -> Path:
    """A models folder that has the artifact twice."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (STREAMS, PROMPTS):
        (folder / name).symlink_to(artifact.resolve(), target_is_directory=True)
    return folder


async def _take(
    target: str, metrics: str, settings: SharingSettings, vocab_size: int, source: random.Random, *, has_prompts: bool
) -> Round:
    """Loads both models without end; measures after the lead."""
    stop = Event()
    answers: list[Answer] = []

    async def write(stub: GenerationServiceAsyncStub, new: int) -> None:
        while not stop.is_set():
            prompt = draw(source, vocab_size, settings.stream_prompt)
            answers.append(await follow(stub, prompt, new, model=STREAMS, stop=stop))

    async def read(stub: GenerationServiceAsyncStub) -> None:
        while not stop.is_set():
            await follow(stub, draw(source, vocab_size, settings.prompt), 1, model=PROMPTS)

    async with connected(target) as stub, asyncio.TaskGroup() as group:
        for _ in range(settings.streams):
            group.create_task(write(stub, settings.prompt))
        for _ in range(settings.in_flight if has_prompts else 0):
            group.create_task(read(stub))
        await asyncio.sleep(settings.lead)
        before, began = await asyncio.to_thread(read_runs, metrics), time.perf_counter()
        await asyncio.sleep(settings.seconds)
        after, ended = await asyncio.to_thread(read_runs, metrics), time.perf_counter()
        stop.set()
    return Round(
        seconds=ended - began,
        runs={
            model: Runs(runs.seconds - before[model].seconds, runs.num_steps - before[model].num_steps)
            for model, runs in after.items()
        },
        waits=tuple(b - a for answer in answers for a, b in answer.gaps if a >= began and b <= ended),
    )


def read_runs(metrics: str) -> dict[str, Runs]:
    """Graph runs of each model since the server's start."""
    found = {STREAMS: {"sum": 0.0, "count": 0.0}, PROMPTS: {"sum": 0.0, "count": 0.0}}
    for sample in read_metrics(metrics):
        name, _, part = sample.name.rpartition("_")
        if name == _RUNS and part in ("sum", "count"):
            found[sample.labels["model_name"]][part] = sample.value
    return {model: Runs(values["sum"], int(values["count"])) for model, values in found.items()}


def render(results: Results) -> str:
    """The document."""
    settings, rows = results["settings"], []
    for way, each in results["ways"].items():
        wait, step = each["wait_seconds"], each["step_seconds"]
        shares = f"{each['share']:.1%}", f"{each['share_by_weight']:.0%}", f"{each['share_step_by_step']:.1%}"
        seconds = map(milliseconds, (wait["p50"], wait["p99"], step[STREAMS], step[PROMPTS]))
        rows.append([way, *shares, f"{each['tokens_per_second']:.1f}", *seconds])
    headings = "|share of the cores|by weight|step by step|tokens/s|wait p50|p99|a step|of the other"
    lines = [
        "# Two models on the same cores",
        "",
        f"{subject(results)} under two names: {settings['streams']} streams of one, prompts of {settings['prompt']} "
        f"tokens for the other, {settings['in_flight']} in flight; medians of {settings['repeats']} repeats of "
        f"{settings['seconds']:g} s, {conditions(results)}.",
        "",
        *table(headings, rows),
        "",
        f"The promise, every share within {results['tolerance']:.0%} of that by weight, {verdict(results['passed'])}.",
    ]
    return "\n".join(lines)


SCENARIO = Scenario(__name__, SharingSettings, measure, render)
