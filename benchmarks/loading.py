"""What loading a model does to those who are being answered: waits between tokens before, while it loads and reloads.

    python -m benchmarks.loading [--model llama-110m] [--precision int8] [--streams 4] [--repeats 5] [--quick] [--docs]

Two measurements. Over gRPC, on a server of its own with random weights: streams run on one model, while `LoadModel`
brings a second one of the same size, `ReloadModel` replaces it and `UnloadModel` takes it away; "before" is every wait
that ended before, the others are every wait that overlaps their call. And in a process of its own, with nobody else
there: each stage of loading on a thread, beside an asyncio task and a thread that do nothing but look at the clock
every millisecond; the longest silence of either is what the stage keeps the interpreter's lock for, as far as the
machine's own noise, which is measured too, lets it be seen. The last line on stdout is one JSON object; the report goes
to `build/bench`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks import scenario
from benchmarks.amid_streams import (
    PAUSE_SECONDS,
    Span,
    describe,
    pause,
    running,
    table,
    timed,
    waits_overlapping,
    waits_within,
)
from benchmarks.bench_onward import artifact
from benchmarks.scenario import Answer, draw, milliseconds
from benchmarks.scenario_options import ScenarioSettings, at_least, new_parser, read_settings
from benchmarks.serving import serving
from loadtest.child import run_module
from model.spec.artifact import load
from onward.v1 import model_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub
from service.config import ServeConfig
from service.engine.types import PrefillProvider
from service.repository.load_check import LoadCheck
from service.repository.loading import build_engines, load_model
from service.repository.startup import prove

NAME = "loading"
SECOND = "second"
STAGES = ("nothing", "read and check", "sessions and K/V", "proof")
_TICK_SECONDS = 0.001
_QUIET_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ScenarioSettings):
    """What is measured: `lead` tokens of each stream do not count, `window` tokens are what "before" is made of."""

    model: str = "llama-110m"
    streams: int = 4
    stream_prompt: int = 64
    repeats: int = 5
    lead: int = 16
    window: int = 128


@dataclass(frozen=True, slots=True)
class Timeline:
    """Streams from their start on, and when each change began and ended, by its name."""

    streams: tuple[Answer, ...]
    began: float
    changes: Mapping[str, Sequence[Span]]


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """Makes the model, loads it by itself, serves it and measures."""
    options = scenario.make_artifact(
        settings.model, settings.precision, build=build, max_batch=settings.streams, threads=settings.threads
    )
    folder = artifact(options)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    given = json.dumps({"folder": str(folder), "threads": settings.threads, "streams": settings.streams})
    alone = [_ask_child("benchmarks.loading", "--inside", given) for _ in range(settings.repeats)]
    trials = [_time_trial(folder, settings) for _ in range(settings.repeats)]
    flags = ["--threads", str(settings.threads), "--max-batch-size", str(settings.streams), *scenario.QUIET]
    with serving(folder.parent, *flags) as target:
        # All that is in the folder would have been served from the start.
        (folder.parent / SECOND).symlink_to(folder.name, target_is_directory=True)
        timeline = asyncio.run(_follow(target, folder, settings))
    told = {"num_bytes": num_bytes, "stages": _stages(alone), "trial_seconds": statistics.median(trials)}
    return scenario.facts(NAME, settings) | told | judge(timeline, settings.lead)


def judge(timeline: Timeline, lead: int) -> dict[str, Any]:
    """What came out of the streams."""
    gaps = [gap for stream in timeline.streams for gap in stream.gaps[lead:]]
    first = min(begin for calls in timeline.changes.values() for begin, _ in calls)
    changes = {
        name: {
            **describe(waits_overlapping(gaps, calls)),
            "seconds": statistics.median(over - begin for begin, over in calls),
        }
        for name, calls in timeline.changes.items()
    }
    return {"before": describe(waits_within(gaps, timeline.began, first)), "changes": changes}


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings, changes, stages = results["settings"], results["changes"], results["stages"]
    took = {name: f"{each['seconds']:.2f} s" for name, each in changes.items()}
    lines = [
        "# Loading amid running streams",
        "",
        f"{settings['model']} {settings['precision']}, {results['num_bytes'] / 1e6:.0f} MB, twice: "
        f"{settings['streams']} streams on one, the other loaded, reloaded and unloaded {settings['repeats']} times; "
        f"{settings['threads']} threads, on {results['machine']['processor']}.",
        "",
        *table({"before": results["before"], **changes}, "the call took", took),
        "",
        "By itself, stage by stage; silent is the longest time in which a task on the event loop, or a thread, was not "
        f"run, in the worst of {settings['repeats']}.",
        "",
        "| stage | takes | loop silent | thread silent |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {stages[name]['seconds']:.2f} s | {milliseconds(stages[name]['loop'])} | "
            f"{milliseconds(stages[name]['thread'])} |"
            for name in STAGES
        ),
        "",
        f"All of it in a process of its own, with the start of that: {results['trial_seconds']:.2f} s.",
        "",
    ]
    return "\n".join(lines)


def inside(folder: Path, threads: int, streams: int) -> dict[str, dict[str, float]]:
    """Loads an artifact in this process, and reports how long each stage took and silenced others."""
    config = ServeConfig(models=folder.parent, threads=threads, max_batch_size=streams)
    found: dict[str, dict[str, float]] = {}
    found["nothing"], _ = _watched(lambda: time.sleep(_QUIET_SECONDS))
    found["read and check"], model = _watched(lambda: load_model(folder, PrefillProvider.CPU))
    found["sessions and K/V"], engines = _watched(lambda: build_engines(folder.parent, [model], config))
    found["proof"], parity = _watched(lambda: prove(model, engines[model.name]))
    if not parity.passed:
        raise RuntimeError("golden cases failed")
    return found


def _watched(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> tuple[dict[str, float], Any]:
    """Runs it on a thread; its seconds, the longest silences beside it, and what it gave."""
    silences = {"loop": 0.0, "thread": 0.0}
    last = dict.fromkeys(silences, clock())
    is_over = threading.Event()

    def look(who: str) -> None:
        now = clock()
        silences[who], last[who] = max(silences[who], now - last[who]), now

    def tick() -> None:
        while not is_over.is_set():
            look("thread")
            time.sleep(_TICK_SECONDS)

    async def beat() -> None:
        while True:
            look("loop")
            await asyncio.sleep(_TICK_SECONDS)

    async def watch() -> Any:
        beating = asyncio.create_task(beat())
        await asyncio.sleep(_TICK_SECONDS)
        silences["loop"] = silences["thread"] = 0.0
        try:
            return await asyncio.to_thread(work)
        finally:
            # What ended with the work would have its turn only now.
            look("loop")
            beating.cancel()

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = clock()
    try:
        given = asyncio.run(watch())
    finally:
        seconds = clock() - began
        is_over.set()
        ticking.join()
    look("thread")
    return {"seconds": seconds, **silences}, given


def _stages(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """The median of what each stage took, the worst of what it did to others."""
    return {
        name: {
            "seconds": statistics.median(run[name]["seconds"] for run in runs),
            **{who: max(run[name][who] for run in runs) for who in ("loop", "thread")},
        }
        for name in STAGES
    }


def _time_trial(folder: Path, settings: Settings) -> float:
    config = ServeConfig(models=folder.parent, threads=settings.threads, max_batch_size=settings.streams)
    began = time.perf_counter()
    LoadCheck().run(config, folder.name, None)
    return time.perf_counter() - began


def _ask_child(module: str, *arguments: str) -> Any:
    """The JSON object on the last line that a module of ours prints."""
    return json.loads(run_module(module, *arguments).strip().rpartition("\n")[2])


async def _follow(target: str, folder: Path, settings: Settings) -> Timeline:
    config = load(folder).config
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    prompts = (draw(source, config.vocab_size, settings.stream_prompt) for _ in itertools.count())
    room = config.context - settings.stream_prompt
    changes: dict[str, list[Span]] = {"load": [], "reload": [], "unload": []}
    async with grpc.aio.insecure_channel(target) as channel:
        generation, library = GenerationServiceStub(channel), ModelServiceStub(channel)
        calls: Mapping[str, Callable[[], Any]] = {
            "load": lambda: library.LoadModel(pb.LoadModelRequest(model=SECOND)),
            "reload": lambda: library.ReloadModel(pb.ReloadModelRequest(model=SECOND)),
            "unload": lambda: library.UnloadModel(pb.UnloadModelRequest(model=SECOND)),
        }
        # One answer after the other, as none is endless.
        own = [prompts] * settings.streams
        async with running(generation, own, room, begun=settings.lead, model=folder.name) as streams:
            began = time.perf_counter()
            await asyncio.sleep(PAUSE_SECONDS * max(1, settings.window // 32))
            for _ in range(settings.repeats):
                for name, call in calls.items():
                    changes[name].append(await timed(call))
                    await pause(source)
    return Timeline(tuple(streams), began, changes)


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--inside"]:
        given = json.loads(arguments[1])
        print(json.dumps(inside(Path(given["folder"]), given["threads"], given["streams"])))
        return 0
    settings, folder = _parse(arguments)
    return scenario.tell(NAME, lambda: measure(settings, scenario.BUILD), render, folder)


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    parser = new_parser(NAME, __doc__, quick="one repeat", model="a preset of a decoder-only model")
    parser.add_argument("--streams", type=at_least(1))
    parser.add_argument("--repeats", type=at_least(1))
    return read_settings(parser, arguments, Settings(threads=os.cpu_count() or 1), _shorten)


def _shorten(settings: Settings) -> Settings:
    return replace(settings, repeats=1)


if __name__ == "__main__":
    sys.exit(main())
