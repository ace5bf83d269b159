"""Copy on write and the count of blocks; tests/contract/test_kv_contract.py has the rest."""

from __future__ import annotations

import pytest

from model.spec.config import ModelConfig
from service.engine.batch import KVCopy, KVDrop, KVFree, KVRestore, KVSave
from service.engine.kv.blocks import PoolExhausted
from service.engine.paged_backend.paged_kv import HostBlocks, PagedKV
from tests.contract.test_kv_contract import (
    DECODER_ONLY,
    ENCODER_DECODER,
    LARGE,
    NUM_SLOTS,
    ROW_BYTES,
    Paged,
    fill,
    on_linux,
    resident_bytes,
)


class CountedBlocks(HostBlocks):
    """Blocks that remember which positions were copied."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        super().__init__(config, num_blocks, block_size)
        self.copies: list[tuple[int, int]] = []

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        self.copies.append((start, stop))
        super().copy(source, target, start, stop)


@pytest.fixture
def memory() -> CountedBlocks:
    return CountedBlocks(DECODER_ONLY, 12, 256)


@pytest.fixture
def cache(memory: CountedBlocks) -> PagedKV:
    return PagedKV(memory, NUM_SLOTS)


def test_paged_kv_saves_restores_and_forks_without_copies(memory: CountedBlocks, cache: PagedKV) -> None:
    cache.reserve(0, 0, 512)
    held = list(cache.table(0, 512))
    cache.apply(KVSave(0, 7, num_tokens=512, num_source_tokens=0))
    cache.apply(KVRestore(7, 1))
    cache.apply(KVCopy(1, 2, num_tokens=512, num_source_tokens=0))
    assert list(cache.table(1, 512)) == list(cache.table(2, 512)) == held
    for slot in range(3):
        cache.apply(KVFree(slot))
    assert cache.num_free_blocks == 10
    cache.apply(KVDrop(7))
    assert cache.num_free_blocks == 12
    assert memory.copies == []


def test_paged_kv_copies_a_shared_block_once_when_it_is_written(memory: CountedBlocks, cache: PagedKV) -> None:
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
    # A block that will be overwritten as a whole is not copied.
    cache.apply(KVSave(1, 7, num_tokens=256, num_source_tokens=0))
    cache.reserve(1, 0, 256)
    assert memory.copies == [(0, 256)]
    assert list(cache.table(1, 256)) != [first]


def test_paged_kv_copies_only_what_follows_a_common_beginning(memory: CountedBlocks, cache: PagedKV) -> None:
    """As for beams: the child keeps its row up to where it differs from its parent."""
    for slot in (0, 1):
        cache.reserve(slot, 0, 400)
    own = list(cache.table(1, 400))
    cache.apply(KVCopy(0, 1, num_tokens=400, num_source_tokens=0, start=390))
    assert memory.copies == [(134, 144)]
    assert list(cache.table(1, 400)) == own


def test_paged_kv_holds_a_shared_source_once() -> None:
    cache = PagedKV(HostBlocks(ENCODER_DECODER, 12, 256), NUM_SLOTS)
    places = cache.reserve_source((0, 2, 3), 300)
    assert len(set(places.tolist())) == 300
    assert places.min() >= 256, "not in the scratch block"
    assert cache.num_free_blocks == 10
    assert cache.source_table(0, 300) == cache.source_table(2, 300) == cache.source_table(3, 300)
    cache.apply(KVFree(0))
    cache.apply(KVFree(3))
    assert cache.num_free_blocks == 10
    cache.reserve_source((2,), 17)
    assert cache.num_free_blocks == 11


def test_paged_kv_raises_when_no_block_is_left() -> None:
    cache = PagedKV(HostBlocks(DECODER_ONLY, 2, 256), NUM_SLOTS)
    cache.reserve(0, 0, 300)
    with pytest.raises(PoolExhausted, match="all 2 blocks"):
        cache.reserve(1, 0, 1)
    cache.check_invariants()
    cache.apply(KVFree(0))
    cache.reserve(1, 0, 1)


@on_linux
def test_paged_kv_memory_of_saved_copies_stays_until_they_are_dropped() -> None:
    backend = Paged(256, num_saved=0).backend
    cache = backend.make(LARGE, NUM_SLOTS)
    fill(backend, cache, 0, LARGE.context, 1.0)
    full = resident_bytes()
    for handle, stop in enumerate((128, 512, 640, 1024)):
        cache.apply(KVSave(0, handle, num_tokens=stop, num_source_tokens=0, start=128 * handle))
    cache.apply(KVFree(0))
    assert ROW_BYTES * 0.7 < full - resident_bytes() < ROW_BYTES * 0.8
    for handle in (2, 0, 3, 1):
        cache.apply(KVDrop(handle))
    assert full - resident_bytes() > ROW_BYTES * 0.9


def test_paged_kv_releases_what_follows_the_positions_given_to_a_row(cache: PagedKV) -> None:
    cache.reserve(0, 0, 10)
    for slot in (1, 2):
        cache.reserve(slot, 0, 600)
    assert cache.num_free_blocks == 12 - 7
    cache.apply(KVSave(0, 7, num_tokens=10, num_source_tokens=0))
    cache.apply(KVCopy(0, 1, num_tokens=10, num_source_tokens=0))
    cache.apply(KVRestore(7, 2))
    assert cache.num_free_blocks == 12 - 1
