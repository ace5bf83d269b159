"""`python -m service plan`: the memory that serving takes, and flags with which it fits. Loads no model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from model.spec.artifact import MANIFEST, ArtifactError, Manifest, read_manifest
from model.spec.artifact import Device as BuiltFor
from model.spec.config import ConfigError, ModelConfig
from service.config import PlanConfig
from service.engine.kv.budget import memory_needs
from service.engine.kv.process_memory import available_memory
from service.engine.types import Device
from service.errors import StartupError
from service.repository.devices import artifact_folder, model_folders
from service.repository.kv_pool import KVPool
from service.repository.memory_plan import PROCESS_BYTES, MemoryPlan, as_flag, expected_manifest, in_units, plan_memory

_CHECKPOINT = "config.json"
# Of a checkpoint; a folder of another program's has none.
_RUN = "run.json"


def plan(config: PlanConfig, out: TextIO = sys.stdout) -> int:
    """Prints the plan; returns the exit status.

    Raises:
        StartupError: when the folder cannot be read, or its models do not fit, with the numbers.
    """
    manifests = manifests_of(Path(config.folder), config)
    memory = available_memory() if config.memory is None else config.memory
    rows, chunk = config.max_batch_size, config.prefill_chunk
    found = plan_memory(manifests, rows, chunk, memory, config.kv_memory)
    # Refuses parts that are too small, as the server does.
    KVPool(found.kv_bytes, {}, None, {name: memory_needs(each, rows, chunk) for name, each in manifests.items()})
    out.writelines(f"{line}\n" for line in lines_of(found, manifests))
    return 0


def manifests_of(folder: Path, config: PlanConfig) -> Mapping[str, Manifest]:
    """The manifests of an artifact or a folder of artifacts, or the one that a checkpoint's export would have.

    Raises:
        StartupError: when there is none of them, or one is for a GPU.
    """
    try:
        if (folder / _CHECKPOINT).is_file():
            return {folder.resolve().name: _expected(folder, config)}
        found = {each.resolve().name: _read(each) for each in _artifacts(folder)}
    except ArtifactError as error:
        raise StartupError([f"{folder}: {problem}" for problem in error.problems]) from error
    except OSError as error:
        raise StartupError([f"{folder} cannot be read: {error.strerror}"]) from error
    if not found:
        raise StartupError([f"{folder} is no artifact, no folder of artifacts, and no checkpoint"])
    return found


def lines_of(plan: MemoryPlan, manifests: Mapping[str, Manifest]) -> Iterator[str]:
    """The plan as text."""
    for name, manifest in manifests.items():
        config, each = manifest.config, plan.models[name]
        context = f"context {config.context}"
        if config.is_encoder_decoder:
            context += f", source {config.source_context}"
        token = each.least_kv // each.context
        yield (
            f"{name}: {manifest.precision}, K/V in {manifest.kv_cache.precision}, {context}; K/V of a token "
            f"{token / 1024:g} KiB, of a row at full length {in_units(each.least_kv)}, of all {plan.max_batch_size} "
            f"rows {in_units(each.whole_kv)}"
        )
    uses = {
        "process": PROCESS_BYTES,
        "weights": plan.sum_of("weights"),
        "tokenizers, golden cases": plan.sum_of("texts"),
        "logits": plan.sum_of("logits"),
        "activations of a step": plan.sum_of("steps"),
        "pre-faulted memory": plan.prefaulted,
        "K/V": plan.kv_bytes,
        "peak, once K/V are full": plan.peak,
    }
    if plan.memory is not None:
        uses |= {"reserve": plan.reserve, "memory": plan.memory}
    for use, num_bytes in uses.items():
        yield f"  {use:<25}{in_units(num_bytes):>10}"
    if plan.is_cut:
        rows = plan.kv_bytes * plan.max_batch_size / plan.whole_kv
        yield f"K/V hold {rows:.1f} of {plan.max_batch_size} rows at full length; shorter requests share them"
    yield f"serve with: --kv-memory {as_flag(plan.kv_bytes)} --max-batch-size {plan.max_batch_size}"


def _artifacts(folder: Path) -> Iterator[Path]:
    """The folder itself, or its subfolders, as far as they have a manifest."""
    own = artifact_folder(folder, Device.CPU)
    if (own / MANIFEST).is_file():
        yield folder
        return
    for each in model_folders(folder):
        if (artifact_folder(each, Device.CPU) / MANIFEST).is_file():
            yield each


def _read(folder: Path) -> Manifest:
    manifest = read_manifest(artifact_folder(folder, Device.CPU))
    if manifest.device is BuiltFor.CUDA:
        raise StartupError([f"{folder} is for {BuiltFor.CUDA}: a plan is for a CPU, a GPU's free memory is used"])
    return manifest


def _expected(folder: Path, config: PlanConfig) -> Manifest:
    """What exporting a checkpoint would write."""
    if not (folder / _RUN).is_file():
        raise StartupError([f"{folder} is no checkpoint: bring it with python -m model import"])
    try:
        values = json.loads((folder / _CHECKPOINT).read_text(encoding="utf-8"))
        return expected_manifest(ModelConfig.from_dict(values), config.precision, config.kv_cache)
    except ConfigError as error:
        raise StartupError([f"{folder / _CHECKPOINT}: {problem}" for problem in error.problems]) from error
    except ValueError as error:
        raise StartupError([f"{folder / _CHECKPOINT}: {error}"]) from error
