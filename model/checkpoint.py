"""A trained model on disk: one folder of plain JSON and safetensors, nothing pickled.

    config.json         the `ModelConfig`
    model.safetensors   every trained tensor once, shared ones under their first name
    tokenizer.json      (+ target_tokenizer.json where source and target differ)
    run.json            how it came about: data hash, versions, settings, scores; and the sha256 of the files above

Each file is written beside its place, flushed to the disk and renamed into it, so that nobody ever meets half of one.
run.json comes last: a folder whose writer was killed between two files holds a run.json that does not name what lies
beside it, and is refused.
Knows nothing of optimisers or data: what a trainer needs to resume, the trainer keeps.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.artifact import TARGET_TOKENIZER, TOKENIZER, hash_file
from model.config import ConfigError, ModelConfig
from model.transformer import Transformer, build

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
RUN = "run.json"
_HASHES = "files"
_HASHED = (CONFIG, WEIGHTS, TOKENIZER, TARGET_TOKENIZER)
_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


class CheckpointError(Exception):
    """A checkpoint folder is incomplete or damaged; `problems` lists everything found."""

    def __init__(self, folder: Path, problems: Sequence[str]) -> None:
        self.folder = folder
        self.problems = tuple(problems)
        super().__init__(f"{folder}: " + "; ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model with its configuration, where it was read from, and run.json, hashes apart, as `training`."""

    config: ModelConfig
    model: Transformer
    folder: Path
    training: Mapping[str, Any]

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of prompts and sources."""
        return self.folder / TOKENIZER

    @property
    def target_tokenizer(self) -> Path:
        """The tokenizer of outputs: the same one unless the folder holds another."""
        path = self.folder / TARGET_TOKENIZER
        return path if path.is_file() else self.tokenizer


def save(
    folder: Path, model: Transformer, config: ModelConfig, tokenizers: Mapping[str, str], manifest: Mapping[str, Any]
) -> None:
    """Writes or replaces a checkpoint.

    Args:
        folder: made if missing; other files in it are left alone.
        model: any device and float dtype, kept as it is.
        config: the model's.
        tokenizers: texts by file name: tokenizer.json and, if need be, target_tokenizer.json.
        manifest: JSON-ready contents of run.json, to which "files" is added.

    Raises:
        ValueError: when the configuration is not the model's, the tokenizers' names are not as above, or the manifest
            has a "files" of its own.
    """
    if config != model.config:
        raise ValueError("the configuration is not the model's")
    if TOKENIZER not in tokenizers or tokenizers.keys() - {TOKENIZER, TARGET_TOKENIZER}:
        raise ValueError(f"tokenizers are {sorted(tokenizers)}, must be {TOKENIZER} and at most {TARGET_TOKENIZER}")
    if _HASHES in manifest:
        raise ValueError(f"the manifest has an entry {_HASHES!r}")
    folder.mkdir(parents=True, exist_ok=True)
    if TARGET_TOKENIZER not in tokenizers:
        (folder / TARGET_TOKENIZER).unlink(missing_ok=True)
    # Parameters alone: position tables are functions of the configuration, and a shared tensor is listed once.
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.named_parameters()}
    files = {
        CONFIG: _json(config.to_dict()).encode(),
        **{name: text.encode() for name, text in tokenizers.items()},
        WEIGHTS: safetensors.torch.save(tensors, metadata={"format": "pt"}),
    }
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    run = _json({**manifest, _HASHES: hashes})
    for name, data in files.items():
        write_atomically(folder / name, data)
    write_atomically(folder / RUN, run.encode())


def load(folder: Path) -> Checkpoint:
    """Reads a checkpoint onto the CPU as float32, in evaluation mode.

    Raises:
        CheckpointError: listing every missing file, every file that is not the one that run.json names, and every
            missing, unexpected or misshapen tensor by name.
    """
    problems = [f"{name} is missing" for name in (CONFIG, WEIGHTS, TOKENIZER, RUN) if not (folder / name).is_file()]
    config, training = _read_config(folder, problems), _read_run(folder, problems)
    if config is None:
        raise CheckpointError(folder, problems)
    model = build(config, seed=0)
    if (folder / WEIGHTS).is_file():
        _read_weights(folder, model, problems)
    if problems:
        raise CheckpointError(folder, problems)
    return Checkpoint(config=config, model=model.eval(), folder=folder, training=training)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a temporary file beside `path`, flushes it to the disk and renames it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # The rename itself is durable only once the folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _read_json(folder: Path, name: str, problems: list[str]) -> dict[str, Any]:
    """A JSON object, or an empty one and a problem; a missing file is already known."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{name}: {error}")
        return {}
    if not isinstance(values, dict):
        problems.append(f"{name} is not a JSON object")
        return {}
    return values


def _read_run(folder: Path, problems: list[str]) -> dict[str, Any]:
    num_problems = len(problems)
    values = _read_json(folder, RUN, problems)
    if len(problems) == num_problems and (folder / RUN).is_file():
        problems += _check_hashes(folder, values.pop(_HASHES, None))
    return values


def _check_hashes(folder: Path, hashes: object) -> list[str]:
    """Which files are not those that run.json was written with; a missing one that is always needed is known."""
    if not isinstance(hashes, dict):
        return [f"{RUN} does not name the files beside it"]
    problems = []
    for name in _HASHED:
        if not (folder / name).is_file():
            problems += [f"{name} is missing"] if name == TARGET_TOKENIZER and name in hashes else []
        elif hash_file(folder / name).sha256 != hashes.get(name):
            problems.append(f"{name} is not the file that {RUN} names")
    return problems


def _read_config(folder: Path, problems: list[str]) -> ModelConfig | None:
    num_problems = len(problems)
    values = _read_json(folder, CONFIG, problems)
    if len(problems) > num_problems or not (folder / CONFIG).is_file():
        return None
    try:
        return ModelConfig.from_dict(values)
    except ConfigError as error:
        problems += [f"{CONFIG}: {problem}" for problem in error.problems]
        return None


def _read_weights(folder: Path, model: Transformer, problems: list[str]) -> None:
    """Copies the tensors into the model, comparing every name and shape before any is read."""
    expected: dict[str, Tensor] = dict(model.named_parameters())
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            stored = set(file.keys())
            problems += [f"{WEIGHTS} lacks {name}" for name in sorted(expected.keys() - stored)]
            problems += [f"{WEIGHTS} has unexpected {name}" for name in sorted(stored - expected.keys())]
            for name in sorted(stored & expected.keys()):
                piece = file.get_slice(name)
                shape, wanted = list(piece.get_shape()), list(expected[name].shape)
                if shape != wanted:
                    problems.append(f"{WEIGHTS}: {name} is {shape}, must be {wanted}")
                if piece.get_dtype() not in _FLOAT_DTYPES:
                    problems.append(f"{WEIGHTS}: {name} is {piece.get_dtype()}, must be floating")
            if not problems:
                with torch.no_grad():
                    for name, parameter in expected.items():
                        parameter.copy_(file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        problems.append(f"{WEIGHTS}: {error}")
