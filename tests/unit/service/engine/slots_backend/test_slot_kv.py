"""Memory of rows and saved copies in slots, and int8 rows; tests/contract/test_kv_contract.py has the rest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from model.spec.config import ModelConfig
from service.engine.batch import KVCopy, KVDrop, KVFree, KVRestore, KVSave
from service.engine.slots_backend.kv_cache import SlotKV
from tests.contract.test_kv_contract import (
    FAMILIES,
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


@FAMILIES
def test_slot_kv_in_int8_saves_and_restores_rows(config: ModelConfig) -> None:
    """A source that is encoded for two rows, copied to a third, and saved."""
    cache = SlotKV(config, NUM_SLOTS, "int8")
    assert {buffer.dtype for buffer in (*cache.own, *cache.cross)} == {np.dtype(np.int8)}
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
