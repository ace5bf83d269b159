"""A trained model on disk: one folder of plain JSON and safetensors, nothing pickled.

    config.json         the `ModelConfig`, or the `RecurrentConfig`
    model.safetensors   every trained tensor once, shared ones under their first name
    tokenizer.json      (+ target_tokenizer.json where source and target differ)
    generation.json     imported models only: generation settings (`model.spec.generation`)
    chat.json           if it has a chat template (`model.spec.chat`)
    run.json            provenance: data hash, versions, settings, scores; and the sha256 of the files above

Files are staged and renamed into their places (`model.spec.files`), run.json last: if the writer is killed between two
renames, run.json's hashes do not match, and the folder is refused. The state for resuming is the trainer's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.nn.networks import Network, build_empty
from model.nn.transformer import Transformer
from model.spec.artifact import CHAT, TARGET_TOKENIZER, TOKENIZER, hash_file
from model.spec.config import ConfigError, ModelConfig
from model.spec.files import StagedFiles, write_atomically
from model.spec.generation import GENERATION, GenerationError, GenerationSettings
from model.spec.recurrent import NOT_EXPORTED, NetworkConfig, config_kind

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
RUN = "run.json"
_HASHES = "files"
_OPTIONAL = (TARGET_TOKENIZER, GENERATION, CHAT)
_HASHED = (CONFIG, WEIGHTS, TOKENIZER, *_OPTIONAL)
_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


class CheckpointError(Exception):
    """A checkpoint folder is incomplete or damaged; `problems` lists everything found."""

    def __init__(self, folder: Path, problems: Sequence[str]) -> None:
        self.folder = folder
        self.problems = tuple(problems)
        super().__init__(f"{folder}: " + "; ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyCheckpoint:
    """A network with its configuration and folder; `training` is run.json without hashes.

    Without generation.json, `generation` is that `eos_id` ends outputs.
    """

    config: NetworkConfig
    model: Network
    folder: Path
    training: Mapping[str, Any]
    generation: GenerationSettings

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of prompts and sources."""
        return self.folder / TOKENIZER

    @property
    def target_tokenizer(self) -> Path:
        """The tokenizer of outputs, by default that of prompts."""
        return self.tokenizers.get(TARGET_TOKENIZER, self.tokenizer)

    @property
    def tokenizers(self) -> Mapping[str, Path]:
        """The tokenizers' files by name: one, or two where source and target differ."""
        paths = {name: self.folder / name for name in (TOKENIZER, TARGET_TOKENIZER)}
        return {name: path for name, path in paths.items() if path.is_file()}

    @property
    def chat(self) -> Path | None:
        """The chat template, if there is one."""
        path = self.folder / CHAT
        return path if path.is_file() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(AnyCheckpoint):
    """That of a transformer, which can be exported."""

    config: ModelConfig
    model: Transformer


def save(
    folder: Path, model: Network, config: NetworkConfig, tokenizers: Mapping[str, str], manifest: Mapping[str, Any]
) -> None:
    """Writes or replaces a checkpoint.

    The folder is made if missing, and other files in it stay. The model keeps its float dtype. `tokenizers` are texts
    by file name: tokenizer.json and optionally target_tokenizer.json. `manifest` becomes run.json, with "files" added.

    Raises:
        ValueError: when the configuration is not the model's, the tokenizers' names are wrong, or the manifest has a
            field "files".
        OSError: when the files cannot be written; the old ones are unchanged.
    """
    if config != model.config:
        raise ValueError("the configuration is not the model's")
    with StagedFiles(folder) as files:
        stage(files, dict(model.named_parameters()), config, tokenizers, manifest)
        files.commit()
    tidy(folder, tokenizers)


def stage(
    files: StagedFiles,
    weights: Mapping[str, Tensor],
    config: NetworkConfig,
    tokenizers: Mapping[str, str],
    manifest: Mapping[str, Any],
    extras: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Stages a checkpoint's files, as `save`, for callers that commit further files with them; call `tidy` afterwards.

    `weights` are all parameters under their first names, without position tables. `extras` are the texts of
    generation.json and chat.json, by file name.
    """
    if TOKENIZER not in tokenizers or tokenizers.keys() - {TOKENIZER, TARGET_TOKENIZER}:
        raise ValueError(f"tokenizers are {sorted(tokenizers)}, must be {TOKENIZER} and at most {TARGET_TOKENIZER}")
    if extras.keys() - {GENERATION, CHAT}:
        raise ValueError(f"extras are {sorted(extras)}, must be at most {GENERATION} and {CHAT}")
    if _HASHES in manifest:
        raise ValueError(f"the manifest has an entry {_HASHES!r}")
    texts = {CONFIG: _json(config.to_dict()), **tokenizers, **extras}
    staged = {name: files.add(name, partial(_write_text, text)) for name, text in texts.items()}
    staged[WEIGHTS] = files.add(WEIGHTS, partial(write_tensors, weights, {"format": "pt"}))
    hashes = {name: hash_file(path).sha256 for name, path in staged.items()}
    files.add(RUN, partial(_write_text, _json({**manifest, _HASHES: hashes})))


def tidy(folder: Path, names: Collection[str]) -> None:
    """Removes an earlier checkpoint's optional files that are not among this one's `names`."""
    for name in _OPTIONAL:
        if name not in names:
            (folder / name).unlink(missing_ok=True)


def amend(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replaces the contents of run.json, and keeps its hashes."""
    hashes = json.loads((folder / RUN).read_text(encoding="utf-8"))[_HASHES]
    write_atomically(folder / RUN, _json({**manifest, _HASHES: hashes}).encode())


def remove(folder: Path) -> None:
    """Removes a checkpoint, if there is one, and its folder if that is empty then."""
    for name in (RUN, *_HASHED):
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def write_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path) -> None:
    """Writes a safetensors file; tensors on the CPU are not copied.

    Raises:
        OSError: when the file cannot be written.
    """
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(ready, path, metadata=dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{path.parent}: {error}") from error


def load(folder: Path) -> Checkpoint:
    """Reads a transformer's checkpoint onto the CPU as float32, in evaluation mode.

    Raises:
        CheckpointError: as `load_any`; saying why a recurrent network is not taken.
    """
    found = load_any(folder)
    if not (isinstance(found.config, ModelConfig) and isinstance(found.model, Transformer)):
        raise CheckpointError(folder, [NOT_EXPORTED])
    return Checkpoint(
        config=found.config, model=found.model, folder=folder, training=found.training, generation=found.generation
    )


def load_any(folder: Path) -> AnyCheckpoint:
    """Reads a checkpoint onto the CPU as float32, in evaluation mode.

    Raises:
        CheckpointError: listing every missing file, every file whose hash differs from run.json's, and every missing,
            unexpected or misshapen tensor.
    """
    problems = [f"{name} is missing" for name in (CONFIG, WEIGHTS, TOKENIZER, RUN) if not (folder / name).is_file()]
    config, training = _read_config(folder, problems), _read_run(folder, problems)
    if config is None:
        raise CheckpointError(folder, problems)
    generation = _read_generation(folder, config, problems)
    model = build_empty(config)
    if (folder / WEIGHTS).is_file():
        _read_weights(folder, model, problems)
    if problems:
        raise CheckpointError(folder, problems)
    return AnyCheckpoint(config=config, model=model.eval(), folder=folder, training=training, generation=generation)


def _write_text(text: str, path: Path) -> None:
    path.write_bytes(text.encode())


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _read_json(folder: Path, name: str, problems: list[str]) -> dict[str, Any]:
    """A JSON object, or an empty one and a problem; a missing file is reported elsewhere."""
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
    """The files whose hash differs from run.json's; missing required ones are reported elsewhere."""
    if not isinstance(hashes, dict):
        return [f"{RUN} does not name the files beside it"]
    problems = []
    for name in _HASHED:
        if not (folder / name).is_file():
            problems += [f"{name} is missing"] if name in _OPTIONAL and name in hashes else []
        elif hash_file(folder / name).sha256 != hashes.get(name):
            problems.append(f"{name} is not the file that {RUN} names")
    return problems


def _read_config(folder: Path, problems: list[str]) -> NetworkConfig | None:
    num_problems = len(problems)
    values = _read_json(folder, CONFIG, problems)
    if len(problems) > num_problems or not (folder / CONFIG).is_file():
        return None
    try:
        return config_kind(values).from_dict(values)
    except ConfigError as error:
        problems += [f"{CONFIG}: {problem}" for problem in error.problems]
        return None


def _read_generation(folder: Path, config: NetworkConfig, problems: list[str]) -> GenerationSettings:
    default = GenerationSettings((config.eos_id,))
    path = folder / GENERATION
    if not path.is_file():
        return default
    try:
        settings = GenerationSettings.from_json(path.read_text(encoding="utf-8"))
    except GenerationError as error:
        problems += [f"{GENERATION}: {problem}" for problem in error.problems]
        return default
    except (OSError, ValueError) as error:
        problems.append(f"{GENERATION}: {error}")
        return default
    named = [*(("eos_ids", token) for token in settings.eos_ids), *settings.rules.named_ids]
    problems += [
        f"{GENERATION}: {name} has {token}, must be in [0, {config.vocab_size})"
        for name, token in named
        if token >= config.vocab_size
    ]
    return settings


def _read_weights(folder: Path, model: Network, problems: list[str]) -> None:
    """Gives the model its tensors, after checking all names and shapes.

    In float32 they stay mapped from the file, privately: pages that nothing writes to take no memory of their own.
    """
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
                        parameter.data = file.get_tensor(name).to(torch.float32)
    except (SafetensorError, OSError) as error:
        problems.append(f"{WEIGHTS}: {error}")
