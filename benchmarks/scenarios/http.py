"""HTTP beside gRPC: tokens a second of many streams, and the wait for a first token, by one server for both.

Rounds are interleaved. In each, every transport carries the same greedy requests, first all streams at once, then one
after the other for the first token. Both clients keep their connections, run on one event loop in this process and read
each message as a program would: protobuf by grpc.aio, or the JSON of each server-sent event. They share the cores with
the server, so that a transport pays for its client, too: HTTP's is a bare socket. If a token differs between them there
are no results. Promise:

    tokens a second over HTTP ≥ 0.95 of gRPC's; the first token within 3 ms of gRPC's; each by its whole interval
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.frame.models import QUIET, draw
from benchmarks.frame.rounds import interleaved
from benchmarks.frame.scenario import ModelSettings, Results, Run, Scenario, option
from benchmarks.frame.statistics import bootstrap, ratio_of_medians
from benchmarks.frame.streams import connected, greedy
from benchmarks.frame.tables import conditions, milliseconds, subject, table, times, verdict
from loadtest.serving import Server
from onward.v1 import generation_pb2 as pb

GRPC, HTTP = "gRPC", "HTTP"
_LEAST_RATIO = 0.95
_MOST_SECONDS = 3e-3

Ask = Callable[[int, Sequence[int], int], Awaitable["Answer"]]
"""Streams so many greedy tokens over the connection of this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings(ModelSettings):
    """What is measured."""

    streams: int = option(32, "at once", least=1, quick=2)
    prompt: int = option(16, "tokens of each", least=1)
    new: int = option(64, "tokens of an answer", least=2, quick=4)
    singles: int = option(10, "requests alone, in each round", least=1, quick=2)
    rounds: int = option(7, "of both", least=1, quick=1)


@dataclass(frozen=True, slots=True)
class Answer:
    """A stream: its tokens, and the seconds from request to first token."""

    token_ids: list[int]
    first_token_seconds: float


@dataclass(frozen=True, slots=True)
class Round:
    """One transport in one round."""

    tokens_per_second: float
    first_token_seconds: float
    token_ids: list[list[int]]


def measure(settings: HttpSettings, run: Run) -> dict[str, Any]:
    """Both transports in turns.

    Raises:
        RuntimeError: if a request fails, or a token differs.
    """
    model = run.subject(settings, settings.streams)
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    count = settings.streams + settings.singles
    prompts = [draw(source, model.config.vocab_size, settings.prompt) for _ in range(count)]
    with model.served("--http-port", "0", *QUIET) as server:
        rounds = asyncio.run(_all_rounds(server, settings, prompts))
    return judge(rounds)


def judge(rounds: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """By transport, in the same rounds.

    Raises:
        RuntimeError: if a token differs.
    """
    answers = [each.token_ids for of_one in rounds.values() for each in of_one]
    if any(each != answers[0] for each in answers):
        raise RuntimeError("answers to the same request differ")
    rates = {way: [each.tokens_per_second for each in of_one] for way, of_one in rounds.items()}
    firsts = {way: [each.first_token_seconds for each in of_one] for way, of_one in rounds.items()}
    ratio, later = ratio_of_medians(rates[HTTP], rates[GRPC]), _later(firsts[HTTP], firsts[GRPC])
    ratios = bootstrap(ratio_of_medians, rates[HTTP], rates[GRPC]) or (ratio, ratio)
    laters = bootstrap(_later, firsts[HTTP], firsts[GRPC]) or (later, later)
    return {
        "tokens_per_second": {way: statistics.median(each) for way, each in rates.items()},
        "first_token_seconds": {way: statistics.median(each) for way, each in firsts.items()},
        "ratio": ratio,
        "ratio_interval": ratios,
        "first_token_later_seconds": later,
        "first_token_later_interval": laters,
        "rounds": {"tokens_per_second": rates, "first_token_seconds": firsts},
        "tokens_equal": True,
        "passed": ratios[0] >= _LEAST_RATIO and laters[1] <= _MOST_SECONDS,
    }


def _later(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(ours) - statistics.median(theirs)


async def _all_rounds(
    server: Server, settings: HttpSettings, prompts: Sequence[Sequence[int]]
) -> dict[str, list[Round]]:
    found: dict[str, list[Round]] = {GRPC: [], HTTP: []}
    async with _grpc(server) as over_grpc, _http(server, settings.streams) as over_http:
        ways: dict[str, Ask] = {GRPC: over_grpc, HTTP: over_http}
        for ask in ways.values():  # warms up
            await _round(ask, settings, prompts)
        for _, way in interleaved(settings.rounds, ways, settings.seed):
            found[way].append(await _round(ways[way], settings, prompts))
    return found


async def _round(ask: Ask, settings: HttpSettings, prompts: Sequence[Sequence[int]]) -> Round:
    began = time.perf_counter()
    answers = await asyncio.gather(*(ask(i, prompts[i], settings.new) for i in range(settings.streams)))
    seconds = time.perf_counter() - began
    singles = [await ask(0, prompt, 2) for prompt in prompts[settings.streams :]]
    return Round(
        sum(len(each.token_ids) for each in answers) / seconds,
        statistics.median(each.first_token_seconds for each in singles),
        [each.token_ids for each in (*answers, *singles)],
    )


@asynccontextmanager
async def _grpc(server: Server) -> AsyncIterator[Ask]:
    async with connected(server.target) as stub:

        async def ask(_number: int, prompt: Sequence[int], new: int) -> Answer:
            token_ids: list[int] = []
            sent, first = time.perf_counter(), 0.0
            async for event in stub.GenerateStream(greedy(pb.GenerateStreamRequest, prompt, new)):
                if event.delta.token_ids:
                    first = first or time.perf_counter() - sent
                    token_ids += event.delta.token_ids
            return Answer(token_ids, first)

        yield ask


@asynccontextmanager
async def _http(server: Server, num_connections: int) -> AsyncIterator[Ask]:
    host = server.target.rpartition(":")[0]
    pairs = [await asyncio.open_connection(host, server.http_port) for _ in range(num_connections)]

    async def ask(number: int, prompt: Sequence[int], new: int) -> Answer:
        return await _post(*pairs[number], prompt, new)

    try:
        yield ask
    finally:
        for _, writer in pairs:
            writer.close()


async def _post(reader: StreamReader, writer: StreamWriter, prompt: Sequence[int], new: int) -> Answer:
    """A completion, streamed; the connection is left at the end of the answer."""
    fields = {"prompt": list(prompt), "max_tokens": new, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**fields, "stream": True, "return_token_ids": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: server\r\ncontent-type: application/json\r\n"
    token_ids: list[int] = []
    sent, first = time.perf_counter(), 0.0
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    answered = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in answered.partition(b"\r\n")[0]:
        raise RuntimeError(answered.decode() + (await reader.read(1 << 12)).decode())
    async for line in reader:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            break
        for choice in json.loads(line[6:])["choices"]:
            if choice["token_ids"]:
                first = first or time.perf_counter() - sent
                token_ids += choice["token_ids"]
    await reader.readuntil(b"\r\n0\r\n\r\n")
    return Answer(token_ids, first)


def render(results: Results) -> str:
    """The document."""
    settings, later = results["settings"], results["first_token_later_seconds"]
    within = " to ".join(map(milliseconds, results["first_token_later_interval"]))
    rows = [
        (way, f"{results['tokens_per_second'][way]:,.0f}", milliseconds(results["first_token_seconds"][way]))
        for way in (GRPC, HTTP)
    ]
    lines = [
        "# HTTP beside gRPC",
        "",
        f"{subject(results)}, one server for both, {settings['streams']} streams at once of {settings['new']} tokens "
        f"after prompts of {settings['prompt']}, then one request at a time for the first token; medians of "
        f"{settings['rounds']} interleaved rounds, {conditions(results)}. Tokens are equal.",
        "",
        *table("transport|tokens/s|first token", rows),
        "",
        f"HTTP ÷ gRPC: {times(results['ratio'], results['ratio_interval'])}; its first token comes "
        f"{milliseconds(later)} ({within}) later, earlier where that is negative. The promise, "
        f"{_LEAST_RATIO} and {milliseconds(_MOST_SECONDS)} over both intervals, {verdict(results['passed'])}.",
    ]
    return "\n".join(lines)


SCENARIO = Scenario(__name__, HttpSettings, measure, render)
