"""What a run records of itself: run.json, and the identity and environment that a resumed run is compared with."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from model.spec.recurrent import NetworkConfig
from model.training.config import TrainConfig, TrainPrecision
from model.training.parallel import Parallel
from model.training.presets import Recipe
from model.training.resume import RunState
from model.training.task import Scores, Task

_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "babel")
# Settings that change no weights, or only their rounding: they may differ when a run is resumed.
_FREE_SETTINGS = frozenset(
    {"log_every", "evaluate_every", "checkpoint_every", "patience", "device", "precision", "parallelism"}
)


def identity(model: NetworkConfig, config: TrainConfig, task: Task, tokenizers: Mapping[str, str]) -> dict[str, Any]:
    """Everything that must be equal for a run to be resumed; `tokenizers` are texts by file name."""
    settings = {key: value for key, value in config.to_dict().items() if key not in _FREE_SETTINGS}
    return {
        **{f"model.{key}": value for key, value in model.to_dict().items()},
        **{f"train.{key}": value for key, value in settings.items()},
        "data": task.facts["sha256"],
        **{name: hashlib.sha256(text.encode()).hexdigest() for name, text in tokenizers.items()},
    }


def environment(parallel: Parallel, precision: TrainPrecision) -> dict[str, Any]:
    """What the last bits of the weights depend on beside the identity."""
    device = parallel.device
    is_cpu = device.type == "cpu"
    return {
        "torch": version("torch"),
        "device": torch.backends.cpu.get_cpu_capability() if is_cpu else torch.cuda.get_device_name(device),
        "num_threads": torch.get_num_threads(),
        "precision": str(precision),
        "world_size": parallel.world_size,
    }


def manifest(
    recipe: Recipe,
    facts: Mapping[str, Any],
    config: TrainConfig,
    state: RunState,
    *,
    num_parameters: int,
    seconds: float,
    device: str,
) -> dict[str, Any]:
    """run.json of an unfinished run; `seconds` is its whole time so far."""
    return {
        "recipe": recipe.name,
        "data": dict(facts),
        "train": config.to_dict(),
        "step": state.step,
        "steps": config.steps,
        "finished": False,
        "precision": state.environment["precision"],
        "device": device,
        "world_size": state.environment["world_size"],
        "num_threads": state.environment["num_threads"],
        "environment": dict(state.environment),
        "num_parameters": num_parameters,
        "num_target_tokens": state.num_target_tokens,
        "num_skipped": state.num_skipped[0],
        "train_seconds": seconds,
        "step_seconds": state.seconds,
        "loss": state.loss,
        "validation": dict(state.validation),
        "best": None if state.best is None else {"step": state.best.step, "validation": dict(state.best.scores)},
        "scores": {},
        "baselines": {},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
    }


def json_scores(scores: Scores) -> dict[str, float | str]:
    """Scores as JSON can hold them: a number that is not finite becomes a text."""
    return {
        name: score if isinstance(score, str) else float(score) if math.isfinite(score) else str(score)
        for name, score in scores.items()
    }
