"""Models with random weights, and their graphs over blocks, made here or taken from where they were made before.

A graph is emitted from the very modules that a checkpoint's would be, without the proof that `python -m export` adds:
that takes minutes of CPU for a large model, and the device is to be judged here, not the exporter. Where a folder of
artifacts is given, it is laid out as

    NAME/checkpoint       as `python -m model init` or `train` leaves one
    NAME/PRECISION        as `python -m export … --device cuda --precision PRECISION` leaves one

and what it has of a model is used in the place of random weights and of emitting. Models that the plan does not name,
such as trained ones, have their answers checked besides.

What is emitted stays for other processes to find, by all that it depends on: configuration, precision, the exporter's
own sources.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.places import ROOT
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.stages import CHECKPOINT
from export.emit import emit
from export.graphs import OPSET
from export.paged import CONTRIB, STAND_IN, MoveGraph, PagedDecoderGraph, PagedEncoderGraph, in_precision
from model import checkpoint
from model.nn.transformer import EncoderDecoder, Transformer, build
from model.spec import artifact
from model.spec.artifact import (
    CUDA_PRECISIONS,
    DECODER,
    ENCODER,
    MANIFEST,
    MOVE,
    Device,
    FileEntry,
    GraphSpec,
    KVFormat,
    KVLayout,
    KVPrecision,
    Manifest,
    Precision,
)
from model.spec.config import ModelConfig

_SEED = 0
_STIR = 0.2
_SOURCES = ("export", "model")


@dataclass(frozen=True, slots=True)
class Graphs:
    """One model's graphs: where they are, and what a manifest says of them."""

    name: str
    folder: Path
    manifest: Manifest

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        return self.manifest.config


class Workshop:
    """Makes each model and each set of graphs once.

    Args:
        plan: device and sizes.
        folder: for graphs; those of the same models that are there already are taken.
        artifacts: what was made before, see above; None where nothing was.
        say: told what takes time.
    """

    def __init__(self, plan: Plan, folder: Path, artifacts: Path | None, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._folder = folder
        self._artifacts = artifacts
        self._say = say
        self._made: dict[tuple[str, Precision], Graphs] = {}
        # One alone: a large one takes gigabytes, and models are used one after the other.
        self._model: tuple[str, Transformer] | None = None

    def model(self, name: str, config: ModelConfig) -> Transformer:
        """A model in float32 on the CPU, in evaluation mode, not to be changed."""
        if self._model is None or self._model[0] != name or self._model[1].config != config:
            self._model = None
            self._say(f"weights of {name}")
            self._model = (name, self._load(name, config) or stirred(build(config, _SEED)))
        return self._model[1]

    def on_device(self, name: str, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
        """A copy where the graphs run."""
        return copy.deepcopy(self.model(name, config)).to(device=str(self._plan.device), dtype=dtype)

    def graphs(self, name: str, config: ModelConfig, precision: Precision) -> Graphs:
        """A model's graphs in a precision.

        Raises:
            export.emit.EmitError: when they do not come out as they must.
            model.artifact.ArtifactError: when those that were made before are damaged.
        """
        key = (f"{name}-{config.context}", precision)
        if key not in self._made:
            self._made[key] = self._find(name, config, precision) or self._keep(name, config, precision)
        return self._made[key]

    def brought(self, name: str) -> ModelConfig:
        """The configuration of a model that was made before and that no plan knows, such as a trained one.

        Raises:
            KeyError: when there is none.
            model.checkpoint.CheckpointError: when it is damaged.
        """
        folder = self._made_before(name, CHECKPOINT)
        if folder is None:
            raise KeyError(name)
        return checkpoint.load(folder).config

    def adopt(self, name: str, model: Transformer, precision: Precision) -> Graphs:
        """Graphs of a model from elsewhere, such as one that was just trained."""
        self._model = (name, model)
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._emit(name, model.config, precision, Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder)))

    def _load(self, name: str, config: ModelConfig) -> Transformer | None:
        folder = self._made_before(name, CHECKPOINT)
        if folder is None:
            return None
        model = checkpoint.load(folder).model
        return model if self._is_asked_for(folder, model.config, config) else None

    def _find(self, name: str, config: ModelConfig, precision: Precision) -> Graphs | None:
        folder = self._made_before(name, precision)
        if folder is None:
            return None
        if self._made_before(name, CHECKPOINT) is None:
            raise ValueError(f"{folder} is there without {CHECKPOINT} beside it, whose answers it is to give")
        graphs = Graphs(name, folder, artifact.load(folder, devices=(self._plan.device,)))
        return graphs if self._is_asked_for(folder, graphs.config, config) else None

    def _made_before(self, name: str, kind: str) -> Path | None:
        folder = None if self._artifacts is None else self._artifacts / name / kind
        return folder if folder is not None and folder.is_dir() else None

    def _is_asked_for(self, folder: Path, found: ModelConfig, config: ModelConfig) -> bool:
        """Whether what was made before has the sizes that are asked for, as another context is another graph."""
        if found != config:
            self._say(f"{folder} has other sizes than are asked for: not used")
        return found == config

    def _keep(self, name: str, config: ModelConfig, precision: Precision) -> Graphs:
        """Graphs that another process has left here, or new ones for the next to find."""
        if self._made_before(name, CHECKPOINT) is not None:
            # Of weights that no name tells.
            return self.adopt(name, self.model(name, config), precision)
        folder = self._folder / f"{name}-{precision}-{self._fingerprint(config, precision)}"
        if not folder.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=self._folder))
            try:
                self._emit(name, config, precision, unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        return Graphs(name, folder, artifact.read_manifest(folder))

    def _fingerprint(self, config: ModelConfig, precision: Precision) -> str:
        """Of all that graphs with random weights depend on, versions of libraries aside."""
        plan = self._plan
        facts = [config.to_dict(), precision, plan.device, plan.block_size, OPSET, _SEED, torch.__version__]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
        for path in sorted(path for name in _SOURCES for path in (ROOT / name).rglob("*.py")):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def _emit(self, name: str, config: ModelConfig, precision: Precision, folder: Path) -> Graphs:
        self._say(f"graphs of {name} in {precision}")
        attention = CONTRIB if self._plan.device is Device.CUDA else STAND_IN
        kv = KVFormat(_kv_precision(precision), layout=KVLayout.PAGED, block_size=self._plan.block_size)
        model = in_precision(self.model(name, config), kv.precision)
        decoder = PagedDecoderGraph(model, attention, kv.precision, kv.block_size)
        graphs = {DECODER: emit(decoder, folder / f"{DECODER}.onnx")}
        if isinstance(model, EncoderDecoder):
            graphs[ENCODER] = emit(PagedEncoderGraph(model, kv.precision, kv.block_size), folder / f"{ENCODER}.onnx")
        graphs[MOVE] = emit(MoveGraph(model.config, kv.precision, kv.block_size), folder / f"{MOVE}.onnx")
        files = {path.name: artifact.hash_file(path) for path in sorted(folder.iterdir())}
        manifest = _manifest(model.config, self._plan.device, precision, graphs, files, kv)
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        return Graphs(name, folder, manifest)


def stirred(model: Transformer) -> Transformer:
    """A fresh model whose biases and norms are random as well: one that a graph forgot would go unnoticed otherwise."""
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=_STIR)
    return model.eval()


def _kv_precision(precision: Precision) -> KVPrecision:
    return KVPrecision(precision) if precision in CUDA_PRECISIONS else KVPrecision.FP32


def _manifest(
    config: ModelConfig,
    device: Device,
    precision: Precision,
    graphs: Mapping[str, GraphSpec],
    files: Mapping[str, FileEntry],
    kv: KVFormat,
) -> Manifest:
    return Manifest(
        config=config,
        device=device,
        precision=precision,
        opset=OPSET,
        eos_ids=(config.eos_id,),
        pad_id=config.pad_id,
        decoder_start_id=config.bos_id,
        graphs=graphs,
        files=files,
        kv_cache=kv,
    )
