"""The capacity curve for people: a table, and throughput and 99th percentiles against offered load as a picture.

Knows the report of `loadtest.capacity` as plain values, and nothing of how it came about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest import style
from loadtest.records import Outcome
from loadtest.style import BLUE, GREEN, GREY, ORANGE
from loadtest.tables import Table, to_markdown

_FIGURES: Mapping[str, str] = {
    "request_throughput": "finished, req/s",
    "output_throughput": "tokens/s",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "p99_tpot_ms": "TPOT p99, ms",
    "p99_e2el_ms": "E2E p99, ms",
    "p99_lateness_ms": "sent late p99, ms",
}


def render(report: Mapping[str, Any], picture: str) -> str:
    """The document; `picture` is where the drawing lies beside it."""
    doubts = "\n".join(f"- {doubt}" for doubt in doubts_of(report))
    blocks = ["# Capacity", describe(report), to_markdown(table(report)), *([doubts] if doubts else [])]
    blocks.append(f"![Throughput and 99th percentiles against offered load]({picture})")
    return "\n\n".join(blocks) + "\n"


def describe(report: Mapping[str, Any]) -> str:
    """What was measured, in words."""
    tokens, machine = _number(report["closed_loop"]["output_throughput"]), report.get("machine")
    client = "" if machine is None else f"; the client ran on {machine['processor']}, {machine['cores']} processors"
    return (
        f"`{report['model_id']}` over {report['backend']}: {report['capacity']:.2f} requests/s with {report['users']} "
        f"users who each wait for their answer ({tokens} tokens/s). Then, by a schedule ({report['pattern']}, "
        f"{report['seconds']:g} s each), shares of that, whatever became of the requests before. Every offered request "
        "finished, or was refused, failed or was cancelled; none is missing unless the table says so. Latencies count "
        "from when a request was due. Throughput is over the time until the last stream ended. Measured "
        f"by `python -m loadtest capacity`, {report['date'][:10]}{client}."
    )


def table(report: Mapping[str, Any]) -> Table:
    """A row for each load: the account of its requests, and the figures."""
    account = ("offered", *(outcome.value for outcome in Outcome), "missing")
    rows: list[tuple[str, ...]] = [("load", "offered, req/s", *account, *_FIGURES.values())]
    for each in report["loads"]:
        counts = (str(each[name]) for name in account)
        figures = (_number(each[name]) for name in _FIGURES)
        rows.append((f"{each['load']:g}", _number(each["offered_rate"]), *counts, *figures))
    return rows


def doubts_of(report: Mapping[str, Any]) -> list[str]:
    """What went wrong at each load, by code, and reasons to doubt its figures."""
    doubts = []
    for each in report["loads"]:
        for code, count in each["errors"].items():
            detail = each["error_details"].get(code)
            doubts.append(f"at {each['load']:g}: {count} of {code}" + (f" ({detail})" if detail else ""))
        doubts += [f"at {each['load']:g}: {warning}" for warning in each["warnings"]]
    return doubts


def draw_picture(report: Mapping[str, Any], file_format: str = "svg") -> bytes:
    """Two drawings over the offered load, as SVG or PNG: what came out, and how long it took."""

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

    return style.to_bytes(draw, "capacity", file_format)


def _throughput(axes: Axes, report: Mapping[str, Any]) -> None:
    offered = [each["offered_rate"] for each in report["loads"]]
    ends = [0.0, max(*offered, report["capacity"])]
    axes.plot(ends, ends, color=GREY, linewidth=0.8, label="all that is offered")
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
    for name, label, colour, mark in (
        ("p99_e2el_ms", "end to end", GREEN, "^"),
        ("p99_ttft_ms", "first token", BLUE, "o"),
        ("p99_tpot_ms", "per further token", ORANGE, "s"),
    ):
        points = [(each["offered_rate"], each[name]) for each in report["loads"] if each[name] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), f"{mark}-", color=colour, label=label)
    style.logarithmic_axis(axes, "99th percentile, ms")
    axes.legend(loc="upper left")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:,.0f}"
