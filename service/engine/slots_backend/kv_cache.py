"""K/V in slots: one buffer per layer over all rows, bound to the graph as past and present, and saved copies of rows.

A step writes in place, and the active rows are a prefix view. Changed by the runner only. Knows rows and lengths; no
sequences and no budget: what to copy, save and drop is the ledger's decision (`service.engine.kv.ledger`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import numpy.typing as npt

from model.spec.config import ModelConfig
from service.engine.batch import KVCopy, KVDrop, KVFree, KVOperation, KVRestore, KVRetain, KVSave
from service.engine.kv.pages import Pages
from service.engine.kv.prefaulted_memory import PrefaultedMemory

Buffers = npt.NDArray[np.float32 | np.int8]


@dataclass(frozen=True, slots=True)
class _Saved:
    """A part of a row: self positions from `start` on, `[tensors, kv_heads, length, head_dim]`, and cross positions."""

    start: int
    own: Buffers
    cross: Buffers


class SlotKV:
    """K/V of a fixed number of rows, each with room for a whole context.

    Address space is reserved at once, memory is touched by the page as rows are written.

    Args:
        config: the model's sizes.
        num_slots: rows.
        dtype: "float32" or "int8", of self and cross attention.
        chunk_tokens: self positions of most saved copies.
        prefault_bytes: pre-faulted memory for such copies (`prefault`).

    Raises:
        MemoryError: when there is not even so much address space.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        dtype: str = "float32",
        chunk_tokens: int = 0,
        prefault_bytes: int = 0,
    ) -> None:
        num_tensors = 2 * config.num_layers
        row = (config.num_kv_heads, config.context, config.head_dim)
        cross_row = (config.num_kv_heads, config.source_context, config.head_dim)
        num_cross = num_tensors if config.is_encoder_decoder else 0
        self._own_pages = Pages((num_tensors, num_slots, *row), dtype, is_sparse=True)
        self._cross_pages = Pages((num_cross, num_slots, *cross_row), dtype, is_sparse=True)
        self._own: Buffers = self._own_pages.array
        self._cross: Buffers = self._cross_pages.array
        self._saved: dict[int, _Saved] = {}
        chunk_shape = (num_tensors, config.num_kv_heads, chunk_tokens, config.head_dim)
        self._prefaulted = PrefaultedMemory(chunk_shape, dtype, prefault_bytes)

    @property
    def num_slots(self) -> int:
        """Rows."""
        return int(self._own.shape[1])

    @property
    def stored_bytes(self) -> int:
        """Memory of saved copies."""
        return sum(saved.own.nbytes + saved.cross.nbytes for saved in self._saved.values())

    @property
    def own(self) -> tuple[Buffers, ...]:
        """For each layer K then V of self-attention: `[slots, kv_heads, context, head_dim]`, live."""
        return tuple(self._own)

    @property
    def cross(self) -> tuple[Buffers, ...]:
        """For each layer K then V of cross-attention: `[slots, kv_heads, source_context, head_dim]`, live."""
        return tuple(self._cross)

    def prefault(self) -> bool:
        """Pre-faults some memory for saved copies, while the engine is idle; returns whether there is more to do.

        Raises:
            MemoryError: when the system refuses.
        """
        return self._prefaulted.prefault()

    def apply(self, operation: KVOperation) -> None:
        """Carries out one operation on all layers.

        Raises:
            KeyError: when nothing is saved under a handle that is restored or dropped.
            ValueError: when a handle to save under is in use.
        """
        match operation:
            case KVCopy():
                self._copy(operation)
            case KVSave():
                self._save(operation)
            case KVRestore():
                saved = self._saved[operation.handle]
                _write(self._own, operation.slot, saved.start, saved.own)
                _write(self._cross, operation.slot, 0, saved.cross)
            case KVDrop():
                self._drop(operation.handle)
            case KVFree():
                _free(self._own_pages, operation.slot, operation.num_tokens)
                _free(self._cross_pages, operation.slot, operation.num_source_tokens)
            case KVRetain():
                for handle in self._saved.keys() - operation.handles:
                    self._drop(handle)
            case _:
                assert_never(operation)

    def write_own(self, slots: Sequence[int], lengths: Sequence[int], computed: Buffers) -> None:
        """Writes the first positions of rows.

        Args:
            slots: the rows.
            lengths: tokens of each; what follows them in `computed` is padding.
            computed: for each layer K then V, `[tensors, len(slots), kv_heads, padded, head_dim]`.
        """
        for index, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            _write(self._own, slot, 0, computed[:, index, :, :length])

    def write_cross(self, slots: Sequence[Sequence[int]], tensors: Sequence[Buffers]) -> None:
        """Writes encoded sources with their padding, which is never attended to.

        Args:
            slots: rows of each source.
            tensors: for each layer K then V, `[len(slots), kv_heads, source, head_dim]`, of the rows' dtype.
        """
        for buffer, tensor in zip(self._cross, tensors, strict=True):
            for source, rows in zip(tensor, slots, strict=True):
                buffer[list(rows), :, : tensor.shape[2]] = source

    def _copy(self, copy: KVCopy) -> None:
        own, cross = slice(copy.start, copy.num_tokens), slice(copy.num_source_tokens)
        # Tensor by tensor: over all of them NumPy cannot tell that rows do not overlap, and copies twice.
        for rows in self._own:
            rows[copy.target, :, own] = rows[copy.source, :, own]
        for rows in self._cross:
            rows[copy.target, :, cross] = rows[copy.source, :, cross]

    def _save(self, save: KVSave) -> None:
        if save.handle in self._saved:
            raise ValueError(f"handle {save.handle} is in use")
        own = self._compact(self._own, save.slot, save.start, save.num_tokens)
        cross = self._compact(self._cross, save.slot, 0, save.num_source_tokens)
        self._saved[save.handle] = _Saved(save.start, own, cross)

    def _drop(self, handle: int) -> None:
        self._prefaulted.give_back(self._saved.pop(handle).own)

    def _compact(self, buffers: Buffers, slot: int, start: int, stop: int) -> Buffers:
        """A copy of positions `[start, stop)` of a row, all tensors, in memory of its own."""
        num_tensors, _, num_heads, _, head_dim = buffers.shape
        copy = self._prefaulted.take((num_tensors, num_heads, stop - start, head_dim))
        copy[:] = buffers[:, slot, :, start:stop]
        return copy


def _free(pages: Pages, slot: int, num_tokens: int) -> None:
    """Returns a row's memory to the system, except under its first positions."""
    for rows in pages.array:
        for part in [head[num_tokens:] for head in rows[slot]] if num_tokens else [rows[slot]]:
            pages.release(part)


def _write(buffers: Buffers, slot: int, start: int, values: Buffers) -> None:
    buffers[:, slot, :, start : start + values.shape[2]] = values
