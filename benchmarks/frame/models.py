"""Models that scenarios measure: random weights from seed 0, exported into an artifact and served.

Preset names and recipe files name them. Needs neither torch nor the exporter in this process.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version as installed
from pathlib import Path

import onnxruntime

from loadtest.child import run_module
from loadtest.serving import Server, serving
from model.spec.artifact import load
from model.spec.config import ModelConfig
from model.spec.recurrent import NetworkConfig

NUM_SPECIAL = 4
"""Ids below are control tokens: prompts have none."""
QUIET = ("--no-metrics", "--log-level", "warning")
METRICS = ("--metrics-port", "0", "--log-level", "warning")
KV_BITS = "-kv"
"""Joins a precision and the bits of its keys and values, if fewer than float32's: `int8-kv8`."""
_MODEL = "model"


@dataclass(frozen=True, slots=True)
class Subject:
    """An artifact to serve."""

    folder: Path
    threads: int
    max_batch: int

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return load(self.folder).config

    @contextmanager
    def served(self, *flags: str, models: Path | None = None) -> Iterator[Server]:
        """A server of its own, until the block ends. `models` replaces the folder of artifacts."""
        own = ("--threads", str(self.threads), "--max-batch-size", str(self.max_batch))
        with serving(models or self.folder.parent, *own, *flags) as server:
            yield server


def make_subject(source: str, precision: str, build: Path, *flags: str, max_batch: int, threads: int) -> Subject:
    """Exports a preset or recipe file with random weights, anew each time: the exporter may have changed.

    Raises:
        RuntimeError: if the weights or the artifact cannot be made.
    """
    folder = build / "scenarios" / Path(source).stem
    shutil.rmtree(folder / precision, ignore_errors=True)
    make_checkpoint(source, folder / "checkpoint")
    return Subject(export(folder / "checkpoint", folder, precision, *flags), threads, max_batch)


def make_checkpoint(source: str, folder: Path) -> None:
    """A checkpoint with random weights, unless the folder has one.

    Raises:
        RuntimeError: with the trainer's last words.
    """
    if not (folder / "run.json").exists():
        run_module("model", "init", source, "--out", str(folder), "--seed", "0")


def artifact_folder(work: Path, precision: str) -> Path:
    """Where a precision's artifact lies; its parent can be given to a server."""
    return work / precision / _MODEL


def export(checkpoint: Path, work: Path, precision: str, *flags: str) -> Path:
    """Exports a checkpoint, unless the same exporter has done so; returns the artifact's folder.

    Raises:
        RuntimeError: with the exporter's last words.
    """
    place = artifact_folder(work, precision)
    stamp = place.parent.with_suffix(".exporter")
    # An artifact without a stamp was put there by somebody else.
    if place.exists() and (not stamp.exists() or stamp.read_text(encoding="utf-8") == _exporter()):
        return place
    staged = work / f"{precision}.part"
    for folder in (place.parent, staged):
        shutil.rmtree(folder, ignore_errors=True)
    staged.mkdir(parents=True)
    weights, _, kv_bits = precision.partition(KV_BITS)
    more = ["--kv-cache", f"int{kv_bits}"] if kv_bits else []
    run_module("export", str(checkpoint), "--out", str(staged / _MODEL), "--precision", weights, *more, *flags)
    staged.rename(place.parent)
    stamp.write_text(_exporter(), encoding="utf-8")
    return place


@cache
def _exporter() -> str:
    """Digest of the exporter's sources."""
    sources = [(path.name, path.read_bytes()) for path in sorted((Path(__file__).parents[2] / "export").glob("*.py"))]
    return hashlib.sha256(repr(sources).encode()).hexdigest()


def digest(config: NetworkConfig) -> str:
    """Eight hexadecimal digits that identify a configuration."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()[:8]


def version() -> str:
    """This distribution's version and ONNX Runtime's."""
    return f"{installed('onward')} (onnxruntime {onnxruntime.__version__})"


def draw(source: random.Random, vocab_size: int, length: int) -> list[int]:
    """A random prompt."""
    return [source.randrange(NUM_SPECIAL, vocab_size) for _ in range(length)]


def reference_agreement(checkpoint: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
    """Share of greedy tokens that PyTorch, fed the same tokens in float32 without a cache, chooses too."""
    from model import checkpoint as checkpoints
    from model.nn import reference

    loaded = checkpoints.load(checkpoint)
    agreeing = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        if loaded.config.is_encoder_decoder:
            logits = reference.logits(loaded.model, [loaded.config.bos_id, *answer[:-1]], prompt)
        else:
            logits = reference.logits(loaded.model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
        agreeing += sum(int(best) == token for best, token in zip(logits.argmax(-1), answer, strict=True))
    return agreeing / sum(map(len, answers))
