"""The capacity curve for people: a table in Markdown, and throughput and 99th percentiles against offered load as SVG.

Knows the report of `loadtest.capacity` as plain values, and nothing of how it came about.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.records import Outcome

_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#E69F00", "#009E73", "#555555"


def render(report: Mapping[str, Any], picture: str) -> str:
    """The document; `picture` is where the drawing lies beside it."""
    closed = report["closed_loop"]
    lines = [
        "# Capacity",
        "",
        f"`{report['model_id']}` over {report['backend']}: {report['capacity']:.2f} requests/s with {report['users']} "
        f"users who each wait for their answer ({_number(closed['output_throughput'])} tokens/s). Then, by a schedule "
        f"({report['pattern']}, {report['seconds']:g} s each):",
        "",
        "| load | offered, req/s | offered | " + " | ".join(outcome.value for outcome in Outcome) + " | missing "
        "| finished, req/s | tokens/s | TTFT p50, ms | p99 | TPOT p99, ms | E2E p99, ms | sent late p99, ms |",
        "|---" + "|---:" * (11 + len(Outcome)) + "|",
    ]
    for each in report["loads"]:
        cells = [
            f"{each['load']:g}",
            _number(each["offered_rate"]),
            str(each["offered"]),
            *(str(each[outcome.value]) for outcome in Outcome),
            str(each["missing"]),
            *(
                _number(each[name])
                for name in (
                    "request_throughput",
                    "output_throughput",
                    "median_ttft_ms",
                    "p99_ttft_ms",
                    "p99_tpot_ms",
                    "p99_e2el_ms",
                    "p99_lateness_ms",
                )
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    told = [f"- at {each['load']:g}: {warning}" for each in report["loads"] for warning in each["warnings"]]
    errors = [
        f"- at {each['load']:g}: {count} of {code}"
        + (f" ({detail})" if (detail := each["error_details"].get(code)) else "")
        for each in report["loads"]
        for code, count in each["errors"].items()
    ]
    lines += ["", *errors, *told] if errors or told else []
    lines += [
        "",
        "Latencies count from when a request was due. Throughput is over the time until the last stream ended.",
        "",
        f"![Throughput and 99th percentiles against offered load]({picture})",
        "",
    ]
    return "\n".join(lines)


def draw_picture(report: Mapping[str, Any]) -> str:
    """Two drawings over the offered load, as SVG: what came out, and how long it took."""
    stream = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "capacity", "font.size": 8}):
        figure = Figure(figsize=(7.0, 2.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        _throughput(left, report)
        _latency(right, report)
        for axes in (left, right):
            axes.axvline(report["capacity"], color=_GREY, linewidth=0.8, linestyle=":")
            axes.set_xlabel("offered, requests/s")
            axes.set_xlim(left=0)
        figure.savefig(stream, format="svg", facecolor="white", metadata={"Date": None})
    return stream.getvalue()


def _throughput(axes: Axes, report: Mapping[str, Any]) -> None:
    offered = [each["offered_rate"] for each in report["loads"]]
    ends = [0.0, max(*offered, report["capacity"])]
    axes.plot(ends, ends, color=_GREY, linewidth=0.8)
    axes.annotate("all that is offered", (ends[1] / 2, ends[1] / 2), rotation=0, ha="right", va="bottom", color=_GREY)
    axes.plot(offered, [each["request_throughput"] for each in report["loads"]], "o-", color=_BLUE, label="finished")
    refused = [each["refused"] / each["duration"] for each in report["loads"]]
    if any(refused):
        axes.plot(offered, refused, "s--", color=_ORANGE, label="refused")
    place = (report["capacity"], 1.0)
    axes.annotate(
        "capacity ", place, xycoords=("data", "axes fraction"), ha="right", va="top", rotation=90, color=_GREY
    )
    axes.set_ylabel("requests/s")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")


def _latency(axes: Axes, report: Mapping[str, Any]) -> None:
    for name, label, colour, mark in (
        ("p99_e2el_ms", "end to end", _GREEN, "^"),
        ("p99_ttft_ms", "first token", _BLUE, "o"),
        ("p99_tpot_ms", "per further token", _ORANGE, "s"),
    ):
        points = [(each["offered_rate"], each[name]) for each in report["loads"] if each[name] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), f"{mark}-", color=colour, label=label)
    axes.set_yscale("log")
    axes.set_ylabel("99th percentile, ms")
    axes.legend(frameon=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"
