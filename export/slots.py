"""The pipeline for K/V in slots: float32 graphs, then int8 K/V, then bf16, int8 or int4 weights, then fused operators.

Each rewrite starts from graphs that have passed their own, tighter tolerance. What the next tolerance allows beyond it
is therefore rounding alone. Graphs that share weights have copies of their own until all are rewritten.
"""

from __future__ import annotations

import dataclasses

from export import explain, fusion, graphs, quantize, quantize_kv
from export.emit import read_signature, share_weights
from export.explain import ExplainGraph
from export.graphs import DecoderGraph, EncoderGraph
from export.job import Job
from model.nn.transformer import EncoderDecoder
from model.spec.artifact import (
    CPU_PRECISIONS,
    DECODER,
    ENCODER,
    EXPLAIN,
    Device,
    GraphSpec,
    KVFormat,
    KVPrecision,
    Manifest,
    Precision,
)
from model.spec.config import ModelConfig


def unsupported(
    config: ModelConfig, precision: Precision, kv_precision: KVPrecision, *, explain_graph: bool
) -> list[str]:
    """Why a model cannot be exported over slots; empty when it can."""
    problems = []
    if precision not in CPU_PRECISIONS:
        problems.append(f"precision {precision} is not for {Device.CPU}, only {', '.join(CPU_PRECISIONS)}")
    problems += [*graphs.unsupported(config), *quantize.unsupported(config, precision)]
    problems += quantize_kv.unsupported(config) if kv_precision is KVPrecision.INT8 else []
    problems += explain.unsupported(kv_precision) if explain_graph else []
    return problems


def write(job: Job, precision: Precision, kv_precision: KVPrecision, *, explain_graph: bool) -> Manifest:
    """Writes the graphs into the job's folder; returns their manifest, whose last rewrite is yet to be proven.

    Raises:
        ParityError: when graphs fail before they are rewritten.
    """
    draft = job.draft(Device.CPU, _write_graphs(job, explain_graph=explain_graph), KVFormat())
    if kv_precision is not KVPrecision.FP32:
        job.prove(draft)
        draft = _quantize_kv(job, draft, kv_precision)
    if precision is not Precision.FP32:
        job.prove(draft)
        draft = _quantize(job, draft, precision)
    _fuse(job, draft)
    _share_weights(job, draft)
    return draft


def _write_graphs(job: Job, *, explain_graph: bool) -> dict[str, GraphSpec]:
    """Writes the graphs in float32, each with weights of its own."""
    model = job.checkpoint.model
    specs = {DECODER: job.emit("decoder graph", DECODER, DecoderGraph(model))}
    if isinstance(model, EncoderDecoder):
        specs[ENCODER] = job.emit("encoder graph", ENCODER, EncoderGraph(model))
    if explain_graph:
        specs[EXPLAIN] = job.emit("explain graph", EXPLAIN, ExplainGraph(model))
    return specs


def _quantize_kv(job: Job, draft: Manifest, kv_precision: KVPrecision) -> Manifest:
    """Calibrates scales and rewrites decoder and encoder to store K/V in fewer bits."""
    paths = {name: job.folder / draft.graphs[name].file for name in (DECODER, ENCODER) if name in draft.graphs}
    job.on_stage(f"calibrating {kv_precision} K/V")
    scales, calibration = quantize_kv.calibrate(paths[DECODER], draft.config, paths.get(ENCODER))
    quantize_kv.quantize_kv_file(paths[DECODER], scales)
    if ENCODER in paths:
        quantize_kv.quantize_sources_file(paths[ENCODER], scales)
    specs = {**draft.graphs, **{name: read_signature(path) for name, path in paths.items()}}
    return dataclasses.replace(draft, graphs=specs, kv_cache=KVFormat(kv_precision, calibration))


def _quantize(job: Job, draft: Manifest, precision: Precision) -> Manifest:
    """Rewrites products with weights, and token embeddings."""
    for name, graph in draft.graphs.items():
        job.on_stage(f"{name} graph in {precision}")
        quantize.quantize_file(job.folder / graph.file, precision)
    return dataclasses.replace(draft, precision=precision)


def _fuse(job: Job, draft: Manifest) -> None:
    """Rewrites the graphs to the project's own operators."""
    for graph in draft.graphs.values():
        if draft.precision is Precision.FP32:
            quantize.quantize_file(job.folder / graph.file, Precision.FP32)
        fusion.fuse_file(job.folder / graph.file)


def _share_weights(job: Job, draft: Manifest) -> None:
    """Keeps one copy of each weight."""
    files = {name: job.folder / graph.file for name, graph in draft.graphs.items()}
    if EXPLAIN in files:
        share_weights(files[EXPLAIN], *(files[name] for name in (DECODER, ENCODER) if name in files))
