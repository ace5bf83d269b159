"""The pipeline for K/V in blocks: graphs over packed tokens, which no rewrite follows.

Graphs for CUDA are proven where the device is. Before they are written, a twin is exported and proven: the same graphs
in float32, with standard operators instead of PagedAttention. The twin is then deleted.
"""

from __future__ import annotations

import dataclasses
import shutil

from export import dot, paged
from export.job import Job
from export.paged import CONTRIB, STAND_IN, MoveGraph, PagedDecoderGraph, PagedEncoderGraph
from model.nn.transformer import EncoderDecoder
from model.spec.artifact import (
    BLOCK_SIZE,
    CUDA_PRECISIONS,
    DECODER,
    ENCODER,
    MIN_BLOCK_SIZE,
    MOVE,
    Device,
    GraphSpec,
    KVFormat,
    KVLayout,
    KVPrecision,
    Manifest,
    Precision,
)
from model.spec.config import AttentionScore, ModelConfig


def unsupported(config: ModelConfig, device: Device, precision: Precision, kv_precision: KVPrecision) -> list[str]:
    """Why a model cannot be exported over blocks for this device and precision; empty when it can."""
    problems = []
    if config.attention_score is not AttentionScore.DOT:
        problems.append(f"K/V in blocks are for dot-product attention, this model's score is {config.attention_score}")
    else:
        problems += dot.unsupported(config)
    precisions = CUDA_PRECISIONS if device is Device.CUDA else (Precision.FP32,)
    if precision not in precisions:
        problems.append(f"K/V in blocks are for {' or '.join(precisions)} on {device}, asked for is {precision}")
    if kv_precision is KVPrecision.INT8:
        problems.append(f"K/V in blocks have the precision of the graph, asked for is {kv_precision}")
    return problems


def write(job: Job, device: Device, precision: Precision, block_size: int) -> Manifest:
    """Writes the graphs into the job's folder; returns their manifest, yet to be proven.

    `precision` is that of weights and K/V; a `block_size` of 0 is the default.

    Raises:
        ParityError: when the twin of graphs for CUDA fails.
    """
    if device is Device.CUDA:
        _prove_twin(job)
    kv_precision = KVPrecision(precision) if precision in CUDA_PRECISIONS else KVPrecision.FP32
    kv = KVFormat(kv_precision, layout=KVLayout.PAGED, block_size=block_size or BLOCK_SIZE)
    return job.draft(device, _write_graphs(job, device, kv), kv, precision)


def _prove_twin(job: Job) -> None:
    """Proves all of a CUDA graph but its attention operator and its rounding."""
    twin = dataclasses.replace(job, folder=job.folder.parent / "twin")
    twin.folder.mkdir()
    kv = KVFormat(layout=KVLayout.PAGED, block_size=MIN_BLOCK_SIZE)
    twin.prove(twin.draft(Device.CPU, _write_graphs(twin, Device.CPU, kv), kv))
    shutil.rmtree(twin.folder)


def _write_graphs(job: Job, device: Device, kv: KVFormat) -> dict[str, GraphSpec]:
    attention = CONTRIB if device is Device.CUDA else STAND_IN
    layout = kv.precision, kv.block_size
    model = paged.in_precision(job.checkpoint.model, kv.precision)
    stage = "decoder graph over blocks"
    specs = {DECODER: job.emit(stage, DECODER, PagedDecoderGraph(model, attention, *layout))}
    if isinstance(model, EncoderDecoder):
        specs[ENCODER] = job.emit("encoder graph over blocks", ENCODER, PagedEncoderGraph(model, *layout))
    specs[MOVE] = job.emit("graph of copies", MOVE, MoveGraph(model.config, *layout))
    return specs
