"""What is kept is found by what it says and what precedes it, and goes in the right order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.chunks import CachedChunk
from service.engine.kv.prefix_cache import PrefixCache


def piece(handle: int, token_ids: tuple[int, ...], parent: CachedChunk | None = None) -> CachedChunk:
    return CachedChunk(handle, token_ids, len(token_ids), parent)


def test_prefix_cache_finds_pieces_only_below_what_precedes_them() -> None:
    cache = PrefixCache()
    first, other = piece(1, (1, 2)), piece(2, (3, 4))
    below = piece(3, (5, 6), first)
    for each in (first, other, below):
        cache.add(each)
    assert cache.find([(1, 2), (5, 6), (7, 8)]) == [first, below]
    assert cache.find([(3, 4), (5, 6)]) == [other]
    assert cache.find([(5, 6)]) == []
    assert cache.num_bytes == 6


def test_prefix_cache_gives_up_the_least_recently_used_and_never_what_others_need() -> None:
    cache = PrefixCache()
    root = piece(1, (1,))
    leaves = [piece(2, (2,), root), piece(3, (3,), root)]
    other = piece(4, (4,))
    for each in (root, *leaves, other):
        cache.add(each)
    cache.use(leaves[0])
    assert [cache.evict() for _ in range(len(cache))] == [leaves[1], other, leaves[0], root]
    assert cache.num_bytes == 0
    with pytest.raises(KeyError):
        cache.evict()


def test_prefix_cache_refuses_a_piece_twice_or_without_its_parent() -> None:
    cache = PrefixCache()
    root = piece(1, (1,))
    cache.add(root)
    with pytest.raises(ValueError, match="chunk 2 is cached"):
        cache.add(piece(2, (1,)))
    with pytest.raises(ValueError, match="chunk 4 is cached, or its parent is not"):
        cache.add(piece(4, (2,), piece(3, (9,))))


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(0, 2)), max_size=40))
def test_prefix_cache_whatever_is_kept_can_be_found(actions: list[tuple[list[int], int]]) -> None:
    """Paths through a small tree are kept, used and given up in any order."""
    cache, handles = PrefixCache(), itertools.count(1)
    for path, num_taken in actions:
        pieces = [(token_id,) for token_id in path]
        found = cache.find(pieces)
        assert [each.token_ids for each in found] == pieces[: len(found)]
        if found:
            cache.use(found[-1])
        for token_ids in pieces[len(found) :]:
            found.append(piece(next(handles), token_ids, found[-1] if found else None))
            cache.add(found[-1])
        for _ in range(min(num_taken, len(cache))):
            cache.evict()
        cache.check_invariants()
