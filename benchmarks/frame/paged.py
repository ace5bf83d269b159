"""Graphs over blocks of K/V, emitted without the proof that `python -m export` adds.

They come from the modules that the exporter uses: CUDA's contrib operators, or on a CPU a stand-in of standard
operators.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from benchmarks.frame.models import artifact_folder
from export.emit import emit
from export.graphs import OPSET
from export.paged import CONTRIB, STAND_IN, MoveGraph, PagedDecoderGraph, PagedEncoderGraph, in_precision
from model import checkpoint
from model.nn.transformer import EncoderDecoder, Transformer
from model.spec import artifact
from model.spec.artifact import (
    BLOCK_SIZE,
    CUDA_PRECISIONS,
    DECODER,
    ENCODER,
    MANIFEST,
    MIN_BLOCK_SIZE,
    MOVE,
    Device,
    KVFormat,
    KVLayout,
    KVPrecision,
    Manifest,
    Precision,
)

_STIR = 0.2


def block_size(device: Device) -> int:
    """Tokens of a block."""
    return BLOCK_SIZE if device is Device.CUDA else MIN_BLOCK_SIZE


def emit_checkpoint(folder: Path, work: Path, precision: str, device: str) -> Path:
    """Graphs of a checkpoint, unless they are there; returns their folder."""
    place = artifact_folder(work, precision)
    if not (place / MANIFEST).exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        emit_model(checkpoint.load(folder).model, place, Precision(precision), Device(device))
    return place


def emit_model(model: Transformer, folder: Path, precision: Precision, device: Device) -> Manifest:
    """Graphs of a model, and their manifest.

    Raises:
        export.emit.EmitError: if a graph does not come out as it must.
    """
    kv_precision = KVPrecision(precision) if precision in CUDA_PRECISIONS else KVPrecision.FP32
    kv = KVFormat(kv_precision, layout=KVLayout.PAGED, block_size=block_size(device))
    attention = CONTRIB if device is Device.CUDA else STAND_IN
    rounded = in_precision(model, kv.precision)
    decoder = PagedDecoderGraph(rounded, attention, kv.precision, kv.block_size)
    graphs = {DECODER: emit(decoder, folder / f"{DECODER}.onnx")}
    if isinstance(rounded, EncoderDecoder):
        graphs[ENCODER] = emit(PagedEncoderGraph(rounded, kv.precision, kv.block_size), folder / f"{ENCODER}.onnx")
    graphs[MOVE] = emit(MoveGraph(rounded.config, kv.precision, kv.block_size), folder / f"{MOVE}.onnx")
    manifest = Manifest(
        config=model.config,
        device=device,
        precision=precision,
        opset=OPSET,
        eos_ids=(model.config.eos_id,),
        pad_id=model.config.pad_id,
        decoder_start_id=model.config.bos_id,
        graphs=graphs,
        files={path.name: artifact.hash_file(path) for path in sorted(folder.iterdir())},
        kv_cache=kv,
    )
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def stirred(model: Transformer, seed: int = 0) -> Transformer:
    """A fresh model with random biases and norms as well: a graph that drops one then computes something else."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=_STIR)
    return model.eval()
