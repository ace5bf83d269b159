"""The capacity curve for people: a table, and a picture of throughput and 99th percentiles against offered load.

Reads the JSON report of `loadtest.capacity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest import style
from loadtest.core.records import Outcome
from loadtest.document import Block, Drawing, Items, Table
from loadtest.style import BLUE, GREEN, GREY, ORANGE

_FIGURES: Mapping[str, str] = {
    "request_throughput": "finished, req/s",
    "output_throughput": "tokens/s",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "p99_tpot_ms": "TPOT p99, ms",
    "p99_e2el_ms": "E2E p99, ms",
    "p99_lateness_ms": "sent late p99, ms",
}


def blocks(report: Mapping[str, Any], name: str) -> list[Block]:
    """The curve, a table and everything doubtful; `name` is the stem of the drawing's file."""
    drawing = Drawing(name, "Throughput and 99th percentiles against offered load", describe(report), _draw(report))
    return [drawing, table(report), Items(doubts_of(report))]


def describe(report: Mapping[str, Any]) -> str:
    """One paragraph: what was measured, and what the table's columns mean."""
    tokens, machine = _number(report["closed_loop"]["output_throughput"]), report.get("machine")
    client = "" if machine is None else f"; the client ran on {machine['processor']}, {machine['cores']} processors"
    return (
        f"Closed loop: `{report['model_id']}` over {report['backend']} finishes {report['capacity']:.2f} requests/s "
        f"with {report['users']} users ({tokens} tokens/s). Open loop: a schedule offers shares of that "
        f"({report['pattern']}, {report['seconds']:g} s each). Every offered request finished or was refused, failed "
        "or cancelled; the table counts missing ones. Latencies count from when a request was due; throughput is over "
        "the time until the last stream ended. Measured by `python -m loadtest capacity`, "
        f"{report['date'][:10]}{client}."
    )


def table(report: Mapping[str, Any]) -> Table:
    """A row for each load: how its requests ended, and the figures."""
    account = ("offered", *(outcome.value for outcome in Outcome), "missing")
    rows: list[tuple[str, ...]] = [("load", "offered, req/s", *account, *_FIGURES.values())]
    for each in report["loads"]:
        counts = (str(each[name]) for name in account)
        figures = (_number(each[name]) for name in _FIGURES)
        rows.append((f"{each['load']:g}", _number(each["offered_rate"]), *counts, *figures))
    return Table(rows)


def doubts_of(report: Mapping[str, Any]) -> list[str]:
    """Errors at each load, by code, and warnings about its figures."""
    doubts = []
    for each in report["loads"]:
        for code, count in each["errors"].items():
            detail = each["error_details"].get(code)
            doubts.append(f"at {each['load']:g}: {count} of {code}" + (f" ({detail})" if detail else ""))
        doubts += [f"at {each['load']:g}: {warning}" for warning in each["warnings"]]
    return doubts


def _draw(report: Mapping[str, Any]) -> bytes:
    """Throughput and latency over the offered load, as SVG."""

    def draw() -> Figure:
        figure, (left, right) = style.new_figure(2)
        _throughput(left, report)
        _latency(right, report)
        for axes in (left, right):
            axes.axvline(report["capacity"], color=GREY, linewidth=0.8, linestyle=":")
            axes.set_xlabel("offered, requests/s")
            axes.set_xlim(left=0)
            axes.grid(visible=True, alpha=0.25)
        return figure

    return style.to_svg(draw, "capacity")


def _throughput(axes: Axes, report: Mapping[str, Any]) -> None:
    offered = [each["offered_rate"] for each in report["loads"]]
    ends = [0.0, max(*offered, report["capacity"])]
    axes.plot(ends, ends, color=GREY, linewidth=0.8, label="offered")
    axes.plot(offered, [each["request_throughput"] for each in report["loads"]], "o-", color=BLUE, label="finished")
    refused = [each["refused"] / each["duration"] for each in report["loads"]]
    if any(refused):
        axes.plot(offered, refused, "s--", color=ORANGE, label="refused")
    place = (report["capacity"], 0.0)
    axes.annotate(
        "capacity", place, xycoords=("data", "axes fraction"), xytext=(-3, 4), textcoords="offset points", ha="right",
        va="bottom", rotation=90, color=GREY,
    )  # fmt: skip
    axes.set_ylabel("requests/s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def _latency(axes: Axes, report: Mapping[str, Any]) -> None:
    for name, label, color, mark in (
        ("p99_e2el_ms", "end to end", GREEN, "^"),
        ("p99_ttft_ms", "first token", BLUE, "o"),
        ("p99_tpot_ms", "per further token", ORANGE, "s"),
    ):
        points = [(each["offered_rate"], each[name]) for each in report["loads"] if each[name] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), f"{mark}-", color=color, label=label)
    style.logarithmic_axis(axes, "99th percentile, ms")
    axes.legend(loc="upper left")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:,.0f}"
