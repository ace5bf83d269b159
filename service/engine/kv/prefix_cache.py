"""The prefix cache: chunks of earlier prompts, and whole sources, whose K/V later requests can reuse. LRU, plain ints.

A tree of chunks: each is found by its tokens and those of its ancestors, compared token by token instead of by hash.
Only whole chunks of a prefill are cached, so that a cache hit has the bits that computing would give.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from service.engine.chunks import CachedChunk, TokenIds


class PrefixCache:
    """Cached chunks in order of their last use.

    A chunk is always more recently used than its descendants, so that an evicted one has none.
    """

    def __init__(self) -> None:
        self._chunks: OrderedDict[tuple[int | None, TokenIds], CachedChunk] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, chunk: CachedChunk) -> bool:
        return self._chunks.get(chunk.key) is chunk

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return self._num_bytes

    def get(self, parent: CachedChunk | None, token_ids: TokenIds) -> CachedChunk | None:
        """The chunk with these tokens after `parent`, if cached; no use."""
        return self._chunks.get((None if parent is None else parent.handle, token_ids))

    def find(self, chunks: Iterable[TokenIds]) -> list[CachedChunk]:
        """The longest cached prefix of these chunks; no use."""
        found: list[CachedChunk] = []
        for token_ids in chunks:
            if (chunk := self.get(found[-1] if found else None, token_ids)) is None:
                break
            found.append(chunk)
        return found

    def use(self, chunk: CachedChunk) -> None:
        """Marks a chunk and its ancestors as just used."""
        current: CachedChunk | None = chunk
        while current is not None:
            self._chunks.move_to_end(current.key)
            current = current.parent

    def add(self, chunk: CachedChunk) -> None:
        """Caches a chunk, as just used.

        Raises:
            ValueError: when it is cached already, or its parent is not.
        """
        if chunk.key in self._chunks or (chunk.parent is not None and chunk.parent not in self):
            raise ValueError(f"chunk {chunk.handle} is cached, or its parent is not")
        self._chunks[chunk.key] = chunk
        self._num_bytes += chunk.num_bytes
        self.use(chunk)

    def evict(self) -> CachedChunk:
        """Takes out the least recently used chunk.

        Raises:
            KeyError: when the cache is empty.
        """
        _, chunk = self._chunks.popitem(last=False)
        self._num_bytes -= chunk.num_bytes
        return chunk

    def check_invariants(self) -> None:
        """Asserts that every chunk can be found, is counted once, and is used after its descendants."""
        ages = {chunk: age for age, chunk in enumerate(self._chunks.values())}
        for chunk, age in ages.items():
            if chunk.parent is not None and ages.get(chunk.parent, -1) < age:
                raise AssertionError(f"chunk {chunk.handle} would outlive its parent")
        if self._num_bytes != sum(chunk.num_bytes for chunk in ages):
            raise AssertionError(f"{self._num_bytes} bytes counted")
        if len({chunk.handle for chunk in ages}) != len(ages):
            raise AssertionError("two chunks under one handle")
