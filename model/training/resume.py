"""What an interrupted run needs to go on as if nothing had happened, in one safetensors file, nothing pickled.

Weights, optimiser state and the random generator are tensors; how far the run had come, and which run it was, is JSON
in the file's header. The file is replaced atomically: whoever finds one finds a whole one. The position in the data is
the step, because batches are a function of configuration and step alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.checkpoint import write_atomically
from model.transformer import Transformer

STATE = "resume.safetensors"
_HEADER = "run"
_GENERATOR = "generator"


class ResumeError(Exception):
    """There is no state to resume from, it is damaged, or it belongs to another run."""


@dataclass(frozen=True, slots=True)
class RunState:
    """How far a run had come.

    `step` updates are done, `num_target_tokens` were predicted in `seconds` of training. `identity` is everything that
    must be the same for the run to go on: configurations and data.
    """

    step: int
    num_target_tokens: int
    seconds: float
    identity: Mapping[str, Any]


def save(path: Path, model: Transformer, optimizers: Sequence[torch.optim.Optimizer], state: RunState) -> None:
    """Writes or replaces the file."""
    tensors = {_GENERATOR: torch.get_rng_state()}
    tensors |= {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    tensors |= _optimizer_tensors(optimizers)
    header = {_HEADER: json.dumps(asdict(state), sort_keys=True)}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(path, safetensors.torch.save(contiguous, metadata=header))


def load(
    path: Path, model: Transformer, optimizers: Sequence[torch.optim.Optimizer], identity: Mapping[str, Any]
) -> RunState:
    """Puts weights, optimiser state and torch's generator back; they must be freshly made for the same run.

    Raises:
        ResumeError: when the file is missing or damaged, or its identity is another; the differences are listed.
    """
    try:
        with safe_open(path, framework="pt") as file:
            state = RunState(**json.loads(file.metadata()[_HEADER]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — not a mapping
    except FileNotFoundError:
        raise ResumeError(f"{path} is missing: nothing to resume") from None
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
        raise ResumeError(f"{path} is damaged: {error}") from error
    differences = [
        f"{key} is {_show(identity.get(key))}, was {_show(state.identity.get(key))}"
        for key in sorted(identity.keys() | state.identity.keys())
        if identity.get(key) != state.identity.get(key)
    ]
    if differences:
        raise ResumeError(f"{path} belongs to another run: " + "; ".join(differences))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for index, optimizer in enumerate(optimizers):
        _load_optimizer(optimizer, f"optimizer.{index}.", tensors)
    torch.set_rng_state(tensors[_GENERATOR])
    return state


def _optimizer_tensors(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    tensors = {}
    for index, optimizer in enumerate(optimizers):
        for parameter, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                # Both AdamW and Muon keep tensors only; anything else would be lost in silence.
                if not isinstance(value, Tensor):
                    raise TypeError(f"optimiser state {name} is a {type(value).__name__}, not a tensor")
                tensors[f"optimizer.{index}.{parameter}.{name}"] = value
    return tensors


def _load_optimizer(optimizer: torch.optim.Optimizer, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            parameter, key = name.removeprefix(prefix).split(".", 1)
            state.setdefault(int(parameter), {})[key] = tensor
    # The groups are as configured; learning rates are set anew at every step.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _show(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
