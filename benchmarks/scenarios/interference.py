"""What a long prompt does to running streams: waits between tokens before it arrives and during its chunked prefill.

Over gRPC, on a server of its own. In every repeat the streams run for a while, then the long prompt is sent. "before"
is every wait that ended until then, "during" every wait that overlaps the time until its first token. The cost of one
chunk is measured beside it: the engine alone in this process, same artifact, a prompt of the same length. Promise, over
the waits of all repeats:

    p99 during - p99 before ≤ the costliest chunk of the prompt
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.frame.engine import checked_step, greedy_request, load_engine
from benchmarks.frame.models import QUIET, draw
from benchmarks.frame.pictures import drawing
from benchmarks.frame.rounds import counted
from benchmarks.frame.scenario import ModelSettings, Results, Run, Scenario, option
from benchmarks.frame.statistics import percentile
from benchmarks.frame.streams import Answer, connected, describe, follow, running, waits_overlapping, waits_within
from benchmarks.frame.streams import table as waits_table
from benchmarks.frame.tables import conditions, milliseconds, subject, verdict
from model.spec.config import ModelConfig
from service.config import ServeConfig
from service.engine.engine import Engine
from service.engine.scheduler import EngineLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceSettings(ModelSettings):
    """What is measured: `lead` tokens of each stream do not count, "before" has `window` tokens."""

    streams: int = option(8, "that run", least=1)
    stream_prompt: int = option(128)
    long_prompt: int = option(3000, "tokens of the long prompt", flag="prompt", least=1)
    lead: int = option(16)
    window: int = option(128)
    repeats: int = option(5, "long prompts", least=1, quick=1)
    chunk: int = option(ServeConfig(models=Path()).chunk_tokens, "prompt tokens of a step", least=1)


@dataclass(frozen=True, slots=True)
class Repeat:
    """Waits in seconds, and each with the time of its end since the long prompt was sent."""

    before: tuple[float, ...]
    during: tuple[float, ...]
    first_token_seconds: float
    timeline: tuple[tuple[float, float], ...]


def measure(settings: InterferenceSettings, run: Run) -> dict[str, Any]:
    """Streams and chunks in turns."""
    model = run.subject(settings, settings.streams + 1)
    limits = EngineLimits(
        max_batch_size=1, prefill_chunk=settings.chunk, max_prefill_tokens=settings.chunk, merged_chunks=1
    )
    engine, config = load_engine(model.folder, limits, settings.threads), model.config
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    repeats, chunks = [], []
    chunk_seconds(engine, draw(source, config.vocab_size, settings.long_prompt), "warm up")
    with model.served("--prefill-chunk", str(settings.chunk), *QUIET) as server:
        asyncio.run(_repeat(server.target, replace(settings, window=settings.lead), config, source))
        for number in counted(settings.repeats, "repeat"):
            chunks.append(chunk_seconds(engine, draw(source, config.vocab_size, settings.long_prompt), str(number)))
            repeats.append(asyncio.run(_repeat(server.target, settings, config, source)))
    return judge(repeats, chunks)


def chunk_seconds(engine: Engine, prompt: Sequence[int], name: str) -> list[float]:
    """Seconds of each step until a lone prompt's first token."""
    engine.add_request(greedy_request(name, prompt, 1))
    seconds = []
    while engine.has_work:
        began = time.perf_counter()
        checked_step(engine)
        seconds.append(time.perf_counter() - began)
    return seconds


def judge(repeats: Sequence[Repeat], chunks: Sequence[Sequence[float]]) -> dict[str, Any]:
    """`chunks` has, for each repeat, the seconds of every chunk of such a prompt alone."""
    before = [wait for repeat in repeats for wait in repeat.before]
    during = [wait for repeat in repeats for wait in repeat.during]
    costs = [statistics.median(each) for each in zip(*chunks, strict=True)]
    rise = percentile(during, 0.99) - percentile(before, 0.99)
    rises = [percentile(each.during, 0.99) - percentile(each.before, 0.99) for each in repeats]
    return {
        "before": describe(before),
        "during": describe(during),
        "p99_rise_seconds": rise,
        "p99_rise_seconds_by_repeat": rises,
        "chunk_seconds": {"mean": statistics.mean(costs), "costliest": max(costs), "each": costs},
        "rise_over_costliest_chunk": rise / max(costs),
        "first_token_seconds": {
            "alone": statistics.median(sum(each) for each in chunks),
            "amid_streams": statistics.median(repeat.first_token_seconds for repeat in repeats),
        },
        "passed": rise <= max(costs),
        "timelines": [repeat.timeline for repeat in repeats],
    }


async def _repeat(target: str, settings: InterferenceSettings, config: ModelConfig, source: random.Random) -> Repeat:
    """Runs the streams, sends the long prompt, and stops everything after its first token."""
    prompts = [draw(source, config.vocab_size, settings.stream_prompt) for _ in range(settings.streams)]
    long_prompt = draw(source, config.vocab_size, settings.long_prompt)
    room, begun = config.context - settings.stream_prompt, settings.lead + settings.window
    async with connected(target) as stub, running(stub, [[each] for each in prompts], room, begun=begun) as streams:
        # In the middle of a step like any request, not right after one.
        await asyncio.sleep(source.random() * 0.02)
        long_answer = await follow(stub, long_prompt, 1)
        # A step's tokens reach the streams one after the other.
        await asyncio.sleep(0.1)
    return divide(streams, long_answer, settings.lead)


def divide(streams: Sequence[Answer], long_answer: Answer, lead: int) -> Repeat:
    """Sorts the waits by whether they overlap the prefill of the long prompt.

    Raises:
        RuntimeError: if a stream had ended before.
    """
    begin, end = long_answer.sent, long_answer.arrivals[0]
    if any(stream.arrivals[-1] < begin for stream in streams):
        raise RuntimeError("a stream ended before the long prompt came: too little context")
    since = max(stream.arrivals[lead] for stream in streams)
    gaps = [gap for stream in streams for gap in stream.gaps]
    return Repeat(
        before=tuple(waits_within(gaps, since, begin)),
        during=tuple(waits_overlapping(gaps, [(begin, end)])),
        first_token_seconds=long_answer.first_token_seconds,
        timeline=tuple((after - begin, after - first) for first, after in gaps if first >= since),
    )


def render(results: Results) -> str:
    """The document."""
    settings, chunks, first = results["settings"], results["chunk_seconds"], results["first_token_seconds"]
    lines = [
        "# A long prompt amid running streams",
        "",
        f"{subject(results)}, {settings['streams']} streams, then a prompt of {settings['long_prompt']} tokens in "
        f"chunks of {settings['chunk']}; {settings['repeats']} repeats, {conditions(results)}.",
        "",
        *waits_table({"before": results["before"], "during": results["during"]}),
        "",
        f"The 99th percentile rises by {milliseconds(results['p99_rise_seconds'])}. A chunk by itself takes "
        f"{milliseconds(chunks['mean'])} on average, the costliest {milliseconds(chunks['costliest'])}: "
        f"the promise {verdict(results['passed'])}. "
        f"The prompt's first token comes after {first['alone']:.2f} s alone, {first['amid_streams']:.2f} s amid them.",
    ]
    return "\n".join(lines)


def draw_picture(results: Results) -> str:
    """Every wait as a point at its end."""
    points = [point for timeline in results["timelines"] for point in timeline]
    limit = results["before"]["p99"] + results["chunk_seconds"]["costliest"]
    with drawing("interference", 7.0, 2.6) as (figure, svg):
        axes = figure.subplots()
        # Thousands of points, as an image within the drawing.
        times, waits = [at for at, _ in points], [1e3 * wait for _, wait in points]
        axes.scatter(times, waits, s=3, color="#0072B2", linewidths=0, rasterized=True)
        axes.axvspan(0, results["first_token_seconds"]["amid_streams"], color="#E69F00", alpha=0.15, linewidth=0)
        axes.axhline(1e3 * limit, color="#555555", linewidth=1.0)
        axes.annotate("p99 before + a chunk", (0.01, 1e3 * limit), xycoords=("axes fraction", "data"), va="bottom")
        axes.set_xlabel("seconds since the long prompt was sent")
        axes.set_ylabel("wait between tokens, ms")
        axes.set_ylim(0, 1e3 * max(limit, *(wait for _, wait in points)) * 1.15)
    return svg.getvalue()


SCENARIO = Scenario(
    __name__,
    InterferenceSettings,
    measure,
    render,
    draw_picture,
    caption="Every wait, by when it ended",
    picture_only=("timelines",),
)
