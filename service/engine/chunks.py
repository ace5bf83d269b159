"""Chunks of prompts: how long each one is, how it is padded, and what is known of one whose K/V are cached.

Boundaries and padded lengths follow from a request alone, whatever runs beside it: batch invariance rests on that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from service.engine.batch import EncodeGroup, EncodeRow, PrefillGroup, PrefillRow

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRules:
    """How work is cut and padded, in tokens.

    Prompts are cut at multiples of `chunk`, and what begins one is padded to a multiple of `prompt_padding` if it has
    at most `short_prompt` tokens, so that such beginnings can be computed together. Sources are padded to multiples of
    `source_padding`. Nothing is padded beyond a chunk or a context.
    """

    chunk: int
    context: int
    prompt_padding: int
    short_prompt: int
    source_padding: int
    source_context: int

    def next_length(self, num_tokens: int, num_computed: int) -> int:
        """Tokens of the chunk that follows the first `num_computed` of `num_tokens`; 0 when nothing is left."""
        boundary = (num_computed // self.chunk + 1) * self.chunk
        return min(boundary, num_tokens) - num_computed

    def is_short(self, start: int, length: int) -> bool:
        """Whether the piece `[start, start + length)` of a prompt is a beginning to be padded."""
        return start == 0 and 1 < length <= min(self.short_prompt, self.chunk)

    def padded_prompt_length(self, length: int) -> int:
        """Length in which a short beginning of `length` tokens is computed."""
        return min(_round_up(length, self.prompt_padding), self.chunk, self.context)

    def group_prompts(self, rows: Iterable[PrefillRow]) -> tuple[PrefillGroup, ...]:
        """Short beginnings by padded length, so that each is computed in the shape that it would have alone."""
        groups: dict[int, list[PrefillRow]] = {}
        for row in rows:
            groups.setdefault(self.padded_prompt_length(len(row.token_ids)), []).append(row)
        return tuple(PrefillGroup(length, tuple(members)) for length, members in groups.items())

    def padded_source_length(self, length: int) -> int:
        """Length that the encoder sees for a source of `length` tokens; 0 where there is no source."""
        return min(_round_up(length, self.source_padding), self.source_context)

    def group_sources(self, rows: Iterable[EncodeRow]) -> tuple[EncodeGroup, ...]:
        """Sources by padded length, so that each is encoded in the shape that it would have alone."""
        groups: dict[int, list[EncodeRow]] = {}
        for row in rows:
            groups.setdefault(self.padded_source_length(len(row.token_ids)), []).append(row)
        return tuple(EncodeGroup(length, tuple(members)) for length, members in groups.items())


@dataclass(frozen=True, slots=True, eq=False)
class CachedChunk:
    """One piece under its handle; `num_bytes` is what it takes of the budget. `parent` is the piece before it."""

    handle: int
    token_ids: TokenIds
    num_bytes: int
    parent: CachedChunk | None

    @property
    def key(self) -> tuple[int | None, TokenIds]:
        """What it is found by."""
        return None if self.parent is None else self.parent.handle, self.token_ids


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
