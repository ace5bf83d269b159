"""One of the two processes of `test_distributed.py`: does what the tests ask about, and writes down the answers."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.__main__ import main as cli
from model.nn.transformer import build
from model.spec.config import Architecture
from model.training.loop import Loop, TrainingError, Update
from model.training.parallel import Parallel, ParallelError, start
from model.training.presets import Recipe
from model.training.sharding import full_tensor
from model.training.trainer import Terminated, train
from tests.training_runs import FAMILIES, FakeTask, Quiet, make_batches, make_recipe

STEPS = 20
KINDS = ("ddp", "fsdp")
COMPARISONS = tuple(f"{family}-{kind}" for family in FAMILIES for kind in KINDS)
RESUMED = {2 * 5 + 1: lambda: signal.raise_signal(signal.SIGTERM)}
"""In every process's own share of the data, so that each is told to stop before the sixth step."""


def make_compared(family: Architecture, kind: str) -> Recipe:
    """Dropout, smoothing and accumulation, two micro-batches in each process; eight rows of unequal lengths in each."""
    return make_recipe(
        family,
        dropout=0.1,
        steps=STEPS,
        gradient_accumulation=4,
        label_smoothing=0.1,
        optimizer="adamw",
        learning_rate=3e-3,
        schedule="noam",
        warmup_fraction=0.3,
        gradient_clip=0.5,
        parallelism=kind,
    )


def make_resumable(kind: str) -> Recipe:
    """Ten steps that are logged and scored on the way."""
    return make_recipe(
        Architecture.ENCODER_DECODER,
        dropout=0.1,
        steps=10,
        gradient_accumulation=2,
        optimizer="adamw",
        log_every=2,
        evaluate_every=4,
        checkpoint_every=2,
        parallelism=kind,
    )


def train_some(family: Architecture, parallel: Parallel) -> tuple[Loop, list[Update]]:
    recipe = make_compared(family, parallel.kind)
    assert recipe.train is not None
    loop = Loop(build(recipe.model, seed=0), make_batches(recipe.model, recipe.train), recipe.train, parallel)
    return loop, [loop.update() for _ in range(STEPS)]


@cache
def train_alone(family: Architecture) -> tuple[Loop, list[Update]]:
    return train_some(family, Parallel())


def compare(family: Architecture, parallel: Parallel) -> dict[str, Any]:
    loop, updates = train_some(family, parallel)
    alone, updates_alone = train_alone(family)
    pairs = list(zip(loop.model.parameters(), alone.model.parameters(), strict=True))
    local = sum(getattr(mine.detach(), "to_local", mine.detach)().numel() for mine, _ in pairs)
    return {
        "losses": [update.loss for update in updates],
        "alone": [update.loss for update in updates_alone],
        "num_targets": [update.num_targets for update in updates],
        "num_targets_alone": [update.num_targets for update in updates_alone],
        "largest_difference": max((full_tensor(mine.detach()) - other).abs().max().item() for mine, other in pairs),
        "local_share": local / sum(other.numel() for _, other in pairs),
    }


def run(
    kind: str,
    folder: Path,
    at: dict[int, Callable[[], object]] | None = None,
    *,
    resume_run: bool = False,
    sha256: str | None = None,
) -> tuple[str | int, list[str]]:
    """A run's end, the step or what it says, and what was said on the way."""
    recipe = make_resumable(kind)
    assert recipe.train is not None
    reporter = Quiet()

    def make(recipe: Recipe) -> FakeTask:
        task = FakeTask(recipe, at)
        task.facts = {**task.facts, "sha256": sha256 or task.facts["sha256"]}
        return task

    with start(recipe.train) as parallel:
        try:
            end = train(recipe, folder, reporter, parallel=parallel, make=make, resume_run=resume_run).steps
        except Terminated as error:
            return int(str(error).split()[3].rstrip(":")), reporter.lines
        except (TrainingError, ParallelError) as error:
            return str(error), reporter.lines
    return end, reporter.lines


def command(folder: Path) -> tuple[int, str, str]:
    """`python -m model train` as this process: exit status, stdout, stderr."""
    recipe = folder / "recipe"
    out, err = io.StringIO(), io.StringIO()
    overrides = ("steps=4", "gradient_accumulation=2", "optimizer=adamw", "parallelism=fsdp", "evaluate_every=2")
    arguments = ["train", str(recipe / "tiny.json"), "--out", str(folder / "command")]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli([*arguments, *(text for override in overrides for text in ("--set", override))])
    return status, out.getvalue(), err.getvalue()


def gather(value: object) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def main(folder: Path) -> None:
    config = make_resumable("ddp").train
    assert config is not None
    # One group for all that follows.
    with start(config) as parallel:
        measured = measure(folder, parallel.rank)
        # As a default argument the group would outlive `start`, and its threads can abort a process at its end.
        assert inspect.signature(torch.distributed.nn.functional.broadcast).parameters["group"].default is None
    assert not dist.is_initialized()
    if parallel.is_first:
        (folder / "measured.json").write_text(json.dumps(measured), encoding="utf-8")


def measure(folder: Path, rank: int) -> dict[str, Any]:
    measured: dict[str, Any] = {"comparisons": {}, "resumed": {}, "stopped": {}}
    for kind in KINDS:
        for family in FAMILIES:
            config = make_compared(family, kind).train
            assert config is not None
            with start(config) as parallel:
                measured["comparisons"][f"{family}-{kind}"] = compare(family, parallel)
        copy(folder / "from-one", folder / f"{kind}-from-one", rank)
        end, lines = run(kind, folder / f"{kind}-from-one", resume_run=True)
        assert end == 10
        measured["resumed"][kind] = [line for line in lines if "bit for bit" in line]
        assert run(kind, folder / f"{kind}-from-two", RESUMED)[0] == 5
        # Only the second process's share of the data holds index 11.
        stop = {11: lambda: signal.raise_signal(signal.SIGTERM)}
        measured["stopped"][kind] = gather(run(kind, folder / f"{kind}-stopped", stop)[0])
    measured["disk_full"] = gather(run("ddp", folder / "disk", {2 * 3: limit_files})[0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    measured["other_data"] = gather(run("ddp", folder / "other", sha256=str(rank))[0])
    measured["command"] = gather(command(folder))
    return measured


def copy(source: Path, target: Path, rank: int) -> None:
    if rank == 0:
        shutil.copytree(source, target)
    dist.barrier()


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
