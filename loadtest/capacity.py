"""The capacity curve: throughput and latency below, near and above a server's capacity.

    python -m loadtest capacity --target 127.0.0.1:8001 --prompt-tokens 128 --max-tokens 64 [--loads 0.5,0.8,1.2]
                                [--seconds 60] [--out build/load]
    python -m loadtest capacity --models build/models --model NAME …

First a closed loop with as many users as the server's batch size measures the capacity in requests per second. Then an
open loop offers shares of that capacity, each for `--seconds`, and waits for the requests in flight: the report counts
every offered request as finished, refused, failed or cancelled. JSON, Markdown and a picture go to `--out`; the last
line on stdout is the JSON.
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
from loadtest.command import ServerSettings, add_server, new_driver, say_bad_options, say_failure
from loadtest.core.arrivals import Arrivals, Pattern
from loadtest.core.clients import Client
from loadtest.core.figures import Run, Wanted, summarize
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
class CapacitySettings(ServerSettings):
    """The sweep's settings; `users` of the closed loop is None for the server's batch size."""

    pattern: Pattern = Pattern.POISSON
    burstiness: float = 1.0
    loads: tuple[float, ...] = LOADS
    seconds: float = 60.0
    closed_seconds: float = 30.0
    users: int | None = None


async def measure(settings: CapacitySettings) -> dict[str, Any]:
    """Warms up, measures the capacity and offers each load; returns the report as plain values for JSON.

    Raises:
        grpc.aio.AioRpcError: if the server is unreachable or lacks the model.
        RuntimeError: if the closed loop gives no capacity.
        ValueError: if the options do not fit the model.
    """
    load = settings.load
    async with settings.connect() as client:
        users = settings.users or client.facts.max_batch_size
        if not users:
            raise ValueError("--users: this protocol does not report a batch size")
        await settings.warm_up(client)
        _say(f"closed loop, {users} users, {settings.closed_seconds:g} s")
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
            "closed_loop": summarize(closed, _wanted(load)),
            "loads": offers,
        }


async def _offer(client: Client, settings: CapacitySettings, number: int, capacity: float) -> dict[str, Any]:
    """Offers one load, by its index."""
    load = settings.load
    factor = settings.loads[number]
    arrivals = Arrivals(
        pattern=settings.pattern,
        rate=factor * capacity,
        burstiness=settings.burstiness,
        seed=load.seed + number,
    )
    schedule = arrivals.schedule(seconds=settings.seconds)
    _say(f"{factor:g} of {capacity:.2f} requests/s for {settings.seconds:g} s: {len(schedule)} requests")
    run = await new_driver(client, load, _FIRST_OPEN_STREAM + number).open_loop(schedule)
    return {
        "load": factor,
        "offered_rate": factor * capacity,
        "scheduled": len(schedule),
        **summarize(run, _wanted(load)),
    }


def capacity_of(run: Run, users: int) -> float:
    """Requests per second of a closed loop, without its first and last round.

    In the first round all users wait for their first answers; in the last, users have stopped and the load falls.

    Raises:
        RuntimeError: if fewer than two rounds remain, or a request did not finish.
    """
    if others := [record for record in run.records if record.outcome is not Outcome.FINISHED]:
        code, detail = others[0].code, others[0].detail
        raise RuntimeError(
            f"{len(others)} of {len(run.records)} requests of the closed loop ended with {code}: {detail}"
        )
    # The last round was in flight when the users stopped.
    ends = sorted(record.ended for record in run.records)[users - 1 : -users]
    if len(ends) < 2 or ends[-1] <= ends[0]:
        raise RuntimeError(
            f"the closed loop of {users} users finished {len(run.records)} requests: too few to measure a capacity; "
            "give it more seconds (--closed-seconds)"
        )
    return (len(ends) - 1) / (ends[-1] - ends[0])


def _wanted(load: LoadOptions) -> Wanted:
    """The metrics in the options and those that the report shows."""
    metrics = tuple(dict.fromkeys((*load.wanted.metrics, "ttft", "tpot", "e2el")))
    return replace(load.wanted, metrics=metrics, percentiles=tuple(dict.fromkeys((*load.wanted.percentiles, 99.0))))


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    """Measures and writes; the exit status is 1 on failure or a missing request, 2 if the options are invalid."""
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


def _settings(options: argparse.Namespace) -> CapacitySettings:
    problems = [
        f"--{name.replace('_', '-')}: {getattr(options, name)} is not above 0"
        for name in ("seconds", "closed_seconds")
        if not getattr(options, name) > 0
    ]
    pattern = Pattern(options.arrivals)
    if pattern is Pattern.TRACE:
        problems.append("--arrivals: a trace has its own times, so its load cannot be set")
    try:
        loads = tuple(float(each) for each in options.loads.split(","))
    except ValueError:
        loads = ()
    if not loads or any(not (math.isfinite(each) and each > 0.0) for each in loads):
        problems.append(f"--loads: {options.loads!r} is not a list of shares above 0, as in 0.5,0.8,1.2")
    return CapacitySettings.read(
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
    parser.add_argument("--models", default="", metavar="DIR", help="serve the models in DIR, instead of --target")
    add_options(parser, rate=1.0, arrivals="poisson")
    parser.add_argument(
        "--loads", default=",".join(str(each) for each in LOADS), help="shares of the capacity to offer"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each load")
    parser.add_argument("--closed-seconds", type=float, default=30.0, help="duration of the closed loop")
    parser.add_argument(
        "--users", type=int, default=0, help="users of the closed loop; 0 takes the server's batch size"
    )
    parser.add_argument("--out", default="build/load", help="folder for the report")
    return parser
