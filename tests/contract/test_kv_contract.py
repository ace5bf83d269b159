"""What every `KVCache` promises, whatever it is made of: rows and kept copies hold their bits through any operations.

A backend joins by adding a `Backend` to `BACKENDS`: how to make one, and how a graph would write and read it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.spec.config import Architecture, ModelConfig
from service.engine.batch import KVCopy, KVDrop, KVFree, KVOperation, KVRestore, KVSave
from service.engine.kv.blocks import SCRATCH, PoolExhausted
from service.engine.paged_backend.paged_kv import HostBlocks, PagedKV
from service.engine.slots_backend.kv_cache import KVCache, SlotKV

Float32 = npt.NDArray[np.float32]

NUM_SLOTS = 4
NUM_HANDLES = 2
# Rows of several pages whose borders are not pages' borders.
CONTEXT = 600
SOURCE_CONTEXT = 500
DECODER_ONLY = ModelConfig(
    architecture=Architecture.DECODER_ONLY,
    vocab_size=8,
    context=CONTEXT,
    d_model=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    d_ff=8,
)
ENCODER_DECODER = ModelConfig(
    architecture=Architecture.ENCODER_DECODER,
    vocab_size=8,
    context=CONTEXT,
    source_context=SOURCE_CONTEXT,
    d_model=8,
    num_layers=2,
    num_encoder_layers=1,
    num_heads=2,
    d_ff=8,
)
STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Backend:
    """A cache and the graph's side of it: `write` stores values `[2 * layers, kv_heads, length, head_dim]` at a row's
    positions from `start` on; `read` and `read_cross` give those of `[start, stop)`; `write_cross` stores sources
    `[sources, kv_heads, length, head_dim]` in each tensor, each in rows of its own.

    Memory is counted in blocks of so many tokens. With `shares`, what is kept is the row's own memory until that
    changes, and there is room for `num_kept` copies of whole rows."""

    make: Callable[[ModelConfig, int], KVCache]
    write: Callable[[KVCache, int, int, Float32], None]
    write_cross: Callable[[KVCache, Sequence[Sequence[int]], Sequence[Float32]], None]
    read: Callable[[KVCache, int, int, int], Float32]
    read_cross: Callable[[KVCache, int, int, int], Float32]
    block_size: int = 1
    num_kept: int = 0
    shares: bool = False


def slot_kv(cache: KVCache) -> SlotKV:
    assert isinstance(cache, SlotKV)
    return cache


def slot_write(cache: KVCache, slot: int, start: int, values: Float32) -> None:
    for buffer, tensor in zip(slot_kv(cache).own, values, strict=True):
        buffer[slot, :, start : start + tensor.shape[1]] = tensor


def slot_read(buffers: Sequence[Float32], slot: int, start: int, stop: int) -> Float32:
    return np.stack([buffer[slot, :, start:stop] for buffer in buffers])


SLOT_KV = Backend(
    make=SlotKV,
    write=slot_write,
    write_cross=lambda cache, slots, tensors: slot_kv(cache).write_cross(slots, tensors),
    read=lambda cache, slot, start, stop: slot_read(slot_kv(cache).own, slot, start, stop),
    read_cross=lambda cache, slot, start, stop: slot_read(slot_kv(cache).cross, slot, start, stop),
)
FAMILIES = pytest.mark.parametrize("config", [DECODER_ONLY, ENCODER_DECODER], ids=lambda c: c.architecture)


class SpoiledBlocks(HostBlocks):
    """Blocks that are overwritten as soon as nobody wants them: whoever still reads one is found out."""

    def release(self, block: int) -> None:
        for blocks in self.caches:
            blocks[block] = np.float32(-3.5)


class Paged:
    """A paged cache beside the memory that a graph would be given, and what a graph does with it.

    A pool has as many blocks as rows and kept copies can name, and not one more.
    """

    def __init__(self, block_size: int, num_kept: int) -> None:
        self._block_size = block_size
        self._num_kept = num_kept
        self._memories: WeakKeyDictionary[KVCache, HostBlocks] = WeakKeyDictionary()

    @property
    def backend(self) -> Backend:
        return Backend(
            make=self.make,
            write=self.write,
            write_cross=self.write_cross,
            read=lambda cache, slot, start, stop: self.gather(cache, paged_kv(cache).table(slot, stop), start, stop),
            read_cross=lambda cache, slot, start, stop: self.gather(
                cache, paged_kv(cache).source_table(slot, stop), start, stop
            ),
            block_size=self._block_size,
            num_kept=self._num_kept,
            shares=True,
        )

    def make(self, config: ModelConfig, num_slots: int) -> PagedKV:
        lengths = (config.context, config.source_context if config.is_encoder_decoder else 0)
        num_blocks = (num_slots + self._num_kept) * sum(-(-length // self._block_size) for length in lengths)
        # What is spoiled has been touched, and where memory is measured must not have been.
        kind = HostBlocks if config is LARGE else SpoiledBlocks
        memory = kind(config, num_blocks, self._block_size)
        cache = PagedKV(memory, num_slots)
        self._memories[cache] = memory
        return cache

    def write(self, cache: KVCache, slot: int, start: int, values: Float32) -> None:
        stop = start + values.shape[2]
        paged_kv(cache).reserve(slot, start, stop)
        self._scatter(cache, paged_kv(cache).places(slot, start, stop), values)

    def write_cross(self, cache: KVCache, slots: Sequence[Sequence[int]], tensors: Sequence[Float32]) -> None:
        for index, rows in enumerate(slots):
            places = paged_kv(cache).reserve_source(rows, tensors[0].shape[2])
            self._scatter(cache, places, [tensor[index] for tensor in tensors])

    def gather(self, cache: KVCache, table: Sequence[int], start: int, stop: int) -> Float32:
        """As an operator reads it: by the table, past whose end there is whatever the scratch block holds."""
        whole = [*table, *[SCRATCH] * (-(-stop // self._block_size) - len(table))]
        rows = [blocks[whole].reshape(-1, *blocks.shape[2:]) for blocks in self._memories[cache].caches]
        return np.stack([row[start:stop].transpose(1, 0, 2) for row in rows])

    def _scatter(self, cache: KVCache, places: npt.NDArray[np.int32], values: Iterable[Float32]) -> None:
        for blocks, tensor in zip(self._memories[cache].caches, values, strict=True):
            blocks.reshape(-1, *blocks.shape[2:])[places] = tensor.transpose(1, 0, 2)


def paged_kv(cache: KVCache) -> PagedKV:
    assert isinstance(cache, PagedKV)
    return cache


BACKENDS = pytest.mark.parametrize(
    "backend",
    [SLOT_KV, Paged(16, num_kept=NUM_HANDLES).backend, Paged(256, num_kept=NUM_HANDLES).backend],
    ids=["slot", "paged-16", "paged-256"],
)


def values_of(config: ModelConfig, stamps: npt.NDArray[np.int64]) -> Float32:
    """`[2 * layers, kv_heads, len(stamps), head_dim]`: bits of all kinds, NaN too, that no two places share."""
    shape = (2 * config.num_layers, config.num_kv_heads, 1, config.head_dim)
    places = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    bits = (stamps[:, np.newaxis] * 997 + places) * 2654435761
    return (bits % 2**32).astype(np.uint32).view(np.float32)


class PlainModel:
    """Rows and kept copies as a stamp for each position, -1 where nothing is promised."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.own = np.full((NUM_SLOTS, config.context), -1, np.int64)
        self.cross = np.full((NUM_SLOTS, config.source_context), -1, np.int64)
        self.kept: dict[int, tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def apply(self, operation: KVOperation) -> type[Exception] | None:
        """What the operation does; the error that it must raise instead."""
        match operation:
            case KVCopy(source, target, num_tokens, num_source_tokens, start):
                self.own[target, start:num_tokens] = self.own[source, start:num_tokens]
                self.cross[target, :num_source_tokens] = self.cross[source, :num_source_tokens]
                self.own[target, num_tokens:] = -1
                if num_source_tokens:
                    self.cross[target, num_source_tokens:] = -1
            case KVSave(slot, handle, num_tokens, num_source_tokens, start):
                if handle in self.kept:
                    return ValueError
                cross = self.cross[slot, :num_source_tokens].copy()
                self.kept[handle] = (start, self.own[slot, start:num_tokens].copy(), cross)
            case KVRestore(handle, slot):
                if handle not in self.kept:
                    return KeyError
                start, own, cross = self.kept[handle]
                for row, first, values in ((self.own[slot], start, own), (self.cross[slot], 0, cross)):
                    if len(values):
                        row[first : first + len(values)] = values
                        row[first + len(values) :] = -1
            case KVDrop(handle):
                return None if self.kept.pop(handle, None) else KeyError
            case KVFree(slot):
                self.own[slot] = self.cross[slot] = -1
        return None

    def stored_bytes(self, block_size: int) -> int:
        """What all copies take, each by itself and in whole blocks."""
        spans = [(start, start + len(own)) for start, own, _ in self.kept.values()]
        spans += [(0, len(cross)) for _, _, cross in self.kept.values()]
        num_blocks = sum(-(-stop // block_size) - start // block_size for start, stop in spans if stop > start)
        return num_blocks * block_size * self._config.kv_bytes_per_token

    def check(self, backend: Backend, cache: KVCache) -> None:
        if backend.shares:
            assert cache.stored_bytes <= self.stored_bytes(backend.block_size)
            paged_kv(cache).check_invariants()
        else:
            assert cache.stored_bytes == self.stored_bytes(1)
        for slot in range(NUM_SLOTS):
            for stamps, read in ((self.own[slot], backend.read), (self.cross[slot], backend.read_cross)):
                known = stamps >= 0
                if known.any():
                    actual = read(cache, slot, 0, len(stamps))[:, :, known]
                    assert actual.tobytes() == values_of(self._config, stamps[known]).tobytes(), f"slot {slot}"


SLOTS = st.integers(0, NUM_SLOTS - 1)
HANDLES = st.integers(0, NUM_HANDLES - 1)


@dataclass(frozen=True, slots=True)
class Write:
    """A graph writes positions `[start, stop)` of a row."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Encode:
    """Sources come from the encoder, all of one length, each for rows of its own."""

    slots: tuple[tuple[int, ...], ...]
    length: int


@st.composite
def spans(draw: st.DrawFn, capacity: int) -> tuple[int, int]:
    """Ordered positions; borders that pages might share, or that are none, come often."""
    ends = st.one_of(st.integers(0, capacity), st.sampled_from([0, 1, 64, 256, capacity - 1, capacity]))
    first, second = sorted((draw(ends), draw(ends)))
    return first, second


@st.composite
def operations(draw: st.DrawFn, *, has_source: bool) -> KVOperation | Write | Encode:
    start, stop = draw(spans(CONTEXT))
    num_source = draw(spans(SOURCE_CONTEXT))[1] if has_source else 0
    slot, handle = draw(SLOTS), draw(HANDLES)
    kinds: list[KVOperation | Write | Encode] = [
        Write(slot, start, stop),
        Write(slot, 0, stop),
        KVSave(slot, handle, stop, num_source, start),
        KVRestore(handle, slot),
        KVDrop(handle),
        KVFree(slot),
        KVFree(slot, start, num_source),
    ]
    target = draw(SLOTS)
    if target != slot:
        kinds.append(KVCopy(slot, target, stop, num_source, draw(st.sampled_from([0, start]))))
    if num_source:
        order = draw(st.permutations(range(NUM_SLOTS)))
        cut, end = draw(st.integers(1, 2)), draw(st.integers(3, NUM_SLOTS))
        kinds.append(Encode((tuple(order[:cut]), tuple(order[cut:end])), num_source))
    return draw(st.sampled_from(kinds))


@BACKENDS
@FAMILIES
def test_kv_cache_reports_the_bytes_it_reserves(backend: Backend, config: ModelConfig) -> None:
    cache = backend.make(config, NUM_SLOTS)
    lengths = (config.context, config.source_context if config.is_encoder_decoder else 0)
    num_blocks = (NUM_SLOTS + backend.num_kept) * sum(-(-length // backend.block_size) for length in lengths)
    num_scratch = int(backend.shares)
    assert cache.num_slots == NUM_SLOTS
    assert cache.reserved_bytes == (num_blocks + num_scratch) * backend.block_size * config.kv_bytes_per_token
    assert cache.stored_bytes == 0


@BACKENDS
@FAMILIES
@settings(max_examples=50)
@given(data=st.data())
def test_kv_cache_holds_its_bits_through_any_operations(
    backend: Backend, config: ModelConfig, data: st.DataObject
) -> None:
    """Rows and kept copies against a plain model; operations on handles that are not there fail and change nothing.

    Rows are full at first, so that nothing can go to a wrong place unseen.
    """
    cache = backend.make(config, NUM_SLOTS)
    model = PlainModel(config)
    next_stamp = 0
    full: list[Write | Encode] = [Write(slot, 0, CONTEXT) for slot in range(NUM_SLOTS)]
    if config.is_encoder_decoder:
        full.append(Encode(tuple((slot,) for slot in range(NUM_SLOTS)), SOURCE_CONTEXT))
    drawn = data.draw(st.lists(operations(has_source=config.is_encoder_decoder), min_size=1, max_size=12))
    for operation in (*full, *drawn):
        match operation:
            case Write(slot, start, stop):
                stamps = np.arange(next_stamp, next_stamp + stop - start)
                next_stamp += len(stamps)
                backend.write(cache, slot, start, values_of(config, stamps))
                model.own[slot, start:stop] = stamps
            case Encode(slots, length):
                rows = [next_stamp + np.arange(length) + index * length for index in range(len(slots))]
                next_stamp += len(rows) * length
                tensors = np.stack([values_of(config, row) for row in rows], axis=1)
                backend.write_cross(cache, slots, list(tensors))
                for row, targets in zip(rows, slots, strict=True):
                    model.cross[list(targets), :length] = row
                    model.cross[list(targets), length:] = -1
            case _:
                if error := model.apply(operation):
                    with pytest.raises(error):
                        cache.apply(operation)
                else:
                    cache.apply(operation)
        model.check(backend, cache)


@BACKENDS
def test_kv_cache_says_which_handle_is_wrong(backend: Backend) -> None:
    """A scheduler that miscounts must not go on as if nothing were."""
    cache = backend.make(DECODER_ONLY, NUM_SLOTS)
    cache.apply(KVSave(slot=0, handle=7, num_tokens=3, num_source_tokens=0))
    with pytest.raises(ValueError, match="handle 7"):
        cache.apply(KVSave(slot=1, handle=7, num_tokens=3, num_source_tokens=0))
    cache.apply(KVDrop(7))
    for operation in (KVDrop(7), KVRestore(handle=7, slot=0)):
        with pytest.raises(KeyError, match="7"):
            cache.apply(operation)


@BACKENDS
def test_kv_cache_refuses_sources_with_a_layer_missing(backend: Backend) -> None:
    cache = backend.make(ENCODER_DECODER, NUM_SLOTS)
    tensors = list(values_of(ENCODER_DECODER, np.arange(2))[:, np.newaxis])
    with pytest.raises(ValueError, match="zip"):
        backend.write_cross(cache, [(0,)], tensors[:-1])


# 1 MiB for each row of each of sixteen tensors.
LARGE = ModelConfig(
    architecture=Architecture.DECODER_ONLY,
    vocab_size=8,
    context=4096,
    d_model=64,
    num_layers=8,
    num_heads=1,
    d_ff=8,
)
ROW_BYTES = LARGE.context * LARGE.kv_bytes_per_token
on_linux = pytest.mark.skipif(not STATM.exists(), reason="the system does not tell a process its memory")


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * mmap.PAGESIZE


def fill(backend: Backend, cache: KVCache, slot: int, length: int, value: float) -> None:
    shape = (2 * LARGE.num_layers, LARGE.num_kv_heads, length, LARGE.head_dim)
    backend.write(cache, slot, 0, np.broadcast_to(np.float32(value), shape))


@on_linux
@BACKENDS
def test_kv_cache_memory_is_what_was_touched(backend: Backend) -> None:
    cache = backend.make(LARGE, NUM_SLOTS)
    empty = resident_bytes()
    fill(backend, cache, 1, 64, 1.0)
    assert resident_bytes() - empty < ROW_BYTES / 8
    fill(backend, cache, 1, LARGE.context, 1.0)
    assert resident_bytes() - empty > ROW_BYTES * 0.9


@on_linux
@BACKENDS
def test_kv_cache_memory_of_a_freed_row_goes_back_and_no_other(backend: Backend) -> None:
    cache = backend.make(LARGE, NUM_SLOTS)
    for slot in range(NUM_SLOTS):
        fill(backend, cache, slot, LARGE.context, slot + 1.0)
    full = resident_bytes()
    cache.apply(KVFree(2))
    assert full - resident_bytes() > ROW_BYTES * 0.9
    for slot in (0, 1, 3):
        assert (backend.read(cache, slot, 0, LARGE.context) == slot + 1).all()
    fill(backend, cache, 2, LARGE.context, 9.0)
    assert (backend.read(cache, 2, 0, LARGE.context) == 9).all()


@on_linux
def test_slot_kv_memory_of_a_freed_row_may_stay_under_its_first_positions() -> None:
    backend = SLOT_KV
    cache = backend.make(LARGE, NUM_SLOTS)
    for slot in range(NUM_SLOTS):
        fill(backend, cache, slot, LARGE.context, slot + 1.0)
    full = resident_bytes()
    cache.apply(KVFree(2, LARGE.context // 4))
    assert ROW_BYTES * 0.7 < full - resident_bytes() < ROW_BYTES * 0.8
    for slot in (0, 1, 3):
        assert (backend.read(cache, slot, 0, LARGE.context) == slot + 1).all()
    before = resident_bytes()
    fill(backend, cache, 2, LARGE.context // 4, 9.0)
    assert resident_bytes() - before < ROW_BYTES * 0.1, "what stayed is written to again"


@on_linux
def test_slot_kv_memory_of_dropped_copies_goes_back_in_any_order() -> None:
    """Also when others of all sizes were kept in between: there is no heap that they could leave holes in."""
    backend = SLOT_KV
    cache = backend.make(LARGE, NUM_SLOTS)
    fill(backend, cache, 0, LARGE.context, 1.0)
    before = resident_bytes()
    for handle in range(32):
        cache.apply(KVSave(0, handle, num_tokens=128 * (1 + handle % 4) + 128, num_source_tokens=0, start=128))
    for handle in range(0, 32, 2):
        cache.apply(KVDrop(handle))
    kept = cache.stored_bytes
    assert kept == 16 * 128 * 3 * LARGE.kv_bytes_per_token
    assert abs(resident_bytes() - before - kept) < 0.1 * kept
    for handle in range(1, 32, 2):
        cache.apply(KVDrop(handle))
    assert resident_bytes() - before < 0.1 * kept


@FAMILIES
def test_slot_kv_in_eight_bits_takes_a_quarter(config: ModelConfig) -> None:
    cache, whole = SlotKV(config, NUM_SLOTS, "int8"), SlotKV(config, NUM_SLOTS)
    assert {buffer.dtype for buffer in (*cache.own, *cache.cross)} == {np.dtype(np.int8)}
    assert len(cache.cross) == len(whole.cross)
    assert 4 * cache.reserved_bytes == whole.reserved_bytes


@FAMILIES
def test_slot_kv_in_eight_bits_keeps_and_restores_what_rows_hold(config: ModelConfig) -> None:
    """A source that is encoded for two rows, copied to a third, and kept."""
    cache = SlotKV(config, NUM_SLOTS, "int8")
    for layer, buffer in enumerate(cache.own):
        buffer[1] = numbered(buffer[1].shape, layer % 2)
    shape = (1, config.num_kv_heads, 4, config.head_dim)
    source = [numbered(shape, layer) for layer in range(len(cache.cross))]
    cache.write_cross([(1, 3)], source)
    wanted = [buffer[1, :, 2:5].copy() for buffer in cache.own]
    num_source = 4 if config.is_encoder_decoder else 0
    cache.apply(KVCopy(1, 2, num_tokens=5, num_source_tokens=num_source))
    cache.apply(KVSave(1, 7, num_tokens=5, num_source_tokens=num_source, start=2))
    assert cache.stored_bytes == (3 + num_source) * config.kv_bytes_per_token // 4
    cache.apply(KVFree(1))
    cache.apply(KVRestore(7, 0))
    for row in (0, 2):
        for buffer, values in zip(cache.own, wanted, strict=True):
            np.testing.assert_array_equal(buffer[row, :, 2:5], values)
    for row in (0, 2, 3):
        for buffer, (values,) in zip(cache.cross, source, strict=True):
            np.testing.assert_array_equal(buffer[row, :, :4], values)


def numbered(shape: tuple[int, ...], start: int) -> npt.NDArray[np.int8]:
    """Bytes of all kinds."""
    return (np.arange(start, start + np.prod(shape)).reshape(shape) % 251 - 125).astype(np.int8)


class CountedBlocks(HostBlocks):
    """Blocks that remember what was copied."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        super().__init__(config, num_blocks, block_size)
        self.copies: list[tuple[int, int]] = []

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        self.copies.append((start, stop))
        super().copy(source, target, start, stop)


def test_paged_kv_keeps_restores_and_forks_without_moving_anything() -> None:
    memory = CountedBlocks(DECODER_ONLY, 12, 256)
    cache = PagedKV(memory, NUM_SLOTS)
    cache.reserve(0, 0, 512)
    held = list(cache.table(0, 512))
    cache.apply(KVSave(0, 7, num_tokens=512, num_source_tokens=0))
    cache.apply(KVRestore(7, 1))
    cache.apply(KVCopy(1, 2, num_tokens=512, num_source_tokens=0))
    assert list(cache.table(1, 512)) == list(cache.table(2, 512)) == held
    assert cache.num_free_blocks == 10
    assert cache.stored_bytes == 0, "rows hold the same memory"
    for slot in range(3):
        cache.apply(KVFree(slot))
    assert cache.stored_bytes == 512 * DECODER_ONLY.kv_bytes_per_token
    assert cache.num_free_blocks == 10
    cache.apply(KVDrop(7))
    assert cache.num_free_blocks == 12
    assert memory.copies == []


def test_paged_kv_copies_a_shared_block_once_and_only_when_it_is_written() -> None:
    memory = CountedBlocks(DECODER_ONLY, 12, 256)
    cache = PagedKV(memory, NUM_SLOTS)
    cache.reserve(0, 0, 300)
    cache.apply(KVCopy(0, 1, num_tokens=300, num_source_tokens=0))
    first, second = cache.table(0, 300)
    cache.reserve(1, 300, 301)
    assert list(cache.table(0, 300)) == [first, second]
    assert cache.table(1, 300)[0] == first
    assert memory.copies == [(0, 256)]
    cache.reserve(0, 300, 302)
    cache.reserve(1, 301, 303)
    assert memory.copies == [(0, 256)], "each has a block of its own now"
    # One that is overwritten as a whole is not copied first.
    cache.apply(KVSave(1, 7, num_tokens=256, num_source_tokens=0))
    cache.reserve(1, 0, 256)
    assert memory.copies == [(0, 256)]
    assert list(cache.table(1, 256)) != [first]


def test_paged_kv_copies_of_a_block_that_two_rows_begin_alike_only_what_follows() -> None:
    """As beams do: the child keeps its row up to where it differs from its parent."""
    memory = CountedBlocks(DECODER_ONLY, 12, 256)
    cache = PagedKV(memory, NUM_SLOTS)
    for slot in (0, 1):
        cache.reserve(slot, 0, 400)
    own = list(cache.table(1, 400))
    cache.apply(KVCopy(0, 1, num_tokens=400, num_source_tokens=0, start=390))
    assert memory.copies == [(134, 144)]
    assert list(cache.table(1, 400)) == own


def test_paged_kv_holds_a_source_once_for_all_rows_that_share_it() -> None:
    cache = PagedKV(HostBlocks(ENCODER_DECODER, 12, 256), NUM_SLOTS)
    places = cache.reserve_source((0, 2, 3), 300)
    assert len(set(places.tolist())) == 300
    assert places.min() >= 256, "the scratch block is nobody's"
    assert cache.num_free_blocks == 10
    assert cache.source_table(0, 300) == cache.source_table(2, 300) == cache.source_table(3, 300)
    cache.apply(KVFree(0))
    cache.apply(KVFree(3))
    assert cache.num_free_blocks == 10
    cache.reserve_source((2,), 17)
    assert cache.num_free_blocks == 11


def test_paged_kv_says_when_there_is_no_block_left() -> None:
    cache = PagedKV(HostBlocks(DECODER_ONLY, 2, 256), NUM_SLOTS)
    cache.reserve(0, 0, 300)
    with pytest.raises(PoolExhausted, match="all 2 blocks"):
        cache.reserve(1, 0, 1)
    cache.check_invariants()
    cache.apply(KVFree(0))
    cache.reserve(1, 0, 1)


@on_linux
def test_paged_kv_memory_of_what_is_kept_stays_and_goes_back_when_it_is_dropped() -> None:
    backend = Paged(256, num_kept=0).backend
    cache = backend.make(LARGE, NUM_SLOTS)
    fill(backend, cache, 0, LARGE.context, 1.0)
    full = resident_bytes()
    for handle, stop in enumerate((128, 512, 640, 1024)):
        cache.apply(KVSave(0, handle, num_tokens=stop, num_source_tokens=0, start=128 * handle))
    cache.apply(KVFree(0))
    assert cache.stored_bytes == ROW_BYTES // 4
    assert ROW_BYTES * 0.7 < full - resident_bytes() < ROW_BYTES * 0.8
    for handle in (2, 0, 3, 1):
        cache.apply(KVDrop(handle))
    assert full - resident_bytes() > ROW_BYTES * 0.9


def test_paged_kv_lets_go_of_what_lies_behind_what_a_row_is_given() -> None:
    cache = PagedKV(HostBlocks(DECODER_ONLY, 12, 256), NUM_SLOTS)
    cache.reserve(0, 0, 10)
    for slot in (1, 2):
        cache.reserve(slot, 0, 600)
    assert cache.num_free_blocks == 12 - 7
    cache.apply(KVSave(0, 7, num_tokens=10, num_source_tokens=0))
    cache.apply(KVCopy(0, 1, num_tokens=10, num_source_tokens=0))
    cache.apply(KVRestore(7, 2))
    assert cache.num_free_blocks == 12 - 1
