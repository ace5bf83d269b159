"""How much memory a model needs and its K/V may take: from its sizes and the operator's wish to its engine's budget.

Knows sizes; neither tensors nor who uses them, nor that there are other models.
"""

from __future__ import annotations

import dataclasses
import mmap
from dataclasses import dataclass

import numpy as np

from model.artifact import KVLayout, Manifest
from service.engine.kv_ledger import KVBudget
from service.engine.memory import memory_limit
from service.errors import StartupError

_FLOAT_BYTES = np.dtype(np.float32).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What a model wants of memory, in bytes.

    `whole` is its K/V with all rows at full length, `least` with one: below that, not every request could run.
    `besides` is taken whatever K/V may take: logits, and the K/V of prompts in passing.
    """

    whole: int
    least: int
    besides: int


def memory_needs(manifest: Manifest, num_slots: int, max_prefill_tokens: int) -> MemoryNeeds:
    """What an artefact's engine wants.

    Args:
        manifest: the artefact's.
        num_slots: rows, each with its logits.
        max_prefill_tokens: rows of logits that may be wanted besides, where prompts are computed in chunks.
    """
    budget = plan_kv_memory(manifest, num_slots, None)
    num_chunked = 0 if manifest.config.is_encoder_decoder else max_prefill_tokens
    logits = (num_slots + num_chunked) * manifest.config.vocab_size * _FLOAT_BYTES
    return MemoryNeeds(
        whole=budget.num_bytes,
        least=_row(manifest, budget),
        besides=logits + num_chunked * budget.token_bytes,
    )


def plan_kv_memory(manifest: Manifest, num_slots: int, kv_memory_bytes: int | None) -> KVBudget:
    """The budget of an artefact's K/V: `kv_memory_bytes`, or what all slots at full length take if that is None."""
    budget = _paged_budget(manifest) if manifest.kv_cache.layout is KVLayout.PAGED else _slot_budget(manifest)
    whole = num_slots * _row(manifest, budget)
    return dataclasses.replace(budget, num_bytes=whole if kv_memory_bytes is None else kv_memory_bytes)


def num_row_blocks(manifest: Manifest) -> int:
    """Blocks of one sequence of full length and its source, for an artefact whose K/V are paged."""
    budget = _paged_budget(manifest)
    return _row(manifest, budget) // (budget.page_tokens * budget.token_bytes)


def check_memory(manifest: Manifest, budget: KVBudget, num_slots: int, max_prefill_tokens: int) -> None:
    """Refuses limits that this machine cannot keep: the kernel would not, and end the process once memory is touched.

    Args:
        manifest: the artefact's.
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
    rest = limit - budget.num_bytes - max_prefill_tokens * budget.token_bytes
    if needed > rest:
        raise StartupError([f"{num_logits} rows of logits need {needed} bytes, there are {rest} besides K/V"])


def _slot_budget(manifest: Manifest) -> KVBudget:
    """What a row of slots takes. A head's positions lie one after the other, and memory is given by the page."""
    config = manifest.config
    itemsize = np.dtype(manifest.kv_cache.precision.dtype).itemsize
    return KVBudget(
        num_bytes=0,
        token_bytes=config.kv_bytes_per_token * itemsize // _FLOAT_BYTES,
        source_token_bytes=config.kv_bytes_per_token,
        page_tokens=max(1, mmap.PAGESIZE // (config.head_dim * itemsize)),
        source_page_tokens=max(1, mmap.PAGESIZE // (config.head_dim * _FLOAT_BYTES)),
    )


def _paged_budget(manifest: Manifest) -> KVBudget:
    """What a row of blocks takes: sources come from the same pool."""
    kv = manifest.kv_cache
    token_bytes = manifest.config.kv_bytes_per_token * np.dtype(kv.precision.dtype).itemsize // _FLOAT_BYTES
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
