"""An engine from an artefact folder: the one place where the parts of `service.engine` are put together."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from model.artifact import DECODER, ENCODER, Manifest
from model.config import ModelConfig
from service.engine.engine import Engine, LastRun
from service.engine.kv_cache import SlotKV
from service.engine.kv_ledger import KVBudget
from service.engine.memory import memory_limit
from service.engine.runner import OrtRunner
from service.engine.sampler import Sampler
from service.engine.scheduler import EngineLimits, ModelShape, Scheduler
from service.engine.session import GraphSession, SessionOptions
from service.engine.text import Decode
from service.errors import StartupError


def build_engine(
    folder: Path, manifest: Manifest, decode: Decode, limits: EngineLimits, options: SessionOptions, last_run: LastRun
) -> Engine:
    """Loads an artefact's graphs and reserves its K/V.

    Loading takes seconds and holds the interpreter lock: do it before serving.

    Args:
        folder: the artefact.
        manifest: its manifest, already checked against the files (`model.artifact.load`).
        decode: output ids to text, special tokens skipped; for requests with stop strings.
        limits: slots and step sizes.
        options: threads.
        last_run: shared by the engines that one thread will step.

    Raises:
        StartupError: when a graph cannot be loaded or is not the manifest's, or the memory cannot be reserved.
    """
    budget = kv_budget(folder, manifest.config, limits)
    runner = build_runner(folder, manifest, limits, options)
    return Engine(Scheduler(limits, model_shape(manifest), decode, budget), runner, Sampler(), last_run)


def build_runner(folder: Path, manifest: Manifest, limits: EngineLimits, options: SessionOptions) -> OrtRunner:
    """An artefact's graphs and the K/V they work on.

    Raises:
        StartupError: when a graph cannot be loaded or is not the manifest's, or the memory cannot be reserved.
    """
    sessions = {name: GraphSession(folder, spec, options) for name, spec in manifest.graphs.items()}
    decoder, encoder = sessions[DECODER], sessions.get(ENCODER)
    # The decoder of an encoder-decoder computes no chunks.
    max_prefill_tokens = limits.max_prefill_tokens if encoder is None else 0
    try:
        kv = SlotKV(manifest.config, limits.max_batch_size, memory_limit())
        return OrtRunner(manifest.config, kv, decoder, encoder, max_prefill_tokens, memory_limit())
    except (MemoryError, StartupError) as error:
        sizes = f"max_batch_size {limits.max_batch_size}, prefill_chunk {limits.prefill_chunk}"
        raise StartupError([f"{folder}: {sizes}: {error}"]) from error


def kv_budget(folder: Path, config: ModelConfig, limits: EngineLimits) -> KVBudget:
    """How many tokens' K/V a model may have: what `kv_memory_bytes` holds, a whole context for each slot if None.

    Raises:
        StartupError: when not even one sequence of full length has room.
    """
    # A head's positions lie one after the other in a row, and the system gives memory by pages.
    page_tokens = max(1, mmap.PAGESIZE // (config.head_dim * np.dtype(np.float32).itemsize))
    pages = KVBudget(num_tokens=0, page_tokens=page_tokens).pages
    row = pages(config.context) + (pages(config.source_context) if config.is_encoder_decoder else 0)
    if limits.kv_memory_bytes is None:
        return KVBudget(num_tokens=limits.max_batch_size * row, page_tokens=page_tokens)
    num_tokens = limits.kv_memory_bytes // config.kv_bytes_per_token
    if num_tokens < row:
        least = row * config.kv_bytes_per_token
        given = f"kv_memory is {limits.kv_memory_bytes} bytes"
        raise StartupError([f"{folder}: {given}, must be at least {least}: one sequence of full length"])
    return KVBudget(num_tokens=num_tokens, page_tokens=page_tokens)


def model_shape(manifest: Manifest) -> ModelShape:
    """What scheduling must know of an artefact's model."""
    config = manifest.config
    return ModelShape(
        context=config.context,
        eos_ids=frozenset(manifest.eos_ids),
        source_context=config.source_context if config.is_encoder_decoder else None,
        decoder_start_id=manifest.decoder_start_id,
    )
