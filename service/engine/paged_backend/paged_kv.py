"""K/V in blocks: a row is a list of block numbers, and rows with equal K/V share blocks.

Forks, saved copies and cached prefixes hold the blocks of the row that they come from (copy on write): only a block
that is written while shared, or taken over in part, is copied. Rows' own tokens and their sources use one pool.

`PagedKV` counts references and decides what to copy; a `BlockMemory` holds the numbers and copies them. Changed by the
runner only. Knows rows and lengths; no sequences and no budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

import numpy as np
import numpy.typing as npt

from model.spec.config import ModelConfig
from service.engine.batch import KVCopy, KVDrop, KVFree, KVOperation, KVRestore, KVRetain, KVSave
from service.engine.kv.blocks import SCRATCH, BlockPool
from service.engine.kv.pages import Pages

Array = npt.NDArray[np.generic]
Int32 = npt.NDArray[np.int32]

Table = list[int]
"""Blocks by their index in a row; `SCRATCH` for gaps."""


class BlockMemory(Protocol):
    """K/V of all layers in blocks: the scratch block 0 and `num_blocks` of `block_size` tokens."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copies positions `[start, stop)` of one block to the same positions of another, in all layers."""

    def release(self, block: int) -> None:
        """A block is free; its memory may go back to the system until it is written again."""

    def flush(self) -> None:
        """Carries out pending copies; before any graph runs."""


class HostBlocks:
    """A `BlockMemory` on this machine; untouched blocks cost address space only.

    Attributes:
        caches: for each layer K then V: `[num_blocks + 1, block_size, kv_heads, head_dim]`, live.

    Raises:
        MemoryError: when there is not even so much address space.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: str = "float32") -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (2 * config.num_layers, num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self._pages = Pages(shape, dtype, is_sparse=True)
        self.caches: tuple[Array, ...] = tuple(self._pages.array)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """See `BlockMemory`."""
        # Tensor by tensor: over all of them NumPy cannot tell that blocks do not overlap, and copies twice.
        for blocks in self.caches:
            blocks[target, start:stop] = blocks[source, start:stop]

    def release(self, block: int) -> None:
        """See `BlockMemory`."""
        for blocks in self.caches:
            self._pages.release(blocks[block])

    def flush(self) -> None:
        """See `BlockMemory`: copies are never pending."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """The blocks, in order, under self positions `[start, stop)` and the first `num_source` source positions."""

    start: int
    stop: int
    own: tuple[int, ...]
    num_source: int
    source: tuple[int, ...]


class PagedKV:
    """K/V of a fixed number of rows, in the blocks of a memory that this cache alone allocates."""

    def __init__(self, memory: BlockMemory, num_slots: int) -> None:
        self._memory = memory
        self._block_size = memory.block_size
        self._pool = BlockPool(memory.num_blocks)
        self._own: list[Table] = [[] for _ in range(num_slots)]
        self._source: list[Table] = [[] for _ in range(num_slots)]
        self._saved: dict[int, _Saved] = {}

    @property
    def num_slots(self) -> int:
        """Rows."""
        return len(self._own)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks."""
        return self._pool.num_free

    def apply(self, operation: KVOperation) -> None:
        """Carries out one operation.

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
                self._lay_over(self._own[operation.slot], saved.own, saved.start, saved.stop)
                self._lay_over(self._source[operation.slot], saved.source, 0, saved.num_source)
            case KVDrop():
                self._drop(operation.handle)
            case KVFree():
                self._cut(self._own[operation.slot], 0)
                self._cut(self._source[operation.slot], 0)
            case KVRetain():
                for handle in [handle for handle in self._saved if handle not in operation.handles]:
                    self._drop(handle)
            case _:
                assert_never(operation)

    def reserve(self, slot: int, start: int, stop: int) -> None:
        """Makes positions `[start, stop)` of a row writable: allocated, and shared with no other holder.

        Raises:
            PoolExhausted: when no block is free.
        """
        table, size = self._own[slot], self._block_size
        for index in range(start // size, -(-stop // size)):
            if _block_at(table, index) == SCRATCH:
                self._put(table, index, self._pool.take())
            else:
                self._own_alone(table, index, is_overwritten=start <= index * size and (index + 1) * size <= stop)

    def reserve_source(self, slots: Sequence[int], length: int) -> Int32:
        """Allocates a source of `length` tokens that the rows share, instead of the sources that they had.

        Returns:
            Where to write its tokens: `[length]` places in the pool, `block * block_size + offset`.

        Raises:
            PoolExhausted: when no block is free.
        """
        for slot in slots:
            self._cut(self._source[slot], 0)
        blocks = [self._pool.take() for _ in range(-(-length // self._block_size))]
        for number, slot in enumerate(slots):
            self._source[slot].extend(blocks)
            if number:
                for block in blocks:
                    self._pool.share(block)
        return self._places(blocks, 0, length)

    def places(self, slot: int, start: int, stop: int) -> Int32:
        """Places of positions `[start, stop)` of a row, `block * block_size + offset`."""
        return self._places(self._own[slot], start, stop)

    def place(self, slot: int, position: int) -> int:
        """The place of one position of a row."""
        block, offset = divmod(position, self._block_size)
        return self._own[slot][block] * self._block_size + offset

    def table(self, slot: int, length: int) -> Sequence[int]:
        """The blocks under the first `length` tokens of a row."""
        return self._own[slot][: -(-length // self._block_size)]

    def source_table(self, slot: int, length: int) -> Sequence[int]:
        """The blocks under the first `length` tokens of a row's source."""
        return self._source[slot][: -(-length // self._block_size)]

    def check_invariants(self) -> None:
        """Asserts that every block has as many holders as rows and saved copies name it."""
        saved = (blocks for each in self._saved.values() for blocks in (each.own, each.source))
        held = (block for blocks in (*self._own, *self._source, *saved) for block in blocks)
        self._pool.check_invariants(block for block in held if block != SCRATCH)

    def _copy(self, copy: KVCopy) -> None:
        own = self._blocks_under(self._own[copy.source], copy.start, copy.num_tokens)
        self._lay_over(self._own[copy.target], own, copy.start, copy.num_tokens)
        source = self._blocks_under(self._source[copy.source], 0, copy.num_source_tokens)
        self._lay_over(self._source[copy.target], source, 0, copy.num_source_tokens)

    def _save(self, save: KVSave) -> None:
        if save.handle in self._saved:
            raise ValueError(f"handle {save.handle} is in use")
        own = self._blocks_under(self._own[save.slot], save.start, save.num_tokens)
        source = self._blocks_under(self._source[save.slot], 0, save.num_source_tokens)
        for block in (*own, *source):
            self._share(block)
        self._saved[save.handle] = _Saved(save.start, save.num_tokens, own, save.num_source_tokens, source)

    def _drop(self, handle: int) -> None:
        saved = self._saved.pop(handle)
        for block in (*saved.own, *saved.source):
            self._release(block)

    def _lay_over(self, table: Table, blocks: Sequence[int], start: int, stop: int) -> None:
        """Gives a row positions `[start, stop)` of `blocks`, the first of which contains `start`.

        The row keeps what it has before `start` and releases what it has after `stop`. A block is shared, unless the
        row has a part of its own before `start` in it: then the rest is copied.
        """
        if start == stop:
            return
        size = self._block_size
        for index, block in enumerate(blocks, start // size):
            begin = max(start - index * size, 0)
            present = _block_at(table, index)
            if begin == 0 or present == SCRATCH:
                self._share(block)
                self._put(table, index, block)
            elif block not in (present, SCRATCH):
                self._own_alone(table, index, is_overwritten=False)
                self._memory.copy(block, table[index], begin, min(stop - index * size, size))
        self._cut(table, -(-stop // size))

    def _own_alone(self, table: Table, index: int, *, is_overwritten: bool) -> None:
        """Copies one of a row's blocks if it is shared; only takes another block if `is_overwritten`."""
        block = table[index]
        if not self._pool.is_shared(block):
            return
        fresh = self._pool.take()
        if not is_overwritten:
            self._memory.copy(block, fresh, 0, self._block_size)
        self._put(table, index, fresh)

    def _put(self, table: Table, index: int, block: int) -> None:
        """Puts a block that the row holds already into its table."""
        table.extend([SCRATCH] * (index + 1 - len(table)))
        former, table[index] = table[index], block
        self._release(former)

    def _cut(self, table: Table, num_blocks: int) -> None:
        for block in table[num_blocks:]:
            self._release(block)
        del table[num_blocks:]

    def _share(self, block: int) -> None:
        if block != SCRATCH:
            self._pool.share(block)

    def _release(self, block: int) -> None:
        if block != SCRATCH and self._pool.release(block):
            self._memory.release(block)

    def _blocks_under(self, table: Table, start: int, stop: int) -> tuple[int, ...]:
        """The blocks under positions `[start, stop)`, `SCRATCH` for gaps."""
        if start == stop:
            return ()
        size = self._block_size
        return tuple(_block_at(table, index) for index in range(start // size, -(-stop // size)))

    def _places(self, table: Sequence[int], start: int, stop: int) -> Int32:
        positions = np.arange(start, stop)
        blocks = np.array(table, np.int64)[positions // self._block_size]
        places: Int32 = (blocks * self._block_size + positions % self._block_size).astype(np.int32)
        return places


def _block_at(table: Table, index: int) -> int:
    return table[index] if index < len(table) else SCRATCH
