"""Chunking and padding rules, and cached chunks.

Boundaries and padded lengths follow from a request alone, whatever runs beside it: batch invariance rests on that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from service.engine.batch import EncodeGroup, EncodeRow, PrefillGroup, PrefillRow

MERGED_CHUNKS = 4
"""Chunks of a prompt that are one run, at most: `llama-110m` gains a quarter by four, and nothing by eight."""

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRules:
    """Chunking and padding rules, in tokens. Immutable, thread-safe.

    Prompts are cut at multiples of `chunk`. A first chunk of at most `short_prompt` tokens is padded to a multiple of
    `prompt_padding`, so that several can run together; sources are padded to multiples of `source_padding`. Nothing is
    padded beyond a chunk or a context. Whole chunks of a prompt that a step computes alone are one run of at most
    `long_run` tokens; with 0, none are.
    """

    chunk: int
    context: int
    prompt_padding: int
    short_prompt: int
    source_padding: int
    source_context: int
    long_run: int = 0

    def next_length(self, num_tokens: int, num_computed: int) -> int:
        """Tokens of the chunk after the first `num_computed` of `num_tokens`; 0 when nothing is left."""
        boundary = (num_computed // self.chunk + 1) * self.chunk
        return min(boundary, num_tokens) - num_computed

    def is_short(self, start: int, length: int) -> bool:
        """Whether the chunk `[start, start + length)` of a prompt is padded and run with others."""
        return start == 0 and 1 < length <= min(self.short_prompt, self.chunk)

    def padded_prompt_length(self, length: int) -> int:
        """Padded length of a short first chunk."""
        return min(_round_up(length, self.prompt_padding), self.chunk, self.context)

    def group_prompts(self, rows: Iterable[PrefillRow]) -> tuple[PrefillGroup, ...]:
        """Groups short first chunks by padded length."""
        groups: dict[int, list[PrefillRow]] = {}
        for row in rows:
            groups.setdefault(self.padded_prompt_length(len(row.token_ids)), []).append(row)
        return tuple(PrefillGroup(length, tuple(members)) for length, members in groups.items())

    def padded_source_length(self, length: int) -> int:
        """Padded length of a source; 0 where there is none."""
        return min(_round_up(length, self.source_padding), self.source_context)

    def group_sources(self, rows: Iterable[EncodeRow]) -> tuple[EncodeGroup, ...]:
        """Groups sources by padded length."""
        groups: dict[int, list[EncodeRow]] = {}
        for row in rows:
            groups.setdefault(self.padded_source_length(len(row.token_ids)), []).append(row)
        return tuple(EncodeGroup(length, tuple(members)) for length, members in groups.items())


@dataclass(frozen=True, slots=True, eq=False)
class CachedChunk:
    """A chunk in the prefix cache: `num_bytes` of the budget under a handle, following the chunk `parent`."""

    handle: int
    token_ids: TokenIds
    num_bytes: int
    parent: CachedChunk | None

    @property
    def key(self) -> tuple[int | None, TokenIds]:
        """Cache key."""
        return None if self.parent is None else self.parent.handle, self.token_ids


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
