"""Answers in time under overload: a server that refuses what it could not answer in time, beside one that does not.

    python -m benchmarks.goodput [--model llama-110m] [--precision int8] [--load 1.5] [--timeout 2] [--batch 8]
                                 [--seconds 40] [--rounds 3] [--quick] [--docs]

Two servers with the same flags but for `--admission`, over gRPC. Each round begins with the capacity: requests without
deadlines, always twice as many as run at once, to the server without admission; on a shared machine it is another one
each time. Then, in random order, each server is offered `load` times that by the same seeded schedule: Poisson arrivals
that wait for no answer (open loop), lognormal lengths of prompts and answers, known to the server as `max_tokens` with
`ignore_eos`. Every call has a deadline, counted from the moment when it was meant to be sent, as is the time that its
answer takes. The first seconds of a round do not count: the queue is empty then. Goodput is the answers in time per
second; the promise is

    goodput with admission ≥ 1.5 · goodput without

over all rounds. The last line on stdout is one JSON object; report and picture go to `build/bench`.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from benchmarks import scenario
from benchmarks.frame.pictures import drawing
from benchmarks.frame.servers import serving
from benchmarks.peers.onward import artifact
from benchmarks.scenario import draw, milliseconds, percentile
from benchmarks.scenario_options import ScenarioSettings, above, at_least, new_parser, read_settings
from model.spec.artifact import load
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

NAME = "goodput"
WAYS = ("off", "deadline")
LIMIT = 1.5
"""How many times as many answers in time there must be."""
IN_TIME, REFUSED, LATE, FAILED = "in time", "refused", "late", "failed"
ENDS = (IN_TIME, REFUSED, LATE, FAILED)
_SHORTEST, _LONGEST_SHARE = 4, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ScenarioSettings):
    """What is measured; lengths in tokens, of which `spread` is the standard deviation of the logarithm."""

    model: str = "llama-110m"
    batch: int = 8
    prompt: int = 64
    answer: int = 32
    spread: float = 0.5
    load: float = LIMIT
    timeout: float = 2.0
    capacity_seconds: float = 20.0
    lead: float = 10.0
    seconds: float = 40.0
    rounds: int = 3


_QUEUE = 100_000


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and when it is to be sent: seconds from the beginning of its round."""

    at: float
    prompt: tuple[int, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Answered:
    """How it ended, in seconds from when it was meant to be sent; `lag` is how late the client sent it."""

    at: float
    end: str
    seconds: float
    lag: float


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """Makes the model, serves it twice and measures."""
    options = scenario.make_artifact(
        settings.model, settings.precision, build=build, max_batch=settings.batch, threads=settings.threads
    )
    config = load(artifact(options)).config
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    flags = ["--threads", str(settings.threads), "--max-batch-size", str(settings.batch), *scenario.QUIET]
    # However fast the server: nobody is to be refused for want of a place, but by the admission that is compared.
    flags += ["--max-queue-size", str(_QUEUE)]
    rounds: dict[str, list[Sequence[Answered]]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        targets = {
            way: stack.enter_context(serving(artifact(options).parent, *flags, "--admission", way)) for way in WAYS
        }
        endless = schedule(settings, math.inf, source, config.vocab_size, config.context)
        # What both servers learn from before anything counts.
        for way in WAYS:
            asyncio.run(_saturate(targets[way], settings, endless))
        capacities: list[float] = []
        for number in range(settings.rounds):
            capacities.append(asyncio.run(_saturate(targets["off"], settings, endless)))
            told = f"round {number + 1}/{settings.rounds}: capacity {capacities[-1]:.2f} requests a second"
            print(told, file=sys.stderr, flush=True)
            asked = schedule(settings, settings.load * capacities[-1], source, config.vocab_size, config.context)
            ways = list(WAYS)
            source.shuffle(ways)
            for way in ways:
                rounds[way].append(asyncio.run(_offer(targets[way], settings, asked)))
    return scenario.facts(NAME, settings) | judge(settings, capacities, rounds)


def schedule(settings: Settings, rate: float, source: random.Random, vocab_size: int, context: int) -> list[Asked]:
    """Requests with exponential pauses for one round; if `rate` is infinite, as many as a closed loop can turn over."""
    longest = int(_LONGEST_SHARE * context)

    def length(median: int) -> int:
        return max(_SHORTEST, min(longest, round(source.lognormvariate(math.log(median), settings.spread))))

    asked: list[Asked] = []
    at = 0.0
    while at < settings.lead + settings.seconds and (math.isfinite(rate) or len(asked) < 1024):
        at += source.expovariate(rate) if math.isfinite(rate) else 0.0
        prompt = tuple(draw(source, vocab_size, length(settings.prompt)))
        asked.append(Asked(at, prompt, length(settings.answer)))
    return asked


async def _saturate(target: str, settings: Settings, asked: Sequence[Asked]) -> float:
    """Answers a second while there are always twice as many requests as run at once, after the lead."""
    begin = time.perf_counter() + settings.lead
    end = begin + settings.capacity_seconds
    ends: list[float] = []
    left = list(asked)

    async def ask(stub: GenerationServiceAsyncStub) -> None:
        while time.perf_counter() < end:
            each = left.pop()
            left.insert(0, each)
            await stub.Generate(_request(each))
            ends.append(time.perf_counter())

    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        await asyncio.gather(*(ask(stub) for _ in range(2 * settings.batch)))
    return sum(begin <= at < end for at in ends) / settings.capacity_seconds


async def _offer(target: str, settings: Settings, asked: Sequence[Asked]) -> list[Answered]:
    """Sends each request at its time, whatever became of those before."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        await channel.channel_ready()
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for each in asked:
                await asyncio.sleep(begin + each.at - time.perf_counter())
                tasks.append(group.create_task(_ask(stub, each, begin + each.at, settings)))
    return [task.result() for task in tasks]


async def _ask(stub: GenerationServiceAsyncStub, asked: Asked, intended: float, settings: Settings) -> Answered:
    sent = time.perf_counter()
    try:
        await stub.Generate(_request(asked), timeout=intended + settings.timeout - sent)
        end = None
    except grpc.aio.AioRpcError as error:
        codes = {grpc.StatusCode.RESOURCE_EXHAUSTED: REFUSED, grpc.StatusCode.DEADLINE_EXCEEDED: LATE}
        end = codes.get(error.code(), FAILED)
    seconds = time.perf_counter() - intended
    return Answered(asked.at, end or (IN_TIME if seconds <= settings.timeout else LATE), seconds, sent - intended)


def _request(asked: Asked) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=asked.prompt),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=asked.answer, ignore_eos=True),
    )


def judge(
    settings: Settings, capacities: Sequence[float], rounds: Mapping[str, Sequence[Sequence[Answered]]]
) -> dict[str, Any]:
    """What came out.

    Args:
        settings: of what was measured.
        capacities: answers a second without deadlines, by round.
        rounds: by way, what became of each round's requests.
    """
    counted = {
        way: [[each for each in told if each.at >= settings.lead] for told in each_way]
        for way, each_way in rounds.items()
    }
    goodputs = {
        way: [sum(each.end == IN_TIME for each in told) / settings.seconds for told in each_way]
        for way, each_way in counted.items()
    }
    off, deadline = (statistics.mean(goodputs[way]) for way in WAYS)
    return {
        "capacity": statistics.mean(capacities),
        "capacity_by_round": list(capacities),
        "offered": statistics.mean(len(told) / settings.seconds for told in counted["off"]),
        "ways": {way: _describe(settings, told, goodputs[way]) for way, told in counted.items()},
        "ratio": deadline / off if off else None,
        "ratio_by_round": [
            with_ / without if without else None for without, with_ in zip(*goodputs.values(), strict=True)
        ],
        "limit": LIMIT,
        "passed": deadline >= LIMIT * off and deadline > 0,
    }


def _describe(settings: Settings, rounds: Sequence[Sequence[Answered]], goodputs: Sequence[float]) -> dict[str, Any]:
    told = [each for each_round in rounds for each in each_round]
    ends = Counter(each.end for each in told)
    total = settings.seconds * len(rounds)
    return {
        "goodput": statistics.mean(goodputs),
        "goodput_by_round": list(goodputs),
        "per_second": {end: ends[end] / total for end in ENDS},
        "seconds": {
            end: _percentiles([each.seconds for each in told if each.end == end]) for end in (IN_TIME, REFUSED)
        },
        "client_lag_seconds": _percentiles([each.lag for each in told]),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    return {f"p{share}": percentile(values, share / 100) for share in (50, 99)} if values else None


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings = results["settings"]
    rows = []
    for way, found in results["ways"].items():
        per_second, seconds = found["per_second"], found["seconds"]
        answered, refused = seconds[IN_TIME], seconds[REFUSED]
        rows.append(
            f"| `--admission={way}` | {found['goodput']:.2f} | {per_second[REFUSED]:.2f} | {per_second[LATE]:.2f} | "
            f"{'-' if answered is None else format(answered['p50'], '.2f') + ' s'} | "
            f"{'-' if refused is None else milliseconds(refused['p50'])} |"
        )
    each = ", ".join(map(_times, results["ratio_by_round"]))
    capacity = ", ".join(f"{each:.2f}" for each in results["capacity_by_round"])
    verdict = "holds" if results["passed"] else "does **not** hold"
    lines = [
        "# Answers in time",
        "",
        f"{settings['model']} {settings['precision']}, {settings['batch']} sequences at once, {settings['threads']} "
        f"threads, on {results['machine']['processor']}. Prompts of {settings['prompt']} tokens and answers of "
        f"{settings['answer']} (medians of lognormal lengths, spread {settings['spread']:g}). The server answers "
        f"{results['capacity']:.2f} such requests a second ({capacity} by round); offered were "
        f"{results['offered']:.2f}, {settings['load']:g} times as many, each to be answered within "
        f"{settings['timeout']:g} s. "
        f"{settings['rounds']} rounds, of which {settings['seconds']:g} s each count.",
        "",
        "| per second | answered in time | refused at once | too late | median answer | median refusal |",
        "|---|---:|---:|---:|---:|---:|",
        *rows,
        "",
        f"Answers in time with admission over those without: {_times(results['ratio'])}; by round {each}. The promise, "
        f"{results['limit']:g}, {verdict}.",
        "",
        f"![What became of the requests]({NAME}.svg)",
        "",
    ]
    return "\n".join(lines)


def _times(ratio: float | None) -> str:
    return "nothing to compare with" if ratio is None else f"{ratio:.2f}"


def draw_picture(results: Mapping[str, Any]) -> str:
    """What became of the requests of each server, per second, as SVG."""
    colours = {IN_TIME: "#0072B2", REFUSED: "#CCCCCC", LATE: "#D55E00", FAILED: "#000000"}
    with drawing(NAME, 7.0, 1.8) as (figure, svg):
        axes = figure.subplots()
        names = [f"--admission={way}" for way in results["ways"]]
        left = [0.0] * len(names)
        for end, colour in colours.items():
            widths = [found["per_second"][end] for found in results["ways"].values()]
            if not any(widths):
                continue
            axes.barh(names, widths, left=left, color=colour, height=0.6, label=end)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.axvline(results["capacity"], color="#555555", linewidth=1.0)
        axes.annotate("capacity", (results["capacity"], 1.02), xycoords=("data", "axes fraction"), ha="center")
        axes.invert_yaxis()
        axes.set_xlabel("requests a second")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return svg.getvalue()


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(NAME, lambda: measure(settings, scenario.BUILD), render, folder, draw_picture)


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    parser = new_parser(NAME, __doc__, quick="one short round")
    parser.add_argument("--batch", type=at_least(1), help="sequences that run at once")
    parser.add_argument("--prompt", type=at_least(1), help="median tokens of a prompt")
    parser.add_argument("--answer", type=at_least(1), help="median tokens of an answer")
    parser.add_argument("--load", type=above(0.0), help="offered, as a multiple of the capacity")
    parser.add_argument("--timeout", type=above(0.0), help="seconds until the deadline")
    parser.add_argument("--seconds", type=above(0.0), help="of each round that count")
    parser.add_argument("--rounds", type=at_least(1))
    return read_settings(parser, arguments, Settings(threads=os.cpu_count() or 1), _shorten)


def _shorten(settings: Settings) -> Settings:
    return replace(settings, capacity_seconds=5.0, lead=3.0, seconds=min(8.0, settings.seconds), rounds=1)


if __name__ == "__main__":
    sys.exit(main())
