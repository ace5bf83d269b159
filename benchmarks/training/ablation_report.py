"""The ablation's results as a table and as pictures. Measures nothing: everything shown is in `ablation.json`.

`write` puts all of it into one folder: the results themselves, two pictures, and the table between two markers of
`model.md`, whose other text stays as it is.

Colours are Okabe and Ito's, told apart by all common kinds of colour vision; line styles repeat the distinction.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.frame.pictures import drawing

RESULTS = "ablation.json"
DOCUMENT = "model.md"
BEGIN = "<!-- ablation: begin; written by python -m benchmarks.training.ablation, do not edit -->"
END = "<!-- ablation: end -->"

Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a panel's ways to do one thing: the row that was measured, and what to call it beside the others."""

    row: str
    label: str


@dataclass(frozen=True, slots=True)
class Panel:
    """What is compared in one block of the table and in one set of axes; the first choice is the base's."""

    title: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A table and its picture."""

    picture: str
    alternative_text: str
    caption: str
    panels: tuple[Panel, ...]
    is_logarithmic: bool


SECTIONS = (
    Section(
        "ablation.svg",
        "Training loss over steps: positions, scores, heads, a GRU, optimisers",
        "The base is the `dates` preset trained with AdamW: sinusoidal positions, dot-product scores, 4 heads, "
        "pre-norm, 2 + 2 layers. It stands at the top of every block, always the same runs; the others differ in that "
        "one thing. Losses below 0.001 leave the picture.",
        (
            Panel(
                "positions",
                (Choice("base", "sinusoidal"), Choice("learned", "learned"), Choice("rotary", "rotary")),
            ),
            Panel("score", (Choice("base", "dot product"), Choice("additive", "additive"))),
            Panel(
                "heads",
                (Choice("base", "4"), Choice("heads-1", "1"), Choice("heads-2", "2"), Choice("heads-8", "8")),
            ),
            Panel("network", (Choice("base", "transformer"), Choice("gru", "GRU, additive attention"))),
            Panel("optimiser", (Choice("base", "AdamW"), Choice("muon", "Muon, as in the preset"))),
        ),
        is_logarithmic=True,
    ),
    Section(
        "ablation-postln.svg",
        "Training loss over steps, 6 + 6 layers: post- and pre-norm, with and without warm-up",
        "Norm placement and warm-up in 6 + 6 layers with LayerNorm and a high rate. The loss is what to look at: so "
        "few steps are to show whether learning begins at all.",
        (
            Panel(
                "LayerNorm",
                (
                    Choice("post", "post, no warm-up"),
                    Choice("post-warmup", "post, 40 % warm-up"),
                    Choice("pre", "pre, no warm-up"),
                    Choice("pre-warmup", "pre, 40 % warm-up"),
                ),
            ),
        ),
        is_logarithmic=False,
    ),
)

_HEADINGS = ("", "", "exact match, %", "final loss, nats", "ms a step", "parameters", "n")
_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73")
_STYLES = ("-", "--", "-.", ":")
# A model that knows the answers has a loss of nearly nothing, and a logarithm without end.
_LEAST_LOSS_SHOWN = 1e-3


def load(folder: Path) -> Results:
    """The results that `write` left in a folder."""
    results: Results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    return results


def write(results: Results, folder: Path) -> None:
    """Writes results, pictures and table.

    Raises:
        ValueError: when the folder's document has lost its markers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = folder / DOCUMENT
    text = document.read_text(encoding="utf-8") if document.exists() else f"{BEGIN}\n{END}\n"
    # First what can fail, so that nothing is half replaced.
    text = insert(text, markdown(results))
    (folder / RESULTS).write_text(dump(results), encoding="utf-8")
    for section in _measured_sections(results):
        (folder / section.picture).write_bytes(draw(results, section))
    document.write_text(text, encoding="utf-8")


def dump(results: Results) -> str:
    """JSON with a line for each row and each run, so that a difference between two files can be read."""
    parts = []
    for key, value in results.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inner = "[\n" + ",\n".join("  " + json.dumps(item) for item in value) + "\n ]"
        elif isinstance(value, dict) and all(isinstance(item, dict) for item in value.values()):
            inner = (
                "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items()) + "\n }"
            )
        else:
            inner = json.dumps(value)
        parts.append(f" {json.dumps(key)}: {inner}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def insert(document: str, generated: str) -> str:
    """The document with what stands between its markers replaced.

    Raises:
        ValueError: when there are no two markers in this order.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT} has not both markers, {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{generated}{END}{after}"


def extract(document: str) -> str:
    """What `insert` put between the markers."""
    _, _, rest = document.partition(BEGIN + "\n")
    generated, _, _ = rest.partition(END)
    return generated


def markdown(results: Results) -> str:
    """Tables, pictures and under what conditions they were measured."""
    blocks = []
    for section in _measured_sections(results):
        lines = [
            f"![{section.alternative_text}]({section.picture})",
            "",
            section.caption + " " + _steps(results, section),
        ]
        lines += ["", _row(_HEADINGS), _row(("---", "---", "---:", "---:", "---:", "---:", "---:"))]
        for panel in _measured_panels(results, section):
            choices = [choice for choice in panel.choices if _runs(results, choice.row)]
            lines += [
                _row((panel.title if choice is choices[0] else "", choice.label, *_cells(_runs(results, choice.row))))
                for choice in choices
            ]
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, _conditions(results)]) + "\n"


def draw(results: Results, section: Section) -> bytes:
    """An SVG with a set of axes for each panel: mean loss over the seeds, and a band from the least to the greatest."""
    panels = _measured_panels(results, section)
    columns = min(3, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    with drawing("ablation", 3.6 * columns if columns > 1 else 6.4, 3.2 * rows + 0.2, font_size=10.0) as (figure, svg):
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for number, axes in enumerate(grid.flat):
            if number >= len(panels):
                axes.set_visible(False)
                continue
            _draw_panel(axes, results, panels[number])
            if section.is_logarithmic:
                axes.set_yscale("log")
                axes.set_ylim(bottom=_LEAST_LOSS_SHOWN)
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            else:
                axes.set_ylim(bottom=0.0)
            if number % columns == 0:
                axes.set_ylabel("training loss, nats per token")
            if number + columns >= len(panels):
                axes.set_xlabel("step")
                axes.tick_params(labelbottom=True)
    return svg.getvalue().encode()


def _draw_panel(axes: Axes, results: Results, panel: Panel) -> None:
    for choice, colour, style in zip(panel.choices, _COLOURS, _STYLES, strict=False):
        curves = [dict(run["curve"]) for run in _runs(results, choice.row)]
        if not curves:
            continue
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        losses = [[curve[step] for curve in curves] for step in steps]
        axes.fill_between(
            steps, [min(at) for at in losses], [max(at) for at in losses], color=colour, alpha=0.2, linewidth=0.0
        )
        axes.plot(steps, [statistics.fmean(at) for at in losses], color=colour, linestyle=style, label=choice.label)
    axes.set_title(panel.title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)


def _measured_sections(results: Results) -> list[Section]:
    return [section for section in SECTIONS if _measured_panels(results, section)]


def _measured_panels(results: Results, section: Section) -> list[Panel]:
    """Panels with something to compare; where only part of the rows was measured, at least one with what there is."""
    counts = [sum(bool(_runs(results, choice.row)) for choice in panel.choices) for panel in section.panels]
    found = [panel for panel, count in zip(section.panels, counts, strict=True) if count > 1]
    return found or [panel for panel, count in zip(section.panels, counts, strict=True) if count][:1]


def _runs(results: Results, row: str) -> list[Mapping[str, Any]]:
    return [run for run in results["runs"] if run["row"] == row]


def _cells(runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return (
        _spread([run["exact_match"] * 100.0 for run in runs], lambda value: f"{value:.1f}"),
        _spread([run["loss"] for run in runs], lambda value: f"{value:.3g}"),
        _spread([run["seconds_per_step"] * 1e3 for run in runs], lambda value: f"{value:.0f}"),
        " / ".join(f"{number:,}" for number in sorted({run["num_parameters"] for run in runs})),
        str(len(runs)),
    )


def _spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Median, and from least to greatest."""
    return f"{form(statistics.median(values))} ({form(min(values))}…{form(max(values))})"


def _steps(results: Results, section: Section) -> str:
    """Updates and rates of a section's rows; those that all rows share are named once."""
    names = {choice.row for panel in section.panels for choice in panel.choices}
    settings = [row["train"] for name, row in results["rows"].items() if name in names]
    steps = sorted({setting["steps"] for setting in settings})
    rates = sorted({setting["learning_rate"] for setting in settings if setting["optimizer"] == "adamw"})
    text = f"{' or '.join(map(str, steps))} steps"
    if rates:
        text += f", AdamW's peak rate {' or '.join(f'{rate:g}' for rate in rates)}"
    return text + "."


def _conditions(results: Results) -> str:
    machine, versions = results["machine"], results["versions"]
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"Median (least…greatest) over n seeds; exact match is of {results['num_test_dates']} held-out days, final "
        "loss the mean of the last twentieth of the steps, a step's time the median, on one thread, "
        f"{machine['num_jobs']} run(s) at a time. Measured {results['date']} on {machine['num_cores']} cores "
        f"({machine['processor']}), fp32; {packages}. Every run with its curve and settings is in "
        f"[{RESULTS}]({RESULTS})."
    )


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
