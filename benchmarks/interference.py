"""What a long prompt does to those who are being answered: waits between tokens before it comes and while it is read.

    python -m benchmarks.interference [--model llama-110m] [--precision int8] [--streams 8] [--prompt 3000]
                                      [--repeats 5] [--chunk 128] [--quick] [--docs]

Over gRPC, on a server of its own. In every repeat the streams run for a while, then the long prompt is sent; "before"
is every wait that ended between the streams' start and then, "during" every wait that overlaps the time until its first
token. What one chunk costs is measured beside it: the engine alone in this process, on the same artefact, a prompt of
the same length, every step by itself. The promise is

    p99 during - p99 before ≤ the costliest chunk of the prompt

over the waits of all repeats. The mean chunk is printed too: attention makes the later ones dearer. The last line on
stdout is one JSON object; report and picture go to `build/bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import random
import statistics
import sys
from asyncio import Event
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks import scenario
from benchmarks.bench_onward import artefact
from benchmarks.bench_onward_engine import OnwardEngine
from benchmarks.scenario import Answer, draw, milliseconds, percentile
from benchmarks.serving import serving
from model.artifact import load
from model.config import ModelConfig
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub

NAME = "interference"
DOCS = Path("docs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured: `lead` tokens of each stream do not count, `window` tokens are what "before" is made of."""

    model: str = "llama-110m"
    precision: str = "int8"
    streams: int = 8
    stream_prompt: int = 128
    long_prompt: int = 3000
    lead: int = 16
    window: int = 128
    repeats: int = 5
    chunk: int = field(default_factory=scenario.default_prefill_chunk)
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Repeat:
    """One long prompt: waits in seconds, and each with when it ended, counted from when the long prompt was sent."""

    before: tuple[float, ...]
    during: tuple[float, ...]
    first_token_seconds: float
    timeline: tuple[tuple[float, float], ...]


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """Makes the model, serves it and measures."""
    options = scenario.make_artefact(
        settings.model,
        settings.precision,
        build=build,
        max_batch=settings.streams + 1,
        threads=settings.threads,
    )
    config = load(artefact(options)).config
    engine = OnwardEngine(replace(options, max_batch=1), prefill_chunk=settings.chunk)
    version = engine.load()
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    flags = ["--threads", str(settings.threads), "--max-batch-size", str(settings.streams + 1)]
    flags += ["--prefill-chunk", str(settings.chunk), *scenario.QUIET]
    repeats, chunks = [], []
    engine.prefill_seconds(draw(source, config.vocab_size, settings.long_prompt))  # the first call does not count
    with serving(artefact(options).parent, *flags) as target:
        asyncio.run(_repeat(target, replace(settings, window=settings.lead), config, source))  # nor does this
        for number in range(settings.repeats):
            print(f"repeat {number + 1}/{settings.repeats}", file=sys.stderr, flush=True)
            chunks.append(engine.prefill_seconds(draw(source, config.vocab_size, settings.long_prompt)))
            repeats.append(asyncio.run(_repeat(target, settings, config, source)))
    facts = {"scenario": NAME, "version": version, "settings": asdict(settings), "machine": scenario.machine()}
    return facts | judge(repeats, chunks)


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
        "before": _describe(before),
        "during": _describe(during),
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


def _describe(waits: Sequence[float]) -> dict[str, float]:
    return {
        "p50": percentile(waits, 0.5),
        "p99": percentile(waits, 0.99),
        "max": max(waits),
        "count": len(waits),
    }


async def _repeat(target: str, settings: Settings, config: ModelConfig, source: random.Random) -> Repeat:
    """Lets the streams run, sends the long prompt, and stops everything once it has its first token."""
    stop, ready = Event(), [Event() for _ in range(settings.streams)]
    wanted = settings.lead + settings.window
    prompts = [draw(source, config.vocab_size, settings.stream_prompt) for _ in ready]
    long_prompt = draw(source, config.vocab_size, settings.long_prompt)

    def teller(event: Event) -> Any:
        return lambda answer: event.set() if len(answer.arrivals) >= wanted else None

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
            # In the middle of a step like any request, not right after one.
            await asyncio.sleep(source.random() * 0.02)
            long_answer = await scenario.follow(stub, long_prompt, 1)
            # A step's tokens reach the streams one after the other.
            await asyncio.sleep(0.1)
            stop.set()
    return divide([task.result() for task in tasks], long_answer, settings.lead)


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
        before=tuple(after - first for first, after in gaps if first >= since and after <= begin),
        during=tuple(after - first for first, after in gaps if first < end and after > begin),
        first_token_seconds=long_answer.first_token_seconds,
        timeline=tuple((after - begin, after - first) for first, after in gaps if first >= since),
    )


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings, chunks, first = results["settings"], results["chunk_seconds"], results["first_token_seconds"]
    before, during = results["before"], results["during"]
    lines = [
        "# A long prompt amid running streams",
        "",
        f"{settings['model']} {settings['precision']}, {settings['streams']} streams, then a prompt of "
        f"{settings['long_prompt']} tokens in chunks of {settings['chunk']}; {settings['repeats']} repeats, "
        f"{settings['threads']} threads, on {results['machine']['processor']}.",
        "",
        "| wait between tokens | p50 | p99 | largest |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {' | '.join(milliseconds(each[key]) for key in ('p50', 'p99', 'max'))} |"
        for name, each in (("before", before), ("during", during))
    ]
    lines += [
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
    stream = io.StringIO()
    points = [point for timeline in results["timelines"] for point in timeline]
    limit = results["before"]["p99"] + results["chunk_seconds"]["costliest"]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": NAME, "font.size": 8}):
        figure = Figure(figsize=(7.0, 2.6), layout="constrained")
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
        figure.savefig(stream, format="svg", dpi=150, facecolor="white", metadata={"Date": None})
    return stream.getvalue()


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(
        NAME, lambda: measure(settings, scenario.BUILD), render, folder, draw_picture, untold=("timelines",)
    )


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    defaults = Settings(threads=os.cpu_count() or 1)
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=defaults.model, help="a preset")
    parser.add_argument("--precision", default=defaults.precision, help="fp32, bf16, int8, int4")
    parser.add_argument("--streams", type=int, default=defaults.streams)
    parser.add_argument("--prompt", type=int, default=defaults.long_prompt, help="tokens of the long prompt")
    parser.add_argument("--repeats", type=int, default=defaults.repeats)
    parser.add_argument("--chunk", type=int, default=defaults.chunk, help="prompt tokens per step")
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--quick", action="store_true", help="one repeat: to see that it works")
    parser.add_argument("--docs", action="store_true", help="write the report into docs/ and not into build/bench")
    options = parser.parse_args(arguments)
    for name in ("streams", "prompt", "repeats", "chunk", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    settings = replace(
        defaults,
        model=options.model,
        precision=options.precision,
        streams=options.streams,
        long_prompt=options.prompt,
        repeats=1 if options.quick else options.repeats,
        chunk=options.chunk,
        threads=options.threads,
        seed=options.seed,
    )
    return settings, DOCS if options.docs else scenario.BUILD


if __name__ == "__main__":
    sys.exit(main())
