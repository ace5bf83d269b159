"""Cached chunks are found by their tokens and predecessors, and evicted least recently used first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.chunks import CachedChunk
from service.engine.kv.prefix_cache import PrefixCache


def chunk(handle: int, token_ids: tuple[int, ...], parent: CachedChunk | None = None) -> CachedChunk:
    return CachedChunk(handle, token_ids, len(token_ids), parent)


def test_prefix_cache_finds_chunks_only_below_their_predecessors() -> None:
    cache = PrefixCache()
    first, other = chunk(1, (1, 2)), chunk(2, (3, 4))
    below = chunk(3, (5, 6), first)
    for each in (first, other, below):
        cache.add(each)
    assert cache.find([(1, 2), (5, 6), (7, 8)]) == [first, below]
    assert cache.find([(3, 4), (5, 6)]) == [other]
    assert cache.find([(5, 6)]) == []
    assert cache.num_bytes == 6


def test_prefix_cache_evicts_the_least_recently_used_and_no_parent_before_its_children() -> None:
    cache = PrefixCache()
    root = chunk(1, (1,))
    leaves = [chunk(2, (2,), root), chunk(3, (3,), root)]
    other = chunk(4, (4,))
    for each in (root, *leaves, other):
        cache.add(each)
    cache.use(leaves[0])
    assert [cache.evict() for _ in range(len(cache))] == [leaves[1], other, leaves[0], root]
    assert cache.num_bytes == 0
    with pytest.raises(KeyError):
        cache.evict()


def test_prefix_cache_refuses_a_chunk_twice_or_without_its_parent() -> None:
    cache = PrefixCache()
    root = chunk(1, (1,))
    cache.add(root)
    with pytest.raises(ValueError, match="chunk 2 is cached"):
        cache.add(chunk(2, (1,)))
    with pytest.raises(ValueError, match="chunk 4 is cached, or its parent is not"):
        cache.add(chunk(4, (2,), chunk(3, (9,))))


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(0, 2)), max_size=40))
def test_prefix_cache_finds_every_cached_chunk(actions: list[tuple[list[int], int]]) -> None:
    """Paths through a small tree are cached, used and evicted in any order."""
    cache, handles = PrefixCache(), itertools.count(1)
    for path, num_taken in actions:
        chunks = [(token_id,) for token_id in path]
        found = cache.find(chunks)
        assert [each.token_ids for each in found] == chunks[: len(found)]
        if found:
            cache.use(found[-1])
        for token_ids in chunks[len(found) :]:
            found.append(chunk(next(handles), token_ids, found[-1] if found else None))
            cache.add(found[-1])
        for _ in range(min(num_taken, len(cache))):
            cache.evict()
        cache.check_invariants()
