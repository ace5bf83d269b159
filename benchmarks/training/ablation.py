"""The ablation's training runs: each row changes one setting of its experiment's base and is trained with every seed.

A seed fixes weights, training texts and their order for all rows. All rows use AdamW in float32 with one learning rate,
chosen for the base. The preset's optimizer, Muon, has a row of its own.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from model import evaluate
from model.data import dates
from model.data.batches import Pair
from model.nn.networks import build
from model.nn.transformer import DecoderOnly, num_parameters
from model.spec.artifact import TOKENIZER
from model.spec.recurrent import RecurrentConfig
from model.training.loop import Loop
from model.training.presets import Recipe, resolve
from model.training.tasks import fit_vocabulary, make_task

NUM_TEST_DATES = 500
_CURVE_POINTS = 50
_FINAL_SHARE = 20
_PACKAGES = ("torch", "numpy", "tokenizers", "babel")
_REPOSITORY = Path(__file__).resolve().parents[2]


class AblationError(RuntimeError):
    """The table cannot be measured."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Rows that are compared: each row's preset with these overrides, for so many updates."""

    steps: int
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: its experiment with these overrides too."""

    name: str
    experiment: str
    overrides: tuple[str, ...] = ()
    preset: str = "dates"


_SAME_FOR_ALL = ("optimizer=adamw", "precision=fp32", "device=cpu")
EXPERIMENTS: Mapping[str, Experiment] = {
    "parts": Experiment(1000, (*_SAME_FOR_ALL, "learning_rate=1e-3")),
    # Deep, with a high rate: where norm placement matters.
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
    Row("gru", "parts", preset="dates-recurrent"),
    # With the preset's own rates: Muon's for matrices, this one for the rest.
    Row("muon", "parts", ("optimizer=muon", "learning_rate=2e-3")),
    Row("post", "norms", ("norm_placement=post", "warmup_fraction=0.0")),
    Row("post-warmup", "norms", ("norm_placement=post", "warmup_fraction=0.4")),
    Row("pre", "norms", ("norm_placement=pre", "warmup_fraction=0.0")),
    Row("pre-warmup", "norms", ("norm_placement=pre", "warmup_fraction=0.4")),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One training: a row with a seed. Picklable."""

    row: Row
    seed: int
    recipe: Recipe

    @property
    def settings(self) -> dict[str, Any]:
        """Its configuration, JSON-ready."""
        recipe = self.recipe
        if recipe.data is None or recipe.train is None:
            raise AblationError(f"{recipe.name} has no data to train on")
        return {
            "preset": self.row.preset,
            "model": recipe.model.to_dict(),
            "data": recipe.data.to_dict(),
            "train": recipe.train.to_dict(),
        }


def plan(rows: Sequence[Row], seeds: int, *, steps: int | None = None, overrides: Sequence[str] = ()) -> list[Run]:
    """The runs, seed after seed over all rows.

    Args:
        rows: what to compare.
        seeds: how many, from 0.
        steps: updates of every run; None: the experiment's.
        overrides: for every run; a row's own win.

    Raises:
        RecipeError: if an override is wrong.
        AblationError: if an override has an option of its own.
    """
    if fixed := [override for override in overrides if override.partition("=")[0] in ("seed", "steps")]:
        raise AblationError(f"override {fixed[0]!r}: seeds and steps are given by --seeds and --steps")
    runs = []
    for seed in range(seeds):
        for row in rows:
            experiment = EXPERIMENTS[row.experiment]
            common = (f"steps={experiment.steps if steps is None else steps}", f"seed={seed}")
            recipe = resolve(row.preset, (*experiment.overrides, *common, *overrides, *row.overrides))
            runs.append(Run(row, seed, recipe))
    return runs


def measure(run: Run) -> dict[str, Any]:
    """Trains, and scores on held-out test dates; JSON-ready.

    `loss` is the mean training loss of the last 5 % of updates, in nats per token. `curve` has pairs of a step and the
    mean loss since the previous pair. `seconds_per_step` is the median.

    Raises:
        AblationError: if the recipe has no data to train on.
    """
    started = time.perf_counter()
    recipe = run.recipe
    train = recipe.train
    if train is None:
        raise AblationError(f"{recipe.name} has no data to train on")
    task = make_task(recipe)
    model = build(fit_vocabulary(recipe.model, task), run.seed)
    if isinstance(model, DecoderOnly):
        raise AblationError(f"architecture is {model.config.architecture}, dates are read by an encoder-decoder")
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
        "hidden": model.config.hidden if isinstance(model.config, RecurrentConfig) else None,
        "curve": curve,
        "seconds": round(time.perf_counter() - started, 2),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that figures depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def code_hash(own: Path = Path(__file__)) -> str:
    """SHA-256 of the sources that a run depends on: the model's, and the measurement's own."""
    files = [*sorted((_REPOSITORY / "model").rglob("*.py")), own]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(_REPOSITORY).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _rounded(number: float) -> float:
    """Six significant digits."""
    return float(f"{number:.6g}")
