"""Benchmark of a server that generates over gRPC, with the report fields of vLLM's `bench serve`.

    python -m loadtest bench --target 127.0.0.1:8001 --request-rate 4 --duration 60 --goodput ttft:500 tpot:50
    python -m loadtest bench --target 127.0.0.1:8001 --max-concurrency 8 --num-prompts 200
    python -m loadtest bench --target HOST:PORT --protocol oip --model NAME --num-prompts 50 --request-rate 2

A finite `--request-rate` is an open loop: requests are sent when due. `inf`, the default, is a closed loop of
`--max-concurrency` users; without that, all requests are sent at once. With `--unary` the time to the first token is
the time to the whole answer. The last line on stdout is the report as JSON; progress goes to stderr.

`--fail-if 'ttft_p99>0.5'` ends with status 1 where that holds: a latency as METRIC_STATISTIC in seconds, or a number of
the report by its name. `--junit FILE` writes these verdicts for CI.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from loadtest.command import ServerSettings, add_server, new_driver, say_bad_options, say_failure
from loadtest.core import progress
from loadtest.core.conditions import Condition, parse_condition, to_junit
from loadtest.core.drive import Driver
from loadtest.core.figures import Run, render, summarize
from loadtest.core.options import add_options

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEFAULT_REQUESTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings(ServerSettings):
    """The benchmark's settings; `seconds` and `max_concurrency` are None without a limit, `conditions` fail it."""

    max_concurrency: int | None = None
    seconds: float | None = None
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The run, the model's name, and the run's begin on this host's monotonic clock."""

    run: Run
    model: str
    began: float


async def measure(settings: BenchSettings) -> Result:
    """Warms up, then runs.

    Raises:
        grpc.aio.AioRpcError: if the server is unreachable or lacks the model.
        RuntimeError: if a warm-up request does not finish.
        ValueError: if the options do not fit the model.
    """
    async with settings.connect() as client:
        await settings.warm_up(client)
        driver = new_driver(client, settings.load)
        count, seconds = settings.load.requests, settings.seconds
        with _stopping(driver):
            async with progress.shown(driver, sys.stderr, count=count, seconds=seconds):
                run = await _drive(driver, settings)
        return Result(run, client.facts.model, driver.began)


async def _drive(driver: Driver, settings: BenchSettings) -> Run:
    load, limit = settings.load, settings.max_concurrency
    count = load.requests
    if load.arrivals is not None:
        schedule = load.arrivals.schedule(count=count, seconds=settings.seconds)
        return await driver.open_loop(schedule, limit)
    if limit is not None:
        return await driver.closed_loop(limit, count=count, seconds=settings.seconds)
    return await driver.open_loop((0.0,) * (count or 0))


@contextmanager
def _stopping(driver: Driver) -> Iterator[None]:
    """The first Ctrl-C stops sending, the second cancels the requests in flight; the report is printed either way."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, driver.stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def detailed(run: Run) -> dict[str, list[Any]]:
    """Every request, as one list per field in the order of request numbers; times in seconds."""
    records = sorted(run.records, key=lambda record: record.number)
    return {
        "request_ids": [record.request_id for record in records],
        "outcomes": [record.outcome.value for record in records],
        "codes": [record.code for record in records],
        "stages": [record.stage for record in records],
        "intended": [record.intended for record in records],
        "sent": [record.sent for record in records],
        "arrivals": [list(record.arrivals) for record in records],
        "ended": [record.ended for record in records],
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.generated_tokens for record in records],
        "ttfts": [record.first_token_seconds for record in records],
        "itls": [record.gaps for record in records],
    }


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; the exit status is 1 if the measurement or a condition failed, 2 for invalid options."""
    options = make_parser().parse_args(arguments)
    try:
        settings = _settings(options)
    except ValueError as error:
        return say_bad_options(error)
    try:
        result = asyncio.run(measure(settings))
    except (grpc.aio.AioRpcError, RuntimeError, ValueError) as error:
        return say_failure(settings.target, error)
    report = _describe(settings, options, result)
    try:
        verdicts = [(each, each.complaint(result.run, report)) for each in settings.conditions]
    except ValueError as error:
        return say_bad_options(error)
    if options.save_detailed:
        report |= {"began_monotonic": result.began} | detailed(result.run)
    line = json.dumps(report, allow_nan=False)
    if options.save_result or options.save_detailed or options.result_filename:
        path = _path(options, result.model)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line + "\n", encoding="utf-8")
        sys.stderr.write(f"saved to {path}\n")
    if options.junit:
        options.junit.parent.mkdir(parents=True, exist_ok=True)
        options.junit.write_text(to_junit(verdicts, result.run.seconds), encoding="utf-8")
    sys.stdout.write(render(report, settings.load.wanted) + f"\n\n{line}\n")
    complaints = [complaint for _, complaint in verdicts if complaint is not None]
    sys.stderr.write("".join(f"failed: {complaint}\n" for complaint in complaints))
    return int(bool(complaints))


def _describe(settings: BenchSettings, options: argparse.Namespace, result: Result) -> dict[str, Any]:
    load = settings.load
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "backend": settings.protocol.value,
        "model_id": result.model,
        "num_prompts": load.requests,
        "request_rate": "inf" if load.arrivals is None else load.arrivals.rate or "trace",
        "burstiness": None if load.arrivals is None else load.arrivals.burstiness,
        "max_concurrency": settings.max_concurrency,
        "options": {name: _plain(value) for name, value in sorted(vars(options).items())},
        **summarize(result.run, load.wanted),
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) or value == math.inf else value


def _path(options: argparse.Namespace, model: str) -> Path:
    rate = f"{options.rate:g}"
    name = options.result_filename or f"{options.protocol}-{rate}qps-{model}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return Path(options.result_dir) / name


def _settings(options: argparse.Namespace) -> BenchSettings:
    problems = []
    if options.max_concurrency < 0:
        problems.append(f"--max-concurrency: {options.max_concurrency} is below 0")
    if options.duration < 0.0:
        problems.append(f"--duration: {options.duration} is below 0")
    if not options.requests and not options.duration:
        options.requests = _DEFAULT_REQUESTS
    if options.duration and not options.max_concurrency and options.rate == math.inf and not options.trace:
        problems.append("--duration: without --request-rate or --max-concurrency everything is sent at once")
    if options.trace:
        options.arrivals = "trace"
    conditions = []
    for text in options.fail_if:
        try:
            conditions.append(parse_condition(text))
        except ValueError as error:
            problems.append(str(error))
    if options.junit and not options.fail_if:
        problems.append("--junit: without --fail-if there is no verdict to write")
    return BenchSettings.read(
        options,
        problems,
        max_concurrency=options.max_concurrency or None,
        seconds=options.duration or None,
        conditions=tuple(conditions),
    )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="onward bench" if Path(sys.argv[0]).name == "onward" else "python -m loadtest bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server(parser)
    add_options(parser, rate=math.inf, arrivals="gamma")
    parser.add_argument("--duration", type=float, default=0.0, help="seconds of sending; 0 for no limit")
    parser.add_argument("--max-concurrency", type=int, default=0, help="maximum requests in flight; 0 for no limit")
    text = "fail where this holds, as in ttft_p99>0.5 (seconds) or request_throughput<2; may be repeated"
    parser.add_argument("--fail-if", action="append", default=[], metavar="CONDITION", help=text)
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the verdicts of --fail-if as JUnit's XML")
    parser.add_argument("--save-result", action="store_true", help="also write the report to a file")
    parser.add_argument("--save-detailed", action="store_true", help="also write every request to it")
    parser.add_argument("--result-dir", default=".", help="folder of the file")
    parser.add_argument("--result-filename", default="", help="its name; default: protocol, rate, model and time")
    return parser
