"""What each part of the transformer is worth: trained with it, without it, and beside a recurrent network.

Every row differs from its experiment's base in one thing, and every row is trained with every seed; a seed fixes
weights, training texts and their order, the same for all rows. The optimiser is AdamW with one rate for all, in
float32, because it treats every parameter alike: the preset's Muon moves matrices in its own way, which parts and
networks have in unlike numbers, so that it has a row of its own. The rate was chosen for the base.

One command measures, writes `ablation.json` and the pictures, and puts the table into `model.md` (`ablation_report`).
Runs take one thread each, side by side, seed after seed over all rows, so that a machine that slows down slows all rows
alike. Each is saved as it ends: the command, given again, goes on with what is missing, unless the code has changed.
The last line of stdout is one JSON object.

    python -m benchmarks.training.ablation [--seeds N] [--steps N] [--rows NAME ...] [--jobs N] [--set key=value ...]
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.training import ablation_report
from benchmarks.training.ablation_report import RESULTS
from benchmarks.training.gru import RecurrentEncoderDecoder, build_recurrent, equal_size
from model import evaluate
from model.data import dates
from model.data.batches import Pair
from model.nn.transformer import EncoderDecoder, build, num_parameters
from model.spec.artifact import TOKENIZER
from model.spec.config import ModelConfig
from model.training.loop import Loop
from model.training.presets import Recipe, RecipeError, resolve
from model.training.tasks import fit_vocabulary, make_task

NUM_SEEDS = 3
NUM_TEST_DATES = 500
_CURVE_POINTS = 50
_FINAL_SHARE = 20
_PACKAGES = ("torch", "numpy", "tokenizers", "babel")
_REPOSITORY = Path(__file__).resolve().parents[2]


class AblationError(Exception):
    """The table cannot be measured."""


class Network(StrEnum):
    """What is trained: the repository's transformer, or `benchmarks.training.gru`."""

    TRANSFORMER = "transformer"
    GRU = "gru"


@dataclass(frozen=True, slots=True)
class Experiment:
    """Rows that are compared with each other: the `dates` preset with these overrides, for so many updates."""

    steps: int
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: its experiment with these overrides as well."""

    name: str
    experiment: str
    overrides: tuple[str, ...] = ()
    network: Network = Network.TRANSFORMER


_SAME_FOR_ALL = ("optimizer=adamw", "precision=fp32", "device=cpu")
EXPERIMENTS: Mapping[str, Experiment] = {
    "parts": Experiment(1000, (*_SAME_FOR_ALL, "learning_rate=1e-3")),
    # Deep, with a high rate: where it starts to matter on which side of the sum the norm is.
    "norms": Experiment(
        300, (*_SAME_FOR_ALL, "learning_rate=3e-3", "num_encoder_layers=6", "num_layers=6", "norm=layernorm")
    ),
}
ROWS: tuple[Row, ...] = (
    Row("base", "parts"),
    Row("learned", "parts", ("positions=learned",)),
    Row("rotary", "parts", ("positions=rotary",)),
    Row("additive", "parts", ("attention_score=additive",)),
    Row("heads-1", "parts", ("num_heads=1",)),
    Row("heads-2", "parts", ("num_heads=2",)),
    Row("heads-8", "parts", ("num_heads=8",)),
    Row("gru", "parts", network=Network.GRU),
    # With the preset's own rates: Muon's for matrices, this one for the rest.
    Row("muon", "parts", ("optimizer=muon", "learning_rate=2e-3")),
    Row("post", "norms", ("norm_placement=post", "warmup_fraction=0.0")),
    Row("post-warmup", "norms", ("norm_placement=post", "warmup_fraction=0.4")),
    Row("pre", "norms", ("norm_placement=pre", "warmup_fraction=0.0")),
    Row("pre-warmup", "norms", ("norm_placement=pre", "warmup_fraction=0.4")),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One training: a row with a seed. Picklable, as it is sent to another process."""

    row: Row
    seed: int
    recipe: Recipe

    @property
    def settings(self) -> dict[str, Any]:
        """JSON-ready: everything that was asked for."""
        recipe = self.recipe
        if recipe.data is None or recipe.train is None:
            raise AblationError(f"{recipe.name} has no data to train on")
        return {
            "network": str(self.row.network),
            "model": recipe.model.to_dict(),
            "data": recipe.data.to_dict(),
            "train": recipe.train.to_dict(),
        }


def plan(rows: Sequence[Row], seeds: int, *, steps: int | None = None, overrides: Sequence[str] = ()) -> list[Run]:
    """The runs, seed after seed over all rows.

    Args:
        rows: what to compare.
        seeds: how many, counted from 0.
        steps: updates of every run; None is what each experiment has.
        overrides: for every run. What a row itself is about comes later and wins.

    Raises:
        RecipeError: when an override is wrong.
        AblationError: when an override is of what has an option of its own.
    """
    if fixed := [override for override in overrides if override.partition("=")[0] in ("seed", "steps")]:
        raise AblationError(f"override {fixed[0]!r}: seeds and steps are given by --seeds and --steps")
    runs = []
    for seed in range(seeds):
        for row in rows:
            experiment = EXPERIMENTS[row.experiment]
            common = (f"steps={experiment.steps if steps is None else steps}", f"seed={seed}")
            recipe = resolve("dates", (*experiment.overrides, *common, *overrides, *row.overrides))
            runs.append(Run(row, seed, recipe))
    return runs


def make_network(network: Network, config: ModelConfig, seed: int) -> EncoderDecoder | RecurrentEncoderDecoder:
    """Fresh weights of a transformer, or of a recurrent network with as many."""
    if network is Network.GRU:
        return build_recurrent(equal_size(config), seed)
    model = build(config, seed)
    if not isinstance(model, EncoderDecoder):
        raise AblationError(f"architecture is {config.architecture}, dates are read by an encoder-decoder")
    return model


def measure(run: Run) -> dict[str, Any]:
    """Trains once and scores once, on test days that nothing was chosen by; JSON-ready.

    `loss` is the training loss, nats per token, mean of the last twentieth of the updates; `curve` holds pairs of a
    step and the mean loss since the one before. `seconds_per_step` is the median update's.

    Raises:
        AblationError: naming the run, when its loss or a gradient is no finite number.
    """
    started = time.perf_counter()
    recipe = run.recipe
    train = recipe.train
    if train is None:
        raise AblationError(f"{recipe.name} has no data to train on")
    task = make_task(recipe)
    model = make_network(run.row.network, fit_vocabulary(recipe.model, task), run.seed)
    loop = Loop(model, task.batch, train)
    updates = [loop.update() for _ in range(train.steps)]
    losses = [update.loss for update in updates]
    every = max(1, train.steps // _CURVE_POINTS)
    curve = [
        [end, _rounded(statistics.fmean(losses[end - every : end]))] for end in range(every, train.steps + 1, every)
    ]
    model.eval()
    tokenizer = task.tokenizers[TOKENIZER]
    pairs = [
        Pair(tokenizer.encode(example.text), tokenizer.encode_plain(example.iso))
        for example in dates.held_out(NUM_TEST_DATES, seed=0)
    ]
    return {
        "row": run.row.name,
        "seed": run.seed,
        "steps": train.steps,
        "exact_match": evaluate.exact_match(model, pairs),
        "loss": _rounded(statistics.fmean(losses[-max(1, train.steps // _FINAL_SHARE) :])),
        "seconds_per_step": _rounded(statistics.median(update.seconds for update in updates)),
        "num_parameters": num_parameters(model),
        "hidden": model.config.hidden if isinstance(model, RecurrentEncoderDecoder) else None,
        "curve": curve,
        "seconds": round(time.perf_counter() - started, 2),
    }


def measure_all(runs: Sequence[Run], log: Path, jobs: int) -> list[dict[str, Any]]:
    """The records of all runs, in their order: from the log where it has them, measured and added to it where not.

    Raises:
        AblationError: when a run fails; those before it are in the log.
    """
    surroundings = {"machine": machine(jobs), "versions": versions(), "code": code_hash()}
    keys = [_key(run, surroundings) for run in runs]
    saved = _read_log(log)
    records = {key: saved[key] for key in keys if key in saved}
    pending = [(key, run) for key, run in zip(keys, runs, strict=True) if key not in records]
    if records:
        _say(f"{len(records)} of {len(runs)} runs are in {log} already")
    log.parent.mkdir(parents=True, exist_ok=True)
    # A fresh interpreter for each worker: what this process has set up is none of a measurement's business.
    pool = ProcessPoolExecutor(min(jobs, max(1, len(pending))), get_context("spawn"), _use_one_thread)
    with pool, log.open("a", encoding="utf-8") as stream:
        futures = {pool.submit(measure, run): (key, run) for key, run in pending}
        try:
            for future in as_completed(futures):
                key, run = futures[future]
                try:
                    record = future.result()
                except Exception as error:
                    raise AblationError(f"{run.row.name}, seed {run.seed}: {error}") from error
                records[key] = record
                # The line break comes first, so that half a line left by a killed command spoils no other.
                stream.write("\n" + json.dumps({"key": key, "record": record}))
                stream.flush()
                waiting = [run for key, run in pending if key not in records]
                _say(
                    f"[{len(records)}/{len(runs)}] {run.row.name}, seed {run.seed}: "
                    f"exact match {record['exact_match']:.1%}, loss {record['loss']:.3g}, "
                    f"{record['seconds_per_step'] * 1e3:.0f} ms a step; "
                    f"about {_seconds_left(waiting, list(records.values())) / jobs / 60.0:.1f} min left"
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [records[key] for key in keys]


def machine(jobs: int) -> dict[str, Any]:
    """What the times were taken on."""
    names = Path("/proc/cpuinfo")
    lines = names.read_text(encoding="utf-8").splitlines() if names.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "num_cores": num_cores(),
        "num_jobs": jobs,
        "num_threads_per_job": 1,
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Of Python and of the packages that the figures depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def code_hash() -> str:
    """SHA-256 over everything that a run computes with: a log of other code must not be gone on with."""
    files = [
        *sorted((_REPOSITORY / "model").rglob("*.py")),
        _REPOSITORY / "benchmarks" / "training" / "ablation.py",
        _REPOSITORY / "benchmarks" / "training" / "gru.py",
    ]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(_REPOSITORY).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, writes, draws, prints."""
    arguments = _parser().parse_args(argv)
    names = arguments.rows or [row.name for row in ROWS]
    # A table of other runs than the documented ones does not replace the documented one by itself.
    is_documented = names == [row.name for row in ROWS] and (arguments.seeds, arguments.steps, arguments.set) == (
        NUM_SEEDS,
        None,
        [],
    )
    docs: Path = arguments.docs or (_REPOSITORY / "docs" if is_documented else arguments.build)
    if arguments.render:
        ablation_report.write(ablation_report.load(docs), docs)
        return
    started = time.monotonic()
    rows = [row for row in ROWS if row.name in names]
    try:
        runs = plan(rows, arguments.seeds, steps=arguments.steps, overrides=arguments.set)
        records = measure_all(runs, arguments.build / "runs.jsonl", arguments.jobs)
    except (AblationError, RecipeError) as error:
        sys.exit(f"ablation: {error}")
    results = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(arguments.jobs),
        "versions": versions(),
        "code": code_hash(),
        "num_test_dates": NUM_TEST_DATES,
        "seeds": list(range(arguments.seeds)),
        # The seed is the run's own; all else is the same for all of a row.
        "rows": {run.row.name: {"experiment": run.row.experiment, **run.settings} for run in runs if run.seed == 0},
        "runs": records,
    }
    ablation_report.write(results, docs)
    _say(f"wrote {ablation_report.DOCUMENT}, {RESULTS} and the pictures to {docs}")
    # Curves and settings are in the file.
    runs_shown = [{key: value for key, value in record.items() if key != "curve"} for record in records]
    shown = {**results, "runs": runs_shown, "total_seconds": round(time.monotonic() - started, 1)}
    print(json.dumps({key: value for key, value in shown.items() if key != "rows"} | {"results": str(docs / RESULTS)}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=_positive, default=NUM_SEEDS, help=f"runs of each row (default: {NUM_SEEDS})")
    parser.add_argument("--steps", type=_positive, help="updates of each run (default: what each experiment has)")
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], metavar="NAME", help="only these rows")
    parser.add_argument("--jobs", type=_positive, default=num_cores(), help="runs side by side (default: one a core)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override in every run")
    parser.add_argument(
        "--build",
        type=Path,
        default=Path("build/ablation"),
        help="where runs are saved as they end (default: %(default)s)",
    )
    parser.add_argument(
        "--docs", type=Path, help="where the table goes (default: docs, or --build where an option changes the table)"
    )
    parser.add_argument("--render", action="store_true", help="measure nothing: write table and pictures anew")
    return parser


def _use_one_thread() -> None:
    torch.set_num_threads(1)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _key(run: Run, surroundings: Mapping[str, Any]) -> str:
    """Two runs with the same key are the same measurement."""
    identity = {"row": run.row.name, "seed": run.seed, "test": NUM_TEST_DATES, **run.settings, **surroundings}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _read_log(log: Path) -> dict[str, dict[str, Any]]:
    """Records by key."""
    records = {}
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # An empty line, or half a one.
        records[entry["key"]] = entry["record"]
    return records


def _seconds_left(waiting: Sequence[Run], done: Sequence[Mapping[str, Any]]) -> float:
    """What the waiting runs will take one after another, going by the row's own runs or else by all per step."""
    per_step = statistics.fmean(record["seconds"] / record["steps"] for record in done)
    total = 0.0
    for run in waiting:
        own = [record["seconds"] for record in done if record["row"] == run.row.name]
        steps = run.recipe.train.steps if run.recipe.train else 0
        total += statistics.fmean(own) if own else per_step * steps
    return total


def _rounded(number: float) -> float:
    """Six significant digits: more would only make the file longer."""
    return float(f"{number:.6g}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
