"""Streams that run while something else is done to their server, and what becomes of the waits between their tokens.

Times are seconds on this process's clock; a span is when something began and when it ended. Knows nothing of what is
done meanwhile: that is `benchmarks.explaining`, `benchmarks.interference` and `benchmarks.loading`.
"""

from __future__ import annotations

import asyncio
import random
import time
from asyncio import Event
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from benchmarks.scenario import Answer, follow, milliseconds, percentile

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

Span: TypeAlias = tuple[float, float]

PAUSE_SECONDS = 0.5
"""Between two calls amid streams: long enough for a wait after the one to be no wait of the other."""


@asynccontextmanager
async def running(
    stub: GenerationServiceAsyncStub,
    prompts: Sequence[Iterable[Sequence[int]]],
    new: int,
    *,
    begun: int,
    model: str = "",
) -> AsyncIterator[list[Answer]]:
    """Streams that run for as long as the body does, which begins once each has so many tokens.

    Args:
        stub: of their server.
        prompts: for each stream the prompts that it asks with, one after the other.
        new: tokens asked for after each.
        begun: tokens of a stream that has begun.
        model: by name; of a server with one it need not be told.

    Yields:
        The answers that have ended. Once the body has, all have; those that were cut short have the tokens until then.

    Raises:
        RuntimeError: when there is no room for the tokens that a stream begins with.
        ExceptionGroup: of what the streams or the body raised.
    """
    if new < begun:
        raise RuntimeError(f"streams of {new} tokens never have {begun}: too little context")
    answers: list[Answer] = []
    stop, have_begun = Event(), [Event() for _ in prompts]

    async def ask(own: Iterable[Sequence[int]], has_begun: Event) -> None:
        def seen(answer: Answer) -> None:
            if len(answer.arrivals) >= begun:
                has_begun.set()

        for prompt in own:
            if stop.is_set():
                return
            answers.append(await follow(stub, prompt, new, model=model, seen=seen, stop=stop))

    async with asyncio.TaskGroup() as group:
        for own, has_begun in zip(prompts, have_begun, strict=True):
            group.create_task(ask(own, has_begun))
        for has_begun in have_begun:
            await has_begun.wait()
        yield answers
        stop.set()


async def timed(call: Callable[[], Awaitable[Any]]) -> Span:
    """Makes a call and waits for it; when that began and ended."""
    began = time.perf_counter()
    await call()
    return began, time.perf_counter()


async def pause(source: random.Random) -> None:
    """About `PAUSE_SECONDS`, and never quite the same: what comes next is to come at any moment of a step."""
    await asyncio.sleep(PAUSE_SECONDS * source.uniform(0.8, 1.2))


def waits_within(gaps: Iterable[Span], begin: float, end: float) -> list[float]:
    """Seconds of those that began and ended between two moments."""
    return [after - before for before, after in gaps if before >= begin and after <= end]


def waits_overlapping(gaps: Iterable[Span], spans: Sequence[Span]) -> list[float]:
    """Seconds of those that have a moment in common with one of the spans."""
    return [after - before for before, after in gaps if any(before < end and after > begin for begin, end in spans)]


def describe(waits: Sequence[float]) -> dict[str, float]:
    """Percentiles of at least one wait, the largest, and how many they are."""
    return {
        "p50": percentile(waits, 0.5),
        "p99": percentile(waits, 0.99),
        "max": max(waits),
        "count": len(waits),
    }


def table(
    rows: Mapping[str, Mapping[str, float]], further: str = "", cells: Mapping[str, str] | None = None
) -> list[str]:
    """Lines of Markdown: waits by their names, and what a further column has of some of them."""
    head, rule = (f" {further} |", "---:|") if further else ("", "")
    lines = [f"| wait between tokens | p50 | p99 | largest |{head}", f"|---|---:|---:|---:|{rule}"]
    for name, waits in rows.items():
        shown = " | ".join(milliseconds(waits[key]) for key in ("p50", "p99", "max"))
        lines.append(f"| {name} | {shown} |" + (f" {(cells or {}).get(name, '')} |" if further else ""))
    return lines
