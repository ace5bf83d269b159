"""What attention replaced: recurrent networks beside a transformer as sources grow, in accuracy, gradient and time.

Four networks of about equal size (one fixed context vector, additive attention, a transformer with sinusoidal and one
with rotary positions) learn three jobs (`benchmarks.training.lengths`), each with every seed on one thread, several
side by side. Each network's rate is the best of four in brief trainings of another seed. Then fresh cells' gradients
through time, and, with no training beside it, the time of an update and of one more token. Every figure is a line of
the journal as it is measured: `--resume` continues.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes

from benchmarks.frame.journal import Journal
from benchmarks.frame.pictures import drawing
from benchmarks.frame.rounds import say
from benchmarks.frame.scenario import Results, Run, Scenario, cores, option
from benchmarks.frame.statistics import mean_interval
from benchmarks.frame.tables import table
from benchmarks.training import lengths
from benchmarks.training.ablation import code_hash, versions
from benchmarks.training.lengths import NUM_TESTS, TIMED, Job, Network, Training
from model.spec.recurrent import Cell

_NAMES = {
    Network.FIXED: "one fixed vector",
    Network.ATTENTION: "additive attention",
    Network.TRANSFORMER: "transformer",
    Network.ROTARY: "transformer, rotary",
}
_COLORS = {
    Network.FIXED: "#D55E00",
    Network.ATTENTION: "#0072B2",
    Network.TRANSFORMER: "#000000",
    Network.ROTARY: "#CC79A7",
}
_RATES = (1e-2, 2e-2, 4e-2, 8e-2)
_TRIAL_SEED = 1 << 20
_CELL_COLORS = ("#D55E00", "#009E73", "#0072B2")
_LEAST_GRADIENT = 1e-12
_FIRST_TIMED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceSettings:
    """How much is learned, and up to which length."""

    seeds: int = option(3, "trainings of each network and job", least=1, quick=1)
    steps: int = option(1200, "updates of each training", least=1, quick=40)
    longest: int = option(512, "longest source, a power of two", least=64, quick=64)
    batch_tokens: int = option(1024, "of sources and targets in an update", least=64, quick=512)
    cell: str = option("gru", "of the recurrent networks", choices=tuple(Cell))
    jobs: int = option(cores(), "trainings side by side", least=1)


def measure(settings: RecurrenceSettings, run: Run) -> dict[str, Any]:
    """All figures that the journal does not have."""
    facts = {"code": code_hash(Path(lengths.__file__)), "versions": versions(), "is_quick": run.is_quick}
    given = {name: getattr(settings, name) for name in ("steps", "longest", "batch_tokens", "cell")}
    journal = run.journal("recurrence", facts | given)
    _train(settings, journal)
    for seed in range(settings.seeds):
        for name in _GRADIENT_NAMES:
            if not _has(journal, kind="gradient", of=name, seed=seed):
                distances = lengths.gradients(name, settings.longest, seed)
                shown = {str(k): distances[k] for k in _octaves(1, settings.longest - 1)}
                journal.record({"kind": "gradient", "of": name, "seed": seed, "gradients": shown})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for length in _octaves(_FIRST_TIMED, settings.longest):
        for network in TIMED:
            if not _has(journal, kind="time", network=network, length=length):
                seconds = lengths.update_seconds(network, length, settings.batch_tokens)
                entry = {"kind": "time", "network": network, "length": length, "update_seconds": seconds}
                journal.record(entry | {"token_seconds": lengths.token_seconds(network, length)})
    torch.set_num_threads(threads)
    of_kind = {kind: [_plain(each) for each in journal.entries if each["kind"] == kind] for kind in _KINDS}
    of_kind["training"] = [each for each in of_kind["training"] if each["seed"] < settings.seeds]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "num_tests": NUM_TESTS,
        "rates": of_kind["rate"],
        "trainings": of_kind["training"],
        "gradients": of_kind["gradient"],
        "times": of_kind["time"],
    }


_KINDS = ("rate", "training", "gradient", "time")


def _train(settings: RecurrenceSettings, journal: Journal) -> None:
    """Trials of rates, and then seed after seed over all networks and jobs: a slower machine slows all alike."""
    limits = settings.batch_tokens, Cell(settings.cell)
    trials = [
        Training(
            Job.REVERSE, network, _TRIAL_SEED, settings.steps // 2 + 1, max(settings.longest // 4, 16), *limits, rate
        )
        for rate in _RATES
        for network in Network
        if not _has(journal, kind="rate", network=network, rate=rate)
    ]
    _train_all(settings, journal, "rate", trials)
    rates = {network: _best_rate(journal.entries, network) for network in Network}
    trainings = [
        Training(job, network, seed, settings.steps, settings.longest, *limits, rates[network])
        for seed in range(settings.seeds)
        for job in Job
        for network in Network
        if not _has(journal, kind="training", job=job, network=network, seed=seed)
    ]
    _train_all(settings, journal, "training", trainings)


def _best_rate(entries: Iterable[Mapping[str, Any]], network: Network) -> float:
    trials = [each for each in entries if each["kind"] == "rate" and each["network"] == network]
    return float(min(trials, key=lambda each: each["loss"])["rate"])


def _train_all(settings: RecurrenceSettings, journal: Journal, kind: str, pending: Sequence[Training]) -> None:
    if not pending:
        return
    with ProcessPoolExecutor(min(settings.jobs, len(pending)), get_context("spawn"), _use_one_thread) as pool:
        futures = [pool.submit(lengths.train, each) for each in pending]
        for count, future in enumerate(as_completed(futures), start=1):
            try:
                found = future.result()
            except Exception as error:
                pool.shutdown(wait=False, cancel_futures=True)
                raise RuntimeError(f"a training failed: {error}") from error
            journal.record({"kind": kind, **found})
            at = ", ".join(f"{length} {share:.0%}" for length, share in found["accuracy"].items())
            about = f"seed {found['seed']}" if kind == "training" else f"rate {found['rate']}"
            say(f"{kind} [{count}/{len(pending)}] {found['job']}, {found['network']}, {about}: {at}")


def _use_one_thread() -> None:
    torch.set_num_threads(1)


def _has(journal: Journal, **values: object) -> bool:
    return any(all(entry.get(name) == value for name, value in values.items()) for entry in journal.entries)


def _plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "kind"}


def _octaves(first: int, longest: int) -> list[int]:
    return [first << step for step in range(longest.bit_length()) if first << step <= longest]


def render(results: Results) -> str:
    """The document."""
    settings, trainings = results["settings"], results["trainings"]
    sizes = sorted(each["num_parameters"] for each in trainings)
    lines = [
        "# What attention replaced",
        "",
        f"Encoder-decoders of {settings['cell'].upper()} cells, with one fixed context vector or additive attention, "
        f"and transformers with sinusoidal or rotary positions; {sizes[0]:,} to {sizes[-1]:,} parameters, "
        f"{settings['steps']} updates of {settings['batch_tokens']} tokens each, sources of up to "
        f"{settings['longest']} tokens, short and long ones alike. All are trained by Muon, which takes the matrices "
        "of linear layers, and by AdamW at a tenth of its rate, which takes the rest: cells and embeddings. The rate "
        f"is the best of {_listed(results['rates'])} on shorter reversals of another seed: "
        f"{_chosen(results['rates'])}. More updates would move the curves. Accuracy is of target tokens after the "
        "true ones before, whole is of targets without an error, in percent of "
        f"{results['num_tests']} unseen sources, the same for all; mean (95 % interval over seeds, by Student's t).",
        "",
    ]
    for job in Job:
        of_job = [each for each in trainings if each["job"] == job]
        lines += [f"## {job.capitalize()}", "", _JOBS[job], ""]
        names = list(of_job[0]["accuracy"])
        rows = [
            (_NAMES[network], what, *(_percent(_values(of_job, network, part, length)) for length in names))
            for network in Network
            for what, part in (("accuracy", "accuracy"), ("whole", "exact"))
        ]
        lines += [*table("|".join(["network", "%", *names]), rows, text_columns=2), ""]
    lines += ["## Gradient through time", "", _GRADIENTS, ""]
    names = list(results["gradients"][0]["gradients"])
    lines += table(
        "|".join(["last output of", *names]),
        [(_GRADIENT_NAMES[of], *(f"{value:.1e}" for _, value in _decay(results, of))) for of in _GRADIENT_NAMES],
    )
    lines += ["", "## Time", "", _TIMES.format(tokens=settings["batch_tokens"]), ""]
    timed = sorted({each["length"] for each in results["times"]})
    for part, unit, scale in (("update_seconds", "update, ms", 1e3), ("token_seconds", "one more token, µs", 1e6)):
        rows = [
            (_NAMES[network], *(f"{scale * seconds:,.0f}" for _, seconds in _timed(results, network, part)))
            for network in TIMED
        ]
        lines += [*table("|".join([unit, *map(str, timed)]), rows), ""]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    machine = results["machine"]
    lines += [
        f"Measured {results['date']} on {machine['cores']} cores ({machine['processor']}), float32, one thread each; "
        f"{versions}. Every training is in [recurrence.json](data/recurrence.json)."
    ]
    return "\n".join(lines)


def _listed(trials: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted({each["rate"] for each in trials}))


def _chosen(trials: Sequence[Mapping[str, Any]]) -> str:
    entries = [{"kind": "rate", **each} for each in trials]
    return ", ".join(f"{_NAMES[network]} {_best_rate(entries, network):g}" for network in Network)


_JOBS = {
    Job.COPY: "Random symbols, and the same again.",
    Job.REVERSE: "Random symbols, and then backwards.",
    Job.DATES: "A date written out in one of twelve languages, amid random letters, to ISO 8601: what matters is short "
    "wherever it stands, so that one fixed vector's accuracy hangs on what it must keep, not on how far back it was.",
}
_GRADIENT_NAMES: dict[str, str] = {
    **{str(cell): f"{cell.upper()} cells, before training" for cell in Cell},
    Network.TRANSFORMER: "self-attention, before training",
}
_GRADIENTS = (
    "The gradient of the last output with respect to the input so many tokens before it, over that with respect to the "
    "last input; the median of the seeds, float64, fresh weights: training moves them. A recurrence multiplies by one "
    "Jacobian a token; self-attention reaches every token in one step, so that its share falls at once and no "
    "further."
)
_TIMES = (
    "By source length, targets as long. An update has about {tokens} tokens at every length, so that a network that "
    "computes its positions together takes about as long for few long sources as for many short ones. One more token "
    "comes after a source and a target of that length, from a state or from cached keys and values, in PyTorch and for "
    "one sequence: recurrent networks are not served, and two layers on each side have more launches than one. "
    "Medians, measured when the trainings had ended."
)


def draw(results: Results) -> str:
    """Accuracy of each job, gradients, times."""
    with drawing("recurrence", 9.0, 5.4) as (figure, svg):
        grid = figure.subplots(2, 3)
        for axes, job in zip(grid[0], Job, strict=True):
            _draw_accuracy(axes, [each for each in results["trainings"] if each["job"] == job])
            axes.set_title(job)
        grid[0][0].set_ylabel("right tokens")
        gradients, updates, tokens = grid[1]
        for of, color in zip(_GRADIENT_NAMES, (*_CELL_COLORS, _COLORS[Network.TRANSFORMER]), strict=True):
            points = [(k, value) for k, value in _decay(results, of) if value > _LEAST_GRADIENT]
            gradients.plot(*zip(*points, strict=True), color=color, label=_GRADIENT_NAMES[of].split(",")[0])
        gradients.set_title("gradient at a distance")
        for axes, part, title in (
            (updates, "update_seconds", "seconds an update"),
            (tokens, "token_seconds", "seconds one more token"),
        ):
            for network in TIMED:
                axes.plot(*zip(*_timed(results, network, part), strict=True), color=_COLORS[network])
            axes.set_title(title)
        for axes in grid.flat:
            axes.set_xscale("log", base=2)
            axes.grid(visible=True, alpha=0.3)
        for axes in grid[1]:
            axes.set_yscale("log")
        for axes in (grid[0][0], gradients):
            axes.legend(frameon=False)
        figure.supxlabel("tokens")
    return svg.getvalue()


def _draw_accuracy(axes: Axes, trainings: Sequence[Mapping[str, Any]]) -> None:
    names = list(trainings[0]["accuracy"])
    for network in Network:
        spread = [mean_interval(_values(trainings, network, "accuracy", name)) for name in names]
        means, lows, highs = zip(*((mean, *_within(low, high)) for mean, low, high in spread), strict=True)
        axes.fill_between([*map(int, names)], lows, highs, color=_COLORS[network], alpha=0.2, linewidth=0.0)
        axes.plot([*map(int, names)], means, color=_COLORS[network], marker=".", label=_NAMES[network])
    axes.set_ylim(0.0, 1.02)


def _values(trainings: Iterable[Mapping[str, Any]], network: Network, part: str, length: str) -> list[float]:
    return [each[part][length] for each in trainings if each["network"] == network]


def _percent(values: Sequence[float]) -> str:
    mean, *interval = mean_interval(values)
    low, high = _within(*interval)
    return f"{100 * mean:.0f} ({100 * low:.0f} to {100 * high:.0f})" if len(values) > 1 else f"{100 * mean:.0f}"


def _within(low: float, high: float) -> tuple[float, float]:
    """A share's interval."""
    return max(0.0, low), min(1.0, high)


def _decay(results: Results, of: str) -> list[tuple[int, float]]:
    found = [each["gradients"] for each in results["gradients"] if each["of"] == of]
    return [(int(k), statistics.median(each[k] for each in found)) for k in found[0]]


def _timed(results: Results, network: Network, part: str) -> list[tuple[int, float]]:
    return sorted((each["length"], each[part]) for each in results["times"] if each["network"] == network)


SCENARIO = Scenario(
    __name__,
    RecurrenceSettings,
    measure,
    render,
    draw,
    caption="Accuracy, gradient and time by length: recurrent networks and a transformer",
    printed=("scenario", "date", "seconds", "settings"),
    is_resumable=True,
)
