"""Greedy requests and streams over gRPC, and the waits between their tokens. Times are the client's, in seconds."""

from __future__ import annotations

import asyncio
import random
import time
from asyncio import Event
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc.aio

from benchmarks.frame.statistics import percentiles
from benchmarks.frame.tables import milliseconds
from benchmarks.frame.tables import table as markdown
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

Span: TypeAlias = tuple[float, float]
"""Begin and end."""
PAUSE_SECONDS = 0.5
"""Between two calls amid streams, so that no wait overlaps both."""

_Result = TypeVar("_Result")
_Request = TypeVar("_Request", pb.GenerateRequest, pb.GenerateStreamRequest)


def greedy(kind: type[_Request], prompt: Sequence[int], new: int, **more: Any) -> _Request:
    """A request for exactly so many greedy tokens."""
    return kind(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=new, ignore_eos=True),
        **more,
    )


@asynccontextmanager
async def connected(target: str) -> AsyncIterator[GenerationServiceAsyncStub]:
    """A stub with a channel of its own."""
    async with grpc.aio.insecure_channel(target) as channel:
        yield GenerationServiceStub(channel)


async def gathered(calls: Iterable[Awaitable[_Result]], in_flight: int) -> list[_Result]:
    """Results of calls, of which so many run at a time; time in this queue is not theirs."""
    gate = asyncio.Semaphore(in_flight)

    async def one(call: Awaitable[_Result]) -> _Result:
        async with gate:
            return await call

    return list(await asyncio.gather(*map(one, calls)))


@dataclass(slots=True)
class Answer:
    """A stream. `arrivals` has a time for each token; tokens of one message arrive at the same time."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def first_token_seconds(self) -> float:
        """Time to first token."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[Span]:
        """Waits between tokens."""
        return list(zip(self.arrivals, self.arrivals[1:], strict=False))


async def follow(
    stub: GenerationServiceAsyncStub,
    prompt: Sequence[int],
    new: int,
    *,
    model: str = "",
    seen: Callable[[Answer], None] = lambda _: None,
    stop: Event | None = None,
) -> Answer:
    """Streams so many greedy tokens; `seen` is called after each message, and `stop` cancels the stream at its next.

    Raises:
        RuntimeError: if the stream ends without being stopped and without all its tokens.
    """
    answer = Answer(time.perf_counter())
    call = stub.GenerateStream(greedy(pb.GenerateStreamRequest, prompt, new, model=model))
    async for event in call:
        answer.arrivals += [time.perf_counter()] * len(event.delta.token_ids)
        if event.HasField("summary"):
            answer.cached_tokens = event.summary.usage.cached_tokens
        seen(answer)
        if stop is not None and stop.is_set():
            call.cancel()
            return answer
    if len(answer.arrivals) != new:
        raise RuntimeError(f"asked for {new} tokens, got {len(answer.arrivals)}")
    return answer


@asynccontextmanager
async def running(
    stub: GenerationServiceAsyncStub,
    prompts: Sequence[Iterable[Sequence[int]]],
    new: int,
    *,
    begun: int,
    model: str = "",
) -> AsyncIterator[list[Answer]]:
    """Streams that run until the block ends; the block begins once each has `begun` tokens.

    Args:
        stub: of their server.
        prompts: for each stream the prompts it sends, one after the other.
        new: tokens for each prompt.
        begun: tokens of each stream before the block.
        model: by name.

    Yields:
        The answers that have ended; after the block all have, some cut short.

    Raises:
        RuntimeError: if `new` is less than `begun`.
        ExceptionGroup: with what the streams or the block raised.
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
    """When a call began and ended."""
    began = time.perf_counter()
    await call()
    return began, time.perf_counter()


async def pause(source: random.Random) -> None:
    """About `PAUSE_SECONDS`, with jitter: what follows starts at a random point of a step."""
    await asyncio.sleep(PAUSE_SECONDS * source.uniform(0.8, 1.2))


def waits_within(gaps: Iterable[Span], begin: float, end: float) -> list[float]:
    """Seconds of the gaps that lie between two times."""
    return [after - before for before, after in gaps if before >= begin and after <= end]


def waits_overlapping(gaps: Iterable[Span], spans: Sequence[Span]) -> list[float]:
    """Seconds of the gaps that overlap one of the spans."""
    return [after - before for before, after in gaps if any(before < end and after > begin for begin, end in spans)]


def describe(waits: Sequence[float]) -> dict[str, float]:
    """Percentiles, maximum and count of at least one wait."""
    return {**percentiles(waits, 50, 99), "max": max(waits), "count": len(waits)}


def table(
    rows: Mapping[str, Mapping[str, float]], further: str = "", cells: Mapping[str, str] | None = None
) -> list[str]:
    """Markdown: waits by name, and a `further` column for some of them."""
    headings = "wait between tokens|p50|p99|largest" + (f"|{further}" if further else "")
    lines = []
    for name, waits in rows.items():
        shown = [milliseconds(waits[key]) for key in ("p50", "p99", "max")]
        lines.append([name, *shown, *([(cells or {}).get(name, "")] if further else [])])
    return markdown(headings, lines)
