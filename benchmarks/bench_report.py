"""The benchmark's results as a table and a picture, beside what the machine could do at most. Measures nothing.

    python -m benchmarks.bench_report [build/bench/bench.json] [--out DIR]

Rooflines are upper bounds for models larger than the caches, whatever it costs to serve:

    decode    B / max(bytes / read bandwidth, operations / GEMM rate), with all weights read once a step and every
              sequence's keys and values at its mean length, as wide as the weights but a byte at least
    prefill   tokens / (operations / GEMM rate), logits at one position only

The GEMM rate is that of the precision, or the nearest faster one measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks.frame.pictures import drawing
from benchmarks.peers.onward import KV_BITS
from model.spec import cost
from model.spec.config import ModelConfig, Positions

RESULTS = "bench.json"
DOCUMENT = "bench.md"
PICTURE = "bench.svg"
NOISY = 0.05
"""Share of the machine that others took from which on a figure is marked."""

_WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 32}
_KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 1.0}
_RATES = {
    "fp32": ("fp32",),
    "bf16": ("bf16", "fp32"),
    "int8": ("int8", "bf16", "fp32"),
    "int4": ("int8", "bf16", "fp32"),
}
# Okabe and Ito's colours, one for each system; hatching tells precisions apart.
_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#F0E442", "#000000")
_HATCHES = {"fp32": "", "bf16": "//", "int8": "..", "int4": "xx", "int8-kv8": "oo", "int4-kv8": "++"}

Row = Mapping[str, Any]
Place = tuple[str, int, int]
"""Metric, batch, prompt tokens."""


def roofline(
    config: ModelConfig, limits: Mapping[str, Any] | None, precision: str, place: Place, new: int
) -> float | None:
    """Tokens a second at most; None where the machine's limits are not known.

    Args:
        config: the model.
        limits: as `benchmarks.bench_limits` prints them.
        precision: of the weights and products.
        place: what is measured.
        new: tokens that decoding generates.
    """
    # A system may keep keys and values in fewer bits than its weights' precision has them.
    precision, _, kv_bits = precision.partition(KV_BITS)
    if limits is None or precision not in _WEIGHT_BYTES:
        return None
    rates = [limits["gemm"][name] for name in _RATES[precision] if limits["gemm"].get(name)]
    if not rates:
        return None
    metric, batch, prompt = place
    rate = max(rates) * 1e9
    if metric == "prefill":
        # The causal half of the pairs is enough, and of one position what follows the last layer's attention.
        attention = cost.pair_flops(config) * cost.attended_pairs(config, prompt)
        return float(prompt * rate / (cost.prompt_linear_flops(config, prompt) + attention))
    length = prompt + new // 2
    parameters = cost.num_parameters(config)
    if config.positions is Positions.LEARNED:
        parameters -= config.d_model * config.context  # a step reads one position of the table
    per_token = cost.forward_flops(config, length)
    operations = batch * (per_token.linear / length + per_token.attention / length)
    num_bytes = parameters * _WEIGHT_BYTES[precision]
    kv_bytes = int(kv_bits) / 8 if kv_bits else _KV_BYTES[precision]
    num_bytes += batch * cost.kv_bytes(config, length) * kv_bytes / _KV_BYTES["fp32"]
    return float(batch / max(num_bytes / (limits["read_gb_per_second"] * 1e9), operations / rate))


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    rows: Sequence[Row] = results["rows"]
    lines = ["# Benchmark", "", *_facts(results), ""]
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += [f"## {model}", "", *_table([row for row in rows if row["model"] == model]), ""]
    lines += [f"![Tokens a second of every system, by metric]({PICTURE})", "", *_ratios(results["ratios"])]
    lines += _failures(rows)
    return "\n".join(lines).rstrip() + "\n"


def draw(rows: Sequence[Row]) -> str:
    """The picture, as SVG: a line of panels for each model and metric, a bar for each system and precision.

    Every panel has a scale of its own from zero; a grey line over a bar is its roofline, where that is in sight.
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
    colour = _COLOURS[systems.index(system) % len(_COLOURS)]
    return {"facecolor": colour, "edgecolor": "white", "linewidth": 0.0, "hatch": _HATCHES.get(precision, "")}


def write(results: Mapping[str, Any], folder: Path) -> None:
    """Writes the results, the document and the picture into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / DOCUMENT).write_text(render(results), encoding="utf-8")
    (folder / PICTURE).write_text(draw(results["rows"]), encoding="utf-8")


def _facts(results: Mapping[str, Any]) -> list[str]:
    settings, machine, limits = results["settings"], results["machine"], results["limits"]
    facts = [
        f"Tokens a second, medians of {settings['rounds']} rounds, {settings['threads']} threads, "
        f"on {machine['processor']} ({machine['cores']} processors).",
        "Each system ran alone in its round; in brackets the share of the machine's limit (roofline).",
        f"† marks figures during which other processes took more than {NOISY:.0%} of the machine.",
    ]
    if "command" in results:
        facts.append(f"Measured by `{results['command']}`.")
    if settings["is_quick"]:
        facts.append("**A quick run, to see that everything works: its figures say nothing.**")
    if limits is not None:
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in limits["gemm"].items())
        facts.append(f"Measured limits: {limits['read_gb_per_second']:.1f} GB/s read; GEMM {rates} GFLOP/s.")
    return facts


def _table(rows: Sequence[Row]) -> list[str]:
    """One model's figures: a line for each system and precision, a column for each metric and size."""
    places = sorted(
        {(row["metric"], row["batch"], row["prompt"]) for row in rows}, key=lambda place: (place[0], *place[1:])
    )
    heads = [f"{metric} {prompt if metric == 'prefill' else f'batch {batch}'}" for metric, batch, prompt in places]
    lines = [
        f"| system | version | precision | {' | '.join(heads)} | agreement with fp32 |",
        f"|---|---|---|{'---:|' * (len(heads) + 1)}",
    ]
    for system, precision in dict.fromkeys((row["system"], row["precision"]) for row in rows):
        own = {
            (row["metric"], row["batch"], row["prompt"]): row
            for row in rows
            if (row["system"], row["precision"]) == (system, precision)
        }
        some = next(iter(own.values()))
        agreement = "-" if some["agreement"] is None else f"{some['agreement']:.1%}"
        cells = " | ".join(_cell(own[place]) for place in places)
        lines.append(f"| {system} | {some['version'] or '-'} | {precision} | {cells} | {agreement} |")
    roofs = {(row["precision"], row["metric"], row["batch"], row["prompt"]): row["roofline"] for row in rows}
    for precision in dict.fromkeys(row["precision"] for row in rows):
        values = [roofs.get((precision, *place)) for place in places]
        if any(values):
            cells = " | ".join("-" if value is None else f"{value:.0f}" for value in values)
            lines.append(f"| *the machine's limit* | | {precision} | {cells} | |")
    return lines


def _cell(row: Row) -> str:
    if row["value"] is None:
        return "failed"
    share = f" ({row['value'] / row['roofline']:.0%})" if row["roofline"] else ""
    return f"{row['value']:.0f}{share}{'†' if max(row['noise'], default=0.0) > NOISY else ''}"


def _ratios(ratios: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not ratios:
        return []
    lines = [
        "## Ours over the best peer",
        "",
        "| model/precision/metric/batch/prompt | onward | onward-engine | best peer | its agreement |",
    ]
    lines.append("|---|---:|---:|---|---:|")
    for place, ratio in ratios.items():
        ours = (("-" if ratio[name] is None else f"{ratio[name]:.2f}") for name in ("onward", "onward-engine"))
        peer = f"{ratio['best_peer']} {ratio['best_peer_precision']}"
        agreed = ratio["best_peer_agreement"]
        lines.append(f"| {place} | {' | '.join(ours)} | {peer} | {'-' if agreed is None else f'{agreed:.1%}'} |")
    return [*lines, ""]


def _failures(rows: Sequence[Row]) -> list[str]:
    """Every error once for each system, model and precision, with what it befell."""
    failures: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        if "error" in row:
            key = row["system"], row["model"], row["precision"], row["error"]
            what = f"{row['metric']} {row['batch']} x {row['prompt']}"
            failures.setdefault(key, []).append(what if row["value"] is None else f"{what} (in some rounds)")
    if not failures:
        return []
    lines = ["## Failures", ""]
    for (system, model, precision, error), places in failures.items():
        lines.append(f"- **{system}**, {model}, {precision} ({', '.join(places)}): `{error.replace('`', chr(39))}`")
    return [*lines, ""]


def main() -> None:
    """Draws stored results again."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_report")
    parser.add_argument("results", type=Path, nargs="?", default=Path("build/bench") / RESULTS)
    parser.add_argument("--out", type=Path, default=None, help="default: the results' folder")
    options = parser.parse_args()
    write(json.loads(options.results.read_text(encoding="utf-8")), options.out or options.results.parent)


if __name__ == "__main__":
    main()
