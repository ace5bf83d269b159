"""What loading a model and `Explain` do to running streams: waits between tokens before, and during each call.

Two measurements. Over gRPC, on a server of its own: streams run on one model while `LoadModel` loads a second one of
the same size, `ReloadModel` replaces it, `UnloadModel` unloads it, and `Explain` computes attention over a text; its
first call loads the graph for that. "before" is every wait that ended before, the others are every wait that overlaps
their call. And in a process of its own: each stage of loading on a thread, beside an asyncio task and a thread that
only read the clock every millisecond. The longest silence of either is how long the stage holds the interpreter's
lock, above the machine's own jitter, which is measured too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.frame import streams
from benchmarks.frame.models import QUIET, draw
from benchmarks.frame.scenario import ModelSettings, Results, Run, Scenario, option
from benchmarks.frame.streams import Answer, Span, describe, pause, running, timed, waits_overlapping, waits_within
from benchmarks.frame.streams import table as waits_table
from benchmarks.frame.tables import conditions, milliseconds, subject, table
from loadtest.child import run_module
from model.spec.artifact import load
from onward.v1 import generation_pb2
from onward.v1 import model_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub
from service.config import ServeConfig
from service.repository.load_check import LoadCheck
from service.repository.loading import build_engines, load_model
from service.repository.startup import prove

SECOND = "second"
STAGES = ("nothing", "read and check", "sessions and K/V", "proof")
_TICK_SECONDS = 0.001
_QUIET_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingSettings(ModelSettings):
    """What is measured: `lead` tokens of each stream do not count, "before" has `window` tokens."""

    streams: int = option(4, "that run", least=1)
    stream_prompt: int = option(64)
    repeats: int = option(5, "loads", least=1, quick=1)
    lead: int = option(16)
    window: int = option(128)
    explained: int = option(64, "tokens of a text for Explain", least=2)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Streams from their start on, and when each change began and ended, by its name."""

    streams: tuple[Answer, ...]
    began: float
    changes: Mapping[str, Sequence[Span]]


def measure(settings: LoadingSettings, run: Run) -> dict[str, Any]:
    """Loads the model by itself, then amid streams."""
    model = run.subject(settings, settings.streams, "--explain-graph")
    folder = model.folder
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    given = json.dumps({"folder": str(folder), "threads": settings.threads, "streams": settings.streams})
    alone = [_ask_child(__name__, given) for _ in range(settings.repeats)]
    checks = [_time_load_check(folder, settings) for _ in range(settings.repeats)]
    with model.served(*QUIET) as server:
        # Linked now: the server loads at its start all that is in the folder.
        (folder.parent / SECOND).symlink_to(folder.name, target_is_directory=True)
        timeline = asyncio.run(_follow(server.target, folder, settings))
    found = {"num_bytes": num_bytes, "stages": _stages(alone), "trial_seconds": statistics.median(checks)}
    return found | judge(timeline, settings.lead)


def judge(timeline: Timeline, lead: int) -> dict[str, Any]:
    """Of the streams."""
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


def render(results: Results) -> str:
    """The document."""
    settings, changes, stages = results["settings"], results["changes"], results["stages"]
    took = {name: f"{each['seconds']:.2f} s" for name, each in changes.items()}
    rows = [
        [name, f"{each['seconds']:.2f} s", milliseconds(each["loop"]), milliseconds(each["thread"])]
        for name, each in stages.items()
    ]
    lines = [
        "# Loading amid running streams",
        "",
        f"{subject(results)}, {results['num_bytes'] / 1e6:.0f} MB, twice: {settings['streams']} streams on one, the "
        f"other loaded, reloaded and unloaded {settings['repeats']} times, and Explain over {settings['explained']} "
        f"tokens; {conditions(results)}.",
        "",
        *waits_table({"before": results["before"], **changes}, "the call took", took),
        "",
        "By itself, stage by stage; silent is the longest time in which a task on the event loop, or a thread, did not "
        f"run, in the worst of {settings['repeats']}.",
        "",
        *table("stage|takes|loop silent|thread silent", rows),
        "",
        f"The load check in a child process, with its start: {results['trial_seconds']:.2f} s.",
    ]
    return "\n".join(lines)


def inside(folder: Path, threads: int, num_streams: int) -> dict[str, dict[str, float]]:
    """Loads an artifact in this process: each stage's seconds, and the silences it causes."""
    config = ServeConfig(models=folder.parent, threads=threads, max_batch_size=num_streams)
    found: dict[str, dict[str, float]] = {}
    found["nothing"], _ = watch_silences(lambda: time.sleep(_QUIET_SECONDS))
    found["read and check"], model = watch_silences(lambda: load_model(folder))
    found["sessions and K/V"], engines = watch_silences(lambda: build_engines(folder.parent, [model], config))
    found["proof"], parity = watch_silences(lambda: prove(model, engines[model.name]))
    if not parity.passed:
        raise RuntimeError("golden cases failed")
    return found


def watch_silences(
    work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> tuple[dict[str, float], Any]:
    """Runs it on a thread; its seconds, the longest silences beside it, and what it returned."""
    silences = {"loop": 0.0, "thread": 0.0}
    last = dict.fromkeys(silences, clock())
    is_over = threading.Event()

    def look(name: str) -> None:
        now = clock()
        silences[name], last[name] = max(silences[name], now - last[name]), now

    def tick() -> None:
        while not is_over.is_set():
            look("thread")
            time.sleep(_TICK_SECONDS)

    async def beat() -> None:
        while True:
            look("loop")
            await asyncio.sleep(_TICK_SECONDS)

    async def work_beside() -> Any:
        beating = asyncio.create_task(beat())
        await asyncio.sleep(_TICK_SECONDS)
        silences["loop"] = silences["thread"] = 0.0
        try:
            return await asyncio.to_thread(work)
        finally:
            # A silence that ends with the work has not been seen yet.
            look("loop")
            beating.cancel()

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = clock()
    try:
        made = asyncio.run(work_beside())
    finally:
        seconds = clock() - began
        is_over.set()
        ticking.join()
    look("thread")
    return {"seconds": seconds, **silences}, made


def _stages(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Median seconds of each stage, and its worst silences."""
    return {
        name: {
            "seconds": statistics.median(run[name]["seconds"] for run in runs),
            **{part: max(run[name][part] for run in runs) for part in ("loop", "thread")},
        }
        for name in STAGES
    }


def _time_load_check(folder: Path, settings: LoadingSettings) -> float:
    config = ServeConfig(models=folder.parent, threads=settings.threads, max_batch_size=settings.streams)
    began = time.perf_counter()
    LoadCheck().run(config, folder.name, None)
    return time.perf_counter() - began


def _ask_child(module: str, *arguments: str) -> Any:
    """The JSON object on the last line of a module's stdout."""
    return json.loads(run_module(module, *arguments).strip().rpartition("\n")[2])


async def _follow(target: str, folder: Path, settings: LoadingSettings) -> Timeline:
    config = load(folder).config
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    prompts = (draw(source, config.vocab_size, settings.stream_prompt) for _ in itertools.count())
    room = config.context - settings.stream_prompt
    half = settings.explained // 2
    explain = generation_pb2.ExplainRequest(
        model=folder.name,
        token_ids=generation_pb2.TokenIds(ids=draw(source, config.vocab_size, half)),
        target_token_ids=generation_pb2.TokenIds(ids=draw(source, config.vocab_size, settings.explained - half)),
        layers=[config.num_layers - 1],
    )
    changes: dict[str, list[Span]] = {}
    async with grpc.aio.insecure_channel(target) as channel:
        generation, library = GenerationServiceStub(channel), ModelServiceStub(channel)
        calls: Mapping[str, Callable[[], Any]] = {
            "load": lambda: library.LoadModel(pb.LoadModelRequest(model=SECOND)),
            "reload": lambda: library.ReloadModel(pb.ReloadModelRequest(model=SECOND)),
            "unload": lambda: library.UnloadModel(pb.UnloadModelRequest(model=SECOND)),
            "explain": lambda: generation.Explain(explain),
        }
        # One answer after the other: each is limited by the context.
        own = [prompts] * settings.streams
        async with running(generation, own, room, begun=settings.lead, model=folder.name) as answers:
            began = time.perf_counter()
            await asyncio.sleep(streams.PAUSE_SECONDS * max(1, settings.window // 32))
            changes["first explain"] = [await timed(calls["explain"])]
            for _ in range(settings.repeats):
                for name, call in calls.items():
                    changes.setdefault(name, []).append(await timed(call))
                    await pause(source)
    return Timeline(tuple(answers), began, changes)


SCENARIO = Scenario(__name__, LoadingSettings, measure, render)

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    print(json.dumps(inside(Path(settings["folder"]), settings["threads"], settings["streams"])))
