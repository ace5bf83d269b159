"""What each part needs of the interpreter that runs it: looked up before anything is run, and told by name.

Standard library only, so that it works where everything else is missing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib import metadata

from model.artifact import Device

_TORCH = ("numpy", "tokenizers", "torch")
_GRAPHS = (*_TORCH, "jinja2", "onnx", "onnxruntime", "onnxscript", "safetensors")
MODULES: Mapping[str, tuple[str, ...]] = {
    "ceilings": _TORCH,
    "parity": _GRAPHS,
    "captured": _GRAPHS,
    "batches": _GRAPHS,
    "speed": (*_GRAPHS, "transformers"),
    "law": (*_GRAPHS, "scipy"),
    "translation": (*_GRAPHS, "babel", "matplotlib", "rich", "sacrebleu"),
}
"""Modules by part, the parts in the order in which they are run."""
NEEDED_FIRST: Mapping[str, tuple[str, ...]] = {"speed": ("ceilings",)}
"""Parts that others compare with: run before them in the same run, asked for or not."""

_ON_HOST = ("ceilings",)
_CUDA = "CUDAExecutionProvider"
_TOLD = (
    *("torch", "onnxruntime", "onnxruntime-gpu", "onnx", "onnxscript", "transformers", "triton", "numpy"),
    *("tokenizers", "sacrebleu", "scipy"),
)


def missing(part: str, device: Device) -> list[str]:
    """What a part lacks here, for people; empty when it can be run."""
    lacking = [name for name in MODULES[part] if importlib.util.find_spec(name) is None]
    if device is Device.CUDA and "torch" not in lacking:
        import torch

        if not torch.cuda.is_available():
            lacking.append("a CUDA device that torch sees")
    if device is Device.CUDA and part not in _ON_HOST and "onnxruntime" not in lacking:
        import onnxruntime

        if _CUDA not in onnxruntime.get_available_providers():
            lacking.append(f"onnxruntime-gpu (this onnxruntime has no {_CUDA})")
    return lacking


def versions() -> dict[str, str]:
    """Of what the figures depend on, as far as it is installed."""
    found = {}
    for name in _TOLD:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
