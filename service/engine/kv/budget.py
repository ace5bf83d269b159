"""Memory budgets: what a model needs, what its K/V may take, and limits that the machine or device cannot keep.

From an artifact's sizes and the operator's settings; knows neither tensors nor other models. `num_slots` are rows,
`max_prefill_tokens` the prompt tokens of a step, each of which may want logits.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace

from model.spec.artifact import MAX_CANDIDATES, Device, KVLayout, Manifest
from service.engine.kv.decode_sizes import decode_sizes
from service.engine.kv.process_memory import memory_limit
from service.engine.kv.reservations import KVBudget
from service.errors import StartupError

MAX_PREFAULT_BYTES = 128 << 20
"""The most pre-faulted memory of a model."""
PREFAULT_SHARE = 8
"""Pre-faulted memory is at most one part in so many of the K/V budget."""

_FLOAT_BYTES = 4
# An id and a logit.
_CANDIDATE_BYTES = 12
# Scratch space of matrix products and attention in a step.
_WORKSPACE_BYTES = 128 << 20
# One CUDA graph: its launches and its kernels' own memory. An estimate.
_RECORD_BYTES = 8 << 20
# CUDA's libraries, and fragmentation of the device's memory.
_LIBRARY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """Bytes that a model needs.

    `whole` is its K/V with all rows at full length, `least` with one row: with less, some requests could never run.
    `besides` is needed beyond K/V: logits, K/V of prompts in a group prefill; on a device also weights and activations.
    With `is_prefaulted`, pre-faulted memory comes on top, in proportion to the K/V that the model gets.
    """

    whole: int
    least: int
    besides: int
    is_prefaulted: bool = False

    def prefaulted(self, kv_bytes: int) -> int:
        """Pre-faulted memory beside so many bytes of K/V."""
        return prefault_share(min(kv_bytes, self.whole)) if self.is_prefaulted else 0


def prefault_share(kv_bytes: int) -> int:
    """Pre-faulted memory of a model that has some, beside so many bytes of its K/V."""
    return min(MAX_PREFAULT_BYTES, kv_bytes // PREFAULT_SHARE)


def memory_needs(manifest: Manifest, num_slots: int, max_prefill_tokens: int) -> MemoryNeeds:
    """What an artifact's engine needs."""
    budget = plan_kv_memory(manifest, num_slots, None)
    if manifest.device is Device.CUDA:
        overhead = device_overhead_bytes(manifest, num_slots, max_prefill_tokens)
        besides = weight_bytes(manifest) + overhead + _LIBRARY_BYTES
    else:
        num_chunked = 0 if manifest.config.is_encoder_decoder else max_prefill_tokens
        besides = logits_bytes(manifest, num_slots + num_chunked) + num_chunked * budget.token_bytes
    return MemoryNeeds(
        whole=budget.num_bytes,
        least=_full_row_bytes(manifest, budget),
        besides=besides,
        is_prefaulted=is_prefaulted(manifest),
    )


def prefault_bytes(manifest: Manifest, budget: KVBudget, num_slots: int) -> int:
    """Pre-faulted memory for copies of whole chunks, beyond the K/V budget.

    None for blocks, which are shared instead of copied, and for encoder-decoders, whose copies vary in size. A budget
    beyond all rows at full length gets no more than `memory_needs` counts.
    """
    if not is_prefaulted(manifest):
        return 0
    whole = num_slots * _full_row_bytes(manifest, budget)
    return prefault_share(min(budget.num_bytes, whole))


def is_prefaulted(manifest: Manifest) -> bool:
    """Whether an engine has pre-faulted memory: where chunks are copied, all of one size."""
    return not (manifest.kv_cache.layout is KVLayout.PAGED or manifest.config.is_encoder_decoder)


def weight_bytes(manifest: Manifest) -> int:
    """Weights of all graphs of an artifact, as in their files."""
    return sum(entry.num_bytes for name, entry in manifest.files.items() if name.endswith((".onnx", ".onnx.data")))


def graph_weight_bytes(manifest: Manifest, name: str) -> int:
    """Weights of one graph, as in its files."""
    file = manifest.graphs[name].file
    return sum(entry.num_bytes for each, entry in manifest.files.items() if each in (file, f"{file}.data"))


def graph_bytes(manifest: Manifest, name: str, num_slots: int, max_prefill_tokens: int) -> int:
    """The limit of ONNX Runtime's arena for one graph on a device, which counts weights and activations, not K/V."""
    return graph_weight_bytes(manifest, name) + step_bytes(manifest, num_slots, max_prefill_tokens)


def step_bytes(manifest: Manifest, num_slots: int, max_prefill_tokens: int) -> int:
    """Activations of a step on a device, between its inputs and its outputs.

    A generous estimate: twice one layer's activations for all tokens, the logits and their derivatives, and half as
    much again for fragmentation.
    """
    config, itemsize = manifest.config, manifest.kv_cache.precision.itemsize
    num_tokens = num_slots + max_prefill_tokens
    layer = (8 * config.d_model + 4 * config.d_ff) * itemsize
    # As computed, in float32, minus the maximum, exponentials, and two of top-k.
    logit = itemsize + 5 * _FLOAT_BYTES
    num_bytes = num_tokens * (2 * layer + config.vocab_size * logit)
    if config.is_encoder_decoder:
        source = config.source_context
        # Scores of token pairs: products, exponentials and weights.
        scores = 3 * config.num_heads * source * _FLOAT_BYTES
        num_bytes += num_slots * source * (2 * layer + scores)
    return num_bytes * 3 // 2 + _WORKSPACE_BYTES


def device_overhead_bytes(manifest: Manifest, num_slots: int, max_prefill_tokens: int) -> int:
    """A model's device memory besides weights and the K/V budget."""
    budget = _row_costs(manifest)
    scratch = budget.page_tokens * budget.token_bytes
    # Rows are rounded up to a power of two, at most twice as many; an encoder has its own arena.
    results = 2 * num_slots * (manifest.config.vocab_size * _FLOAT_BYTES + MAX_CANDIDATES * _CANDIDATE_BYTES)
    num_arenas = 2 if manifest.config.is_encoder_decoder else 1
    steps = num_arenas * step_bytes(manifest, num_slots, max_prefill_tokens)
    records = len(decode_sizes(num_slots, manifest.config.context)) * _RECORD_BYTES
    return scratch + results + steps + records


def plan_kv_memory(manifest: Manifest, num_slots: int, kv_memory_bytes: int | None) -> KVBudget:
    """The K/V budget: `kv_memory_bytes`, or if None enough for all slots at full length."""
    costs = _row_costs(manifest)
    num_bytes = num_slots * _full_row_bytes(manifest, costs) if kv_memory_bytes is None else kv_memory_bytes
    return replace(costs, num_bytes=num_bytes)


def check_memory(manifest: Manifest, budget: KVBudget, num_slots: int, max_prefill_tokens: int) -> None:
    """Refuses limits that exceed this machine's memory, for which the kernel would later kill the process.

    Raises:
        StartupError: when K/V have no room for one full-length sequence, or K/V and logits exceed memory.
    """
    limit = memory_limit()
    _check_least(manifest, budget)
    if limit is None:
        return
    if budget.num_bytes > limit:
        raise StartupError([f"K/V of {num_slots} slots needs {budget.num_bytes} bytes, there are {limit}"])
    num_logits = num_slots + max_prefill_tokens
    needed = logits_bytes(manifest, num_logits)
    prefault = prefault_bytes(manifest, budget, num_slots)
    # A group prefill has K/V of its own.
    rest = limit - budget.num_bytes - max_prefill_tokens * budget.token_bytes - prefault
    if needed > rest:
        besides = f"there are {rest} besides K/V and {prefault} for copies"
        raise StartupError([f"{num_logits} rows of logits need {needed} bytes, {besides}"])


def check_device_memory(
    manifest: Manifest, budget: KVBudget, num_slots: int, max_prefill_tokens: int, free_bytes: int
) -> None:
    """Refuses limits that exceed a device's memory; `free_bytes` are those after the weights are loaded.

    Raises:
        StartupError: with the numbers.
    """
    _check_least(manifest, budget)
    besides = device_overhead_bytes(manifest, num_slots, max_prefill_tokens)
    if budget.num_bytes + besides > free_bytes:
        needed = f"K/V need {budget.num_bytes} bytes and steps {besides}"
        raise StartupError([f"{needed}, the device has {free_bytes} left beside the weights"])


def check_host_memory(manifest: Manifest, num_slots: int, max_prefill_tokens: int) -> None:
    """Refuses limits whose logits exceed this host's memory beside a device.

    Logits are on the host twice, in packed order and by row; those of slots once more in pinned memory.

    Raises:
        StartupError: with the numbers.
    """
    num_rows = num_slots + 2 * (num_slots + max_prefill_tokens)
    needed, limit = logits_bytes(manifest, num_rows), memory_limit()
    if limit is not None and needed > limit:
        raise StartupError([f"{num_rows} rows of logits need {needed} bytes of this host's memory, there are {limit}"])


def _check_least(manifest: Manifest, budget: KVBudget) -> None:
    if budget.num_bytes < (least := _full_row_bytes(manifest, budget)):
        given = f"kv_memory is {budget.num_bytes} bytes"
        raise StartupError([f"{given}, must be at least {least}, for one sequence of full length"])


def logits_bytes(manifest: Manifest, num_rows: int) -> int:
    """Logits of so many tokens."""
    return num_rows * manifest.config.vocab_size * _FLOAT_BYTES


def _row_costs(manifest: Manifest) -> KVBudget:
    """What a row costs, in a budget of 0 bytes. In slots the positions of one head share pages of memory."""
    config, kv = manifest.config, manifest.kv_cache
    itemsize = kv.precision.itemsize
    token_bytes = config.kv_bytes_per_token * itemsize // _FLOAT_BYTES
    is_paged = kv.layout is KVLayout.PAGED
    page_tokens = kv.block_size if is_paged else max(1, mmap.PAGESIZE // (config.head_dim * itemsize))
    return KVBudget(
        num_bytes=0,
        token_bytes=token_bytes,
        source_token_bytes=token_bytes,
        page_tokens=page_tokens,
        source_page_tokens=page_tokens,
    )


def _full_row_bytes(manifest: Manifest, budget: KVBudget) -> int:
    config = manifest.config
    return budget.row_bytes(config.context, config.source_context if config.is_encoder_decoder else 0)
