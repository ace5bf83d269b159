"""The benchmark's results as tables and a picture, beside the machine's limits. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks.frame.pictures import drawing
from benchmarks.frame.tables import conditions, table, times
from benchmarks.peers.systems import OURS

NOISY = 0.05
"""Share of the machine taken by others from which a figure is marked."""

# Okabe and Ito's colors, one for each system; hatching for precisions.
_COLORS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#F0E442", "#000000")
_HATCHES = {"fp32": "", "bf16": "//", "int8": "..", "int4": "xx", "int8-kv8": "oo", "int4-kv8": "++"}

Row = Mapping[str, Any]


def render(results: Mapping[str, Any]) -> str:
    """The document."""
    rows: Sequence[Row] = results["rows"]
    lines = ["# Benchmark", "", *_facts(results), ""]
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += [f"## {model}", "", *_model_table([row for row in rows if row["model"] == model]), ""]
    return "\n".join([*lines, *_ratios(results["ratios"]), *_failures(rows)])


def draw(rows: Sequence[Row]) -> str:
    """The picture, as SVG: a line of panels for each model and metric, a bar for each system and precision.

    Every panel has a scale of its own from zero; a gray line over a bar is its roofline, if it is in sight.
    """
    lines = list(dict.fromkeys(_line(row) for row in rows))
    bars = list(dict.fromkeys((row["system"], row["precision"]) for row in rows if row["value"]))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    with drawing("bench", 9.0, 2.4 * max(1, len(lines)) + 0.6) as (figure, svg):
        sizes = [sorted({(row["batch"], row["prompt"]) for row in rows if _line(row) == line}) for line in lines]
        grid = figure.subplots(max(1, len(lines)), max(map(len, sizes), default=1), squeeze=False)
        for axes in grid.flat:
            axes.set_visible(False)
        for number, ((model, metric), places) in enumerate(zip(lines, sizes, strict=True)):
            for axes, (batch, prompt) in zip(grid[number], places, strict=False):
                here = [
                    row for row in rows if (*_line(row), row["batch"], row["prompt"]) == (model, metric, batch, prompt)
                ]
                axes.set_visible(True)
                axes.set_title(f"{model}: {metric} {prompt if metric == 'prefill' else f'batch {batch}'}")
                _draw_panel(axes, here, bars, systems)
            grid[number][0].set_ylabel("tokens/s")
        handles = [
            Patch(label=f"{system} {precision}", **_style(system, precision, systems)) for system, precision in bars
        ]
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return svg.getvalue()


def _line(row: Row) -> tuple[str, str]:
    """Which line of panels a row belongs to."""
    return row["model"], row["metric"]


def _draw_panel(axes: Axes, rows: Sequence[Row], bars: Sequence[tuple[str, str]], systems: Sequence[str]) -> None:
    for row in rows:
        if row["value"]:
            system, precision = row["system"], row["precision"]
            x = bars.index((system, precision))
            axes.bar(x, row["value"], 0.9, **_style(system, precision, systems))
            if row["roofline"]:
                axes.hlines(row["roofline"], x - 0.45, x + 0.45, colors="#555555", linewidth=1.0)
    axes.set_xticks([])
    axes.set_xlim(-0.6, max(1, len(bars)) - 0.4)
    axes.set_ylim(0, 1.1 * max((row["value"] or 0.0 for row in rows), default=0.0) or 1.0)


def _style(system: str, precision: str, systems: Sequence[str]) -> dict[str, Any]:
    color = _COLORS[systems.index(system) % len(_COLORS)]
    return {"facecolor": color, "edgecolor": "white", "linewidth": 0.0, "hatch": _HATCHES.get(precision, "")}


def _facts(results: Mapping[str, Any]) -> list[str]:
    settings, limits = results["settings"], results["limits"]
    facts = [
        f"Tokens a second, medians of {settings['rounds']} rounds, {conditions(results)} "
        f"({results['machine']['cores']} processors).",
        "Each system ran alone in its round; in brackets the share of the roofline.",
        f"† marks figures during which other processes took more than {NOISY:.0%} of the machine.",
    ]
    if limits is not None:
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in limits["gemm"].items())
        reads = ", ".join(f"{size >> 20} MiB {rate:.0f}" for size, rate in limits["read_gb_per_second"])
        facts.append(f"Measured limits: reads of {reads} GB/s; GEMM {rates} GFLOP/s.")
    return facts


def _model_table(rows: Sequence[Row]) -> list[str]:
    """A line for each system and precision, a column for each metric and size."""
    places = sorted({_place(row) for row in rows})
    heads = [f"{metric} {prompt if metric == 'prefill' else f'batch {batch}'}" for metric, batch, prompt in places]
    lines = []
    for system, precision in dict.fromkeys((row["system"], row["precision"]) for row in rows):
        own = {_place(row): row for row in rows if (row["system"], row["precision"]) == (system, precision)}
        some = next(iter(own.values()))
        cells = [_cell(own[place]) for place in places]
        lines.append([system, some["version"] or "-", precision, *cells, _share(some["agreement"])])
    roofs = {(row["precision"], *_place(row)): row["roofline"] for row in rows}
    for precision in dict.fromkeys(row["precision"] for row in rows):
        values = [roofs.get((precision, *place)) for place in places]
        if any(values):
            cells = ["-" if value is None else f"{value:.0f}" for value in values]
            lines.append(["*the machine's limit*", "", precision, *cells, ""])
    return table("|".join(["system", "version", "precision", *heads, "agreement with fp32"]), lines, text_columns=3)


def _place(row: Row) -> tuple[str, int, int]:
    return row["metric"], row["batch"], row["prompt"]


def _cell(row: Row) -> str:
    if row["value"] is None:
        return "failed"
    share = f" ({row['value'] / row['roofline']:.0%})" if row["roofline"] else ""
    return f"{row['value']:.0f}{share}{'†' if max(row['noise'], default=0.0) > NOISY else ''}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ratios(ratios: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [
        [
            place,
            *(times(ratio[name], ratio["interval"] if name == judged else None) for name in OURS),
            ratio["precision"] or "-",
            f"{ratio['best_peer']} {ratio['best_peer_precision']}",
            _share(ratio["best_peer_agreement"]),
        ]
        for place, ratio in ratios.items()
        for judged in [next((name for name in OURS if ratio[name] is not None), None)]
    ]
    headings = f"model/precision/metric/batch/prompt|{'|'.join(OURS)}|in|best peer|its agreement"
    return ["## Ours over the best peer", "", *table(headings, lines), ""] if lines else []


def _failures(rows: Sequence[Row]) -> list[str]:
    """Every error once for each system, model and precision."""
    failures: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        if "error" in row:
            key = row["system"], row["model"], row["precision"], row["error"]
            what = f"{row['metric']} {row['batch']} x {row['prompt']}"
            failures.setdefault(key, []).append(what if row["value"] is None else f"{what} (in some rounds)")
    lines = [
        f"- **{system}**, {model}, {precision} ({', '.join(places)}): `{error.replace('`', chr(39))}`"
        for (system, model, precision, error), places in failures.items()
    ]
    return ["## Failures", "", *lines, ""] if lines else []
