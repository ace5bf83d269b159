"""Keys and values in blocks: a row is a list of block numbers, and rows that agree hold the same blocks.

The second `KVCache`, for graphs that find K/V through tables (`model.spec.artifact.paged_decoder_signature`). What
`SlotKV` copies is shared here: a fork, a preempted row and a prefix that is kept for later hold the blocks of the row
they come from. Only what is written while others hold it, or is taken over in part, is copied: a block at a time, and
to a block that one row alone holds.

    row             blocks of its own tokens, and of its source's; both kinds come from one pool
    kept copy       the blocks under the positions that were saved

`PagedKV` counts, and decides what moves; a `BlockMemory` has the numbers and moves them. Changed by the runner alone.
Knows no sequences and no budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
"""Blocks by their place in a row; `SCRATCH` where nothing is."""


class BlockMemory(Protocol):
    """The numbers in the blocks of all layers. Block 0 is there besides the `num_blocks` that may be given out."""

    @property
    def num_blocks(self) -> int:
        """How many may be given out."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def block_bytes(self) -> int:
        """What a block takes in all layers, keys and values."""

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copies positions `[start, stop)` of one block to the same places of another, in all layers."""

    def release(self, block: int) -> None:
        """Nobody wants what is in a block; its memory may go back to the system until it is written again."""

    def flush(self) -> None:
        """Carries out what was asked for, if that is still to be done; before any graph runs."""


class HostBlocks:
    """Blocks in this machine's memory; what nobody has filled costs address space only.

    Args:
        config: the model's sizes.
        num_blocks: how many may be given out.
        block_size: tokens in each.
        dtype: of what they hold.

    Raises:
        MemoryError: when there is not even so much address space.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: str = "float32") -> None:
        shape = (2 * config.num_layers, num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self._pages = Pages(shape, dtype, is_sparse=True)

    @property
    def caches(self) -> tuple[Array, ...]:
        """For each layer K then V: `[num_blocks + 1, block_size, kv_heads, head_dim]`, live."""
        return tuple(self._pages.array)

    @property
    def num_blocks(self) -> int:
        """See `BlockMemory`."""
        return int(self._pages.array.shape[1]) - 1

    @property
    def block_size(self) -> int:
        """See `BlockMemory`."""
        return int(self._pages.array.shape[2])

    @property
    def block_bytes(self) -> int:
        """See `BlockMemory`."""
        return int(self._pages.array[:, SCRATCH].nbytes)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """See `BlockMemory`."""
        # One tensor at a time: over all of them NumPy cannot tell that blocks do not overlap, and copies twice.
        for blocks in self._pages.array:
            blocks[target, start:stop] = blocks[source, start:stop]

    def release(self, block: int) -> None:
        """See `BlockMemory`."""
        for blocks in self._pages.array:
            self._pages.release(blocks[block])

    def flush(self) -> None:
        """See `BlockMemory`; there is never anything left."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Self positions `[start, stop)` and the first `num_source` of the source: the blocks under them, in order."""

    start: int
    stop: int
    own: tuple[int, ...]
    num_source: int
    source: tuple[int, ...]


class PagedKV:
    """K/V of a fixed number of rows, in blocks of one pool.

    Args:
        memory: the blocks; nobody else may give them out.
        num_slots: how many rows.
    """

    def __init__(self, memory: BlockMemory, num_slots: int) -> None:
        self._memory = memory
        self._block_size = memory.block_size
        self._pool = BlockPool(memory.num_blocks)
        self._own: list[Table] = [[] for _ in range(num_slots)]
        self._source: list[Table] = [[] for _ in range(num_slots)]
        self._kept: dict[int, _Kept] = {}

    @property
    def num_slots(self) -> int:
        """How many sequences fit."""
        return len(self._own)

    @property
    def reserved_bytes(self) -> int:
        """Memory set aside for blocks, used or not."""
        return (self._memory.num_blocks + 1) * self._memory.block_bytes

    @property
    def stored_bytes(self) -> int:
        """Memory of kept blocks that no row holds."""
        of_rows = {block for table in (*self._own, *self._source) for block in table}
        kept = {block for each in self._kept.values() for block in (*each.own, *each.source)}
        return len(kept - of_rows - {SCRATCH}) * self._memory.block_bytes

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing anybody wants."""
        return self._pool.num_free

    def apply(self, operation: KVOperation) -> None:
        """Carries out one operation; see `KVCache.apply`."""
        match operation:
            case KVCopy():
                self._copy(operation)
            case KVSave():
                self._save(operation)
            case KVRestore():
                kept = self._kept[operation.handle]
                self._lay_over(self._own[operation.slot], kept.own, kept.start, kept.stop)
                self._lay_over(self._source[operation.slot], kept.source, 0, kept.num_source)
            case KVDrop():
                self._forget(operation.handle)
            case KVFree():
                self._cut(self._own[operation.slot], 0)
                self._cut(self._source[operation.slot], 0)
            case KVRetain():
                for handle in [handle for handle in self._kept if handle not in operation.handles]:
                    self._forget(handle)
            case _:
                assert_never(operation)

    def reserve(self, slot: int, start: int, stop: int) -> None:
        """Makes positions `[start, stop)` of a row writable: there, and in nobody else's hands.

        What the row holds elsewhere stays as it is.

        Raises:
            PoolExhausted: when a block is wanted and none is free.
        """
        table, size = self._own[slot], self._block_size
        for index in range(start // size, -(-stop // size)):
            if _block_at(table, index) == SCRATCH:
                self._put(table, index, self._pool.take())
            else:
                self._own_alone(table, index, is_overwritten=start <= index * size and (index + 1) * size <= stop)

    def reserve_source(self, slots: Sequence[int], length: int) -> Int32:
        """Gives rows one source of `length` tokens to share, in the place of any that they had.

        Returns:
            Where its tokens are to be written: `[length]` places in the pool, `block * block_size + offset`.

        Raises:
            PoolExhausted: when a block is wanted and none is free.
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
        """Where positions `[start, stop)` of a row lie in the pool: `block * block_size + offset`, `[stop - start]`."""
        return self._places(self._own[slot], start, stop)

    def place(self, slot: int, position: int) -> int:
        """Where one position of a row lies in the pool."""
        block, offset = divmod(position, self._block_size)
        return self._own[slot][block] * self._block_size + offset

    def table(self, slot: int, length: int) -> Sequence[int]:
        """The blocks under the first `length` tokens of a row."""
        return self._own[slot][: -(-length // self._block_size)]

    def source_table(self, slot: int, length: int) -> Sequence[int]:
        """The blocks under the first `length` tokens of a row's source."""
        return self._source[slot][: -(-length // self._block_size)]

    def check_invariants(self) -> None:
        """Asserts that every block is held as often as rows and kept copies name it, and no other is.

        Raises:
            AssertionError: saying what broke.
        """
        self._pool.check_invariants(block for block in self._held() if block != SCRATCH)

    def _held(self) -> Iterator[int]:
        for table in (*self._own, *self._source):
            yield from table
        for kept in self._kept.values():
            yield from kept.own
            yield from kept.source

    def _copy(self, copy: KVCopy) -> None:
        own = self._blocks_under(self._own[copy.source], copy.start, copy.num_tokens)
        self._lay_over(self._own[copy.target], own, copy.start, copy.num_tokens)
        source = self._blocks_under(self._source[copy.source], 0, copy.num_source_tokens)
        self._lay_over(self._source[copy.target], source, 0, copy.num_source_tokens)

    def _save(self, save: KVSave) -> None:
        if save.handle in self._kept:
            raise ValueError(f"handle {save.handle} is in use")
        own = self._blocks_under(self._own[save.slot], save.start, save.num_tokens)
        source = self._blocks_under(self._source[save.slot], 0, save.num_source_tokens)
        for block in (*own, *source):
            self._share(block)
        self._kept[save.handle] = _Kept(save.start, save.num_tokens, own, save.num_source_tokens, source)

    def _forget(self, handle: int) -> None:
        kept = self._kept.pop(handle)
        for block in (*kept.own, *kept.source):
            self._release(block)

    def _lay_over(self, table: Table, blocks: Sequence[int], start: int, stop: int) -> None:
        """Gives a row positions `[start, stop)` of `blocks`, which begin with the one that `start` lies in.

        What the row holds before `start` stays, what it holds after `stop` is let go. A block of which all that counts
        is wanted is shared; one that the row has a beginning in is copied behind that beginning.
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
        """Sees to it that a row holds one of its blocks alone, with what is in it unless that is to be overwritten."""
        block = table[index]
        if not self._pool.is_shared(block):
            return
        fresh = self._pool.take()
        if not is_overwritten:
            self._memory.copy(block, fresh, 0, self._block_size)
        self._put(table, index, fresh)

    def _put(self, table: Table, index: int, block: int) -> None:
        """Puts a block, held for it already, into a row's table."""
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
        """The blocks under positions `[start, stop)`, `SCRATCH` where there are none."""
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
