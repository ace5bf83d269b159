"""What `Explain` does to those who are being answered: waits between tokens without it, and while it loads and runs.

    python -m benchmarks.explaining [--model llama-110m] [--precision int8] [--streams 4] [--length 64] [--calls 5]
                                    [--quick] [--docs]

Over gRPC, on a server of its own with random weights. The streams run for a while; then one attention matrix after the
other is asked for over a given text. The first call finds nothing loaded: it hashes the artifact, loads the graph and
proves it, all beside the streams but for what holds the interpreter's lock. "before" is every wait that ended between
the streams' start and the first call, "first call" and "next calls" every wait that overlaps one of those. The last
line on stdout is one JSON object; the report goes to `build/bench`.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks import scenario
from benchmarks.amid_streams import (
    Span,
    describe,
    pause,
    running,
    table,
    timed,
    waits_overlapping,
    waits_within,
)
from benchmarks.frame.servers import serving
from benchmarks.scenario import Answer, draw, milliseconds
from benchmarks.scenario_options import ScenarioSettings, at_least, new_parser, read_settings
from loadtest.child import run_module
from model.spec.artifact import load
from model.spec.config import ModelConfig
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub

NAME = "explaining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ScenarioSettings):
    """What is measured: `lead` tokens of each stream do not count, `window` tokens are what "before" is made of."""

    model: str = "llama-110m"
    streams: int = 4
    stream_prompt: int = 64
    length: int = 64
    calls: int = 5
    lead: int = 16
    window: int = 128


@dataclass(frozen=True, slots=True)
class Timeline:
    """Streams from their start on, and when each call for attention began and ended."""

    streams: tuple[Answer, ...]
    calls: tuple[Span, ...]


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
    made = {"export": {"without": without, "with": explained}}
    return scenario.facts(NAME, settings) | made | judge(timeline, settings.lead)


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
    return {
        "before": describe(waits_within(gaps, since, first[0])),
        "first_call": describe(waits_overlapping(gaps, [first])),
        "next_calls": describe(waits_overlapping(gaps, later)) if later else None,
        "call_seconds": [end - begin for begin, end in timeline.calls],
    }


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings, seconds = results["settings"], results["call_seconds"]
    without, explained = results["export"]["without"], results["export"]["with"]
    rows = {"before": results["before"], "first call": results["first_call"]}
    rows |= {"next calls": results["next_calls"]} if results["next_calls"] else {}
    lines = [
        "# Explain amid running streams",
        "",
        f"{settings['model']} {settings['precision']}, {settings['streams']} streams; attention over "
        f"{settings['length']} tokens, {settings['calls']} calls, {settings['threads']} threads, on "
        f"{results['machine']['processor']}.",
        "",
        *table(rows),
        "",
        f"The calls took {', '.join(map(milliseconds, seconds))}. The graph adds "
        f"{explained['num_bytes'] - without['num_bytes']:,} bytes to an artefact of {without['num_bytes']:,}. "
        f"Exporting took {without['seconds']:.1f} s without it, and then {explained['seconds']:.1f} s with it.",
        "",
    ]
    return "\n".join(lines)


def _export(checkpoint: Path, out: Path, precision: str, *flags: str) -> dict[str, float]:
    began = time.monotonic()
    run_module("export", str(checkpoint), "--out", str(out), "--precision", precision, *flags)
    return {"seconds": time.monotonic() - began, "num_bytes": sum(path.stat().st_size for path in out.iterdir())}


async def _follow(target: str, settings: Settings, config: ModelConfig) -> Timeline:
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    prompts = [draw(source, config.vocab_size, settings.stream_prompt) for _ in range(settings.streams)]
    half = settings.length // 2
    request = pb.ExplainRequest(
        token_ids=pb.TokenIds(ids=draw(source, config.vocab_size, half)),
        target_token_ids=pb.TokenIds(ids=draw(source, config.vocab_size, settings.length - half)),
        layers=[config.num_layers - 1],
    )

    calls = []
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        room, begun = config.context - settings.stream_prompt, settings.lead + settings.window
        async with running(stub, [[prompt] for prompt in prompts], room, begun=begun) as streams:
            for _ in range(settings.calls):
                calls.append(await timed(lambda: stub.Explain(request)))
                await pause(source)
    return Timeline(tuple(streams), tuple(calls))


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(NAME, lambda: measure(settings, scenario.BUILD), render, folder)


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    parser = new_parser(NAME, __doc__, quick="two calls", model="a preset of a decoder-only model")
    parser.add_argument("--streams", type=at_least(1))
    parser.add_argument("--length", type=at_least(2), help="tokens whose attention is asked for")
    parser.add_argument("--calls", type=at_least(1))
    return read_settings(parser, arguments, Settings(threads=os.cpu_count() or 1), _shorten)


def _shorten(settings: Settings) -> Settings:
    return replace(settings, calls=2)


if __name__ == "__main__":
    sys.exit(main())
