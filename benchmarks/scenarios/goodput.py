"""Admission by predicted cost, beyond capacity: answers within their deadline with `--admission=deadline` and without.

Two servers with the same flags but for `--admission`, over gRPC. Each round begins with the capacity: requests without
deadlines, always twice as many as run at once, to the server without admission. Then, in random order, each server is
offered `load` times that by the same seeded schedule: Poisson arrivals (open loop), lognormal lengths of prompts and
answers, known to the server as `max_tokens` with `ignore_eos`. Every call has a deadline, counted from its scheduled
time, as is its duration. The first seconds of a round do not count. Goodput is answers in time per second. Promise,
over all rounds:

    goodput with admission ≥ 1.5 · goodput without
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio

from benchmarks.frame.models import QUIET, draw
from benchmarks.frame.pictures import drawing
from benchmarks.frame.rounds import counted, say, shuffled
from benchmarks.frame.scenario import ModelSettings, Results, Run, Scenario, option
from benchmarks.frame.statistics import bootstrap, percentiles
from benchmarks.frame.streams import connected, greedy
from benchmarks.frame.tables import conditions, milliseconds, subject, table, verdict
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

WAYS = ("off", "deadline")
LIMIT = 1.5
IN_TIME, REFUSED, LATE, FAILED = "in time", "refused", "late", "failed"
ENDS = (IN_TIME, REFUSED, LATE, FAILED)
_SHORTEST, _LONGEST_SHARE = 4, 0.25
_MAX_CLOSED_LOOP = 1024
# No request is refused for a full queue, only by admission.
_QUEUE = ("--max-queue-size", "100000")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputSettings(ModelSettings):
    """What is measured; lengths in tokens, `spread` is the standard deviation of their logarithm."""

    batch: int = option(8, "sequences that run at once", least=1)
    prompt: int = option(64, "median tokens of a prompt", least=1)
    answer: int = option(32, "median tokens of an answer", least=1)
    spread: float = option(0.5)
    load: float = option(LIMIT, "offered, as a multiple of the capacity", above=0.0)
    timeout: float = option(2.0, "seconds until the deadline", above=0.0)
    capacity_seconds: float = option(20.0, quick=5.0)
    lead: float = option(10.0, quick=3.0)
    seconds: float = option(40.0, "of each round that count", above=0.0, quick=8.0)
    rounds: int = option(5, "of both", least=1, quick=1)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, scheduled in seconds since the beginning of its round."""

    at: float
    prompt: tuple[int, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Answered:
    """How it ended, in seconds since its scheduled time; `lag` is how late the client sent it."""

    at: float
    end: str
    seconds: float
    lag: float


def measure(settings: GoodputSettings, run: Run) -> dict[str, Any]:
    """Both servers in every round."""
    model = run.subject(settings, settings.batch)
    config = model.config
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    rounds: dict[str, list[Sequence[Answered]]] = {way: [] for way in WAYS}
    capacities: list[float] = []
    with ExitStack() as stack:
        flags = (*QUIET, *_QUEUE)
        targets = {way: stack.enter_context(model.served(*flags, "--admission", way)).target for way in WAYS}
        endless = schedule(settings, math.inf, source, config.vocab_size, config.context)
        # The predictor of both servers learns before anything counts.
        for way in WAYS:
            asyncio.run(_saturate(targets[way], settings, endless))
        for number in counted(settings.rounds):
            capacities.append(asyncio.run(_saturate(targets["off"], settings, endless)))
            say(f"capacity {capacities[-1]:.2f} requests a second")
            asked = schedule(settings, settings.load * capacities[-1], source, config.vocab_size, config.context)
            for way in shuffled(WAYS, settings.seed, number):
                rounds[way].append(asyncio.run(_offer(targets[way], settings, asked)))
    return judge(settings, capacities, rounds)


def schedule(
    settings: GoodputSettings, rate: float, source: random.Random, vocab_size: int, context: int
) -> list[Asked]:
    """One round's requests, with exponential pauses; for an infinite rate as many as a closed loop uses up."""
    longest = int(_LONGEST_SHARE * context)

    def length(median: int) -> int:
        return max(_SHORTEST, min(longest, round(source.lognormvariate(math.log(median), settings.spread))))

    asked: list[Asked] = []
    at = 0.0
    while at < settings.lead + settings.seconds and (math.isfinite(rate) or len(asked) < _MAX_CLOSED_LOOP):
        at += source.expovariate(rate) if math.isfinite(rate) else 0.0
        prompt = tuple(draw(source, vocab_size, length(settings.prompt)))
        asked.append(Asked(at, prompt, length(settings.answer)))
    return asked


async def _saturate(target: str, settings: GoodputSettings, asked: Sequence[Asked]) -> float:
    """Answers a second in a closed loop, after the lead."""
    begin = time.perf_counter() + settings.lead
    end = begin + settings.capacity_seconds
    ends: list[float] = []
    left = list(asked)

    async def ask(stub: GenerationServiceAsyncStub) -> None:
        while time.perf_counter() < end:
            each = left.pop()
            left.insert(0, each)
            await stub.Generate(greedy(pb.GenerateRequest, each.prompt, each.answer))
            ends.append(time.perf_counter())

    async with connected(target) as stub:
        await asyncio.gather(*(ask(stub) for _ in range(2 * settings.batch)))
    return sum(begin <= at < end for at in ends) / settings.capacity_seconds


async def _offer(target: str, settings: GoodputSettings, asked: Sequence[Asked]) -> list[Answered]:
    """Sends each request at its time, whether or not earlier ones have ended."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        await channel.channel_ready()
        begin, tasks = time.perf_counter(), []
        async with asyncio.TaskGroup() as group:
            for each in asked:
                await asyncio.sleep(begin + each.at - time.perf_counter())
                tasks.append(group.create_task(_ask(stub, each, begin + each.at, settings)))
    return [task.result() for task in tasks]


async def _ask(stub: GenerationServiceAsyncStub, asked: Asked, intended: float, settings: GoodputSettings) -> Answered:
    sent = time.perf_counter()
    request = greedy(pb.GenerateRequest, asked.prompt, asked.answer)
    try:
        await stub.Generate(request, timeout=intended + settings.timeout - sent)
        end = None
    except grpc.aio.AioRpcError as error:
        codes = {grpc.StatusCode.RESOURCE_EXHAUSTED: REFUSED, grpc.StatusCode.DEADLINE_EXCEEDED: LATE}
        end = codes.get(error.code(), FAILED)
    seconds = time.perf_counter() - intended
    return Answered(asked.at, end or (IN_TIME if seconds <= settings.timeout else LATE), seconds, sent - intended)


def judge(
    settings: GoodputSettings, capacities: Sequence[float], rounds: Mapping[str, Sequence[Sequence[Answered]]]
) -> dict[str, Any]:
    """By way; `capacities` by round."""
    after_lead = {
        way: [[each for each in found if each.at >= settings.lead] for found in each_way]
        for way, each_way in rounds.items()
    }
    goodputs = {
        way: [sum(each.end == IN_TIME for each in found) / settings.seconds for found in each_way]
        for way, each_way in after_lead.items()
    }
    off, deadline = (statistics.mean(goodputs[way]) for way in WAYS)
    return {
        "capacity": statistics.mean(capacities),
        "capacity_by_round": list(capacities),
        "offered": statistics.mean(len(found) / settings.seconds for found in after_lead["off"]),
        "ways": {way: _describe(settings, found, goodputs[way]) for way, found in after_lead.items()},
        "ratio": deadline / off if off else None,
        "ratio_by_round": [
            with_ / without if without else None for without, with_ in zip(*goodputs.values(), strict=True)
        ],
        "ratio_interval": bootstrap(_ratio_of_means, goodputs["deadline"], goodputs["off"])
        if all(goodputs["off"])
        else None,
        "limit": LIMIT,
        "passed": deadline >= LIMIT * off and deadline > 0,
    }


def _ratio_of_means(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.mean(ours) / statistics.mean(theirs)


def _describe(
    settings: GoodputSettings, rounds: Sequence[Sequence[Answered]], goodputs: Sequence[float]
) -> dict[str, Any]:
    found = [each for each_round in rounds for each in each_round]
    ends = Counter(each.end for each in found)
    seconds = {end: [each.seconds for each in found if each.end == end] for end in (IN_TIME, REFUSED)}
    return {
        "goodput": statistics.mean(goodputs),
        "goodput_by_round": list(goodputs),
        "per_second": {end: ends[end] / (settings.seconds * len(rounds)) for end in ENDS},
        "seconds": {end: percentiles(values, 50, 99) if values else None for end, values in seconds.items()},
        "client_lag_seconds": percentiles([each.lag for each in found], 50, 99),
    }


def render(results: Results) -> str:
    """The document."""
    settings, rows = results["settings"], []
    for way, found in results["ways"].items():
        per_second, seconds = found["per_second"], found["seconds"]
        answered, refused = seconds[IN_TIME], seconds[REFUSED]
        rows.append(
            [
                f"`--admission={way}`",
                *(f"{each:.2f}" for each in (found["goodput"], per_second[REFUSED], per_second[LATE])),
                "-" if answered is None else f"{answered['p50']:.2f} s",
                "-" if refused is None else milliseconds(refused["p50"]),
            ]
        )
    capacity = ", ".join(f"{each:.2f}" for each in results["capacity_by_round"])
    lines = [
        "# Answers in time",
        "",
        f"{subject(results)}, {settings['batch']} sequences at once, {conditions(results)}. Prompts of "
        f"{settings['prompt']} tokens and answers of {settings['answer']} (medians of lognormal lengths, spread "
        f"{settings['spread']:g}). The server answers {results['capacity']:.2f} such requests a second ({capacity} by "
        f"round); offered were {results['offered']:.2f}, {settings['load']:g} times as many, each with a deadline of "
        f"{settings['timeout']:g} s. {settings['rounds']} rounds, of which {settings['seconds']:g} s each count.",
        "",
        *table("per second|answered in time|refused at once|too late|median answer|median refusal", rows),
        "",
        f"Answers in time with admission over those without: {_times(results['ratio'])}; by round "
        f"{', '.join(map(_times, results['ratio_by_round']))}. The promise, {results['limit']:g}, "
        f"{verdict(results['passed'])}.",
    ]
    return "\n".join(lines)


def _times(ratio: float | None) -> str:
    return "no comparison" if ratio is None else f"{ratio:.2f}"


def draw_picture(results: Results) -> str:
    """How the requests to each server ended, per second."""
    colors = {IN_TIME: "#0072B2", REFUSED: "#CCCCCC", LATE: "#D55E00", FAILED: "#000000"}
    with drawing("goodput", 7.0, 1.8) as (figure, svg):
        axes = figure.subplots()
        names = [f"--admission={way}" for way in results["ways"]]
        left = [0.0] * len(names)
        for end, color in colors.items():
            widths = [found["per_second"][end] for found in results["ways"].values()]
            if not any(widths):
                continue
            axes.barh(names, widths, left=left, color=color, height=0.6, label=end)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.axvline(results["capacity"], color="#555555", linewidth=1.0)
        axes.annotate("capacity", (results["capacity"], 1.02), xycoords=("data", "axes fraction"), ha="center")
        axes.invert_yaxis()
        axes.set_xlabel("requests a second")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return svg.getvalue()


SCENARIO = Scenario(
    __name__, GoodputSettings, measure, render, draw_picture, caption="How the requests to each server ended"
)
