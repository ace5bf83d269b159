"""Padded lengths follow from a length alone, and end at the chunk and the context."""

from __future__ import annotations

from service.engine.chunks import ChunkRules

RULES = ChunkRules(chunk=30, context=22, prompt_padding=8, short_prompt=40, source_padding=16, source_context=40)


def test_sources_are_padded_no_further_than_their_context() -> None:
    assert [RULES.padded_source_length(length) for length in (0, 1, 16, 33, 40)] == [0, 16, 16, 40, 40]


def test_short_prompts_are_padded_no_further_than_the_chunk_and_the_context() -> None:
    assert [RULES.padded_prompt_length(length) for length in (2, 8, 9, 17, 22)] == [8, 8, 16, 22, 22]
    assert [RULES.is_short(0, length) for length in (1, 2, 30, 31)] == [False, True, True, False]
    assert not RULES.is_short(30, 2)
    narrow = ChunkRules(chunk=10, context=64, prompt_padding=8, short_prompt=40, source_padding=16, source_context=0)
    assert narrow.padded_prompt_length(9) == 10
