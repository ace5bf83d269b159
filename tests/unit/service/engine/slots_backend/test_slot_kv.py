"""Memory of rows and saved copies in slots; tests/contract/test_kv_contract.py has the rest."""

from __future__ import annotations

from service.engine.batch import KVDrop, KVFree, KVSave
from tests.contract.test_kv_contract import (
    LARGE,
    NUM_SLOTS,
    ROW_BYTES,
    SLOT_KV,
    fill,
    on_linux,
    resident_bytes,
)


@on_linux
def test_slot_kv_memory_of_a_freed_row_may_stay_under_its_first_positions() -> None:
    cache = SLOT_KV.make(LARGE, NUM_SLOTS)
    for slot in range(NUM_SLOTS):
        fill(SLOT_KV, cache, slot, LARGE.context, slot + 1.0)
    full = resident_bytes()
    cache.apply(KVFree(2, LARGE.context // 4))
    assert ROW_BYTES * 0.7 < full - resident_bytes() < ROW_BYTES * 0.8
    for slot in (0, 1, 3):
        assert (SLOT_KV.read(cache, slot, 0, LARGE.context) == slot + 1).all()
    before = resident_bytes()
    fill(SLOT_KV, cache, 2, LARGE.context // 4, 9.0)
    assert resident_bytes() - before < ROW_BYTES * 0.1, "the memory that stayed is reused"


@on_linux
def test_slot_kv_memory_of_dropped_copies_goes_back_in_any_order() -> None:
    """Copies of several sizes: each has a mapping of its own, so that none leaves holes in a heap."""
    cache = SLOT_KV.make(LARGE, NUM_SLOTS)
    fill(SLOT_KV, cache, 0, LARGE.context, 1.0)
    before = resident_bytes()
    for handle in range(32):
        cache.apply(KVSave(0, handle, num_tokens=128 * (1 + handle % 4) + 128, num_source_tokens=0, start=128))
    for handle in range(0, 32, 2):
        cache.apply(KVDrop(handle))
    stored = cache.stored_bytes
    assert stored == 16 * 128 * 3 * LARGE.kv_bytes_per_token
    assert abs(resident_bytes() - before - stored) < 0.1 * stored
    for handle in range(1, 32, 2):
        cache.apply(KVDrop(handle))
    assert resident_bytes() - before < 0.1 * stored
