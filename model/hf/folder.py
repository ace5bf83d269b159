"""A folder in Hugging Face's layout, treated as untrusted: its JSON files and the headers of its weights.

No path leaves the folder, and no weight is read: the header of a safetensors file has the names, dtypes and shapes that
the checks need. All problems are collected. Needs no torch. Pickled weights (`model.hf.pickled`) need it to be read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from model.hf.hub import name_of, repository_of
from model.hf.values import shorten

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"

DTYPES = ("F32", "F16", "BF16")
"""Supported dtypes of weights."""

_MAX_JSON_BYTES = 256 * 2**20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")


class ImportRefused(ValueError):
    """A folder cannot be imported; `problems` lists every reason."""

    def __init__(self, folder: Path, problems: Iterable[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__(f"{folder}: " + "; ".join(self.problems))


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor on disk: its file, its dtype by safetensors' name, its shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFolder:
    """The contents of a folder; optional files that are missing are empty objects.

    `tensors` has everything in the weights' headers; `unread` are the names that the index puts into missing or damaged
    files.
    """

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The folder's name, or a snapshot's name on the hub."""
        repository = repository_of(self.path)
        return self.path.resolve().name if repository is None else name_of(repository)

    def file(self, name: str) -> Path | None:
        """The path of a file; None if it is missing or a link out of the folder."""
        path = self.path / name
        return path if path.is_file() and not _escapes(self.path, name) else None


def is_pickled(file: str) -> bool:
    """Whether a file of weights is PyTorch's, and no safetensors file."""
    return file.endswith(".bin")


def read_folder(path: Path, problems: list[str], read_pickled: ReadPickled | None = None) -> HfFolder:
    """Reads the JSON files and the headers; appends to `problems`.

    Args:
        path: the folder.
        problems: gets what is wrong.
        read_pickled: the tensors of a pickled file, where there are no safetensors; raises ValueError. By default such
            files are refused.
    """
    if not path.is_dir():
        problems.append(f"{path} is not a folder")
        return HfFolder(path=path, config={}, generation={}, tokenizer_config={})
    if not (path / CONFIG).is_file():
        problems.append(f"{CONFIG} is missing")
    if (path / "adapter_config.json").is_file():
        problems.append("adapter_config.json: an adapter is no model; merge it into the model that it is for")
    tensors, unread = _read_headers(path, problems, read_pickled)
    return HfFolder(
        path=path,
        config=read_json(path, CONFIG, problems),
        generation=read_json(path, GENERATION, problems),
        tokenizer_config=read_json(path, TOKENIZER_CONFIG, problems),
        tensors=tensors,
        unread=frozenset(unread),
    )


def _escapes(folder: Path, name: str) -> bool:
    """Whether a name is not a plain file name, or is a link out of the folder or hub repository."""
    if name != Path(name).name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        return True
    try:
        root = repository_of(folder) or folder.resolve()
        return not (folder / name).resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # a loop of links
        return True


def read_text(folder: Path, name: str, problems: list[str]) -> str | None:
    """A text file's contents; None if it is missing, or unreadable, which is a problem."""
    path = folder / name
    if not path.is_file():
        return None
    if _escapes(folder, name):
        problems.append(f"{name} is a link out of the folder; copy the folder with what its links point to (cp -rL)")
        return None
    try:
        if (size := path.stat().st_size) > _MAX_JSON_BYTES:
            problems.append(f"{name} has {size} bytes, must have at most {_MAX_JSON_BYTES}")
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        problems.append(f"{name}: {error}")
        return None


def read_json(folder: Path, name: str, problems: list[str]) -> dict[str, Any]:
    """A JSON object; empty if the file is missing, or is not an object, which is a problem."""
    text = read_text(folder, name, problems)
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{name}: {error}")
        return {}
    if not isinstance(values, dict):
        problems.append(f"{name} is not a JSON object")
        return {}
    return values


ReadPickled = Callable[[Path], dict[str, Stored]]
"""Reads the names, dtypes and shapes of a pickled file's tensors."""
_Headers = tuple[dict[str, Stored], set[str]]
"""The tensors found, and the names of those in unreadable files."""


def _read_headers(folder: Path, problems: list[str], read_pickled: ReadPickled | None) -> _Headers:
    readable = [(WEIGHTS, INDEX), *([(PICKLED, PICKLED_INDEX)] if read_pickled else [])]
    for weights, index in readable:
        has_index, has_single = (folder / index).is_file(), (folder / weights).is_file()
        if has_index and has_single:
            problems.append(f"both {weights} and {index} are there: only one may be the model")
            return {}, set()
        if has_single:
            return _read_header(folder, weights, problems, read_pickled) or {}, set()
        if has_index:
            return _read_shards(folder, index, problems, read_pickled)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        problems.append(
            f"weights are in {shorten(pickles)}: pickled files can run programs and are not read; if you trust "
            "them, load them with transformers and save_pretrained(…) the model again, which writes safetensors"
        )
    else:
        problems.append(f"neither {WEIGHTS} nor {INDEX} is there")
    return {}, set()


def _read_shards(folder: Path, index: str, problems: list[str], read_pickled: ReadPickled | None) -> _Headers:
    """All tensors of all shards, checked against the index."""
    placed = read_json(folder, index, problems).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()) or not placed:
        problems.append(f"{index}: weight_map is {shorten(placed)}, must be an object of file names")
        return {}, set()
    by_file: dict[str, set[str]] = defaultdict(set)
    for name, file in placed.items():
        by_file[file].add(name)
    tensors: dict[str, Stored] = {}
    unread: set[str] = set()
    for file, names in sorted(by_file.items()):
        found = None
        if _escapes(folder, file):
            problems.append(f"{index}: {file!r} leaves the folder")
        elif not (folder / file).is_file():
            problems.append(f"{file} is missing, {index} puts {len(names)} tensors into it")
        else:
            found = _read_header(folder, file, problems, read_pickled)
        if found is None:
            unread |= names
            continue
        problems += [f"{file} lacks {name}, which {index} puts there" for name in sorted(names - found.keys())]
        problems += [f"{file} has {name}, which {index} does not put there" for name in sorted(found.keys() - names)]
        tensors |= found
    return tensors, unread


def _read_header(
    folder: Path, file: str, problems: list[str], read_pickled: ReadPickled | None
) -> dict[str, Stored] | None:
    """A file's tensors; None if it cannot be read, which is a problem."""
    if _escapes(folder, file):
        problems.append(f"{file} is a link out of the folder; copy the folder with what its links point to (cp -rL)")
        return None
    try:
        if read_pickled is not None and is_pickled(file):
            return read_pickled(folder / file)
        with safe_open(folder / file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 — no mapping
            return {name: Stored(file, piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()}
    except (SafetensorError, ValueError, OSError) as error:
        problems.append(f"{file}: {error}")
        return None
