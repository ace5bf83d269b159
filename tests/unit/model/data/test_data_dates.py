"""The date data: whose texts, which days, and what is never trained on."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable

import pytest

from model.data import dates


def test_no_day_is_on_two_sides() -> None:
    trained = {example.iso for example in dates.training(20_000, seed=0)}
    validation = {example.iso for example in dates.validation(2_000, seed=0)}
    held_out = {example.iso for example in dates.held_out(2_000, seed=0)}
    assert not trained & validation
    assert not trained & held_out
    assert not validation & held_out
    for days, wanted in ((trained, (False, False)), (validation, (True, False)), (held_out, (False, True))):
        for day in map(datetime.date.fromisoformat, days):
            assert (dates.is_validation(day), dates.is_held_out(day)) == wanted


def test_held_out_days_do_not_depend_on_the_seed() -> None:
    every_day = len(dates.held_out(2_281, seed=0))
    assert {e.iso for e in dates.held_out(every_day, seed=1)} == {e.iso for e in dates.held_out(every_day, seed=2)}


def test_equal_seeds_give_equal_examples_and_others_do_not() -> None:
    assert dates.training(100, seed=3) == dates.training(100, seed=3)
    assert dates.training(100, seed=3) != dates.training(100, seed=4)
    assert dates.held_out(100, seed=3) == dates.held_out(100, seed=3)
    assert dates.held_out(100, seed=3) != dates.held_out(100, seed=4)


def test_every_language_has_its_share_of_the_held_out_examples() -> None:
    counts = Counter(example.locale for example in dates.held_out(504, seed=0))
    assert counts == dict.fromkeys(dates.LOCALES, 42)


def test_held_out_examples_are_of_different_days() -> None:
    examples = dates.held_out(500, seed=0)
    assert len({example.iso for example in examples}) == 500


def test_a_text_names_one_day_only() -> None:
    days: dict[str, str] = {}
    for example in dates.training(20_000, seed=0):
        assert days.setdefault(example.text, example.iso) == example.iso


@pytest.mark.parametrize(
    ("locale", "text"),
    [
        ("en", "Friday, November 20, 2026"),
        ("fr", "vendredi 20 novembre 2026"),
        ("de", "Freitag, 20. November 2026"),
        ("pl", "piątek, 20 listopada 2026"),
    ],
)
def test_texts_are_what_people_write(locale: str, text: str) -> None:
    assert dates.write(datetime.date(2026, 11, 20), locale, "full") == (text, "2026-11-20", locale)


def test_the_alphabet_holds_every_character_of_every_text() -> None:
    alphabet = set("".join(dates.alphabet()))
    for example in (*dates.training(10_000, seed=0), *dates.held_out(2_000, seed=0)):
        assert set(example.text) <= alphabet
        assert set(example.iso) <= alphabet


@pytest.mark.parametrize("draw", [dates.validation, dates.held_out])
@pytest.mark.parametrize("n", [-1, 10_000])
def test_asking_for_impossibly_many_scored_examples_is_refused(
    draw: Callable[[int, int], list[dates.DateExample]], n: int
) -> None:
    with pytest.raises(ValueError, match=f"n is {n}"):
        draw(n, 0)
