"""The sizes in which steps of single tokens run: few, and all of them known beforehand."""

from __future__ import annotations

import pytest

from service.engine.kv.decode_sizes import SHORTEST, decode_size, decode_sizes


@pytest.mark.parametrize("max_rows", [1, 2, 5, 8, 33])
@pytest.mark.parametrize("context", [7, 511, 512, 513, 4096, 5000])
def test_every_step_within_the_limits_has_one_of_the_sizes_and_none_is_without_a_step(
    max_rows: int, context: int
) -> None:
    sizes = decode_sizes(max_rows, context)
    lengths = {1, context, *(length for length in (511, 512, 513, 1024, 1025, 2049, 4097) if length <= context)}
    met = {decode_size(rows, length) for rows in range(1, max_rows + 1) for length in lengths}
    assert met == set(sizes)
    assert len(set(sizes)) == len(sizes)
    assert all(rows >= each and most >= SHORTEST for rows, most in sizes[:1] for each, _ in sizes)
    assert sizes[0] == decode_size(max_rows, context), "the largest first"


def test_a_size_has_room_for_its_step_and_no_more_than_twice_that() -> None:
    for rows in range(1, 70):
        for length in range(1, 3000, 37):
            most_rows, most_tokens = decode_size(rows, length)
            assert rows <= most_rows < 2 * rows
            assert length <= most_tokens
            assert most_tokens < 2 * length or most_tokens == SHORTEST
