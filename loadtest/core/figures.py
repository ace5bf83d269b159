"""Figures of a run: throughput, latencies, goodput, and the number of requests by outcome.

Fields that vLLM's `bench serve` has too have its names and meanings: milliseconds, over finished requests only, with
linearly interpolated percentiles.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadtest.core.records import Outcome, Record

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token, inter-token latency, end-to-end latency."""
SLO_METRICS = ("ttft", "tpot", "e2el")
_NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (excl. first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
_BUSY_SHARE = 0.8
_LATE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """Processor time of one client process, in shares of a core: all threads, and the thread that reads the streams."""

    cpu_share: float
    reader_share: float


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run.

    Args:
        records: every request that ended, in any order.
        offered: the number of requests that were due before the end.
        seconds: from the begin to the end of the last stream.
        clients: load of each client process.
        is_open: whether a schedule determined the sending times, so that requests could be late.
        silent: client processes that never reported; their requests are unknown.
    """

    records: Sequence[Record]
    offered: int
    seconds: float
    clients: tuple[ClientLoad, ...]
    is_open: bool
    silent: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The metrics and percentiles to report, and the objectives in milliseconds that goodput requires."""

    metrics: tuple[str, ...] = METRICS
    percentiles: tuple[float, ...] = (99.0,)
    objectives: Mapping[str, float] = field(default_factory=dict)


def parse_objectives(words: Iterable[str]) -> dict[str, float]:
    """Parses objectives in vLLM's notation, `ttft:500 tpot:50`, in milliseconds.

    Raises:
        ValueError: naming the word.
    """
    objectives = {}
    for word in words:
        name, _, limit = word.partition(":")
        if name not in SLO_METRICS:
            raise ValueError(f"--goodput: {word!r}: no metric {name!r}, only {', '.join(SLO_METRICS)}")
        try:
            value = float(limit)
        except ValueError:
            value = math.nan
        if not value > 0.0:
            raise ValueError(f"--goodput: {word!r}: {limit!r} is not a number of milliseconds above 0")
        objectives[name] = value
    return objectives


def summarize(run: Run, wanted: Wanted = Wanted()) -> dict[str, Any]:
    """The report as plain values for JSON; a figure without requests is None."""
    finished = [record for record in run.records if record.outcome is Outcome.FINISHED]
    counts = Counter(record.outcome for record in run.records)
    output_tokens = sum(record.generated_tokens for record in finished)
    input_tokens = _sum_known(record.prompt_tokens for record in finished)
    seconds = run.seconds

    def rate(amount: float | None) -> float | None:
        return None if amount is None or not seconds > 0.0 else amount / seconds

    report: dict[str, Any] = {
        "duration": seconds,
        "offered": run.offered,
        **{outcome.value: counts[outcome] for outcome in Outcome},
        "missing": run.offered - len(run.records),
        "silent": run.silent,
        "completed": counts[Outcome.FINISHED],
        "errors": dict(sorted(Counter(each.code for each in run.records if each.code != "OK").items())),
        "error_details": {each.code: each.detail for each in run.records if each.detail},
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": rate(len(finished)),
        "request_goodput": rate(_good(finished, wanted.objectives)) if wanted.objectives else None,
        "output_throughput": rate(output_tokens),
        "total_token_throughput": rate(None if input_tokens is None else input_tokens + output_tokens),
        "max_concurrent_requests": _most_at_once(run.records),
    }
    for metric in wanted.metrics:
        report |= _describe([1e3 * value for value in values_of(run, metric)], metric, wanted.percentiles)
    if run.is_open:
        report |= _describe([1e3 * record.lateness for record in run.records], "lateness", (99.0, 100.0))
    report["client"] = [{"cpu_share": each.cpu_share, "reader_share": each.reader_share} for each in run.clients]
    report["warnings"] = warnings(run)
    return report


def warnings(run: Run) -> list[str]:
    """Reasons to doubt the figures."""
    found = []
    if missing := run.offered - len(run.records):
        found.append(f"{missing} of {run.offered} requests are missing: a process of the client died or lost its link")
    if run.silent:
        found.append(f"{run.silent} of the client's processes never reported: see their logs")
    for number, client in enumerate(run.clients):
        if client.reader_share > _BUSY_SHARE:
            found.append(
                f"client process {number} spent {client.reader_share:.0%} of a core on reading streams: "
                "it adds to the latencies; use more processes"
            )
    if run.is_open and run.records:
        late = float(np.percentile([record.lateness for record in run.records], 99.0))
        firsts = [record.first_token_seconds for record in run.records if record.first_token_seconds is not None]
        if firsts and late > _LATE_SHARE * (typical := statistics.median(firsts)):
            found.append(
                f"one request in a hundred was sent {1e3 * late:.1f} ms late or more, against {1e3 * typical:.1f} ms "
                "to a first token: the client adds to the latencies"
            )
    return found


def _good(finished: Sequence[Record], objectives: Mapping[str, float]) -> int:
    """The number of requests that meet every objective; a metric that a request lacks counts as met."""
    return sum(
        all(
            1e3 * value <= limit  #
            for metric, limit in objectives.items()
            for value in _VALUES[metric](record)
        )
        for record in finished
    )


def _known(value: float | None) -> list[float]:
    return [] if value is None else [value]


_VALUES: Mapping[str, Callable[[Record], list[float]]] = {
    "ttft": lambda record: _known(record.first_token_seconds),
    "tpot": lambda record: _known(record.seconds_per_token),
    "itl": lambda record: record.gaps,
    "e2el": lambda record: [record.end_to_end_seconds],
}


def values_of(run: Run, metric: str) -> list[float]:
    """A metric's values in seconds, over finished requests."""
    return [value for record in run.records if record.outcome is Outcome.FINISHED for value in _VALUES[metric](record)]


def _sum_known(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _describe(values: Sequence[float], metric: str, percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles, under vLLM's names."""
    names = [f"p{percentile:g}" for percentile in percentiles]
    if not values:
        return {f"{name}_{metric}_ms": None for name in ("mean", "median", "std", *names)}
    array = np.asarray(values)
    figures = {"mean": array.mean(), "median": np.median(array), "std": array.std()}
    figures |= dict(zip(names, np.percentile(array, percentiles), strict=True))
    return {f"{name}_{metric}_ms": float(value) for name, value in figures.items()}


def _most_at_once(records: Sequence[Record]) -> int:
    """The largest number of requests in flight at once."""
    # At equal times, ends sort before begins.
    steps = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


def render(report: Mapping[str, Any], wanted: Wanted = Wanted()) -> str:
    """The report as a text table."""
    rows: list[tuple[str, str]] = [("Duration (s)", _number(report["duration"]))]
    rows += [(f"Requests {name}", str(report[name])) for name in ("offered", *(each.value for each in Outcome))]
    if report["missing"]:
        rows.append(("Requests MISSING", str(report["missing"])))
    rows += [(f"  by {code}", str(count)) for code, count in report["errors"].items()]
    rows += [
        ("Input tokens", _number(report["total_input_tokens"])),
        ("Generated tokens", _number(report["total_output_tokens"])),
        ("Request throughput (req/s)", _number(report["request_throughput"])),
    ]
    if wanted.objectives:
        rows.append(("Request goodput (req/s)", _number(report["request_goodput"])))
    rows += [
        ("Output token throughput (tok/s)", _number(report["output_throughput"])),
        ("Total token throughput (tok/s)", _number(report["total_token_throughput"])),
        ("Most requests at once", str(report["max_concurrent_requests"])),
    ]
    for metric in wanted.metrics:
        rows.append((f"{_NAMES[metric]} (ms)", ""))
        for name in ("mean", "median", "std", *(f"p{each:g}" for each in wanted.percentiles)):
            rows.append((f"  {name}", _number(report[f"{name}_{metric}_ms"])))
    if "p99_lateness_ms" in report:
        rows.append(("Sent late (ms), p99", _number(report["p99_lateness_ms"])))
    for number, client in enumerate(report["client"]):
        shares = f"{client['cpu_share']:.2f} cores, {client['reader_share']:.2f} of them reading"
        rows.append((f"Client process {number}", shares))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value:>12}".rstrip() for name, value in rows]
    return "\n".join([*lines, *(f"warning: {each}" for each in report["warnings"])])


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"
