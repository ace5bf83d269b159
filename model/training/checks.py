"""Checks before a long run: the cost of a step, and whether the model can learn. Neither writes a file."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from model.data.batches import Batch
from model.nn.transformer import num_parameters
from model.training.config import Schedule, TrainConfig
from model.training.loop import Loop
from model.training.parallel import Parallel, alone
from model.training.presets import Recipe
from model.training.progress import Progress, Reporter
from model.training.task import Task
from model.training.tasks import make_task
from model.training.trainer import prepare, recipe_config

_OVERFIT_STEPS = 300
_OVERFIT_SHARE = 0.05
_OVERFIT_WARMUP = 0.1


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a dry run.

    `first_shape` and `last_shape` are those of the run's first and last micro-batch. `step_seconds` is the second
    update's time, `train_seconds` its multiple for all updates, without evaluation. `peak_bytes` is the peak memory of
    the card, or of this process on a CPU.
    """

    num_parameters: int
    first_shape: str
    last_shape: str
    loss: float
    step_seconds: float
    train_seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Overfit:
    """Loss on one batch at the start and after `steps`, and whether the model learned it."""

    steps: int
    first_loss: float
    last_loss: float
    learned: bool


def dry_run(
    recipe: Recipe,
    reporter: Reporter,
    parallel: Parallel | None = None,
    make: Callable[[Recipe], Task] = make_task,
) -> DryRun:
    """Reads the data, builds the model and measures two updates.

    Raises:
        TaskError, SetupError, TrainingError: as `model.training.trainer.train`.
    """
    config = recipe_config(recipe)
    parallel = alone(config) if parallel is None else parallel
    task, model = prepare(recipe, reporter, parallel, make)
    size = num_parameters(model)
    loop = Loop(model, task.batch, config, parallel)
    loop.update()
    update = loop.update()
    first, last = (task.batch(index) for index in (0, config.steps * config.gradient_accumulation - 1))
    return DryRun(
        num_parameters=size,
        first_shape=_shape(first),
        last_shape=_shape(last),
        loss=update.loss,
        step_seconds=update.seconds,
        train_seconds=update.seconds * config.steps,
        peak_bytes=_peak_bytes(parallel.device),
    )


def overfit_one_batch(
    recipe: Recipe,
    reporter: Reporter,
    parallel: Parallel | None = None,
    make: Callable[[Recipe], Task] = make_task,
) -> Overfit:
    """Trains the model on its first batch alone; a model that cannot memorize one batch cannot learn.

    Dropout and label smoothing are off, since both keep the loss above zero; the rates warm up briefly and stay. The
    batch is learned when the loss is down to a twentieth within 300 steps.

    Raises:
        TaskError, SetupError, TrainingError: as `dry_run`.
    """
    config = recipe_config(recipe)
    parallel = alone(config) if parallel is None else parallel
    task, model = prepare(_without_dropout(recipe), reporter, parallel, make)
    batch = task.batch(0)
    loop = Loop(model, lambda _: batch, _overfit_config(config, parallel), parallel)
    reporter.say(f"one batch: {_shape(batch)}")
    first = last = loop.update()
    seconds = first.seconds
    while last.loss > _OVERFIT_SHARE * first.loss and loop.step < _OVERFIT_STEPS:
        last = loop.update()
        seconds += last.seconds
        left = (_OVERFIT_STEPS - loop.step) * seconds / loop.step
        reporter.update(Progress(loop.step, _OVERFIT_STEPS, last.loss, last.num_targets / last.seconds, left))
    return Overfit(loop.step, first.loss, last.loss, last.loss <= _OVERFIT_SHARE * first.loss)


def _without_dropout(recipe: Recipe) -> Recipe:
    return replace(recipe, model=replace(recipe.model, dropout=0.0))


def _overfit_config(config: TrainConfig, parallel: Parallel) -> TrainConfig:
    """One batch per process and update; the rates warm up briefly and stay."""
    return replace(
        config,
        steps=_OVERFIT_STEPS,
        gradient_accumulation=parallel.world_size,
        schedule=Schedule.CONSTANT,
        warmup_fraction=_OVERFIT_WARMUP,
        label_smoothing=0.0,
    )


def _shape(batch: Batch) -> str:
    rows, length = batch.input_ids.shape
    source = "" if batch.source_ids is None else f"{batch.source_ids.shape[1]} source and "
    return f"{rows} rows of {source}{length} tokens, {batch.num_targets} labels"


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
