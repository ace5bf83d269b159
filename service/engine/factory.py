"""An engine from an artefact folder: the one place where the parts of `service.engine` are put together."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path

from model.artifact import DECODER, ENCODER, PREFILL, KVLayout, Manifest
from service.engine.engine import Engine, LastRun
from service.engine.intake import ModelShape
from service.engine.kv_cache import SlotKV
from service.engine.kv_memory import check_memory, num_row_blocks, plan_kv_memory
from service.engine.memory import resident_bytes
from service.engine.paged_kv import HostBlocks, PagedKV
from service.engine.paged_runner import PagedRunner
from service.engine.prefill_provider import openvino_for
from service.engine.runner import OrtRunner, Runner
from service.engine.sampler import Sampler
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.session import GraphSession, SessionOptions
from service.engine.text import Decode
from service.engine.types import PrefillProvider
from service.errors import StartupError

_LOGGER = logging.getLogger(__name__)


def build_engine(
    folder: Path,
    manifest: Manifest,
    decode: Decode,
    limits: EngineLimits,
    options: SessionOptions,
    last_run: LastRun,
    prefill: PrefillProvider = PrefillProvider.CPU,
) -> Engine:
    """Loads an artefact's graphs and reserves its K/V.

    Loading takes seconds: do it before serving, or on a thread of its own.

    Args:
        folder: the artefact.
        manifest: its manifest, already checked against the files (`model.artifact.load`).
        decode: output ids to text, special tokens skipped; for requests with stop strings.
        limits: slots and step sizes.
        options: threads.
        last_run: shared by the engines that one thread will step.
        prefill: what computes prompts, as `choose_prefill_provider` says.

    Raises:
        StartupError: when a graph cannot be loaded or is not the manifest's, or the memory cannot be reserved.
    """
    runner: Runner
    if manifest.kv_cache.layout is KVLayout.PAGED:
        runner = build_paged_runner(folder, manifest, limits, options)
    else:
        runner = build_runner(folder, manifest, limits, options, prefill)
    budget = plan_kv_memory(manifest, limits.max_batch_size, limits.kv_memory_bytes)
    return Engine(Scheduler(limits, model_shape(manifest), decode, budget), runner, Sampler(), last_run)


def build_runner(
    folder: Path,
    manifest: Manifest,
    limits: EngineLimits,
    options: SessionOptions,
    prefill: PrefillProvider = PrefillProvider.CPU,
) -> OrtRunner:
    """An artefact's graphs over slots and the K/V they work on.

    Raises:
        StartupError: when a graph cannot be loaded or is not the manifest's, or the memory cannot be reserved.
    """
    by_openvino = prefill is PrefillProvider.OPENVINO
    # Threads that spin when their run is over take the cores from those of the next: of the decoder behind an encoder,
    # of the one provider behind the other. Between a decoder's own steps there is no other.
    stopping = dataclasses.replace(options, stop_spinning=True)
    # Other graphs are loaded when they are wanted.
    decoder = GraphSession(folder, manifest.graphs[DECODER], stopping if by_openvino else options)
    encoder = GraphSession(folder, manifest.graphs[ENCODER], stopping) if ENCODER in manifest.graphs else None
    prefill_graph = _load_prefill_graph(folder, manifest, stopping) if by_openvino else None
    # The decoder of an encoder-decoder computes no chunks.
    max_prefill_tokens = limits.max_prefill_tokens if encoder is None else 0
    try:
        budget = plan_kv_memory(manifest, limits.max_batch_size, limits.kv_memory_bytes)
        check_memory(manifest, budget, limits.max_batch_size, max_prefill_tokens)
        kv = SlotKV(manifest.config, limits.max_batch_size, manifest.kv_cache.precision.dtype)
        return OrtRunner(manifest.config, kv, decoder, encoder, max_prefill_tokens, prefill_graph)
    except (MemoryError, StartupError) as error:
        sizes = f"max_batch_size {limits.max_batch_size}, prefill_chunk {limits.prefill_chunk}"
        raise StartupError([f"{folder}: {sizes}: {error}"]) from error


def build_paged_runner(folder: Path, manifest: Manifest, limits: EngineLimits, options: SessionOptions) -> PagedRunner:
    """An artefact's graphs over blocks and the blocks they work on.

    Raises:
        StartupError: as `build_runner`; when prompts are cut so that what is kept of them would lie across blocks, too.
    """
    config, size = manifest.config, manifest.kv_cache.block_size
    chunk = 1 if config.is_encoder_decoder else limits.prefill_chunk
    if chunk % size and size % chunk:
        problem = f"prefill_chunk is {chunk}, must divide the blocks of {size} tokens or be a multiple of them"
        raise StartupError([f"{folder}: {problem}"])
    decoder = GraphSession(folder, manifest.graphs[DECODER], options)
    encoder = GraphSession(folder, manifest.graphs[ENCODER], options) if config.is_encoder_decoder else None
    try:
        budget = plan_kv_memory(manifest, limits.max_batch_size, limits.kv_memory_bytes)
        check_memory(manifest, budget, limits.max_batch_size, limits.max_prefill_tokens)
        # Golden cases fill rows that no request would be given at once; blocks that nobody fills cost nothing here.
        num_blocks = max(
            budget.num_bytes // (size * budget.token_bytes), limits.max_batch_size * num_row_blocks(manifest)
        )
        memory = HostBlocks(config, num_blocks, size, manifest.kv_cache.precision.dtype)
        kv = PagedKV(memory, limits.max_batch_size)
        return PagedRunner(config, kv, memory, decoder, encoder, limits.max_prefill_tokens)
    except (MemoryError, StartupError) as error:
        sizes = f"max_batch_size {limits.max_batch_size}, prefill_chunk {limits.prefill_chunk}"
        raise StartupError([f"{folder}: {sizes}: {error}"]) from error


def _load_prefill_graph(folder: Path, manifest: Manifest, options: SessionOptions) -> GraphSession:
    """Has OpenVINO load the prefill graph, and tells the log what that cost."""
    openvino = openvino_for(manifest)
    began, before = time.monotonic(), resident_bytes()
    session = GraphSession(folder, manifest.graphs[PREFILL], options, openvino)
    _LOGGER.info(
        "%s: OpenVINO computes prompts in %s; loading took %.1f s and %.0f MiB, runs will take more",
        folder.name,
        openvino.precision,
        time.monotonic() - began,
        (resident_bytes() - before) / (1 << 20),
    )
    return session


def model_shape(manifest: Manifest) -> ModelShape:
    """What scheduling must know of an artefact's model."""
    config = manifest.config
    return ModelShape(
        context=config.context,
        eos_ids=frozenset(manifest.eos_ids),
        source_context=config.source_context if config.is_encoder_decoder else None,
        decoder_start_id=manifest.decoder_start_id,
        generation=manifest.generation,
    )
