"""Before a long run: what a step costs, and whether one batch can be learned; neither leaves a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.spec.config import Architecture
from model.training.checks import dry_run, overfit_one_batch
from model.training.task import TaskError
from tests.training_runs import FAMILIES, FakeTask, Quiet, make_recipe


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_dry_run_measures_two_updates_and_writes_nothing(
    architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = []

    class Counting(FakeTask):
        def batch(self, index: int):  # type: ignore[no-untyped-def]
            asked.append(index)
            return super().batch(index)

    said = dry_run(make_recipe(architecture, steps=50, gradient_accumulation=2), Quiet(), make=Counting)
    # Two updates, and then the shapes of the run's first and last micro-batch.
    assert asked == [0, 1, 2, 3, 0, 99]
    assert said.train_seconds == pytest.approx(50 * said.step_seconds)
    assert said.step_seconds > 0.0
    assert said.peak_bytes > 10_000_000
    assert "labels" in said.first_shape
    assert ("source" in said.first_shape) == (architecture is Architecture.ENCODER_DECODER)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_model_that_can_learn_learns_one_batch(architecture: Architecture) -> None:
    recipe = make_recipe(architecture, dropout=0.5, label_smoothing=0.3, learning_rate=1e-2, gradient_accumulation=4)
    reporter = Quiet()
    said = overfit_one_batch(recipe, reporter, make=FakeTask)
    assert said.learned
    assert said.last_loss <= 0.05 * said.first_loss
    assert 1 < said.steps < 300
    assert reporter.updates[-1].step == said.steps


def test_data_that_are_not_there_are_the_callers_mistake() -> None:
    def make(recipe: object) -> FakeTask:
        raise TaskError("nothing there")

    for check in (dry_run, overfit_one_batch):
        with pytest.raises(TaskError, match="nothing there"):
            check(make_recipe(Architecture.DECODER_ONLY), Quiet(), make=make)
