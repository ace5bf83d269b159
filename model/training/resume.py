"""The state to resume an interrupted run from, in one safetensors file without pickle.

Weights and optimizer state are unsharded tensors, whatever the number of processes. The run's progress and identity are
JSON in the file's header. The position in the data is the step: batches and dropout masks are functions of their index.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.checkpoint import write_tensors
from model.spec.files import StagedFiles
from model.training.loop import Loop
from model.training.parallel import Parallel
from model.training.task import Scores

STATE = "resume.safetensors"
_HEADER = "run"


class ResumeError(Exception):
    """The state to resume from is missing, damaged or another run's."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The progress of a run.

    Attributes:
        identity: what must be equal for the run to be resumed: configurations, data, tokenizers.
        environment: what else the last bits depend on; a run may resume in another, but not bit for bit.
        step: updates done.
        num_target_tokens: labels predicted so far.
        seconds: spent on updates so far.
        num_skipped: updates skipped because a gradient overflowed float16: all, and the current series.
        meter: sums since the last point of the curve.
        loss: of the last point of the curve; None before the first.
        validation: the last scores.
        best: None before the first score.
        num_without_improvement: scores since the best.
        scaler: state of float16's gradient scaler; None in other precisions.
    """

    identity: Mapping[str, Any]
    environment: Mapping[str, Any]
    step: int = 0
    num_target_tokens: int = 0
    seconds: float = 0.0
    num_skipped: tuple[int, int] = (0, 0)
    meter: Mapping[str, Any] = field(default_factory=dict)
    loss: float | None = None
    validation: Scores = field(default_factory=dict)
    best: Best | None = None
    num_without_improvement: int = 0
    scaler: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Best:
    """The best validation scores so far and their step."""

    step: int
    scores: Scores


def optimizer_tensors(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """All optimizer state by names that do not depend on the number of processes; shards stay shards."""
    tensors = {}
    for index, optimizer in enumerate(optimizers):
        for parameter, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                # AdamW and Muon keep tensors only; anything else would be lost silently.
                if not isinstance(value, Tensor):
                    raise TypeError(f"optimizer state {name} is a {type(value).__name__}, not a tensor")
                tensors[f"optimizer.{index}.{parameter}.{name}"] = value
    return tensors


def stage(
    files: StagedFiles, weights: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor], state: RunState
) -> None:
    """Stages the file; all tensors are unsharded."""
    tensors = {**{f"model.{name}": tensor for name, tensor in weights.items()}, **optimizer_state}
    header = {_HEADER: json.dumps(asdict(state), sort_keys=True, allow_nan=False)}
    files.add(STATE, partial(write_tensors, tensors, header))


def load(path: Path, loop: Loop, identity: Mapping[str, Any]) -> RunState:
    """Restores weights and optimizer state into a fresh loop for the same run. Every process reads the file.

    Raises:
        ResumeError: when the file is missing or damaged, or another run's; lists every difference in identity.
    """
    try:
        with safe_open(path, framework="pt") as file:
            state = _parse(file.metadata()[_HEADER])
            _check_identity(path, identity, state.identity)
            _load_weights(loop, file)
            for index, optimizer in enumerate(loop.optimizers):
                _load_optimizer(optimizer, f"optimizer.{index}.", file, loop.parallel)
    except FileNotFoundError:
        raise ResumeError(f"{path} is missing: nothing to resume") from None
    except (SafetensorError, OSError, TypeError, KeyError, ValueError, RuntimeError) as error:
        raise ResumeError(f"{path} is damaged: {error}") from error
    loop.step = state.step
    loop.num_skipped_in_row = state.num_skipped[1]
    if loop.scaler is not None and state.scaler is not None:
        loop.scaler.load_state_dict(dict(state.scaler))
    return state


def _parse(header: str) -> RunState:
    values = json.loads(header)
    best = values.pop("best")
    values["num_skipped"] = tuple(values["num_skipped"])
    return RunState(**values, best=None if best is None else Best(**best))


def _check_identity(path: Path, identity: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    if differences := describe_differences(identity, stored):
        raise ResumeError(f"{path} belongs to another run: " + "; ".join(differences))


def describe_differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Every entry that differs, as text."""
    return [
        f"{key} is {_show(now.get(key))}, was {_show(before.get(key))}"
        for key in sorted(now.keys() | before.keys())
        if now.get(key) != before.get(key)
    ]


def _load_weights(loop: Loop, file: Any) -> None:
    with torch.no_grad():
        for name, parameter in loop.model.named_parameters():
            parameter.copy_(loop.parallel.shard_like(file.get_tensor(f"model.{name}"), parameter))


def _load_optimizer(optimizer: torch.optim.Optimizer, prefix: str, file: Any, parallel: Parallel) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name in file.keys():  # noqa: SIM118 — not a mapping
        if name.startswith(prefix):
            index, key = name.removeprefix(prefix).split(".", 1)
            state.setdefault(int(index), {})[key] = parallel.shard_like(file.get_tensor(name), parameters[int(index)])
    # The groups come from the configuration; learning rates are set at every step.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _show(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
