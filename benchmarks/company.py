"""What a model gets of the cores beside another: streams of one, while the other reads long prompts without end.

    python -m benchmarks.company [--model llama-110m] [--precision int8] [--streams 4] [--prompt 1024] [--in-flight 4]
                                 [--seconds 20] [--repeats 3] [--quick] [--docs]

Over gRPC, on servers of their own that serve one artifact under two names: "streams" writes for a few clients,
"prompts" reads long prompts for others, one token each and several in flight, so that both have work all the while.
Three ways:

    alone      the streams without the prompts
    even       both, with equal weights
    favoured   both, with --time-shares streams=3

A model's share is its seconds in graphs over those of both models, as the server's metrics count them; turns count the
host's work as well, which small models have relatively more of. The promise is that it lies within 5 points of the
share by weight, 50 % and 75 %. What taking turns step by step would give is told beside it: the mean step of the
streams over the mean steps of both. The last line on stdout is one JSON object; the report goes to `build/bench`.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import statistics
import sys
import time
import urllib.request
from asyncio import Event
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import scenario
from benchmarks.frame.servers import served
from benchmarks.peers.onward import artifact
from benchmarks.scenario import Answer, draw, milliseconds, percentile
from benchmarks.scenario_options import ScenarioSettings, at_least, new_parser, read_settings
from model.spec.artifact import load
from onward.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

NAME = "company"
STREAMS, PROMPTS = "streams", "prompts"
WEIGHTS: Mapping[str, float | None] = {"alone": None, "even": 1.0, "favoured": 3.0}
"""By way, what the streams' model weighs beside one; None where that is not asked."""
TOLERANCE = 0.05
_RUNS = "onward_engine_run_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ScenarioSettings):
    """What is measured; lengths in tokens, of `seconds` after a lead that does not count."""

    model: str = "llama-110m"
    streams: int = 4
    stream_prompt: int = 64
    prompt: int = 1024
    in_flight: int = 4
    lead: float = 3.0
    seconds: float = 20.0
    repeats: int = 3
    ways: tuple[str, ...] = tuple(WEIGHTS)


@dataclass(frozen=True, slots=True)
class Runs:
    """A model's graphs: how long they ran, in how many steps."""

    seconds: float = 0.0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """One way, once: how long it was, what the graphs did meanwhile by model, and the streams' waits for a token."""

    seconds: float
    runs: Mapping[str, Runs]
    waits: tuple[float, ...]


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """Makes the model, serves it twice and measures."""
    options = scenario.make_artifact(
        settings.model,
        settings.precision,
        build=build,
        max_batch=max(settings.streams, settings.in_flight),
        threads=settings.threads,
    )
    vocab_size = load(artifact(options)).config.vocab_size
    models = _two_names(artifact(options), options.work / NAME)
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    flags = ["--threads", str(settings.threads), "--max-batch-size", str(options.max_batch)]
    flags += ["--metrics-port", "0", "--log-level", "warning"]
    rounds: dict[str, list[Round]] = {way: [] for way in settings.ways}
    for number in range(settings.repeats):
        print(f"repeat {number + 1}/{settings.repeats}", file=sys.stderr, flush=True)
        ways = list(settings.ways)
        source.shuffle(ways)
        for way in ways:
            weight = WEIGHTS[way]
            shares = [] if weight is None else ["--time-shares", f"{STREAMS}={weight:g}"]
            with served(models, *flags, *shares) as server:
                url = f"http://{server.metrics}/metrics"
                taken = _take(server.target, url, settings, vocab_size, source, has_prompts=weight is not None)
                rounds[way].append(asyncio.run(taken))
    return scenario.facts(NAME, settings) | judge(rounds)


def judge(rounds: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """What came out, by way: medians over the rounds, the promise over the worst of them."""
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
        "wait_seconds": {"p50": percentile(waits, 0.5), "p99": percentile(waits, 0.99), "max": max(waits)},
        "step_seconds": {
            model: statistics.median(_mean_step(each.runs.get(model, Runs())) for each in rounds)
            for model in (STREAMS, PROMPTS)
        },
    }


def _share(runs: Mapping[str, Runs], figure: Callable[[Runs], float]) -> float:
    """What is the streams' of both models' figures."""
    streams, prompts = (figure(runs.get(model, Runs())) for model in (STREAMS, PROMPTS))
    return streams / (streams + prompts) if streams else 0.0


def _mean_step(runs: Runs) -> float:
    return runs.seconds / max(runs.num_steps, 1)


def _two_names(place: Path, folder: Path) -> Path:
    """A models folder that has the artifact twice."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (STREAMS, PROMPTS):
        (folder / name).symlink_to(place.resolve(), target_is_directory=True)
    return folder


async def _take(
    target: str, url: str, settings: Settings, vocab_size: int, source: random.Random, *, has_prompts: bool
) -> Round:
    """Asks without end, and looks at what happens after the lead."""
    stop = Event()
    answers: list[Answer] = []

    async def write(stub: GenerationServiceAsyncStub, new: int) -> None:
        while not stop.is_set():
            prompt = draw(source, vocab_size, settings.stream_prompt)
            answers.append(await scenario.follow(stub, prompt, new, model=STREAMS, stop=stop))

    async def read(stub: GenerationServiceAsyncStub) -> None:
        while not stop.is_set():
            await scenario.follow(stub, draw(source, vocab_size, settings.prompt), 1, model=PROMPTS)

    async with grpc.aio.insecure_channel(target) as channel, asyncio.TaskGroup() as group:
        stub = GenerationServiceStub(channel)
        for _ in range(settings.streams):
            group.create_task(write(stub, settings.prompt))
        for _ in range(settings.in_flight if has_prompts else 0):
            group.create_task(read(stub))
        await asyncio.sleep(settings.lead)
        before, began = await asyncio.to_thread(read_runs, url), time.perf_counter()
        await asyncio.sleep(settings.seconds)
        after, ended = await asyncio.to_thread(read_runs, url), time.perf_counter()
        stop.set()
    return Round(
        seconds=ended - began,
        runs={
            model: Runs(runs.seconds - before[model].seconds, runs.num_steps - before[model].num_steps)
            for model, runs in after.items()
        },
        waits=tuple(b - a for answer in answers for a, b in answer.gaps if a >= began and b <= ended),
    )


def read_runs(url: str) -> dict[str, Runs]:
    """What the server's metrics say of each model's graphs, from its start on."""
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 (our own server)
        text = answer.read().decode()
    found: dict[str, dict[str, float]] = {STREAMS: {}, PROMPTS: {}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name == _RUNS else ():
            if sample.name in (f"{_RUNS}_sum", f"{_RUNS}_count"):
                found[sample.labels["model_name"]][sample.name] = sample.value
    return {
        model: Runs(values.get(f"{_RUNS}_sum", 0.0), int(values.get(f"{_RUNS}_count", 0)))
        for model, values in found.items()
    }


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings = results["settings"]
    lines = [
        "# Two models on the same cores",
        "",
        f"{settings['model']} {settings['precision']} under two names: {settings['streams']} streams of one, prompts "
        f"of {settings['prompt']} tokens for the other, {settings['in_flight']} in flight; medians of "
        f"{settings['repeats']} repeats of {settings['seconds']:g} s, {settings['threads']} threads, on "
        f"{results['machine']['processor']}.",
        "",
        "| | share of the cores | by weight | step by step | tokens/s | wait p50 | p99 | a step | of the other |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for way, each in results["ways"].items():
        wait, step = each["wait_seconds"], each["step_seconds"]
        lines.append(
            f"| {way} | {each['share']:.1%} | {each['share_by_weight']:.0%} | {each['share_step_by_step']:.1%} | "
            f"{each['tokens_per_second']:.1f} | {milliseconds(wait['p50'])} | {milliseconds(wait['p99'])} | "
            f"{milliseconds(step[STREAMS])} | {milliseconds(step[PROMPTS])} |"
        )
    verdict = "holds" if results["passed"] else "does **not** hold"
    lines += ["", f"The promise, every share within {results['tolerance']:.0%} of that by weight, {verdict}.", ""]
    return "\n".join(lines)


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(NAME, lambda: measure(settings, scenario.BUILD), render, folder)


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    parser = new_parser(NAME, __doc__, quick="one short repeat")
    parser.add_argument("--streams", type=at_least(1))
    parser.add_argument("--prompt", type=at_least(1), help="tokens of the other model's prompts")
    parser.add_argument("--in-flight", type=at_least(1), help="prompts at once")
    parser.add_argument("--seconds", type=at_least(1.0), help="length of a round")
    parser.add_argument("--repeats", type=at_least(1))
    return read_settings(parser, arguments, Settings(threads=os.cpu_count() or 1), _shorten)


def _shorten(settings: Settings) -> Settings:
    return replace(settings, seconds=min(5.0, settings.seconds), repeats=1)


if __name__ == "__main__":
    sys.exit(main())
