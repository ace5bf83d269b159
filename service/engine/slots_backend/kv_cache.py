"""Keys and values of the sequences that hold a slot, and copies of them that are kept.

`KVCache` is what every backend promises, `SlotKV` the backend of graphs over slots: for each layer one buffer over all
slots, bound to the graph as past and as present, so that a step writes in place and the active rows are a prefix view
(`service.engine.paged_backend.paged_kv` is the other backend). Changed by the runner alone. Knows no sequences and no
budget: rows are slots, lengths come with the operation, and what is kept, for whom and how long is the scheduler's
business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

import numpy as np
import numpy.typing as npt

from model.spec.config import ModelConfig
from service.engine.batch import KVCopy, KVDrop, KVFree, KVOperation, KVRestore, KVRetain, KVSave
from service.engine.kv.pages import Pages
from service.engine.kv.prefaulted_memory import ReadyMemory

Buffers = npt.NDArray[np.float32 | np.int8]


class KVCache(Protocol):
    """A self-attention cache and, for an encoder-decoder, a cross-attention cache."""

    @property
    def num_slots(self) -> int:
        """How many sequences fit."""

    @property
    def reserved_bytes(self) -> int:
        """Memory set aside for rows, used or not."""

    @property
    def stored_bytes(self) -> int:
        """Memory of the copies that are kept, which is besides."""

    def apply(self, operation: KVOperation) -> None:
        """Carries out one operation (`service.engine.batch`).

        Raises:
            KeyError: when nothing is kept under a handle that is restored or dropped.
            ValueError: when something is kept already under the handle of a copy to be kept.
        """


@dataclass(frozen=True, slots=True)
class _Kept:
    """A part of a row: self positions from `start` on, `[tensors, kv_heads, length, head_dim]`, and cross positions."""

    start: int
    own: Buffers
    cross: Buffers


class SlotKV:
    """K/V of a fixed number of rows, each with room for a whole context.

    Memory is reserved at once and touched as it is used, by the page: rows that nobody has filled cost address space.

    Args:
        config: the model's sizes.
        num_slots: how many rows.
        dtype: of what rows hold, of their own and of their sources, "float32" or "int8".
        kept_tokens: how many tokens most copies have, those of a row's own positions.
        ready_bytes: how much memory may be made ready for such copies (`prepare`).

    Raises:
        MemoryError: when there is not even so much address space.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        dtype: str = "float32",
        kept_tokens: int = 0,
        ready_bytes: int = 0,
    ) -> None:
        num_tensors = 2 * config.num_layers
        row = (config.num_kv_heads, config.context, config.head_dim)
        cross_row = (config.num_kv_heads, config.source_context, config.head_dim)
        num_cross = num_tensors if config.is_encoder_decoder else 0
        self._own_pages = Pages((num_tensors, num_slots, *row), dtype, is_sparse=True)
        self._cross_pages = Pages((num_cross, num_slots, *cross_row), dtype, is_sparse=True)
        self._own: Buffers = self._own_pages.array
        self._cross: Buffers = self._cross_pages.array
        self._kept: dict[int, _Kept] = {}
        kept_shape = (num_tensors, config.num_kv_heads, kept_tokens, config.head_dim)
        self._ready = ReadyMemory(kept_shape, dtype, ready_bytes)

    @property
    def num_slots(self) -> int:
        """How many sequences fit."""
        return int(self._own.shape[1])

    @property
    def reserved_bytes(self) -> int:
        """Memory set aside for rows, used or not."""
        return self._own.nbytes + self._cross.nbytes

    @property
    def stored_bytes(self) -> int:
        """Memory of the copies that are kept, which is besides."""
        return sum(kept.own.nbytes + kept.cross.nbytes for kept in self._kept.values())

    @property
    def own(self) -> tuple[Buffers, ...]:
        """For each layer K then V of self-attention: `[slots, kv_heads, context, head_dim]`, live."""
        return tuple(self._own)

    @property
    def cross(self) -> tuple[Buffers, ...]:
        """For each layer K then V of the sources: `[slots, kv_heads, source_context, head_dim]`, live."""
        return tuple(self._cross)

    def prepare(self) -> bool:
        """Makes some memory ready for copies, for when nobody waits; whether there is more to be done.

        It is besides what rows and copies take, `ready_bytes` at most.

        Raises:
            MemoryError: when the system refuses.
        """
        return self._ready.prepare()

    def apply(self, operation: KVOperation) -> None:
        """Carries out one operation, on all layers; see `KVCache.apply`."""
        match operation:
            case KVCopy():
                self._copy(operation)
            case KVSave():
                self._save(operation)
            case KVRestore():
                kept = self._kept[operation.handle]
                _write(self._own, operation.slot, kept.start, kept.own)
                _write(self._cross, operation.slot, 0, kept.cross)
            case KVDrop():
                self._ready.give_back(self._kept.pop(operation.handle).own)
            case KVFree():
                _free(self._own_pages, operation.slot, operation.num_tokens)
                _free(self._cross_pages, operation.slot, operation.num_source_tokens)
            case KVRetain():
                for handle in self._kept.keys() - operation.handles:
                    self._ready.give_back(self._kept.pop(handle).own)
            case _:
                assert_never(operation)

    def write_own(self, slots: Sequence[int], lengths: Sequence[int], computed: Buffers) -> None:
        """Stores what begins rows, computed elsewhere.

        Args:
            slots: which rows.
            lengths: how many tokens of each there are; what lies behind them in `computed` is left where it is.
            computed: for each layer K then V, `[tensors, len(slots), kv_heads, padded, head_dim]`.
        """
        for index, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            _write(self._own, slot, 0, computed[:, index, :, :length])

    def write_cross(self, slots: Sequence[Sequence[int]], tensors: Sequence[Buffers]) -> None:
        """Stores encoded sources, padding included: it is never attended to.

        Args:
            slots: which rows each source belongs to.
            tensors: for each layer K then V, `[len(slots), kv_heads, source, head_dim]`, of the rows' own dtype.
        """
        for buffer, tensor in zip(self._cross, tensors, strict=True):
            for source, rows in zip(tensor, slots, strict=True):
                buffer[list(rows), :, : tensor.shape[2]] = source

    def _copy(self, copy: KVCopy) -> None:
        own, cross = slice(copy.start, copy.num_tokens), slice(copy.num_source_tokens)
        # One tensor at a time: over all of them NumPy cannot tell that rows do not overlap, and copies twice.
        for rows in self._own:
            rows[copy.target, :, own] = rows[copy.source, :, own]
        for rows in self._cross:
            rows[copy.target, :, cross] = rows[copy.source, :, cross]

    def _save(self, save: KVSave) -> None:
        if save.handle in self._kept:
            raise ValueError(f"handle {save.handle} is in use")
        own = self._compact(self._own, save.slot, save.start, save.num_tokens)
        cross = self._compact(self._cross, save.slot, 0, save.num_source_tokens)
        self._kept[save.handle] = _Kept(save.start, own, cross)

    def _compact(self, buffers: Buffers, slot: int, start: int, stop: int) -> Buffers:
        """A copy of positions `[start, stop)` of a row, all tensors, in memory of its own."""
        num_tensors, _, num_heads, _, head_dim = buffers.shape
        kept = self._ready.take((num_tensors, num_heads, stop - start, head_dim))
        kept[:] = buffers[:, slot, :, start:stop]
        return kept


def _free(pages: Pages, slot: int, num_tokens: int) -> None:
    """Gives back a row's memory but that under its first positions."""
    for rows in pages.array:
        for part in [head[num_tokens:] for head in rows[slot]] if num_tokens else [rows[slot]]:
            pages.release(part)


def _write(buffers: Buffers, slot: int, start: int, kept: Buffers) -> None:
    buffers[:, slot, :, start : start + kept.shape[2]] = kept
