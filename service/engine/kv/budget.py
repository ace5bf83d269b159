"""How much memory a model needs and its K/V may take: from its sizes and the operator's wish to its engine's budget.

Knows sizes; neither tensors nor who uses them, nor that there are other models.
"""

from __future__ import annotations

import dataclasses
import mmap
from dataclasses import dataclass

import numpy as np

from model.spec.artifact import MAX_CANDIDATES, Device, KVLayout, Manifest
from service.engine.kv.decode_sizes import decode_sizes
from service.engine.kv.process_memory import memory_limit
from service.engine.kv.reservations import KVBudget
from service.errors import StartupError

_FLOAT_BYTES = np.dtype(np.float32).itemsize
# An id and a logit.
_CANDIDATE_BYTES = 12
# What matrix products and attention ask for besides, in a step.
_WORKSPACE_BYTES = 128 << 20
# A recorded run of a device: its launches, and what its kernels keep for themselves. An estimate.
_RECORD_BYTES = 8 << 20
# Made ready for copies of K/V while nobody waits: so much at most, and of all that K/V may take so large a part.
_READY_BYTES = 128 << 20
_READY_PART = 8
# What CUDA's libraries load when graphs are, and what is lost as a device hands out memory in large pieces.
_LIBRARY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What a model wants of memory, in bytes.

    `whole` is its K/V with all rows at full length, `least` with one: below that, not every request could run.
    `besides` is taken whatever K/V may take: logits, the K/V of prompts in passing, and memory made ready for copies;
    of a device's memory also weights, and what steps have in hand.
    """

    whole: int
    least: int
    besides: int


def memory_needs(manifest: Manifest, num_slots: int, max_prefill_tokens: int) -> MemoryNeeds:
    """What an artifact's engine wants.

    Args:
        manifest: the artifact's.
        num_slots: rows, each with its logits.
        max_prefill_tokens: rows of logits that may be wanted besides, where prompts are computed in chunks.
    """
    budget = plan_kv_memory(manifest, num_slots, None)
    least = _row(manifest, budget)
    if manifest.device is Device.CUDA:
        overhead = device_overhead_bytes(manifest, num_slots, max_prefill_tokens)
        besides = weight_bytes(manifest) + overhead + _LIBRARY_BYTES
        return MemoryNeeds(whole=budget.num_bytes, least=least, besides=besides)
    num_chunked = 0 if manifest.config.is_encoder_decoder else max_prefill_tokens
    logits = (num_slots + num_chunked) * manifest.config.vocab_size * _FLOAT_BYTES
    return MemoryNeeds(
        whole=budget.num_bytes,
        least=least,
        besides=logits + num_chunked * budget.token_bytes + ready_bytes(manifest, budget, num_slots),
    )


def ready_bytes(manifest: Manifest, budget: KVBudget, num_slots: int) -> int:
    """How much memory is made ready for copies of whole chunks, besides what K/V may take.

    None where blocks are shared in the place of being copied, nor of an encoder-decoder, whose copies have all sizes.
    Whoever has more than all rows at full length take is given no more of it than `memory_needs` counts.
    """
    if manifest.kv_cache.layout is KVLayout.PAGED or manifest.config.is_encoder_decoder:
        return 0
    whole = num_slots * _row(manifest, budget)
    return min(_READY_BYTES, min(budget.num_bytes, whole) // _READY_PART)


def weight_bytes(manifest: Manifest) -> int:
    """What the weights of an artifact's graphs take, wherever they are loaded."""
    return sum(entry.num_bytes for name, entry in manifest.files.items() if name.endswith((".onnx", ".onnx.data")))


def graph_weight_bytes(manifest: Manifest, name: str) -> int:
    """What the weights of one graph take."""
    file = manifest.graphs[name].file
    return sum(entry.num_bytes for each, entry in manifest.files.items() if each in (file, f"{file}.data"))


def graph_bytes(manifest: Manifest, name: str, num_slots: int, max_prefill_tokens: int) -> int:
    """What one graph takes of a device's memory, K/V aside: the limit that ONNX Runtime's arena is given.

    Weights count, as the arena hands them out: it takes them past its regions, but not past its limit.
    """
    return graph_weight_bytes(manifest, name) + step_bytes(manifest, num_slots, max_prefill_tokens)


def step_bytes(manifest: Manifest, num_slots: int, max_prefill_tokens: int) -> int:
    """What a step on a device has in hand at most, between its inputs and its outputs.

    An estimate, and a generous one: all that one layer computes for all tokens at once, twice, and all that is made of
    logits; half as much again for what lies waste between pieces of memory that have each been asked for as they came.

    Args:
        manifest: the artifact's.
        num_slots: rows that decode beside prompts.
        max_prefill_tokens: tokens of prompts in a step.
    """
    config, itemsize = manifest.config, manifest.kv_cache.precision.itemsize
    num_tokens = num_slots + max_prefill_tokens
    layer = (8 * config.d_model + 4 * config.d_ff) * itemsize
    # Rounded, in float32, less the highest, their exponentials, and what the highest are sought in.
    logit = itemsize + 5 * _FLOAT_BYTES
    num_bytes = num_tokens * (2 * layer + config.vocab_size * logit)
    if config.is_encoder_decoder:
        source = config.source_context
        # Of pairs of tokens, as products, as what is taken the exponential of, and as weights.
        scores = 3 * config.num_heads * source * _FLOAT_BYTES
        num_bytes += num_slots * source * (2 * layer + scores)
    return num_bytes * 3 // 2 + _WORKSPACE_BYTES


def device_overhead_bytes(manifest: Manifest, num_slots: int, max_prefill_tokens: int) -> int:
    """What a model takes of a device's memory besides weights and K/V that may be given out."""
    budget = _paged_budget(manifest)
    scratch = budget.page_tokens * budget.token_bytes
    # The next power of two is twice as much at most; an encoder has an arena of its own.
    results = 2 * num_slots * (manifest.config.vocab_size * _FLOAT_BYTES + MAX_CANDIDATES * _CANDIDATE_BYTES)
    num_arenas = 2 if manifest.config.is_encoder_decoder else 1
    steps = num_arenas * step_bytes(manifest, num_slots, max_prefill_tokens)
    records = len(decode_sizes(num_slots, manifest.config.context)) * _RECORD_BYTES
    return scratch + results + steps + records


def plan_kv_memory(manifest: Manifest, num_slots: int, kv_memory_bytes: int | None) -> KVBudget:
    """The budget of an artifact's K/V: `kv_memory_bytes`, or what all slots at full length take if that is None."""
    budget = _paged_budget(manifest) if manifest.kv_cache.layout is KVLayout.PAGED else _slot_budget(manifest)
    whole = num_slots * _row(manifest, budget)
    return dataclasses.replace(budget, num_bytes=whole if kv_memory_bytes is None else kv_memory_bytes)


def check_memory(manifest: Manifest, budget: KVBudget, num_slots: int, max_prefill_tokens: int) -> None:
    """Refuses limits that this machine cannot keep: the kernel would not, and end the process once memory is touched.

    Args:
        manifest: the artifact's.
        budget: what `plan_kv_memory` made of the operator's wish.
        num_slots: rows, each with its logits.
        max_prefill_tokens: rows of logits that may be wanted besides.

    Raises:
        StartupError: when K/V have no room for one sequence of full length, or K/V and logits together exceed memory.
    """
    limit = memory_limit()
    if budget.num_bytes < (least := _row(manifest, budget)):
        given = f"kv_memory is {budget.num_bytes} bytes"
        raise StartupError([f"{given}, must be at least {least}, for one sequence of full length"])
    if limit is None:
        return
    if budget.num_bytes > limit:
        raise StartupError([f"K/V of {num_slots} slots needs {budget.num_bytes} bytes, there are {limit}"])
    num_logits = num_slots + max_prefill_tokens
    needed = num_logits * manifest.config.vocab_size * _FLOAT_BYTES
    # Short prompts that are computed together have K/V of their own in passing.
    ready = ready_bytes(manifest, budget, num_slots)
    rest = limit - budget.num_bytes - max_prefill_tokens * budget.token_bytes - ready
    if needed > rest:
        told = f"{num_logits} rows of logits need {needed} bytes, there are {rest} besides K/V and {ready} for copies"
        raise StartupError([told])


def check_device_memory(
    manifest: Manifest, budget: KVBudget, num_slots: int, max_prefill_tokens: int, free_bytes: int
) -> None:
    """Refuses limits that a device cannot keep.

    Args:
        manifest: the artifact's.
        budget: as for `check_memory`.
        num_slots: rows, each with its logits.
        max_prefill_tokens: tokens of prompts in a step.
        free_bytes: of the device's memory, now that the weights are there.

    Raises:
        StartupError: with the numbers.
    """
    if budget.num_bytes < (least := _row(manifest, budget)):
        given = f"kv_memory is {budget.num_bytes} bytes"
        raise StartupError([f"{given}, must be at least {least}, for one sequence of full length"])
    besides = device_overhead_bytes(manifest, num_slots, max_prefill_tokens)
    if budget.num_bytes + besides > free_bytes:
        needed = f"K/V need {budget.num_bytes} bytes and steps {besides}"
        raise StartupError([f"{needed}, the device has {free_bytes} left beside the weights"])


def check_host_memory(manifest: Manifest, num_slots: int, max_prefill_tokens: int) -> None:
    """Refuses limits whose logits this host cannot hold beside a device: twice, as they come and by their rows.

    Those of slots are there once more, in memory that the device reaches without a detour.

    Args:
        manifest: the artifact's.
        num_slots: rows, each with its logits.
        max_prefill_tokens: rows of logits that may be wanted besides.

    Raises:
        StartupError: with the numbers.
    """
    num_rows = num_slots + 2 * (num_slots + max_prefill_tokens)
    needed, limit = num_rows * manifest.config.vocab_size * _FLOAT_BYTES, memory_limit()
    if limit is not None and needed > limit:
        raise StartupError([f"{num_rows} rows of logits need {needed} bytes of this host's memory, there are {limit}"])


def _slot_budget(manifest: Manifest) -> KVBudget:
    """What a row of slots takes. A head's positions lie one after the other, and memory is given by the page."""
    config = manifest.config
    itemsize = manifest.kv_cache.precision.itemsize
    token_bytes = config.kv_bytes_per_token * itemsize // _FLOAT_BYTES
    page_tokens = max(1, mmap.PAGESIZE // (config.head_dim * itemsize))
    return KVBudget(
        num_bytes=0,
        token_bytes=token_bytes,
        source_token_bytes=token_bytes,
        page_tokens=page_tokens,
        source_page_tokens=page_tokens,
    )


def _paged_budget(manifest: Manifest) -> KVBudget:
    """What a row of blocks takes: sources come from the same pool."""
    kv = manifest.kv_cache
    token_bytes = manifest.config.kv_bytes_per_token * kv.precision.itemsize // _FLOAT_BYTES
    return KVBudget(
        num_bytes=0,
        token_bytes=token_bytes,
        source_token_bytes=token_bytes,
        page_tokens=kv.block_size,
        source_page_tokens=kv.block_size,
    )


def _row(manifest: Manifest, budget: KVBudget) -> int:
    """Bytes of one sequence of full length."""
    config = manifest.config
    return budget.row_bytes(config.context, config.source_context if config.is_encoder_decoder else 0)
