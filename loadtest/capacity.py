"""The capacity curve: what a server does when it is offered less, nearly as much, and more than it can do.

    python -m loadtest capacity --target 127.0.0.1:8001 --prompt-tokens 128 --max-tokens 64 [--loads 0.5,0.8,1.2]
                                [--seconds 60] [--out build/load]
    python -m loadtest capacity --models build/models --model NAME …

First a closed loop of as many users as the server runs requests at once measures its capacity, in requests a second.
Then the same requests are offered by a schedule, at each share of that capacity for so long, and everything that is in
flight at the end is waited for: every offered request stands in the report as finished, refused, failed or cancelled.
JSON, Markdown and a picture go to `--out`; the last line on stdout is the JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from loadtest import machine
from loadtest.capacity_report import blocks
from loadtest.command import AskSettings, add_server, new_driver, say_bad_options, say_failure
from loadtest.core.arrivals import Arrivals, Pattern
from loadtest.core.clients import Client
from loadtest.core.figures import Run, Wanted, summarise
from loadtest.core.options import LoadOptions, add_options
from loadtest.core.records import Outcome
from loadtest.document import Heading, write_markdown
from loadtest.serving import serving

NAME = "capacity"
LOADS = (0.5, 0.8, 1.2)
# Streams of prompts: 0 is the benchmark's, 1 the warm-up's.
_CLOSED_STREAM = 2
_FIRST_OPEN_STREAM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(AskSettings):
    """What to do; `users` of the closed loop is None where the server is to say how many it runs at once."""

    pattern: Pattern = Pattern.POISSON
    burstiness: float = 1.0
    loads: tuple[float, ...] = LOADS
    seconds: float = 60.0
    closed_seconds: float = 30.0
    users: int | None = None


async def measure(settings: Settings) -> dict[str, Any]:
    """Warms up, measures the capacity and offers each load; the report as plain values for JSON.

    Raises:
        grpc.aio.AioRpcError: when the server cannot be reached or does not know the model.
        RuntimeError: when it has no capacity that could be measured.
        ValueError: when model and options do not go together.
    """
    load = settings.load
    async with settings.connect() as client:
        users = settings.users or client.facts.max_batch_size
        if not users:
            raise ValueError("--users: this protocol does not tell how many requests run at once")
        await settings.warm_up(client)
        _tell(f"closed loop, {users} users, {settings.closed_seconds:g} s")
        closed = await new_driver(client, load, _CLOSED_STREAM).closed_loop(users, seconds=settings.closed_seconds)
        capacity = capacity_of(closed, users)
        offers = [await _offer(client, settings, number, capacity) for number in range(len(settings.loads))]
        return {
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": machine.describe(),
            "model_id": client.facts.model,
            "backend": settings.protocol.value,
            "users": users,
            "pattern": settings.pattern.value,
            "burstiness": settings.burstiness,
            "seconds": settings.seconds,
            "capacity": capacity,
            "closed_loop": summarise(closed, _wanted(load)),
            "loads": offers,
        }


async def _offer(client: Client, settings: Settings, number: int, capacity: float) -> dict[str, Any]:
    """One load, by its number among them."""
    load = settings.load
    factor = settings.loads[number]
    arrivals = Arrivals(
        pattern=settings.pattern,
        rate=factor * capacity,
        burstiness=settings.burstiness,
        seed=load.seed + number,
    )
    schedule = arrivals.schedule(seconds=settings.seconds)
    _tell(f"{factor:g} of {capacity:.2f} requests/s for {settings.seconds:g} s: {len(schedule)} requests")
    run = await new_driver(client, load, _FIRST_OPEN_STREAM + number).open_loop(schedule)
    return {
        "load": factor,
        "offered_rate": factor * capacity,
        "scheduled": len(schedule),
        **summarise(run, _wanted(load)),
    }


def capacity_of(run: Run, users: int) -> float:
    """Requests a second that a closed loop got through, from the first round's end to the last end before it drained.

    The first round does not count: until then all users wait for their first answers. Nor do the answers after the
    users stopped asking, when fewer and fewer of them share the server.

    Raises:
        RuntimeError: when fewer than two rounds finished, or a request ended otherwise: such a figure means nothing.
    """
    if others := [record for record in run.records if record.outcome is not Outcome.FINISHED]:
        code, detail = others[0].code, others[0].detail
        raise RuntimeError(
            f"{len(others)} of {len(run.records)} requests of the closed loop ended with {code}: {detail}"
        )
    # The last round is what was in flight when the users stopped.
    ends = sorted(record.ended for record in run.records)[users - 1 : -users]
    if len(ends) < 2 or ends[-1] <= ends[0]:
        raise RuntimeError(
            f"the closed loop of {users} users finished {len(run.records)} requests: too few to measure a capacity; "
            "give it more seconds (--closed-seconds)"
        )
    return (len(ends) - 1) / (ends[-1] - ends[0])


def _wanted(load: LoadOptions) -> Wanted:
    """What the options ask for, and in any case what the report shows."""
    metrics = tuple(dict.fromkeys((*load.wanted.metrics, "ttft", "tpot", "e2el")))
    return replace(load.wanted, metrics=metrics, percentiles=tuple(dict.fromkeys((*load.wanted.percentiles, 99.0))))


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    """Measures and writes; the exit status is 1 if that failed or a request is missing, 2 if the options do not fit."""
    options = make_parser().parse_args(arguments)
    try:
        settings = _settings(options)
    except ValueError as error:
        return say_bad_options(error)
    try:
        with ExitStack() as stack:
            if options.models:
                server = stack.enter_context(serving(Path(options.models), "--no-metrics", "--log-level", "warning"))
                settings = replace(settings, target=server.target)
            report = asyncio.run(measure(settings))
    except (grpc.aio.AioRpcError, RuntimeError, ValueError) as error:
        return say_failure(settings.target, error)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(report, allow_nan=False)
    (folder / f"{NAME}.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    write_markdown([Heading("Capacity", 1), *blocks(report, NAME)], folder / f"{NAME}.md")
    sys.stdout.write(line + "\n")
    return 1 if any(each["missing"] or each["offered"] != each["scheduled"] for each in report["loads"]) else 0


def _settings(options: argparse.Namespace) -> Settings:
    problems = [
        f"--{name.replace('_', '-')}: {getattr(options, name)} is not above 0"
        for name in ("seconds", "closed_seconds")
        if not getattr(options, name) > 0
    ]
    pattern = Pattern(options.arrivals)
    if pattern is Pattern.TRACE:
        problems.append("--arrivals: a trace says itself when requests come, so no load can be asked of it")
    try:
        loads = tuple(float(each) for each in options.loads.split(","))
    except ValueError:
        loads = ()
    if not loads or any(not (math.isfinite(each) and each > 0.0) for each in loads):
        problems.append(f"--loads: {options.loads!r} is not a list of shares above 0, as in 0.5,0.8,1.2")
    return Settings.read(
        options,
        problems,
        pattern=pattern,
        burstiness=options.burstiness,
        loads=loads,
        seconds=options.seconds,
        closed_seconds=options.closed_seconds,
        users=options.users or None,
    )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest capacity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server(parser)
    parser.add_argument("--models", default="", metavar="DIR", help="serve the models in DIR meanwhile, not --target")
    add_options(parser, rate=1.0, arrivals="poisson")
    parser.add_argument(
        "--loads", default=",".join(str(each) for each in LOADS), help="shares of the capacity to offer"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each is offered")
    parser.add_argument("--closed-seconds", type=float, default=30.0, help="how long the capacity is measured")
    parser.add_argument("--users", type=int, default=0, help="users of that closed loop; 0 takes what the server runs")
    parser.add_argument("--out", default="build/load", help="folder for the report")
    return parser
