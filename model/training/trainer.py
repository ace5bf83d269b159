"""A training run: from a recipe to a checkpoint folder, with logging, evaluation, checkpoints and resuming.

A run is a function of its recipe: on the same machine with the same number of threads it ends in the same weights, also
when it was interrupted at any step and resumed.

`model.training.loop` computes an update, `parallel` connects processes, `curves` and `folder` write the files, `record`
describes the run in run.json and in the state to resume from.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model.nn.networks import Network, build, summary
from model.nn.transformer import num_parameters
from model.training import curves, record, resume
from model.training.config import TrainConfig
from model.training.curves import CurveLog, Point
from model.training.folder import RunFolder
from model.training.interruption import Interrupted, Interruption
from model.training.loop import Loop, StopRequested, TrainingError, Update
from model.training.meter import Meter
from model.training.parallel import Parallel, ParallelError, alone
from model.training.presets import Recipe
from model.training.progress import Progress, Reporter
from model.training.resume import Best, RunState
from model.training.task import Scores, Task, TaskError
from model.training.tasks import fit_vocabulary, make_task


class Terminated(Exception):
    """A signal ended the run; its state is saved."""

    def __init__(self, step: int, folder: Path, number: signal.Signals) -> None:
        self.number = number
        super().__init__(f"terminated at step {step}: saved in {folder}, --resume continues")


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run.

    `scores` and `baselines` are on test data, with the last weights. `validation` are the last validation scores;
    `best` those of the weights in `best/`, None without evaluation during the run. `loss` is the recent training loss,
    None if every update was skipped. `steps` are fewer than the recipe's after early stopping. `seconds` is the whole
    run, with the time before a resume and without the baselines; `step_seconds` is the updates alone.
    """

    folder: Path
    steps: int
    seconds: float
    step_seconds: float
    num_parameters: int
    num_target_tokens: int
    loss: float | None
    validation: Scores
    best: Best | None
    scores: Scores
    baselines: Scores


def train(
    recipe: Recipe,
    folder: Path,
    reporter: Reporter,
    *,
    resume_run: bool = False,
    parallel: Parallel | None = None,
    make: Callable[[Recipe], Task] = make_task,
) -> TrainResult:
    """Trains from fresh weights, or resumes an interrupted run of the same recipe.

    Args:
        recipe: with data.
        folder: made if missing; a checkpoint in it is replaced. To resume, every process must see the same folder.
        reporter: shows progress.
        resume_run: continue from the folder's resume file.
        parallel: this process among others; None for a single process.
        make: prepares the data.

    Raises:
        TaskError, ResumeError, SetupError, ParallelError, OSError: before the first step.
        TrainingError: when the run cannot continue; the message names the checkpoint that is left.
        Terminated: when SIGTERM or Ctrl-C ended it.
    """
    started = time.perf_counter()
    config = recipe_config(recipe)
    parallel = alone(config) if parallel is None else parallel
    task, model = prepare(recipe, reporter, parallel, make)
    interruption = Interruption()
    run = _Run(recipe, task, model, folder, reporter, parallel, interruption)
    parallel.check_same(run.state.identity)
    run.begin(started, resume_run=resume_run)
    run.open_curves()
    with interruption:
        try:
            run.train()
            interruption.end_at_once()
            return run.finish()
        except (StopRequested, Interrupted):
            raise Terminated(run.step, folder, interruption.number or signal.SIGTERM) from None
        except (TrainingError, TaskError, ParallelError, OSError, torch.OutOfMemoryError) as error:
            raise TrainingError(f"{_one_line(error)}; {run.describe_saved()}") from error


def recipe_config(recipe: Recipe) -> TrainConfig:
    """The recipe's training configuration.

    Raises:
        TaskError: when the recipe has no data or no training.
    """
    if recipe.train is None or recipe.data is None:
        raise TaskError(f"{recipe.name} has no data to train on")
    return recipe.train


def prepare(
    recipe: Recipe, reporter: Reporter, parallel: Parallel, make: Callable[[Recipe], Task]
) -> tuple[Task, Network]:
    """Reads the data, builds the model on the CPU, and reports its cost.

    Raises:
        TaskError: when the data are missing or do not fit the model.
    """
    config = recipe_config(recipe)
    reporter.say(f"reading {recipe.data.source if recipe.data else recipe.name}")
    task = parallel.together(lambda: make(recipe))
    for note in task.facts.get("notes", ()):
        reporter.say(note)
    model = build(fit_vocabulary(recipe.model, task), config.seed)
    reporter.say(summary(model.config))
    return task, model


class _Run:
    """The state of one run: the loop, its progress, and which step is saved."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        model: Network,
        folder: Path,
        reporter: Reporter,
        parallel: Parallel,
        interruption: Interruption,
    ) -> None:
        self._recipe = recipe
        self._config = recipe_config(recipe)
        self._task = task
        self._model = model
        self._reporter = reporter
        self._parallel = parallel
        # Before FSDP shards the parameters.
        self._num_parameters = num_parameters(model)
        self._tokenizers = {name: tokenizer.to_json() for name, tokenizer in task.tokenizers.items()}
        self._folder = RunFolder(folder, model.config, self._tokenizers)
        self._loop = Loop(model, task.batch, self._config, parallel, stop=interruption.is_requested)
        self._meter = Meter()
        self._curves: CurveLog  # in the first process
        self._saved_step: int | None = None
        self.state = RunState(
            identity=record.identity(model.config, self._config, task, self._tokenizers),
            environment=record.environment(parallel, self._loop.precision),
        )

    @property
    def step(self) -> int:
        """Updates done."""
        return self._loop.step

    def begin(self, started: float, *, resume_run: bool) -> None:
        """Starts fresh, or restores the last saved state."""
        self._started = started
        path = self._folder.state
        if resume_run:
            self.state = self._parallel.together(lambda: resume.load(path, self._loop, self.state.identity))
            self._restore()
        elif path.exists():
            self._reporter.say(f"starting over: the interrupted run in {path.parent} is dropped (--resume keeps it)")
        self._parallel.on_first(partial(self._folder.clear, keeps_run=resume_run))

    def _restore(self) -> None:
        self._reporter.say(f"resuming after step {self.step}")
        environment = record.environment(self._parallel, self._loop.precision)
        if changes := resume.describe_differences(environment, self.state.environment):
            self._reporter.say("resuming, but not bit for bit: " + "; ".join(changes))
        self._started -= self.state.seconds
        self._meter = Meter(**self.state.meter)
        self.state = replace(self.state, environment=environment)
        self._saved_step = self.step

    def open_curves(self) -> None:
        """Opens the curves in the first process; drops points after the state that is resumed."""
        if self._parallel.is_first:
            path = self._folder.path / curves.CURVES
            self._curves = CurveLog(path, curves.read(path, self.step) if self._saved_step is not None else [])

    def train(self) -> None:
        """Runs the remaining steps.

        Raises:
            StopRequested: when a signal arrived; the state is saved.
        """
        try:
            while not self._is_over():
                self._count(self._loop.update())
                self._report()
        except StopRequested:
            if self._saved_step != self.step:
                self._save(best=False)
            raise

    def _is_over(self) -> bool:
        patience = self._config.patience
        return self.step == self._config.steps or 0 < patience <= self.state.num_without_improvement

    def _count(self, update: Update) -> None:
        self._meter.add(update)
        self.state = replace(
            self.state,
            step=self.step,
            num_target_tokens=self.state.num_target_tokens + update.num_targets,
            seconds=self.state.seconds + update.seconds,
            num_skipped=(self.state.num_skipped[0] + update.skipped, self._loop.num_skipped_in_row),
        )

    def _report(self) -> None:
        """Logs a point, evaluates and saves, in this order, where the step is due."""
        is_last = self.step == self._config.steps
        if is_last or self.step % self._config.log_every == 0:
            self._log()
        improved = False
        if is_last or _is_due(self.step, self._config.evaluate_every):
            improved = self._evaluate()
        if self._is_over():
            self._log()
        # A new best is saved with its state, so that a resumed run refers to the best weights on disk.
        saves = self._is_over() or _is_due(self.step, self._config.checkpoint_every)
        if saves or (improved and self._config.checkpoint_every):
            self._save(best=improved)
        elif improved:
            self._write_best(self._full_weights())

    def _log(self) -> None:
        """Adds a point of the curve over the steps since the last one, if there are any."""
        if not self._meter.num_steps:
            return
        point = self._meter.point()
        left = (self._config.steps - self.step) * self.state.seconds / self.step
        loss = point.get("loss", math.nan)
        self._reporter.update(Progress(self.step, self._config.steps, loss, point["tokens_per_second"], left))
        self._append(
            {
                **point,
                "step": self.step,
                "num_target_tokens": self.state.num_target_tokens,
                "num_skipped": self.state.num_skipped[0],
                "seconds": self.state.seconds,
            }
        )
        self.state = replace(self.state, loss=point.get("loss", self.state.loss))
        self._meter = Meter()

    def _append(self, point: Point) -> None:
        self._parallel.on_first(lambda: self._curves.append(point))

    def _evaluate(self) -> bool:
        """Scores the model on validation data; returns whether it is the best of the run."""
        with self._parallel.evaluating(self._model):
            # Rounding may differ between processes; decisions based on a score must not.
            scores = record.json_scores(self._parallel.broadcast(dict(self._task.validate(self._model))))
        self._append({"step": self.step, "scores": scores})
        self._reporter.say(f"step {self.step}: {_describe(scores)}")
        criterion, best = self._task.criterion, self.state.best
        score = scores[criterion.name]
        if not isinstance(score, float):
            raise TrainingError(f"validation {criterion.name} is {score} at step {self.step}")
        self.state = replace(self.state, validation=scores)
        if not self._config.evaluate_every:
            return False
        if not criterion.improves(score, None if best is None else float(best.scores[criterion.name])):
            self.state = replace(self.state, num_without_improvement=self.state.num_without_improvement + 1)
            return False
        self.state = replace(self.state, best=Best(self.step, scores), num_without_improvement=0)
        return True

    def _save(self, *, best: bool) -> None:
        """Writes the checkpoint and the resume state, and the best checkpoint if it is one; a collective call."""
        weights = self._full_weights()
        optimizer_state = self._parallel.full_tensors(resume.optimizer_tensors(self._loop.optimizers))
        scaler = self._loop.scaler
        self.state = replace(
            self.state, meter=asdict(self._meter), scaler=None if scaler is None else scaler.state_dict()
        )
        # The best first: if killed in between, a resumed run reaches the same best and writes it again.
        if best:
            self._write_best(weights)

        def write() -> None:
            self._curves.flush()
            self._folder.write_last(weights, optimizer_state, self.state, self._manifest())

        self._parallel.on_first(write)
        self._saved_step = self.step

    def _write_best(self, weights: dict[str, torch.Tensor]) -> None:
        self._parallel.on_first(lambda: self._folder.write_best(weights, self._manifest()))

    def _full_weights(self) -> dict[str, torch.Tensor]:
        return self._parallel.full_tensors(dict(self._model.named_parameters()))

    def describe_saved(self) -> str:
        """Which step a run that failed can be resumed from."""
        if self._saved_step is None:
            return "nothing of this run was saved"
        return f"{self._folder.path} holds step {self._saved_step}, --resume continues from there"

    def finish(self) -> TrainResult:
        """Scores the last weights on test data, draws the curves, deletes the resume state."""
        self._reporter.say("scoring on test data")
        with self._parallel.evaluating(self._model):
            scores = record.json_scores(self._parallel.broadcast(dict(self._task.test(self._model))))
        seconds = time.perf_counter() - self._started
        baselines: Scores = {}
        if self._parallel.is_first:
            self._reporter.say("measuring the baselines")
            baselines = record.json_scores(self._task.baselines())
        if self.state.best is not None:
            best = self.state.best
            self._reporter.say(f"best is step {best.step}: {_describe(best.scores)}; in {self._folder.best}")
        result = TrainResult(
            folder=self._folder.path,
            steps=self.step,
            seconds=seconds,
            step_seconds=self.state.seconds,
            num_parameters=self._num_parameters,
            num_target_tokens=self.state.num_target_tokens,
            loss=self.state.loss,
            validation=self.state.validation,
            best=self.state.best,
            scores=scores,
            baselines=baselines,
        )
        self._parallel.on_first(partial(self._write_result, result))
        return result

    def _write_result(self, result: TrainResult) -> None:
        finished = {
            "finished": True,
            "train_seconds": result.seconds,
            "scores": dict(result.scores),
            "baselines": dict(result.baselines),
        }
        title = f"{self._recipe.name}: {self._num_parameters:,} parameters"
        self._folder.finish(self._curves.points, title, {**self._manifest(), **finished})

    def _manifest(self) -> dict[str, Any]:
        return record.manifest(
            self._recipe,
            self._task.facts,
            self._config,
            self.state,
            num_parameters=self._num_parameters,
            seconds=time.perf_counter() - self._started,
            device=self._parallel.device.type,
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _describe(scores: Scores) -> str:
    return ", ".join(f"{name} {score:.4f}" for name, score in scores.items() if not isinstance(score, str))


def _one_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
