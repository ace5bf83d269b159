"""What every `KVCache` promises, whatever it is made of: rows keep their valid part through any moves.

A backend joins by adding a `Backend` to `BACKENDS`: how to make one, and how a graph would write and read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config import Architecture, ModelConfig
from service.engine.batch import KVCopy
from service.engine.kv_cache import KVCache, SlotKV
from service.errors import StartupError

Float32 = npt.NDArray[np.float32]

NUM_SLOTS = 4
CONTEXT = 6
SOURCE_CONTEXT = 5
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


@dataclass(frozen=True, slots=True)
class Backend:
    """A cache and the graph's side of it: `write` stores a value at one position of a row in every layer, K and V;
    `read` and `read_cross` give a row's first positions as `[2 * layers, kv_heads, length, head_dim]`."""

    make: Callable[[ModelConfig, int], KVCache]
    write: Callable[[KVCache, int, int, float], None]
    read: Callable[[KVCache, int, int], Float32]
    read_cross: Callable[[KVCache, int, int], Float32]


def slot_kv(cache: KVCache) -> SlotKV:
    assert isinstance(cache, SlotKV)
    return cache


def slot_write(cache: KVCache, slot: int, position: int, value: float) -> None:
    for buffer in slot_kv(cache).own:
        buffer[slot, :, position] = value


SLOT_KV = Backend(
    make=lambda config, num_slots: SlotKV(config, num_slots, None),
    write=slot_write,
    read=lambda cache, slot, length: np.stack([buffer[slot, :, :length] for buffer in slot_kv(cache).own]),
    read_cross=lambda cache, slot, length: np.stack([buffer[slot, :, :length] for buffer in slot_kv(cache).cross]),
)
BACKENDS = pytest.mark.parametrize("backend", [SLOT_KV], ids=["slot"])
FAMILIES = pytest.mark.parametrize("config", [DECODER_ONLY, ENCODER_DECODER], ids=lambda c: c.architecture)


def sources(config: ModelConfig, count: int, length: int, seed: int = 0) -> list[Float32]:
    shape = (count, config.num_kv_heads, length, config.head_dim)
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for _ in range(2 * config.num_layers)]


@BACKENDS
@FAMILIES
def test_kv_cache_reports_the_bytes_it_reserves(backend: Backend, config: ModelConfig) -> None:
    cache = backend.make(config, NUM_SLOTS)
    positions = config.context + (config.source_context if config.is_encoder_decoder else 0)
    assert cache.num_slots == NUM_SLOTS
    assert cache.reserved_bytes == NUM_SLOTS * positions * config.kv_bytes_per_token


@BACKENDS
@FAMILIES
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, NUM_SLOTS - 1), st.just(0)),
            st.tuples(st.just("move"), st.integers(0, NUM_SLOTS - 1), st.integers(0, NUM_SLOTS - 1)),
        ),
        max_size=30,
    )
)
def test_kv_cache_rows_keep_their_valid_part_through_writes_and_moves(
    backend: Backend, config: ModelConfig, actions: list[tuple[str, int, int]]
) -> None:
    cache = backend.make(config, NUM_SLOTS)
    rows: list[list[float]] = [[] for _ in range(NUM_SLOTS)]
    for number, (kind, first, second) in enumerate(actions, start=1):
        if kind == "write" and len(rows[first]) < CONTEXT:
            backend.write(cache, first, len(rows[first]), float(number))
            rows[first].append(float(number))
        elif kind == "move" and first != second:
            cache.move(KVCopy(source=first, target=second, num_tokens=len(rows[first]), num_source_tokens=0))
            rows[second] = list(rows[first])
        for slot, row in enumerate(rows):
            kept = backend.read(cache, slot, len(row))
            assert (kept == np.array(row, np.float32)[:, np.newaxis]).all()


@BACKENDS
def test_kv_cache_sources_go_to_their_slots_and_nowhere_else(backend: Backend) -> None:
    cache = backend.make(ENCODER_DECODER, NUM_SLOTS)
    tensors = sources(ENCODER_DECODER, count=2, length=4)
    cache.write_cross([3, 1], tensors)
    for row, slot in enumerate([3, 1]):
        np.testing.assert_array_equal(backend.read_cross(cache, slot, 4), np.stack([t[row] for t in tensors]))
    for slot in (0, 2):
        assert not backend.read_cross(cache, slot, SOURCE_CONTEXT).any()


@BACKENDS
def test_kv_cache_sources_move_with_their_row(backend: Backend) -> None:
    cache = backend.make(ENCODER_DECODER, NUM_SLOTS)
    moved, overwritten = sources(ENCODER_DECODER, 1, 3), sources(ENCODER_DECODER, 1, 5, seed=1)
    cache.write_cross([2], moved)
    cache.write_cross([0], overwritten)
    backend.write(cache, 2, 0, 7.0)
    cache.move(KVCopy(source=2, target=0, num_tokens=1, num_source_tokens=3))
    for slot in (0, 2):
        np.testing.assert_array_equal(backend.read_cross(cache, slot, 3), np.stack([tensor[0] for tensor in moved]))
        assert (backend.read(cache, slot, 1) == 7.0).all()


@BACKENDS
def test_kv_cache_a_shorter_source_takes_the_place_of_a_longer_one(backend: Backend) -> None:
    cache = backend.make(ENCODER_DECODER, NUM_SLOTS)
    cache.write_cross([0], sources(ENCODER_DECODER, 1, 5))
    second = sources(ENCODER_DECODER, 1, 2, seed=1)
    cache.write_cross([0], second)
    np.testing.assert_array_equal(backend.read_cross(cache, 0, 2), np.stack([tensor[0] for tensor in second]))


@BACKENDS
def test_kv_cache_refuses_sources_with_a_layer_missing(backend: Backend) -> None:
    cache = backend.make(ENCODER_DECODER, NUM_SLOTS)
    with pytest.raises(ValueError, match="zip"):
        cache.write_cross([0], sources(ENCODER_DECODER, 1, 2)[:-1])


@FAMILIES
def test_slot_kv_refuses_to_reserve_more_than_there_is(config: ModelConfig) -> None:
    """The kernel would not: it ends the process once the memory is touched."""
    needed = SlotKV(config, NUM_SLOTS, None).reserved_bytes
    assert SlotKV(config, NUM_SLOTS, needed).reserved_bytes == needed
    with pytest.raises(StartupError, match=f"{NUM_SLOTS} slots needs {needed} bytes, there are {needed - 1}"):
        SlotKV(config, NUM_SLOTS, needed - 1)
