"""The training loop: a recipe in, a checkpoint folder out.

Teacher forcing: the model sees every true token and is asked for the next, all positions at once, and cross-entropy
says how surprised it was. A run is a function of its recipe: same machine, same number of threads, same weights.

Files in the folder while it runs: curves.jsonl, and resume.safetensors every so many steps. At the end: the checkpoint
(`model.checkpoint`) and curves.png, and the resume file is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model import checkpoint
from model.artifact import TOKENIZER
from model.attention import Attend, attend, attend_fused
from model.data.batches import Batch
from model.presets import Recipe
from model.training import curves, resume
from model.training.config import TrainConfig, TrainPrecision
from model.training.curves import CurveLog
from model.training.optimizers import learning_rate_factor, make_optimizers, set_learning_rates
from model.training.progress import Progress, Reporter
from model.training.resume import RunState
from model.training.tasks import Task, TaskError, fit_vocabulary, make_task
from model.transformer import EncoderDecoder, Transformer, build, num_parameters

# The written-out formula trains faster on CPUs than the fused kernel's backward pass, until its S×T matrix gets large.
_MAX_PLAIN_ATTENTION = 512
_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "babel")


class TrainingError(Exception):
    """A run cannot go on."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to. `scores` are on held-out data, `baselines` beside them.

    `seconds` is all of the run but the baselines: reading, tokenising, steps, scoring, and the steps before a resume;
    `step_seconds` is the steps alone.
    """

    folder: Path
    steps: int
    seconds: float
    step_seconds: float
    num_parameters: int
    num_target_tokens: int
    loss: float
    scores: Mapping[str, float]
    baselines: Mapping[str, float]


def train(
    recipe: Recipe,
    folder: Path,
    reporter: Reporter,
    *,
    resume_run: bool = False,
    make: Callable[[Recipe], Task] = make_task,
) -> TrainResult:
    """Trains from fresh weights, or from where an interrupted run of the same recipe left off.

    Args:
        recipe: with data.
        folder: made if missing; a checkpoint in it is replaced.
        reporter: shows progress.
        resume_run: go on from the folder's resume file.
        make: prepares the data.

    Raises:
        TaskError: when the data are not there or do not fit the model.
        ResumeError: when there is nothing to resume, or something else.
        TrainingError: when the loss or a gradient is no longer finite.
    """
    config = recipe.train
    if config is None:
        raise TaskError(f"{recipe.name} has no data to train on")
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    reporter.say(f"reading {recipe.data}")
    task = make(recipe)
    model = build(fit_vocabulary(recipe.model, task.tokenizer), config.seed)
    # The generator is the process's; dropout must draw from our seed and the caller must find it as it was.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        run = _Run(task, config, model, folder, reporter)
        if resume_run:
            run.restore()
        seconds_before = run.state.seconds
        run.train()
    return _finish(recipe, run, seconds_before + time.perf_counter() - started)


class _Run:
    """One run's moving parts: model, optimisers, and how far they have come."""

    def __init__(self, task: Task, config: TrainConfig, model: Transformer, folder: Path, reporter: Reporter) -> None:
        self.task = task
        self.config = config
        self.model = model
        self.folder = folder
        self.reporter = reporter
        self.optimizers = make_optimizers(model, config)
        self.peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.precision = resolve_precision(config.precision)
        # What must stay the same is what the weights depend on; how often something is logged or saved is not.
        settings = {key: value for key, value in config.to_dict().items() if not key.endswith("_every")}
        identity = {
            **{f"model.{key}": value for key, value in model.config.to_dict().items()},
            **{f"train.{key}": value for key, value in settings.items()},
            "precision": str(self.precision),
            "data": task.facts["sha256"],
            "tokenizer": hashlib.sha256(task.tokenizer.to_json().encode()).hexdigest(),
            "torch": version("torch"),
        }
        self.state = RunState(step=0, num_target_tokens=0, seconds=0.0, identity=identity)
        self.points: list[curves.Point] = []

    def restore(self) -> None:
        """Goes back to the last saved state."""
        self.state = resume.load(self.folder / resume.STATE, self.model, self.optimizers, self.state.identity)
        self.points = curves.read(self.folder / curves.CURVES, self.state.step)
        self.reporter.say(f"resuming after step {self.state.step}")

    def train(self) -> None:
        """Does the steps that are left."""
        if not self.state.step and (self.folder / resume.STATE).exists():
            self.reporter.say(f"starting over: the interrupted run in {self.folder} is dropped (--resume keeps it)")
            (self.folder / resume.STATE).unlink()
        log = CurveLog(self.folder / curves.CURVES, self.points)
        self.model.train()
        meter = _Meter()
        # Skipping batches leaves the data exactly where a run without interruption would have them.
        batches = itertools.islice(self.task.batches(), self.state.step, self.config.steps)
        with self.reporter:
            for batch in batches:
                self._step(batch, meter)
                self._report(log, meter)
        self.points = list(log.points)
        self.model.eval()

    def _step(self, batch: Batch, meter: _Meter) -> None:
        started = time.perf_counter()
        factor = learning_rate_factor(self.state.step, self.config.steps, self.config.warmup_steps)
        set_learning_rates(self.optimizers, self.peaks, factor)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with autocast(self.precision):
            loss = batch_loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_clip)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            raise TrainingError(
                f"loss {loss.item()} and gradient norm {norm.item()} at step {self.state.step + 1}: "
                "a lower learning rate or a longer warm-up may help"
            )
        for optimizer in self.optimizers:
            optimizer.step()
        seconds = time.perf_counter() - started
        meter.add(loss.item(), norm.item(), factor, batch.num_targets, seconds)
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            num_target_tokens=self.state.num_target_tokens + batch.num_targets,
            seconds=self.state.seconds + seconds,
        )

    def _report(self, log: CurveLog, meter: _Meter) -> None:
        step, steps = self.state.step, self.config.steps
        if step % self.config.log_every == 0 or step == steps:
            seconds_left = (steps - step) * self.state.seconds / step
            self.reporter.update(Progress(step, steps, meter.loss, meter.tokens_per_second, seconds_left))
            log.append(
                {
                    "step": step,
                    **meter.point(),
                    "num_target_tokens": self.state.num_target_tokens,
                    "seconds": self.state.seconds,
                }
            )
            meter.reset()
        if step == steps or (self.config.evaluate_every and step % self.config.evaluate_every == 0):
            self.model.eval()
            scores = dict(self.task.score(self.model))
            self.model.train()
            log.append({"step": step, "scores": scores})
            self.reporter.say(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
        if self.config.checkpoint_every and step % self.config.checkpoint_every == 0 and step < steps:
            resume.save(self.folder / resume.STATE, self.model, self.optimizers, self.state)


class _Meter:
    """Means over the steps since the last point of the curve."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._num_steps = 0
        self._loss = 0.0
        self._gradient_norm = 0.0
        self._factor = 0.0
        self._num_targets = 0
        self._seconds = 0.0

    def add(self, loss: float, gradient_norm: float, factor: float, num_targets: int, seconds: float) -> None:
        self._num_steps += 1
        self._loss += loss
        self._gradient_norm += gradient_norm
        self._factor = factor
        self._num_targets += num_targets
        self._seconds += seconds

    @property
    def loss(self) -> float:
        return self._loss / self._num_steps

    @property
    def tokens_per_second(self) -> float:
        return self._num_targets / self._seconds

    def point(self) -> dict[str, float]:
        return {
            "loss": self.loss,
            "gradient_norm": self._gradient_norm / self._num_steps,
            "learning_rate_factor": self._factor,
            "tokens_per_second": self.tokens_per_second,
        }


def batch_loss(model: Transformer, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats over the batch's labels; padding does not count."""
    input_ids, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
    formula = _attend_for(batch)
    if isinstance(model, EncoderDecoder):
        if batch.source_ids is None or batch.source_lengths is None:
            raise ValueError("an encoder-decoder needs sources")
        sources, lengths = torch.from_numpy(batch.source_ids), torch.from_numpy(batch.source_lengths)
        logits = model(sources, lengths, input_ids, formula)
    else:
        logits = model(input_ids, formula)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def resolve_precision(precision: TrainPrecision) -> TrainPrecision:
    """Settles `auto`: bfloat16 where this CPU multiplies it in hardware, since emulating it is slower than float32."""
    if precision is not TrainPrecision.AUTO:
        return precision
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "sve_bf16"))
    return TrainPrecision.BF16 if native else TrainPrecision.FP32


def autocast(precision: TrainPrecision) -> contextlib.AbstractContextManager[object]:
    """Matrix products in bfloat16 while weights, norms and losses stay float32; nothing at all for float32."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is TrainPrecision.BF16)


def _attend_for(batch: Batch) -> Attend:
    longest = max(ids.shape[1] for ids in (batch.input_ids, batch.source_ids) if ids is not None)
    return attend if longest <= _MAX_PLAIN_ATTENTION else attend_fused


def _finish(recipe: Recipe, run: _Run, seconds: float) -> TrainResult:
    """Writes the checkpoint, draws the curves, and drops what only a resumed run would have needed."""
    run.reporter.say("measuring the baselines")
    baselines = dict(run.task.baselines())
    last = {name: value for point in run.points for name, value in point.items()}
    result = TrainResult(
        folder=run.folder,
        steps=run.state.step,
        seconds=seconds,
        step_seconds=run.state.seconds,
        num_parameters=num_parameters(run.model),
        num_target_tokens=run.state.num_target_tokens,
        loss=last["loss"],
        scores=last["scores"],
        baselines=baselines,
    )
    picture = curves.draw(run.points, f"{recipe.name}: {result.num_parameters:,} parameters")
    checkpoint.write_atomically(run.folder / curves.PICTURE, picture)
    tokenizers = {TOKENIZER: run.task.tokenizer.to_json()}
    checkpoint.save(run.folder, run.model, run.model.config, tokenizers, _manifest(recipe, run, result))
    (run.folder / resume.STATE).unlink(missing_ok=True)
    return result


def _manifest(recipe: Recipe, run: _Run, result: TrainResult) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "data": dict(run.task.facts),
        "train": run.config.to_dict(),
        "precision": str(run.precision),
        "num_threads": torch.get_num_threads(),
        "num_parameters": result.num_parameters,
        "num_target_tokens": result.num_target_tokens,
        "train_seconds": result.seconds,
        "step_seconds": result.step_seconds,
        "loss": result.loss,
        "scores": dict(result.scores),
        "baselines": dict(result.baselines),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
    }
