"""What a prefix cache saves: time to first token of requests with a shared prefix, beside that of the first of them.

Over gRPC, on a server of its own. Every repeat draws a new prefix; each request adds a suffix of its own. Three ways,
each with its own prefixes:

    sequential   one after the other
    concurrent   the first alone, the others with several in flight
    unshared     as concurrent, but every prefix differs: the cost without cache hits

Promise: sequential, the median over the repeats of each later request is at most a quarter of the first's. A server
without a prefix cache reports 0 `cached_tokens` and breaks the promise.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.frame.models import NUM_SPECIAL, QUIET, draw
from benchmarks.frame.rounds import counted, shuffled
from benchmarks.frame.scenario import ModelSettings, Results, Run, Scenario, option
from benchmarks.frame.statistics import percentile
from benchmarks.frame.streams import connected, follow, gathered
from benchmarks.frame.tables import conditions, milliseconds, subject, table, verdict

WAYS = ("sequential", "concurrent", "unshared")
LIMIT = 0.25
"""Share of the first request's time."""

Series = Sequence[tuple[float, int]]
"""Of one repeat, by request: seconds to the first token, cached tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSettings(ModelSettings):
    """What is measured; lengths in tokens. A suffix's is drawn from its range."""

    prefix: int = option(512, "shared tokens", least=1)
    suffix_least: int = option(16)
    suffix_most: int = option(64)
    requests: int = option(50, "for each prefix", least=2, quick=8)
    in_flight: int = option(8, "concurrent requests", least=1)
    repeats: int = option(5, "each with new prefixes", least=1, quick=1)


def measure(settings: PrefixSettings, run: Run) -> dict[str, Any]:
    """All ways in every repeat."""
    model = run.subject(settings, settings.in_flight)
    vocab_size = model.config.vocab_size
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    series: dict[str, list[Series]] = {way: [] for way in WAYS}
    with model.served(*QUIET) as server:
        warm = prompts(settings, vocab_size, source, is_shared=False)[:3]
        asyncio.run(_ask(server.target, warm, 1))
        for number in counted(settings.repeats, "repeat"):
            for way in shuffled(WAYS, settings.seed, number):
                asked = prompts(settings, vocab_size, source, is_shared=way != "unshared")
                in_flight = 1 if way == "sequential" else settings.in_flight
                series[way].append(asyncio.run(_ask(server.target, asked, in_flight)))
    return judge(series)


def prompts(settings: PrefixSettings, vocab_size: int, source: random.Random, *, is_shared: bool) -> list[list[int]]:
    """One repeat's prompts: one prefix or one each, and suffixes that begin with different tokens."""
    firsts = source.sample(range(NUM_SPECIAL, vocab_size), settings.requests)
    prefix = draw(source, vocab_size, settings.prefix)
    made = []
    for first in firsts:
        length = source.randint(settings.suffix_least, settings.suffix_most)
        made.append([*prefix, first, *draw(source, vocab_size, length - 1)])
        if not is_shared:
            prefix = draw(source, vocab_size, settings.prefix)
    return made


def judge(series: Mapping[str, Sequence[Series]]) -> dict[str, Any]:
    """By way."""
    found = {way: _describe(repeats) for way, repeats in series.items()}
    return {"ways": found, "limit": LIMIT, "passed": found["sequential"]["ratio"]["max"] <= LIMIT}


def _describe(repeats: Sequence[Series]) -> dict[str, Any]:
    """Each request's figures are medians over the repeats."""
    seconds = [statistics.median(each[0] for each in request) for request in zip(*repeats, strict=True)]
    cached = [statistics.median(each[1] for each in request) for request in zip(*repeats, strict=True)]
    first, others = seconds[0], seconds[1:]
    return {
        "first_seconds": first,
        "others_seconds": {"median": statistics.median(others), "p90": percentile(others, 0.9), "max": max(others)},
        "ratio": {"median": statistics.median(others) / first, "max": max(others) / first},
        "ratio_by_repeat": [statistics.median(each[0] for each in series[1:]) / series[0][0] for series in repeats],
        "cached_tokens": {"first": cached[0], "others_least": min(cached[1:]), "others_most": max(cached[1:])},
        "seconds": seconds,
    }


async def _ask(target: str, asked: Sequence[Sequence[int]], in_flight: int) -> Series:
    """The first alone, then the others; time in this client's own queue does not count."""
    async with connected(target) as stub:
        first = await follow(stub, asked[0], 1)
        others = await gathered((follow(stub, prompt, 1) for prompt in asked[1:]), in_flight)
    return [(answer.first_token_seconds, answer.cached_tokens) for answer in (first, *others)]


def render(results: Results) -> str:
    """The document."""
    settings, rows = results["settings"], []
    for way, each in results["ways"].items():
        name = f"{way}, {settings['in_flight']} in flight" if way != "sequential" else way
        others, ratio, cached = each["others_seconds"], each["ratio"], each["cached_tokens"]
        seconds = map(milliseconds, (each["first_seconds"], others["median"], others["max"]))
        share = f"{cached['others_least']:.0f} to {cached['others_most']:.0f}"
        rows.append([name, *seconds, f"{ratio['median']:.0%}", f"{ratio['max']:.0%}", share])
    headings = "asked|first|others, median|others, slowest|median ÷ first|slowest ÷ first|cached tokens"
    lines = [
        "# A shared prefix",
        "",
        f"{subject(results)}, {settings['requests']} requests that share {settings['prefix']} tokens and end in "
        f"{settings['suffix_least']} to {settings['suffix_most']} of their own; medians of {settings['repeats']} "
        f"repeats, {conditions(results)}.",
        "",
        *table(headings, rows),
        "",
        f"The promise, the slowest in {results['limit']:.0%} of the first's time, {verdict(results['passed'])}.",
    ]
    return "\n".join(lines)


SCENARIO = Scenario(__name__, PrefixSettings, measure, render)
