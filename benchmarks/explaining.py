"""What `Explain` does to those who are being answered: waits between tokens without it, and while it loads and runs.

    python -m benchmarks.explaining [--model llama-110m] [--precision int8] [--streams 4] [--length 64] [--calls 5]
                                    [--quick] [--docs]

Over gRPC, on a server of its own with random weights. The streams run for a while; then one attention matrix after the
other is asked for over a given text. The first call finds nothing loaded: it hashes the artefact, loads the graph and
proves it, all beside the streams but for what holds the interpreter's lock. "before" is every wait that ended between
the streams' start and the first call, "first call" and "next calls" every wait that overlaps one of those. The last
line on stdout is one JSON object; the report goes to `build/bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import sys
import time
from asyncio import Event
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks import scenario
from benchmarks.bench_onward import version
from benchmarks.scenario import Answer, draw, milliseconds, percentile
from benchmarks.serving import serving
from model.artifact import load
from model.config import ModelConfig
from proto.onward.v1 import generation_pb2 as pb
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub

NAME = "explaining"
DOCS = Path("docs")
_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured: `lead` tokens of each stream do not count, `window` tokens are what "before" is made of."""

    model: str = "llama-110m"
    precision: str = "int8"
    streams: int = 4
    stream_prompt: int = 64
    length: int = 64
    calls: int = 5
    lead: int = 16
    window: int = 128
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Streams from their start on, and when each call for attention began and ended."""

    streams: tuple[Answer, ...]
    calls: tuple[tuple[float, float], ...]


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """Makes the model, with and without the graph, serves it and measures."""
    folder = build / "scenarios" / f"{NAME}-{Path(settings.model).stem}"
    scenario.make_checkpoint(settings.model, folder / "checkpoint")
    models = folder / settings.precision
    shutil.rmtree(models, ignore_errors=True)
    without = _export(folder / "checkpoint", models / "without", settings.precision)
    explained = _export(folder / "checkpoint", models / "with" / "model", settings.precision, "--explain-graph")
    config = load(models / "with" / "model").config
    flags = ["--threads", str(settings.threads), "--max-batch-size", str(settings.streams), *scenario.QUIET]
    with serving(models / "with", *flags) as target:
        timeline = asyncio.run(_follow(target, settings, config))
    facts = {"scenario": NAME, "version": version(), "settings": asdict(settings), "machine": scenario.machine()}
    return facts | {"export": {"without": without, "with": explained}} | judge(timeline, settings.lead)


def judge(timeline: Timeline, lead: int) -> dict[str, Any]:
    """What came out.

    Raises:
        RuntimeError: when a stream had ended before the last call did.
    """
    if any(stream.arrivals[-1] < timeline.calls[-1][1] for stream in timeline.streams):
        raise RuntimeError("a stream ended before the last call: too little context, or too many calls")
    since = max(stream.arrivals[lead] for stream in timeline.streams)
    gaps = [gap for stream in timeline.streams for gap in stream.gaps if gap[0] >= since]
    first, *later = timeline.calls
    before = [end - start for start, end in gaps if end <= first[0]]
    return {
        "before": _describe(before),
        "first_call": _describe(_overlapping(gaps, [first])),
        "next_calls": _describe(_overlapping(gaps, later)) if later else None,
        "call_seconds": [end - begin for begin, end in timeline.calls],
    }


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings, seconds = results["settings"], results["call_seconds"]
    without, explained = results["export"]["without"], results["export"]["with"]
    rows = [(name, results[key]) for name, key in (("before", "before"), ("first call", "first_call"))]
    rows += [("next calls", results["next_calls"])] if results["next_calls"] else []
    lines = [
        "# Explain amid running streams",
        "",
        f"{settings['model']} {settings['precision']}, {settings['streams']} streams; attention over "
        f"{settings['length']} tokens, {settings['calls']} calls, {settings['threads']} threads, on "
        f"{results['machine']['processor']}.",
        "",
        "| wait between tokens | p50 | p99 | largest |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {' | '.join(milliseconds(each[key]) for key in ('p50', 'p99', 'max'))} |"
            for name, each in rows
        ),
        "",
        f"The calls took {', '.join(map(milliseconds, seconds))}. The graph adds "
        f"{explained['num_bytes'] - without['num_bytes']:,} bytes to an artefact of {without['num_bytes']:,}. "
        f"Exporting took {without['seconds']:.1f} s without it, and then {explained['seconds']:.1f} s with it.",
        "",
    ]
    return "\n".join(lines)


def _export(checkpoint: Path, out: Path, precision: str, *flags: str) -> dict[str, float]:
    command = [sys.executable, "-m", "export", str(checkpoint), "--out", str(out), "--precision", precision, *flags]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"export exited with {done.returncode}: {done.stderr.strip()[-500:]}")
    return {"seconds": time.monotonic() - began, "num_bytes": sum(path.stat().st_size for path in out.iterdir())}


def _overlapping(gaps: Sequence[tuple[float, float]], calls: Sequence[tuple[float, float]]) -> list[float]:
    return [end - start for start, end in gaps if any(start < over and end > begin for begin, over in calls)]


def _describe(waits: Sequence[float]) -> dict[str, float]:
    return {
        "p50": percentile(waits, 0.5),
        "p99": percentile(waits, 0.99),
        "max": max(waits),
        "count": len(waits),
    }


async def _follow(target: str, settings: Settings, config: ModelConfig) -> Timeline:
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    stop, ready = Event(), [Event() for _ in range(settings.streams)]
    wanted = settings.lead + settings.window
    prompts = [draw(source, config.vocab_size, settings.stream_prompt) for _ in ready]
    half = settings.length // 2
    request = pb.ExplainRequest(
        token_ids=pb.TokenIds(ids=draw(source, config.vocab_size, half)),
        target_token_ids=pb.TokenIds(ids=draw(source, config.vocab_size, settings.length - half)),
        layers=[config.num_layers - 1],
    )

    def teller(event: Event) -> Any:
        return lambda answer: event.set() if len(answer.arrivals) >= wanted else None

    calls = []
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        room = config.context - settings.stream_prompt
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(scenario.follow(stub, prompt, room, seen=teller(event), stop=stop))
                for prompt, event in zip(prompts, ready, strict=True)
            ]
            for event in ready:
                await event.wait()
            for _ in range(settings.calls):
                began = time.perf_counter()
                await stub.Explain(request)
                calls.append((began, time.perf_counter()))
                await asyncio.sleep(_PAUSE_SECONDS * source.uniform(0.8, 1.2))
            stop.set()
    return Timeline(tuple(task.result() for task in tasks), tuple(calls))


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(NAME, lambda: measure(settings, scenario.BUILD), render, folder)


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    defaults = Settings(threads=os.cpu_count() or 1)
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=defaults.model, help="a preset of a decoder-only model")
    parser.add_argument("--precision", default=defaults.precision, help="fp32, int8, int4")
    parser.add_argument("--streams", type=int, default=defaults.streams)
    parser.add_argument("--length", type=int, default=defaults.length, help="tokens whose attention is asked for")
    parser.add_argument("--calls", type=int, default=defaults.calls)
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--quick", action="store_true", help="two calls: to see that it works")
    parser.add_argument("--docs", action="store_true", help="write the report into docs/ and not into build/bench")
    options = parser.parse_args(arguments)
    for name in ("streams", "calls", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.length < 2:
        parser.error("--length must be at least 2")
    settings = replace(
        defaults,
        model=options.model,
        precision=options.precision,
        streams=options.streams,
        length=options.length,
        calls=2 if options.quick else options.calls,
        threads=options.threads,
    )
    return settings, DOCS if options.docs else scenario.BUILD


if __name__ == "__main__":
    sys.exit(main())
