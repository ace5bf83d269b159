"""What each part needs of the interpreter that runs it: looked up before anything is run, and told by name.

    python -m benchmarks.gpu.needs DEVICE [PART ...]

prints what is here and what each part lacks, as one JSON object on the last line: asked of a process of its own, so
that whoever starts others never holds the device. Standard library only, so that it works where everything else is
missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

from loadtest import machine
from model.spec.artifact import Device

_TORCH = ("numpy", "tokenizers", "torch")
_GRAPHS = (*_TORCH, "jinja2", "onnx", "onnxruntime", "onnxscript", "safetensors")
MODULES: Mapping[str, tuple[str, ...]] = {
    "ceilings": _TORCH,
    "parity": _GRAPHS,
    "captured": _GRAPHS,
    "batches": _GRAPHS,
    "speed": (*_GRAPHS, "transformers"),
    "small": (*_GRAPHS, "transformers"),
    "law": (*_GRAPHS, "scipy"),
    "translation": (*_GRAPHS, "babel", "matplotlib", "rich", "sacrebleu"),
}
"""Modules by part."""

_WITHOUT_GRAPHS = ("ceilings",)
_TOLD = (
    *("torch", "onnxruntime", "onnxruntime-gpu", "onnx", "onnxscript", "transformers", "triton", "numpy"),
    *("tokenizers", "sacrebleu", "scipy"),
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the check is run on, for people; versions by package; and by part what it lacks here."""

    machine: str
    versions: dict[str, str]
    lacking: dict[str, list[str]]

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Surroundings:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


def look(device: Device, parts: Sequence[str]) -> Surroundings:
    """What is here, and what it takes to run parts."""
    lacking = {part: missing(part, device) for part in parts}
    return Surroundings(_describe(device), versions(), lacking)


def missing(part: str, device: Device) -> list[str]:
    """What a part lacks here, for people; empty when it can be run."""
    lacking = [name for name in MODULES[part] if importlib.util.find_spec(name) is None]
    if device is Device.CUDA and "torch" not in lacking:
        import torch

        if not torch.cuda.is_available():
            lacking.append("a CUDA device that torch sees")
    if device is Device.CUDA and part not in _WITHOUT_GRAPHS and not {"numpy", "onnxruntime"} & set(lacking):
        # Not before what it imports is known to be there.
        from service.engine.sessions.cuda_provider import find_cuda_problem

        if problem := find_cuda_problem():
            lacking.append(f"ONNX Runtime on CUDA ({problem})")
    return lacking


def versions() -> dict[str, str]:
    """Of what the figures depend on, as far as it is installed."""
    found = {}
    for name in _TOLD:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # Two packages bring one module: what counts is which of them is found first.
    if {"onnxruntime", "onnxruntime-gpu"} <= found.keys():
        del found["onnxruntime-gpu"]
        found["onnxruntime"] = str(importlib.import_module("onnxruntime").__version__)
    return found


def _describe(device: Device) -> str:
    host = machine.describe()
    name = f"{host['processor']}, {host['cores']} processors, Python {platform.python_version()}"
    if device is Device.CPU:
        return name
    try:
        import torch

        card = torch.cuda.get_device_properties(0)
    except (ImportError, RuntimeError, AssertionError):
        return name
    return f"{card.name}, {card.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}; {name}"


if __name__ == "__main__":
    print(look(Device(sys.argv[1]), sys.argv[2:]).to_json())
