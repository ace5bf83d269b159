"""Prompts that begin alike have one key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.config import ServeConfig
from service.routing import PREFIX_CHARACTERS, PREFIX_TOKENS, routing_key


@given(st.text(), st.text(), st.integers(1, 20))
def test_key_is_the_same_exactly_when_the_beginnings_are(one: str, other: str, length: int) -> None:
    assert (routing_key(one, length) == routing_key(other, length)) == (one[:length] == other[:length])


@given(st.lists(st.integers(0, 300)), st.lists(st.integers(0, 300)), st.integers(1, 20))
def test_key_of_token_ids_is_the_same_exactly_when_the_beginnings_are(
    one: list[int], other: list[int], length: int
) -> None:
    assert (routing_key(one, length) == routing_key(other, length)) == (one[:length] == other[:length])


def test_key_covers_one_chunk_by_default() -> None:
    assert routing_key("a" * PREFIX_CHARACTERS + "b") == routing_key("a" * PREFIX_CHARACTERS + "c")
    assert routing_key("a" * (PREFIX_CHARACTERS - 1) + "b") != routing_key("a" * (PREFIX_CHARACTERS - 1) + "c")
    ids = list(range(PREFIX_TOKENS))
    assert routing_key([*ids, 7]) == routing_key([*ids, 8]) == routing_key(tuple(ids))
    assert routing_key([*ids[:-1], 7]) != routing_key([*ids[:-1], 8])


def test_ids_that_read_alike_have_keys_of_their_own() -> None:
    assert len({routing_key([1, 23]), routing_key([12, 3]), routing_key([123]), routing_key("1,23")}) == 4


def test_key_fits_into_metadata() -> None:
    assert routing_key("äöü😀\x00\n").isalnum()
    assert len(routing_key("")) == 16


def test_no_beginning_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="length: must be at least 1, got 0"):
        routing_key("a", 0)


def test_default_length_is_the_servers_chunk() -> None:
    assert ServeConfig(models=Path("m")).chunk_tokens == PREFIX_TOKENS
