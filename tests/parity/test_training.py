"""Training: it learns, it repeats, it resumes to the bit, and what it leaves behind is whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model import checkpoint
from model.config import Architecture, ModelConfig
from model.data.batches import IGNORED, Batch, Pair, length_buckets, windows
from model.presets import DataName, Recipe
from model.tokenizer import Tokenizer
from model.tokenizer_training import one_word_per_id
from model.training import curves, resume
from model.training.config import OptimizerName, TrainConfig, TrainPrecision
from model.training.optimizers import learning_rate_factor, make_optimizers
from model.training.progress import Progress
from model.training.resume import ResumeError
from model.training.tasks import Task
from model.training.trainer import TrainingError, TrainResult, batch_loss, train
from model.transformer import EncoderDecoder, Transformer, build

FAMILIES = tuple(Architecture)
VOCABULARY = 24


class Quiet:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.updates: list[Progress] = []

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, progress: Progress) -> None:
        self.updates.append(progress)

    def say(self, line: str) -> None:
        self.lines.append(line)


class Interrupted(Exception):
    """Stands for a power cut."""


class FakeTask:
    """Sequences of a small arithmetic world; may break off at a step."""

    def __init__(self, recipe: Recipe, breaks_at: int | None = None) -> None:
        self.recipe = recipe
        self.breaks_at = breaks_at
        self.tokenizer: Tokenizer = one_word_per_id(VOCABULARY, recipe.model.architecture)
        self.facts: Mapping[str, Any] = {"name": "fake", "sha256": "0" * 64}

    def batches(self) -> Iterator[Batch]:
        config = self.recipe.train
        assert config is not None
        for step, batch in enumerate(make_batches(self.recipe.model, config)):
            if step == self.breaks_at:
                raise Interrupted
            yield batch

    def score(self, model: Transformer) -> Mapping[str, float]:
        assert not model.training
        return {"score": 0.5}

    def baselines(self) -> Mapping[str, float]:
        return {"baseline": 0.25}


def make_batches(model: ModelConfig, config: TrainConfig) -> Iterator[Batch]:
    if model.is_encoder_decoder:
        pairs = [Pair([4 + i % 7, 4 + i % 5, 2], [4 + (i % 7 + i % 5) % 11]) for i in range(35)]
        return length_buckets(pairs, config.batch_tokens, config.seed)
    return windows(np.arange(400) * 7 % 20 + 4, 16, config.batch_tokens, config.seed)


def make_model_config(architecture: Architecture, **changes: object) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": VOCABULARY,
        "context": 32,
        "d_model": 32,
        "num_layers": 2,
        "num_heads": 2,
        "d_ff": 64,
        "num_encoder_layers": 1 if architecture is Architecture.ENCODER_DECODER else 0,
    }
    return ModelConfig(**values | changes)


def make_recipe(architecture: Architecture, *, dropout: float = 0.0, **changes: object) -> Recipe:
    values: dict[str, Any] = {"steps": 12, "batch_tokens": 64, "precision": TrainPrecision.FP32, "log_every": 4}
    return Recipe(
        "fake", make_model_config(architecture, dropout=dropout), DataName.DATES, TrainConfig(**values | changes)
    )


def run(recipe: Recipe, folder: Path, *, resume_run: bool = False, breaks_at: int | None = None) -> TrainResult:
    def make(recipe: Recipe) -> Task:
        return FakeTask(recipe, breaks_at)

    return train(recipe, folder, Quiet(), resume_run=resume_run, make=make)


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(checkpoint.load(folder).model.named_parameters())


def assert_equal_weights(first: Path, second: Path) -> None:
    other = weights(second)
    for name, tensor in weights(first).items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("optimizer", OptimizerName)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_one_batch_can_be_learned_by_heart(architecture: Architecture, optimizer: OptimizerName) -> None:
    config = make_model_config(architecture)
    model = build(config, seed=0)
    settings = TrainConfig(steps=1, batch_tokens=64, optimizer=optimizer, learning_rate=1e-2)
    optimizers = make_optimizers(model, settings)
    batch = next(make_batches(config, settings))
    before = batch_loss(model, batch).item()
    for _ in range(60):
        loss = batch_loss(model, batch)
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        for each in optimizers:
            each.step()
    assert before > 2.0
    assert batch_loss(model, batch).item() < 0.1


@pytest.mark.parametrize("architecture", FAMILIES)
def test_equal_seeds_train_equal_weights_and_others_do_not(architecture: Architecture, tmp_path: Path) -> None:
    for folder, seed in (("first", 1), ("again", 1), ("other", 2)):
        run(make_recipe(architecture, dropout=0.1, seed=seed), tmp_path / folder)
    assert_equal_weights(tmp_path / "first", tmp_path / "again")
    name = "embedding.tokens.weight"
    assert not torch.equal(weights(tmp_path / "first")[name], weights(tmp_path / "other")[name])


@pytest.mark.parametrize("optimizer", OptimizerName)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_interrupted_run_resumes_to_the_same_bits(
    architecture: Architecture, optimizer: OptimizerName, tmp_path: Path
) -> None:
    recipe = make_recipe(architecture, dropout=0.1, optimizer=optimizer, checkpoint_every=5)
    run(recipe, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(recipe, tmp_path / "resumed", breaks_at=8)
    run(recipe, tmp_path / "resumed", resume_run=True)
    assert_equal_weights(tmp_path / "whole", tmp_path / "resumed")
    losses = [
        [point["loss"] for point in curves.read(tmp_path / name / curves.CURVES, 12) if "loss" in point]
        for name in ("whole", "resumed")
    ]
    assert losses[0][-1] == losses[1][-1]


def test_training_leaves_the_callers_random_generator_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    run(make_recipe(Architecture.DECODER_ONLY, dropout=0.1), tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_finished_run_leaves_a_checkpoint_its_curves_and_nothing_else(tmp_path: Path) -> None:
    result = run(make_recipe(Architecture.DECODER_ONLY, checkpoint_every=5), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "run.json"),
        *("curves.jsonl", "curves.png"),
    }
    loaded = checkpoint.load(tmp_path)
    assert loaded.training["data"]["sha256"] == "0" * 64
    assert loaded.training["scores"] == {"score": 0.5} == result.scores
    assert loaded.training["baselines"] == {"baseline": 0.25} == result.baselines
    assert loaded.training["versions"]["torch"] == version("torch")
    assert loaded.training["train"]["steps"] == 12 == result.steps
    assert (tmp_path / curves.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_curves_hold_losses_and_scores_by_step(tmp_path: Path) -> None:
    run(make_recipe(Architecture.DECODER_ONLY, evaluate_every=6), tmp_path)
    points = [json.loads(line) for line in (tmp_path / curves.CURVES).read_text().splitlines()]
    assert [point["step"] for point in points if "loss" in point] == [4, 8, 12]
    assert [point["step"] for point in points if "scores" in point] == [6, 12]


def test_a_half_written_last_line_of_the_curves_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / curves.CURVES
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 9, "loss": 1.5}\n{"step": 2, "lo')
    assert curves.read(path, last_step=5) == [{"step": 1, "loss": 2.0}]


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="nothing to resume"):
        run(make_recipe(Architecture.DECODER_ONLY), tmp_path, resume_run=True)


def test_another_runs_state_is_refused_with_every_difference(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(make_recipe(Architecture.DECODER_ONLY, checkpoint_every=5), tmp_path, breaks_at=8)
    other = make_recipe(Architecture.DECODER_ONLY, dropout=0.1, learning_rate=0.5)
    with pytest.raises(ResumeError) as caught:
        run(other, tmp_path, resume_run=True)
    assert "model.dropout is 0.1, was 0.0" in str(caught.value)
    assert "train.learning_rate is 0.5, was 0.002" in str(caught.value)


def test_damaged_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / resume.STATE).write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ResumeError, match="damaged"):
        run(make_recipe(Architecture.DECODER_ONLY), tmp_path, resume_run=True)


def test_a_fresh_run_forgets_an_older_runs_state(tmp_path: Path) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, checkpoint_every=5)
    with pytest.raises(Interrupted):
        run(recipe, tmp_path, breaks_at=8)
    with pytest.raises(Interrupted):
        run(recipe, tmp_path, breaks_at=2)
    assert not (tmp_path / resume.STATE).exists()


def test_a_loss_that_is_no_number_ends_the_run_in_one_line(tmp_path: Path) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, learning_rate=1e30, warmup_fraction=0.0)
    with pytest.raises(TrainingError, match=r"^loss \S+ and gradient norm \S+ at step \d+: .*$"):
        run(recipe, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_padding_has_no_part_in_the_loss() -> None:
    model = build(make_model_config(Architecture.ENCODER_DECODER), seed=0)
    row = Batch(np.array([[1, 5]]), np.array([[5, 2]]), np.array([[6, 7, 2]]), np.array([3]))
    padded = Batch(
        np.array([[1, 5, 0, 0]]), np.array([[5, 2, IGNORED, IGNORED]]), np.array([[6, 7, 2, 0]]), np.array([3])
    )
    torch.testing.assert_close(batch_loss(model, padded), batch_loss(model, row), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_muon_moves_the_layers_matrices_and_adamw_all_else(architecture: Architecture, *, tied: bool) -> None:
    model = build(make_model_config(architecture, tie_embeddings=tied, mlp_bias=True), seed=0)
    muon, adamw = make_optimizers(model, TrainConfig(steps=1, batch_tokens=1))
    moved = [{id(p) for group in each.param_groups for p in group["params"]} for each in (muon, adamw)]
    layers = [*model.layers, *(model.encoder.layers if isinstance(model, EncoderDecoder) else ())]
    matrices = {id(p) for layer in layers for p in layer.parameters() if p.ndim == 2}
    assert moved[0] == matrices
    assert moved[1] == {id(p) for p in model.parameters()} - matrices


@pytest.mark.parametrize("optimizer", OptimizerName)
def test_norms_and_biases_do_not_decay(optimizer: OptimizerName) -> None:
    model = build(make_model_config(Architecture.DECODER_ONLY, mlp_bias=True), seed=0)
    config = TrainConfig(steps=1, batch_tokens=1, optimizer=optimizer, weight_decay=0.1)
    groups = [group for each in make_optimizers(model, config) for group in each.param_groups]
    for parameter in model.parameters():
        (group,) = (group for group in groups if any(parameter is p for p in group["params"]))
        assert group["weight_decay"] == (0.1 if parameter.ndim == 2 else 0.0)


def test_the_learning_rate_rises_to_its_peak_and_falls_towards_zero() -> None:
    factors = [learning_rate_factor(step, 100, 10) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert max(factors) == factors[9] == 1.0
    assert factors[9:] == sorted(factors[9:], reverse=True)
    assert 0.0 < factors[-1] < 1e-3


def test_warm_up_may_take_none_of_the_run_or_all_of_it() -> None:
    for warmup_steps in (0, 10):
        assert all(0.0 < learning_rate_factor(step, 10, warmup_steps) <= 1.0 for step in range(10))


def test_mixed_precision_keeps_weights_in_float32(tmp_path: Path) -> None:
    run(make_recipe(Architecture.DECODER_ONLY, precision=TrainPrecision.BF16, steps=3), tmp_path)
    assert {tensor.dtype for tensor in weights(tmp_path).values()} == {torch.float32}


def test_dropout_is_off_once_a_run_is_over(tmp_path: Path) -> None:
    run(make_recipe(Architecture.DECODER_ONLY, dropout=0.5, steps=2), tmp_path)
    model = checkpoint.load(tmp_path).model
    assert not any(module.training for module in model.modules() if isinstance(module, nn.Dropout))
    assert math.isfinite(sum(parameter.sum().item() for parameter in model.parameters()))
