"""What a shared prefix saves: the time to first token of requests that begin alike, beside that of the first of them.

    python -m benchmarks.prefix [--model llama-110m] [--precision int8] [--prefix 512] [--requests 50] [--repeats 5]
                                [--in-flight 8] [--quick] [--docs]

Over gRPC, on a server of its own. Every repeat draws a new prefix, which nobody has seen before; each request adds a
suffix of its own. Three ways to ask, each with prefixes of its own:

    sequential   one after the other
    concurrent   the first alone, the others with several in flight
    unshared     as concurrent, but every prefix is another: what there is to save

The promise is that the 2nd to the last request, each by its median over the repeats, have their first token in a
quarter of the first's time when asked one after the other. `cached_tokens` is what the server says it did not compute:
one without a prefix cache says 0 and breaks the promise. The last line on stdout is one JSON object; the report goes to
`build/bench`.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from benchmarks import scenario
from benchmarks.frame.servers import serving
from benchmarks.peers.onward import artifact
from benchmarks.scenario import Answer, draw, milliseconds, percentile
from benchmarks.scenario_options import ScenarioSettings, at_least, new_parser, read_settings
from model.spec.artifact import load
from onward.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

NAME = "prefix"
WAYS = ("sequential", "concurrent", "unshared")
LIMIT = 0.25
"""Share of the first request's time that the others may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ScenarioSettings):
    """What is measured; lengths in tokens, a suffix's is drawn from its range."""

    model: str = "llama-110m"
    prefix: int = 512
    suffix_least: int = 16
    suffix_most: int = 64
    requests: int = 50
    in_flight: int = 8
    repeats: int = 5


Series = Sequence[tuple[float, int]]
"""Of one repeat, request by request: seconds to the first token, cached tokens."""


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """Makes the model, serves it and measures."""
    options = scenario.make_artifact(
        settings.model,
        settings.precision,
        build=build,
        max_batch=settings.in_flight,
        threads=settings.threads,
    )
    vocab_size = load(artifact(options)).config.vocab_size
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    flags = ["--threads", str(settings.threads), "--max-batch-size", str(settings.in_flight), *scenario.QUIET]
    series: dict[str, list[Series]] = {way: [] for way in WAYS}
    with serving(artifact(options).parent, *flags) as target:
        asyncio.run(_ask(target, prompts(settings, vocab_size, source, is_shared=False)[:3], 1))  # does not count
        for number in range(settings.repeats):
            print(f"repeat {number + 1}/{settings.repeats}", file=sys.stderr, flush=True)
            ways = list(WAYS)
            source.shuffle(ways)
            for way in ways:
                asked = prompts(settings, vocab_size, source, is_shared=way != "unshared")
                in_flight = 1 if way == "sequential" else settings.in_flight
                series[way].append(asyncio.run(_ask(target, asked, in_flight)))
    return scenario.facts(NAME, settings) | judge(series)


def prompts(settings: Settings, vocab_size: int, source: random.Random, *, is_shared: bool) -> list[list[int]]:
    """The prompts of one repeat: a prefix for all or one for each, and suffixes that begin with different tokens."""
    firsts = source.sample(range(scenario.NUM_SPECIAL, vocab_size), settings.requests)
    prefix = draw(source, vocab_size, settings.prefix)
    made = []
    for first in firsts:
        length = source.randint(settings.suffix_least, settings.suffix_most)
        made.append([*prefix, first, *draw(source, vocab_size, length - 1)])
        if not is_shared:
            prefix = draw(source, vocab_size, settings.prefix)
    return made


def judge(series: Mapping[str, Sequence[Series]]) -> dict[str, Any]:
    """What came out, by way of asking."""
    found = {way: _describe(repeats) for way, repeats in series.items()}
    return {"ways": found, "limit": LIMIT, "passed": found["sequential"]["ratio"]["max"] <= LIMIT}


def _describe(repeats: Sequence[Series]) -> dict[str, Any]:
    """Each request's figure is its median over the repeats."""
    seconds = [statistics.median(each[0] for each in request) for request in zip(*repeats, strict=True)]
    cached = [statistics.median(each[1] for each in request) for request in zip(*repeats, strict=True)]
    first, others = seconds[0], seconds[1:]
    return {
        "first_seconds": first,
        "others_seconds": {
            "median": statistics.median(others),
            "p90": percentile(others, 0.9),
            "max": max(others),
        },
        "ratio": {"median": statistics.median(others) / first, "max": max(others) / first},
        "cached_tokens": {"first": cached[0], "others_least": min(cached[1:]), "others_most": max(cached[1:])},
        "seconds": seconds,
    }


async def _ask(target: str, asked: Sequence[Sequence[int]], in_flight: int) -> Series:
    """The first alone, then the others, so many at a time; the time in this client's own queue does not count."""
    gate = asyncio.Semaphore(in_flight)

    async def ask(stub: GenerationServiceAsyncStub, prompt: Sequence[int]) -> Answer:
        async with gate:
            return await scenario.follow(stub, prompt, 1)

    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        first = await ask(stub, asked[0])
        others = await asyncio.gather(*(ask(stub, prompt) for prompt in asked[1:]))
    return [(answer.first_token_seconds, answer.cached_tokens) for answer in (first, *others)]


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings = results["settings"]
    lines = [
        "# A shared prefix",
        "",
        f"{settings['model']} {settings['precision']}, {settings['requests']} requests that share {settings['prefix']} "
        f"tokens and end in {settings['suffix_least']} to {settings['suffix_most']} of their own; medians of "
        f"{settings['repeats']} repeats, {settings['threads']} threads, on {results['machine']['processor']}.",
        "",
        "| asked | first | others, median | others, slowest | median ÷ first | slowest ÷ first | cached tokens |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for way, each in results["ways"].items():
        name = f"{way}, {settings['in_flight']} in flight" if way != "sequential" else way
        others, ratio, cached = each["others_seconds"], each["ratio"], each["cached_tokens"]
        lines.append(
            f"| {name} | {milliseconds(each['first_seconds'])} | {milliseconds(others['median'])} | "
            f"{milliseconds(others['max'])} | {ratio['median']:.0%} | {ratio['max']:.0%} | "
            f"{cached['others_least']:.0f} to {cached['others_most']:.0f} |"
        )
    verdict = "holds" if results["passed"] else "does **not** hold"
    lines += ["", f"The promise, the slowest in {results['limit']:.0%} of the first's time, {verdict}.", ""]
    return "\n".join(lines)


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(NAME, lambda: measure(settings, scenario.BUILD), render, folder)


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    parser = new_parser(NAME, __doc__, quick="one repeat of few requests")
    parser.add_argument("--prefix", type=at_least(1), help="tokens that are shared")
    parser.add_argument("--requests", type=at_least(2))
    parser.add_argument("--in-flight", type=at_least(1))
    parser.add_argument("--repeats", type=at_least(1))
    return read_settings(parser, arguments, Settings(threads=os.cpu_count() or 1), _shorten)


def _shorten(settings: Settings) -> Settings:
    return replace(settings, requests=min(8, settings.requests), repeats=1)


if __name__ == "__main__":
    sys.exit(main())
