"""What `Explain` does to running streams: waits between tokens before it, while its graph loads, and while it runs.

Over gRPC, on a server of its own. After a while one attention matrix after the other is requested over a given text.
The first call has to load: it hashes the artifact, loads the graph and proves it. "before" is every wait between the
streams' start and the first call, "first call" and "next calls" every wait that overlaps one of those.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frame import models
from benchmarks.frame.models import QUIET, Subject, draw
from benchmarks.frame.scenario import ModelSettings, Results, Run, Scenario, option
from benchmarks.frame.streams import (
    Answer,
    Span,
    connected,
    describe,
    pause,
    running,
    timed,
    waits_overlapping,
    waits_within,
)
from benchmarks.frame.streams import table as waits_table
from benchmarks.frame.tables import conditions, milliseconds, subject
from loadtest.child import run_module
from model.spec.config import ModelConfig
from onward.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainingSettings(ModelSettings):
    """What is measured: `lead` tokens of each stream do not count, "before" has `window` tokens."""

    streams: int = option(4, "that run", least=1)
    stream_prompt: int = option(64)
    length: int = option(64, "tokens whose attention is requested", least=2)
    calls: int = option(5, "of Explain", least=1, quick=2)
    lead: int = option(16)
    window: int = option(128)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Streams from their start on, and when each call began and ended."""

    streams: tuple[Answer, ...]
    calls: tuple[Span, ...]


def measure(settings: ExplainingSettings, run: Run) -> dict[str, Any]:
    """Exports with and without the graph, and serves the former."""
    folder = run.build / "scenarios" / f"explaining-{Path(settings.model).stem}"
    models.make_checkpoint(settings.model, folder / "checkpoint")
    made = folder / settings.precision
    shutil.rmtree(made, ignore_errors=True)
    without = _export(folder / "checkpoint", made / "without", settings.precision)
    explained = _export(folder / "checkpoint", made / "with" / "model", settings.precision, "--explain-graph")
    model = Subject(made / "with" / "model", settings.threads, settings.streams)
    with model.served(*QUIET) as server:
        timeline = asyncio.run(_follow(server.target, settings, model.config))
    return {"export": {"without": without, "with": explained}, **judge(timeline, settings.lead)}


def judge(timeline: Timeline, lead: int) -> dict[str, Any]:
    """Of the streams.

    Raises:
        RuntimeError: if one ended before the last call.
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


def render(results: Results) -> str:
    """The document."""
    settings, (without, explained) = results["settings"], results["export"].values()
    rows = {"before": results["before"], "first call": results["first_call"]}
    rows |= {"next calls": results["next_calls"]} if results["next_calls"] else {}
    lines = [
        "# Explain amid running streams",
        "",
        f"{subject(results)}, {settings['streams']} streams; attention over {settings['length']} tokens, "
        f"{settings['calls']} calls, {conditions(results)}.",
        "",
        *waits_table(rows),
        "",
        f"The calls took {', '.join(map(milliseconds, results['call_seconds']))}. The graph adds "
        f"{explained['num_bytes'] - without['num_bytes']:,} bytes to an artifact of {without['num_bytes']:,}. "
        f"Exporting took {without['seconds']:.1f} s without it, and then {explained['seconds']:.1f} s with it.",
    ]
    return "\n".join(lines)


def _export(checkpoint: Path, out: Path, precision: str, *flags: str) -> dict[str, float]:
    began = time.monotonic()
    run_module("export", str(checkpoint), "--out", str(out), "--precision", precision, *flags)
    return {"seconds": time.monotonic() - began, "num_bytes": sum(path.stat().st_size for path in out.iterdir())}


async def _follow(target: str, settings: ExplainingSettings, config: ModelConfig) -> Timeline:
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    prompts = [draw(source, config.vocab_size, settings.stream_prompt) for _ in range(settings.streams)]
    half = settings.length // 2
    request = pb.ExplainRequest(
        token_ids=pb.TokenIds(ids=draw(source, config.vocab_size, half)),
        target_token_ids=pb.TokenIds(ids=draw(source, config.vocab_size, settings.length - half)),
        layers=[config.num_layers - 1],
    )
    calls = []
    room, begun = config.context - settings.stream_prompt, settings.lead + settings.window
    async with connected(target) as stub, running(stub, [[each] for each in prompts], room, begun=begun) as streams:
        for _ in range(settings.calls):
            calls.append(await timed(lambda: stub.Explain(request)))
            await pause(source)
    return Timeline(tuple(streams), tuple(calls))


SCENARIO = Scenario(__name__, ExplainingSettings, measure, render)
