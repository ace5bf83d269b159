"""What each part of the transformer is worth: trained with it, without it, and beside a recurrent network.

Every row of `benchmarks.training.ablation` is trained with every seed on one thread each, several side by side, seed
after seed over all rows, so that a machine that slows down slows all rows alike. Each run is a line of the journal as
it ends: `--resume` continues, unless the code has changed.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from matplotlib.axes import Axes

from benchmarks.frame.errors import ArgumentError
from benchmarks.frame.pictures import drawing
from benchmarks.frame.rounds import say
from benchmarks.frame.scenario import Results, Run, Scenario, cores, option
from benchmarks.frame.tables import table
from benchmarks.training import ablation
from benchmarks.training.ablation import NUM_TEST_DATES, ROWS, AblationError, code_hash, plan, versions
from model.training.presets import RecipeError

_NAMES = tuple(row.name for row in ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationSettings:
    """Which runs. Figures of other runs than the default are for `build`, not for the documents."""

    rows: tuple[str, ...] = option(_NAMES, "of the table", choices=_NAMES, quick=("base", "gru"), spaced=True)
    seeds: int = option(3, "runs of each row", least=1, quick=1)
    steps: int = option(0, "updates of each run; 0: what each experiment has", least=0, quick=4)
    jobs: int = option(cores(), "runs side by side", least=1)
    overrides: tuple[str, ...] = option((), "KEY=VALUE in every run", flag="overrides set")


def measure(settings: AblationSettings, run: Run) -> dict[str, Any]:
    """All runs that the journal does not have."""
    try:
        rows = [row for row in ROWS if row.name in settings.rows]
        runs = plan(rows, settings.seeds, steps=settings.steps or None, overrides=settings.overrides)
    except (RecipeError, AblationError) as error:
        raise ArgumentError(str(error)) from error
    facts = {"versions": versions(), "code": code_hash(), "steps": settings.steps, "overrides": settings.overrides}
    journal = run.journal("ablation", facts)
    records = {(entry["row"], entry["seed"]): entry for entry in journal.entries}
    pending = [each for each in runs if (each.row.name, each.seed) not in records]
    # A fresh interpreter for each worker, independent of this one's state.
    pool = ProcessPoolExecutor(min(settings.jobs, max(1, len(pending))), get_context("spawn"), _use_one_thread)
    with pool:
        futures = {pool.submit(ablation.measure, each): each for each in pending}
        for future in as_completed(futures):
            each = futures[future]
            try:
                record = future.result()
            except Exception as error:
                pool.shutdown(wait=False, cancel_futures=True)
                raise AblationError(f"{each.row.name}, seed {each.seed}: {error}") from error
            journal.record(record)
            records[each.row.name, each.seed] = record
            say(
                f"[{len(records)}/{len(runs)}] {each.row.name}, seed {each.seed}: exact match "
                f"{record['exact_match']:.1%}, loss {record['loss']:.3g}"
            )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "num_test_dates": NUM_TEST_DATES,
        # The seed is the run's own; all else is the same for all runs of a row.
        "rows": {each.row.name: {"experiment": each.row.experiment, **each.settings} for each in runs if not each.seed},
        "runs": [records[each.row.name, each.seed] for each in runs],
    }


def _use_one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Choice:
    """A measured row, and its label beside the panel's others."""

    row: str
    label: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A block of the table and a set of axes; the first choice is the base's."""

    title: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A table."""

    caption: str
    panels: tuple[Panel, ...]
    is_logarithmic: bool


SECTIONS = (
    Section(
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
            Panel("optimizer", (Choice("base", "AdamW"), Choice("muon", "Muon, as in the preset"))),
        ),
        is_logarithmic=True,
    ),
    Section(
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

_HEADINGS = "||exact match, %|final loss, nats|ms a step|parameters|n"
_COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73")
_STYLES = ("-", "--", "-.", ":")
# The logarithm of a loss near 0 has no end.
_LEAST_LOSS_SHOWN = 1e-3


def render(results: Results) -> str:
    """The document."""
    lines = ["# What each part is worth", ""]
    for section in _measured_sections(results):
        rows = []
        for panel in _measured_panels(results, section):
            choices = [choice for choice in panel.choices if _runs(results, choice.row)]
            for choice in choices:
                title = panel.title if choice is choices[0] else ""
                rows.append([title, choice.label, *_cells(_runs(results, choice.row))])
        lines += [f"{section.caption} {_steps(results, section)}", "", *table(_HEADINGS, rows, text_columns=2), ""]
    packages = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    machine = results["machine"]
    lines.append(
        f"Median (least…greatest) over n seeds; exact match is of {results['num_test_dates']} held-out days, final "
        "loss the mean of the last twentieth of the steps, a step's time the median, on one thread, "
        f"{results['settings']['jobs']} run(s) at a time. Measured {results['date']} on {machine['cores']} cores "
        f"({machine['processor']}), fp32; {packages}."
    )
    return "\n".join(lines)


def draw(results: Results) -> str:
    """A set of axes for each panel: mean loss over the seeds, and a band from the least to the greatest."""
    panels = [
        (section, panel) for section in _measured_sections(results) for panel in _measured_panels(results, section)
    ]
    columns = min(3, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    with drawing("ablation", 3.6 * columns, 3.2 * rows + 0.2, font_size=10.0) as (figure, svg):
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (section, panel) in zip(grid.flat, panels, strict=False):
            _draw_panel(axes, results, panel)
            if section.is_logarithmic:
                axes.set_yscale("log")
                axes.set_ylim(bottom=_LEAST_LOSS_SHOWN)
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            else:
                axes.set_ylim(bottom=0.0)
            axes.set_xlabel("step")
        grid[0][0].set_ylabel("training loss, nats per token")
    return svg.getvalue()


def _draw_panel(axes: Axes, results: Results, panel: Panel) -> None:
    for choice, color, style in zip(panel.choices, _COLORS, _STYLES, strict=False):
        curves = [dict(run["curve"]) for run in _runs(results, choice.row)]
        if not curves:
            continue
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        losses = [[curve[step] for curve in curves] for step in steps]
        axes.fill_between(
            steps, [min(at) for at in losses], [max(at) for at in losses], color=color, alpha=0.2, linewidth=0.0
        )
        axes.plot(steps, [statistics.fmean(at) for at in losses], color=color, linestyle=style, label=choice.label)
    axes.set_title(panel.title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)


def _measured_sections(results: Results) -> list[Section]:
    return [section for section in SECTIONS if _measured_panels(results, section)]


def _measured_panels(results: Results, section: Section) -> list[Panel]:
    """Panels with two measured rows or more; at least one panel if any row was measured."""
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
    """Median, least and greatest."""
    return f"{form(statistics.median(values))} ({form(min(values))}…{form(max(values))})"


def _steps(results: Results, section: Section) -> str:
    """Updates and rates of a section's rows."""
    names = {choice.row for panel in section.panels for choice in panel.choices}
    settings = [row["train"] for name, row in results["rows"].items() if name in names]
    steps = sorted({setting["steps"] for setting in settings})
    rates = sorted({setting["learning_rate"] for setting in settings if setting["optimizer"] == "adamw"})
    text = f"{' or '.join(map(str, steps))} steps"
    if rates:
        text += f", AdamW's peak rate {' or '.join(f'{rate:g}' for rate in rates)}"
    return text + "."


SCENARIO = Scenario(
    __name__,
    AblationSettings,
    measure,
    render,
    draw,
    caption="Training loss over steps, by part",
    printed=("scenario", "date", "seconds", "settings"),
    is_resumable=True,
)
