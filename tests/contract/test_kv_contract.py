"""The contract of every KV cache: rows and saved copies hold their bits through any operations.

A backend joins by adding a `Backend` to `BACKENDS`: how to make one, and how a graph would write and read it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.spec.config import Architecture, ModelConfig
from service.engine.batch import KVCopy, KVDrop, KVFree, KVOperation, KVRestore, KVSave
from service.engine.kv.blocks import SCRATCH
from service.engine.paged_backend.paged_kv import HostBlocks, PagedKV
from service.engine.slots_backend.kv_cache import SlotKV

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

    With `shares`, copies share the row's memory until either is written; otherwise `stored_bytes` is exact."""

    make: Callable[[ModelConfig, int], Any]
    write: Callable[[Any, int, int, Float32], None]
    write_cross: Callable[[Any, Sequence[Sequence[int]], Sequence[Float32]], None]
    read: Callable[[Any, int, int, int], Float32]
    read_cross: Callable[[Any, int, int, int], Float32]
    shares: bool = False


def slot_write(cache: Any, slot: int, start: int, values: Float32) -> None:
    for buffer, tensor in zip(cache.own, values, strict=True):
        buffer[slot, :, start : start + tensor.shape[1]] = tensor


def slot_read(buffers: Sequence[Float32], slot: int, start: int, stop: int) -> Float32:
    return np.stack([buffer[slot, :, start:stop] for buffer in buffers])


SLOT_KV = Backend(
    make=SlotKV,
    write=slot_write,
    write_cross=lambda cache, slots, tensors: cache.write_cross(slots, tensors),
    read=lambda cache, slot, start, stop: slot_read(cache.own, slot, start, stop),
    read_cross=lambda cache, slot, start, stop: slot_read(cache.cross, slot, start, stop),
)
FAMILIES = pytest.mark.parametrize("config", [DECODER_ONLY, ENCODER_DECODER], ids=lambda c: c.architecture)


class SpoiledBlocks(HostBlocks):
    """Blocks that are overwritten when they are freed, so that a later read is noticed."""

    def release(self, block: int) -> None:
        for blocks in self.caches:
            blocks[block] = np.float32(-3.5)


class Paged:
    """A paged cache beside the memory that a graph would be given, and what a graph does with it.

    The pool has exactly as many blocks as rows and saved copies can name.
    """

    def __init__(self, block_size: int, num_saved: int) -> None:
        self._block_size = block_size
        self._num_saved = num_saved
        self._memories: WeakKeyDictionary[Any, HostBlocks] = WeakKeyDictionary()

    @property
    def backend(self) -> Backend:
        return Backend(
            make=self.make,
            write=self.write,
            write_cross=self.write_cross,
            read=lambda cache, slot, start, stop: self.gather(cache, cache.table(slot, stop), start, stop),
            read_cross=lambda cache, slot, start, stop: self.gather(cache, cache.source_table(slot, stop), start, stop),
            shares=True,
        )

    def make(self, config: ModelConfig, num_slots: int) -> PagedKV:
        lengths = (config.context, config.source_context if config.is_encoder_decoder else 0)
        num_blocks = (num_slots + self._num_saved) * sum(-(-length // self._block_size) for length in lengths)
        # Spoiling touches memory, which the memory tests measure.
        kind = HostBlocks if config is LARGE else SpoiledBlocks
        memory = kind(config, num_blocks, self._block_size)
        cache = PagedKV(memory, num_slots)
        self._memories[cache] = memory
        return cache

    def write(self, cache: Any, slot: int, start: int, values: Float32) -> None:
        stop = start + values.shape[2]
        cache.reserve(slot, start, stop)
        self._scatter(cache, cache.places(slot, start, stop), values)

    def write_cross(self, cache: Any, slots: Sequence[Sequence[int]], tensors: Sequence[Float32]) -> None:
        for index, rows in enumerate(slots):
            places = cache.reserve_source(rows, tensors[0].shape[2])
            self._scatter(cache, places, [tensor[index] for tensor in tensors])

    def gather(self, cache: Any, table: Sequence[int], start: int, stop: int) -> Float32:
        """As an operator reads it: by the table, then from the scratch block."""
        whole = [*table, *[SCRATCH] * (-(-stop // self._block_size) - len(table))]
        rows = [blocks[whole].reshape(-1, *blocks.shape[2:]) for blocks in self._memories[cache].caches]
        return np.stack([row[start:stop].transpose(1, 0, 2) for row in rows])

    def _scatter(self, cache: Any, places: npt.NDArray[np.int32], values: Iterable[Float32]) -> None:
        for blocks, tensor in zip(self._memories[cache].caches, values, strict=True):
            blocks.reshape(-1, *blocks.shape[2:])[places] = tensor.transpose(1, 0, 2)


BACKENDS = pytest.mark.parametrize(
    "backend",
    [SLOT_KV, Paged(16, num_saved=NUM_HANDLES).backend, Paged(256, num_saved=NUM_HANDLES).backend],
    ids=["slot", "paged-16", "paged-256"],
)


def values_of(config: ModelConfig, stamps: npt.NDArray[np.int64]) -> Float32:
    """`[2 * layers, kv_heads, len(stamps), head_dim]`: bits of all kinds, NaN too, that no two places share."""
    shape = (2 * config.num_layers, config.num_kv_heads, 1, config.head_dim)
    places = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    bits = (stamps[:, np.newaxis] * 997 + places) * 2654435761
    return (bits % 2**32).astype(np.uint32).view(np.float32)


class PlainModel:
    """Rows and saved copies as a stamp for each position, -1 where contents are undefined."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.own = np.full((NUM_SLOTS, config.context), -1, np.int64)
        self.cross = np.full((NUM_SLOTS, config.source_context), -1, np.int64)
        self.saved: dict[int, tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

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
                if handle in self.saved:
                    return ValueError
                cross = self.cross[slot, :num_source_tokens].copy()
                self.saved[handle] = (start, self.own[slot, start:num_tokens].copy(), cross)
            case KVRestore(handle, slot):
                if handle not in self.saved:
                    return KeyError
                start, own, cross = self.saved[handle]
                for row, first, values in ((self.own[slot], start, own), (self.cross[slot], 0, cross)):
                    if len(values):
                        row[first : first + len(values)] = values
                        row[first + len(values) :] = -1
            case KVDrop(handle):
                return None if self.saved.pop(handle, None) else KeyError
            case KVFree(slot):
                self.own[slot] = self.cross[slot] = -1
        return None

    def check(self, backend: Backend, cache: Any) -> None:
        if backend.shares:
            cache.check_invariants()
        else:
            num_tokens = sum(len(own) + len(cross) for _, own, cross in self.saved.values())
            assert cache.stored_bytes == num_tokens * self._config.kv_bytes_per_token
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
    """Ordered positions; page and block borders come often."""
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
@settings(max_examples=50)
@given(data=st.data())
def test_kv_cache_holds_its_bits_through_any_operations(
    backend: Backend, config: ModelConfig, data: st.DataObject
) -> None:
    """Rows and saved copies against a plain model; operations on wrong handles raise and change nothing.

    Rows are full at first, so that a write to a wrong place is noticed.
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
def test_kv_cache_names_a_wrong_handle(backend: Backend) -> None:
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


def fill(backend: Backend, cache: Any, slot: int, length: int, value: float) -> None:
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
