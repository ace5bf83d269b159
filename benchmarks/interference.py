"""What a long prompt does to those who are being answered: waits between tokens before it comes and while it is read.

    python -m benchmarks.interference [--model llama-110m] [--precision int8] [--streams 8] [--prompt 3000]
                                      [--repeats 5] [--chunk 128] [--quick] [--docs]

Over gRPC, on a server of its own. In every repeat the streams run for a while, then the long prompt is sent; "before"
is every wait that ended between the streams' start and then, "during" every wait that overlaps the time until its first
token. What one chunk costs is measured beside it: the engine alone in this process, on the same artifact, a prompt of
the same length, every step by itself. The promise is

    p99 during - p99 before ≤ the costliest chunk of the prompt

over the waits of all repeats. The mean chunk is printed too: attention makes the later ones dearer. The last line on
stdout is one JSON object; report and picture go to `build/bench`.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks import scenario
from benchmarks.amid_streams import describe, running, table, waits_overlapping, waits_within
from benchmarks.frame.pictures import drawing
from benchmarks.frame.servers import serving
from benchmarks.peers.onward import artifact
from benchmarks.peers.onward_engine import OnwardEngine
from benchmarks.scenario import Answer, draw, milliseconds, percentile
from benchmarks.scenario_options import ScenarioSettings, at_least, new_parser, read_settings
from model.spec.artifact import load
from model.spec.config import ModelConfig
from onward.v1.generation_pb2_grpc import GenerationServiceStub

NAME = "interference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ScenarioSettings):
    """What is measured: `lead` tokens of each stream do not count, `window` tokens are what "before" is made of."""

    model: str = "llama-110m"
    streams: int = 8
    stream_prompt: int = 128
    long_prompt: int = 3000
    lead: int = 16
    window: int = 128
    repeats: int = 5
    chunk: int = field(default_factory=scenario.default_prefill_chunk)


@dataclass(frozen=True, slots=True)
class Repeat:
    """One long prompt: waits in seconds, and each with when it ended, counted from when the long prompt was sent."""

    before: tuple[float, ...]
    during: tuple[float, ...]
    first_token_seconds: float
    timeline: tuple[tuple[float, float], ...]


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """Makes the model, serves it and measures."""
    options = scenario.make_artifact(
        settings.model,
        settings.precision,
        build=build,
        max_batch=settings.streams + 1,
        threads=settings.threads,
    )
    config = load(artifact(options)).config
    engine = OnwardEngine(replace(options, max_batch=1), prefill_chunk=settings.chunk)
    engine.load()
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    flags = ["--threads", str(settings.threads), "--max-batch-size", str(settings.streams + 1)]
    flags += ["--prefill-chunk", str(settings.chunk), *scenario.QUIET]
    repeats, chunks = [], []
    engine.prefill_seconds(draw(source, config.vocab_size, settings.long_prompt))  # the first call does not count
    with serving(artifact(options).parent, *flags) as target:
        asyncio.run(_repeat(target, replace(settings, window=settings.lead), config, source))  # nor does this
        for number in range(settings.repeats):
            print(f"repeat {number + 1}/{settings.repeats}", file=sys.stderr, flush=True)
            chunks.append(engine.prefill_seconds(draw(source, config.vocab_size, settings.long_prompt)))
            repeats.append(asyncio.run(_repeat(target, settings, config, source)))
    return scenario.facts(NAME, settings) | judge(repeats, chunks)


def judge(repeats: Sequence[Repeat], chunks: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What came out.

    Args:
        repeats: at least one.
        chunks: for each repeat the seconds of every chunk of such a prompt alone.
    """
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


async def _repeat(target: str, settings: Settings, config: ModelConfig, source: random.Random) -> Repeat:
    """Lets the streams run, sends the long prompt, and stops everything once it has its first token."""
    prompts = [draw(source, config.vocab_size, settings.stream_prompt) for _ in range(settings.streams)]
    long_prompt = draw(source, config.vocab_size, settings.long_prompt)

    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        room, begun = config.context - settings.stream_prompt, settings.lead + settings.window
        async with running(stub, [[prompt] for prompt in prompts], room, begun=begun) as streams:
            # In the middle of a step like any request, not right after one.
            await asyncio.sleep(source.random() * 0.02)
            long_answer = await scenario.follow(stub, long_prompt, 1)
            # A step's tokens reach the streams one after the other.
            await asyncio.sleep(0.1)
    return divide(streams, long_answer, settings.lead)


def divide(streams: Sequence[Answer], long_answer: Answer, lead: int) -> Repeat:
    """Sorts the streams' waits by whether they overlap the reading of the long prompt.

    Raises:
        RuntimeError: when one of the streams had ended by then.
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


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings, chunks, first = results["settings"], results["chunk_seconds"], results["first_token_seconds"]
    lines = [
        "# A long prompt amid running streams",
        "",
        f"{settings['model']} {settings['precision']}, {settings['streams']} streams, then a prompt of "
        f"{settings['long_prompt']} tokens in chunks of {settings['chunk']}; {settings['repeats']} repeats, "
        f"{settings['threads']} threads, on {results['machine']['processor']}.",
        "",
        *table({"before": results["before"], "during": results["during"]}),
        "",
        f"The 99th percentile rises by {milliseconds(results['p99_rise_seconds'])}. A chunk by itself takes "
        f"{milliseconds(chunks['mean'])} on average, the costliest {milliseconds(chunks['costliest'])}: "
        f"the promise {'holds' if results['passed'] else 'does **not** hold'}.",
        f"The prompt's first token comes after {first['alone']:.2f} s alone, {first['amid_streams']:.2f} s amid them.",
        "",
        f"![Every wait, by when it ended]({NAME}.svg)",
        "",
    ]
    return "\n".join(lines)


def draw_picture(results: Mapping[str, Any]) -> str:
    """Every wait as a point at the moment when it ended, as SVG."""
    points = [point for timeline in results["timelines"] for point in timeline]
    limit = results["before"]["p99"] + results["chunk_seconds"]["costliest"]
    with drawing(NAME, 7.0, 2.6) as (figure, svg):
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


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(
        NAME, lambda: measure(settings, scenario.BUILD), render, folder, draw_picture, untold=("timelines",)
    )


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    parser = new_parser(NAME, __doc__, quick="one repeat")
    parser.add_argument("--streams", type=at_least(1))
    parser.add_argument(
        "--prompt", type=at_least(1), dest="long_prompt", metavar="PROMPT", help="tokens of the long prompt"
    )
    parser.add_argument("--repeats", type=at_least(1))
    parser.add_argument("--chunk", type=at_least(1), help="prompt tokens per step")
    return read_settings(parser, arguments, Settings(threads=os.cpu_count() or 1), _shorten)


def _shorten(settings: Settings) -> Settings:
    return replace(settings, repeats=1)


if __name__ == "__main__":
    sys.exit(main())
