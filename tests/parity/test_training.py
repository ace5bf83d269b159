"""A whole run: what it leaves behind is whole, says how it came about, and is the same every time."""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model import checkpoint
from model.spec.config import Architecture
from model.training import curves, resume
from model.training.folder import BEST
from model.training.loop import TrainingError
from model.training.parallel import SetupError
from tests.training_runs import FAMILIES, PowerCut, Quiet, cut_power, make_recipe, points, run

CHECKPOINT = {"config.json", "model.safetensors", "tokenizer.json", "run.json"}
PICTURES = {"curves.jsonl", "curves.png"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def manifest(folder: Path) -> dict[str, Any]:
    return dict(checkpoint.load(folder).training)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_equal_seeds_train_equal_weights_and_others_do_not(architecture: Architecture, tmp_path: Path) -> None:
    for folder, seed in (("first", 1), ("again", 1), ("other", 2)):
        run(make_recipe(architecture, dropout=0.1, seed=seed, steps=4), tmp_path / folder)
    first, again, other = (
        (tmp_path / folder / checkpoint.WEIGHTS).read_bytes() for folder in ("first", "again", "other")
    )
    assert first == again != other


def test_a_finished_run_leaves_a_checkpoint_its_curves_and_nothing_else(tmp_path: Path) -> None:
    result = run(make_recipe(Architecture.DECODER_ONLY, checkpoint_every=5), tmp_path)
    assert names(tmp_path) == CHECKPOINT | PICTURES
    said = manifest(tmp_path)
    assert said["data"]["sha256"] == "0" * 64
    assert said["scores"] == result.scores
    assert {"test_loss", "how"} == result.scores.keys()
    assert said["baselines"] == {"baseline": 0.25} == result.baselines
    assert said["validation"] == result.validation
    assert said["versions"]["torch"] == version("torch")
    assert said["train"]["steps"] == said["step"] == said["steps"] == 12 == result.steps
    assert said["finished"]
    assert (said["world_size"], said["device"], said["precision"]) == (1, "cpu", "fp32")
    assert said["environment"]["torch"] == version("torch")
    assert said["best"] is None is result.best
    assert said["loss"] == result.loss == points(tmp_path)[-2]["loss"]
    assert (tmp_path / curves.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_curves_hold_losses_and_scores_by_step(tmp_path: Path) -> None:
    run(make_recipe(Architecture.DECODER_ONLY, evaluate_every=6), tmp_path)
    curve = points(tmp_path)
    assert [point["step"] for point in curve if "loss" in point] == [4, 8, 12]
    assert [point["step"] for point in curve if "scores" in point] == [6, 12]
    assert all(point["gradient_norm"] > 0.0 for point in curve if "loss" in point)


def test_every_checkpoint_on_the_way_is_whole_and_says_how_far_it_is(tmp_path: Path) -> None:
    seen = {}

    def look() -> None:
        seen[len(seen)] = (manifest(tmp_path), names(tmp_path))

    recipe = make_recipe(Architecture.ENCODER_DECODER, checkpoint_every=5, log_every=2)
    run(recipe, tmp_path, at={5: look, 10: look})
    for index, step in ((0, 5), (1, 10)):
        said, files = seen[index]
        assert (said["step"], said["steps"], said["finished"]) == (step, 12, False)
        assert said["scores"] == {}
        assert files == CHECKPOINT | {"curves.jsonl", resume.STATE}
    assert not (tmp_path / resume.STATE).exists()


def test_the_best_weights_are_kept_beside_the_last(tmp_path: Path) -> None:
    kept = {}
    recipe = make_recipe(Architecture.DECODER_ONLY, evaluate_every=3, log_every=5)
    result = run(
        recipe,
        tmp_path,
        scores=[3.0, 1.0, 2.0, 1.0],
        at={6: lambda: kept.update(best=(tmp_path / BEST / checkpoint.WEIGHTS).read_bytes())},
    )
    assert result.best is not None
    assert (result.best.step, result.best.scores, result.validation) == (6, {"loss": 1.0}, {"loss": 1.0})
    assert names(tmp_path) == CHECKPOINT | PICTURES | {BEST}
    assert names(tmp_path / BEST) == CHECKPOINT
    said = manifest(tmp_path / BEST)
    assert (said["step"], said["validation"], said["best"]["step"]) == (6, {"loss": 1.0}, 6)
    assert manifest(tmp_path)["best"] == {"step": 6, "validation": {"loss": 1.0}}
    # The weights of step 6, not the last ones.
    best = (tmp_path / BEST / checkpoint.WEIGHTS).read_bytes()
    assert kept["best"] == best != (tmp_path / checkpoint.WEIGHTS).read_bytes()


def test_a_run_that_gets_no_better_ends_early_with_its_last_weights(tmp_path: Path) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, evaluate_every=2, patience=2, log_every=5)
    result = run(recipe, tmp_path, scores=[3.0, 2.0, 2.5, 2.0])
    assert result.steps == 8
    assert result.best is not None
    assert result.best.step == 4
    said = manifest(tmp_path)
    assert (said["step"], said["steps"], said["finished"]) == (8, 12, True)
    # What was left since the last point of the curve is on it too.
    assert [point["step"] for point in points(tmp_path) if "loss" in point] == [5, 8]


def test_patience_counts_anew_after_each_best(tmp_path: Path) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, evaluate_every=2, patience=2)
    assert run(recipe, tmp_path, scores=[3.0, 3.5, 2.0, 2.5, 1.0, 1.5]).steps == 12


def test_a_fresh_run_forgets_an_older_one(tmp_path: Path) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, checkpoint_every=5, evaluate_every=4)
    with pytest.raises(PowerCut):
        run(recipe, tmp_path, at={8: cut_power})
    assert (tmp_path / BEST).exists()
    (tmp_path / ".staging-of-one-that-was-killed").mkdir()
    reporter = Quiet()
    with pytest.raises(PowerCut):
        run(recipe, tmp_path, at={2: cut_power}, reporter=reporter)
    assert any("is dropped (--resume keeps it)" in line for line in reporter.lines)
    # The older run's checkpoint stays until there is another.
    assert names(tmp_path) == CHECKPOINT | {"curves.jsonl"}
    assert manifest(tmp_path)["step"] == 8


def test_nan_ends_the_run_in_one_line_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, checkpoint_every=2, optimizer="adamw")
    models = []

    def spoil() -> None:
        (model,) = models
        with torch.no_grad():
            model.final_norm.weight[0] = math.nan

    def remember(module: nn.Module, arguments: object) -> None:
        models[:] = [module]

    with (
        nn.modules.module.register_module_forward_pre_hook(
            lambda module, arguments: remember(module, arguments) if hasattr(module, "unembed") else None
        ),
        pytest.raises(TrainingError) as caught,
    ):
        run(recipe, tmp_path, at={5: spoil})
    assert str(caught.value).splitlines() == [
        "loss nan and gradient norm nan at step 6: a lower learning rate or a longer warm-up may help; "
        f"{tmp_path} holds step 4, --resume continues from there"
    ]
    assert manifest(tmp_path)["step"] == 4


def test_weights_that_are_no_numbers_never_replace_a_checkpoint(tmp_path: Path) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, checkpoint_every=1, optimizer="adamw")
    kept: dict[str, Any] = {}

    def raise_rates() -> None:
        # The loss is computed before the weights leave the numbers, and shows nothing yet.
        kept["weights"] = (tmp_path / checkpoint.WEIGHTS).read_bytes()
        kept["patch"].setattr("model.training.loop.learning_rate_factor", lambda *_: math.inf)

    with pytest.MonkeyPatch.context() as patch:
        kept["patch"] = patch
        with pytest.raises(TrainingError, match=r"has values that are no finite numbers after step 3; .* holds step 2"):
            run(recipe, tmp_path, at={2: raise_rates})
    assert (tmp_path / checkpoint.WEIGHTS).read_bytes() == kept["weights"]
    assert manifest(tmp_path)["step"] == 2


def test_a_validation_score_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, evaluate_every=3)
    with pytest.raises(TrainingError, match=r"^validation loss is nan at step 3; nothing of this run was saved$"):
        run(recipe, tmp_path, scores=[math.nan])


def test_a_wish_that_the_machine_cannot_grant_comes_before_any_file(tmp_path: Path) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, parallelism="fsdp")
    with pytest.raises(SetupError, match="parallelism fsdp needs optimizer adamw"):
        run(recipe, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_half_written_last_line_of_the_curves_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / curves.CURVES
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 9, "loss": 1.5}\n{"step": 2, "lo')
    assert curves.read(path, last_step=5) == [{"step": 1, "loss": 2.0}]


def test_curves_are_drawn_without_what_is_no_number() -> None:
    drawn = curves.draw([{"step": 1, "scores": {"bleu": 3.0, "bleu_signature": "text"}}, {"step": 2, "loss": 1.0}], "x")
    assert drawn.startswith(b"\x89PNG")


def test_notes_and_costs_come_before_the_first_step(tmp_path: Path) -> None:
    reporter = Quiet()
    run(make_recipe(Architecture.DECODER_ONLY, steps=2), tmp_path, reporter=reporter)
    assert reporter.lines[0] == "reading dates"
    assert "a small world" in reporter.lines
    assert any(line.startswith("parameters") for line in reporter.lines)
    assert json.dumps(reporter.lines)
