"""Builds an engine from an artifact folder: sessions, KV backend, runner, scheduler, sampler."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from model.spec.artifact import DECODER, ENCODER, MOVE, KVLayout, Manifest
from model.spec.artifact import Device as BuiltFor
from service.engine.engine import Engine, LastRun
from service.engine.interfaces import Runner
from service.engine.kv.budget import (
    check_device_memory,
    check_host_memory,
    check_memory,
    graph_bytes,
    plan_kv_memory,
    prefault_bytes,
)
from service.engine.paged_backend.device_blocks import DeviceBlocks
from service.engine.paged_backend.paged_kv import HostBlocks, PagedKV
from service.engine.paged_backend.paged_runner import PagedRunner
from service.engine.proof.chunk_proof import describe_foreign, find_obstacles
from service.engine.queueing.intake import ModelShape
from service.engine.sampling.sampler import Sampler
from service.engine.sampling.text import Decode
from service.engine.sampling.top_logits import TopLogits
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.sessions.cuda_provider import Cuda, cuda_free_bytes
from service.engine.sessions.session import GraphSession, SessionOptions, arithmetic_of
from service.engine.slots_backend.kv_cache import SlotKV
from service.engine.slots_backend.runner import OrtRunner
from service.engine.types import Device
from service.errors import StartupError

_LOGGER = logging.getLogger(__name__)

_CUDA = "cuda"


def build_engine(
    folder: Path,
    manifest: Manifest,
    decode: Decode,
    limits: EngineLimits,
    options: SessionOptions,
    last_run: LastRun,
    device: Device = Device.AUTO,
) -> Engine:
    """Loads an artifact's graphs and reserves its K/V.

    Loading takes seconds: do it before serving, or on a thread of its own.

    Args:
        folder: the artifact.
        manifest: its manifest, already checked against the files (`model.spec.artifact.load`).
        decode: output ids to text without special tokens; for requests with stop strings.
        limits: slots and step sizes.
        options: threads and weights.
        last_run: shared by the engines of one stepping thread.
        device: what computes; `AUTO` is the device that the artifact was exported for.

    Raises:
        StartupError: when the artifact is for another device, or that cannot be used; when a graph cannot be loaded or
            is not the manifest's; when memory is too short; when `limits.look_up` is set and the kernels would change
            answers. A model that cannot speculate by its own rules is served without, and the log says so.
    """
    _check_device(folder, manifest, device)
    shape, obstacles = model_shape(manifest), find_obstacles(manifest, options)
    if limits.look_up and shape.speculation_obstacle:
        _LOGGER.warning("%s: no prompt-lookup speculation: %s", folder, shape.speculation_obstacle)
        limits = dataclasses.replace(limits, look_up=0)
    if limits.look_up:
        _refuse_speculation(folder, limits, obstacles)
    runner: Runner
    warm_up: Callable[[], None] | None = None
    prepare: Callable[[], bool] | None = None
    top = TopLogits()
    if manifest.kv_cache.layout is KVLayout.PAGED:
        runner = paged = build_paged_runner(folder, manifest, limits, options, top)
        warm_up = paged.warm_up
    else:
        runner = over_slots = build_runner(folder, manifest, limits, options)
        prepare = over_slots.kv.prefault
        obstacles += describe_foreign(over_slots.operators)
        if limits.look_up:
            _refuse_speculation(folder, limits, obstacles)
    if obstacles:
        limits = dataclasses.replace(limits, merged_chunks=1)
    budget = plan_kv_memory(manifest, limits.max_batch_size, limits.kv_memory_bytes)
    scheduler = Scheduler(limits, shape, decode, budget)
    engine = Engine(scheduler, runner, Sampler(top), last_run, warm_up=warm_up, prepare=prepare, name=str(folder))
    engine.arithmetic = arithmetic_of(options)
    return engine


def build_runner(folder: Path, manifest: Manifest, limits: EngineLimits, options: SessionOptions) -> OrtRunner:
    """The runner over slots.

    Raises:
        StartupError: when a graph cannot be loaded or is not the manifest's, or memory is too short.
    """
    # An encoder's threads stop spinning after a run: the decoder's need the cores next.
    for_encoder = dataclasses.replace(options, stop_spinning=True)
    for_decoder = dataclasses.replace(options, records_operators=True)
    decoder = GraphSession(folder, manifest.graphs[DECODER], for_decoder)
    encoder = GraphSession(folder, manifest.graphs[ENCODER], for_encoder) if ENCODER in manifest.graphs else None
    # The decoder of an encoder-decoder computes no chunks.
    max_prefill_tokens = limits.max_prefill_tokens if encoder is None else 0
    try:
        budget = plan_kv_memory(manifest, limits.max_batch_size, limits.kv_memory_bytes)
        check_memory(manifest, budget, limits.max_batch_size, max_prefill_tokens)
        chunk = limits.prefill_chunk
        kv = SlotKV(
            manifest.config,
            limits.max_batch_size,
            manifest.kv_cache.precision.dtype,
            chunk_tokens=chunk,
            # Only whole chunks are cached.
            prefault_bytes=(
                prefault_bytes(manifest, budget, limits.max_batch_size) if chunk <= manifest.config.context else 0
            ),
        )
        return OrtRunner(manifest.config, kv, decoder, encoder, max_prefill_tokens)
    except (MemoryError, StartupError) as error:
        sizes = f"max_batch_size {limits.max_batch_size}, prefill_chunk {limits.prefill_chunk}"
        raise StartupError([f"{folder}: {sizes}: {error}"]) from error


def build_paged_runner(
    folder: Path, manifest: Manifest, limits: EngineLimits, options: SessionOptions, top: TopLogits | None = None
) -> PagedRunner:
    """The runner over blocks, on the processor or a device; `top` as in `PagedRunner`.

    Raises:
        StartupError: as `build_runner`, and when cached chunks would not align with blocks.
    """
    config, size = manifest.config, manifest.kv_cache.block_size
    chunk = 1 if config.is_encoder_decoder else limits.prefill_chunk
    if chunk % size and size % chunk:
        problem = f"prefill_chunk is {chunk}, must divide the blocks of {size} tokens or be a multiple of them"
        raise StartupError([f"{folder}: {problem}"])
    on_device = manifest.device is BuiltFor.CUDA
    sessions = _load_on_device(folder, manifest, limits, options) if on_device else _load(folder, manifest, options)
    try:
        budget = plan_kv_memory(manifest, limits.max_batch_size, limits.kv_memory_bytes)
        num_blocks = budget.num_bytes // (size * budget.token_bytes)
        dtype = manifest.kv_cache.precision.dtype
        memory: HostBlocks | DeviceBlocks
        if on_device:
            check_host_memory(manifest, limits.max_batch_size, limits.max_prefill_tokens)
            free_bytes = cuda_free_bytes()
            check_device_memory(manifest, budget, limits.max_batch_size, limits.max_prefill_tokens, free_bytes)
            memory = DeviceBlocks(config, num_blocks, size, dtype, _CUDA, sessions[MOVE])
        else:
            check_memory(manifest, budget, limits.max_batch_size, limits.max_prefill_tokens)
            memory = HostBlocks(config, num_blocks, size, dtype)
        return PagedRunner(
            config,
            PagedKV(memory, limits.max_batch_size),
            memory,
            sessions[DECODER],
            sessions.get(ENCODER),
            limits.max_prefill_tokens,
            _CUDA if on_device else None,
            top,
        )
    except (MemoryError, StartupError) as error:
        sizes = f"max_batch_size {limits.max_batch_size}, prefill_chunk {limits.prefill_chunk}"
        raise StartupError([f"{folder}: {sizes}: {error}"]) from error


def _load(folder: Path, manifest: Manifest, options: SessionOptions) -> dict[str, GraphSession]:
    """The graphs over blocks on the processor, where blocks are copied without a graph."""
    return {name: GraphSession(folder, graph, options) for name, graph in manifest.graphs.items() if name != MOVE}


def _load_on_device(
    folder: Path, manifest: Manifest, limits: EngineLimits, options: SessionOptions
) -> dict[str, GraphSession]:
    """All graphs on the first CUDA device; the decoder's records its runs."""
    rows, num_tokens = limits.max_batch_size, limits.max_prefill_tokens

    def load(name: str) -> GraphSession:
        cuda = Cuda(records=name == DECODER, max_bytes=graph_bytes(manifest, name, rows, num_tokens))
        return GraphSession(folder, manifest.graphs[name], options, cuda=cuda)

    return {name: load(name) for name in manifest.graphs}


def _refuse_speculation(folder: Path, limits: EngineLimits, problems: Sequence[str]) -> None:
    """Raises if there are problems, which other options or another artifact would solve.

    What only the proof finds (`Engine.prove_speculation`) disables speculation with a log entry instead.
    """
    if problems:
        raise StartupError([f"{folder}: look_up is {limits.look_up}: {problem}" for problem in problems])


def _check_device(folder: Path, manifest: Manifest, device: Device) -> None:
    """Refuses an artifact that was exported for another device."""
    if device not in (Device.AUTO, Device(manifest.device)):
        raise StartupError([f"{folder}: device is {device}, the artifact is for {manifest.device}"])


def model_shape(manifest: Manifest) -> ModelShape:
    """What the scheduler needs to know of an artifact's model."""
    config = manifest.config
    return ModelShape(
        context=config.context,
        eos_ids=frozenset(manifest.eos_ids),
        source_context=config.source_context if config.is_encoder_decoder else None,
        decoder_start_id=manifest.decoder_start_id,
        generation=manifest.generation,
    )
