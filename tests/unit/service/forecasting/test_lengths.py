"""The expected length of an answer: the mean of whole ones, cut ones counted for what they tell."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.forecasting.lengths import AnswerLengths


def seen(*answers: tuple[int, bool], at: float = 0.0) -> AnswerLengths:
    lengths = AnswerLengths()
    for num_tokens, is_whole in answers:
        lengths.note(at, num_tokens, is_whole=is_whole)
    return lengths


@given(st.lists(st.integers(1, 300), min_size=8, max_size=40), st.integers(1, 300))
def test_lengths_of_whole_answers_give_the_mean_of_what_a_limit_leaves_of_them(
    answers: list[int], max_tokens: int
) -> None:
    lengths = seen(*((num_tokens, True) for num_tokens in answers))
    mean = sum(min(num_tokens, max_tokens) for num_tokens in answers) / len(answers)
    expected = lengths.expected(0.0, max_tokens)
    assert expected is not None
    assert expected in (math.ceil(mean - 1e-9), math.ceil(mean + 1e-9))


def test_lengths_are_weighed_by_who_was_left_to_end() -> None:
    """By hand: of 8 two end at 4 and two are cut at 6; of the 4 that are left all end at 10."""
    lengths = seen(*[(4, True)] * 2, *[(6, False)] * 2, *[(10, True)] * 4)
    assert lengths.expected(0.0, 256) == math.ceil(4 + 6 / 8 * 6)


def test_lengths_beyond_the_longest_that_was_seen_are_not_expected() -> None:
    assert seen(*[(20, False)] * 8).expected(0.0, 256) == 20


@pytest.mark.parametrize(("count", "now", "expected"), [(7, 0.0, None), (8, 120.0, 9), (8, 120.1, None)])
def test_lengths_say_nothing_on_too_few_or_too_old_answers(count: int, now: float, expected: int | None) -> None:
    assert seen(*[(9, True)] * count).expected(now, 256) == expected


def test_lengths_forget_all_but_the_latest() -> None:
    lengths = seen(*[(100, True)] * 300)
    for _ in range(256):
        lengths.note(0.0, 5, is_whole=True)
    assert lengths.expected(0.0, 256) == 5
