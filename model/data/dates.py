"""Dates written out in twelve languages with their ISO 8601 form: "vendredi 20 novembre 2026" → "2026-11-20".

The texts come from Babel's CLDR data, without a download. Two sixteenths of the days, chosen by a hash, are never
trained on in any language: one for validation, one for the final test. Every text names exactly one day, so an answer
is scored by exact match.
"""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import babel
import numpy as np
from babel.dates import format_date

LOCALES = ("en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "pl", "cs", "fi")
FORMATS = ("full", "long", "medium")
FIRST_YEAR = 1950
LAST_YEAR = 2049
SOURCE = f"CLDR date formats of Babel {babel.__version__}"

_NUM_SHARES = 16
_HELD_OUT_SHARE = 0
_VALIDATION_SHARE = 1


class DateExample(NamedTuple):
    """`text` as CLDR writes it in `locale`, no-break spaces included, and `iso`, the same day as YYYY-MM-DD."""

    text: str
    iso: str
    locale: str


def is_held_out(day: datetime.date) -> bool:
    """Whether this day is in the final test; independent of seed and machine."""
    return _share(day) == _HELD_OUT_SHARE


def is_validation(day: datetime.date) -> bool:
    """Whether this day is in the validation set; independent of seed and machine."""
    return _share(day) == _VALIDATION_SHARE


def training(n: int, seed: int) -> list[DateExample]:
    """`n` texts of training days, locale and format drawn independently; texts may repeat."""
    days = _split_days().training
    generator = np.random.default_rng(seed)
    draws = zip(
        generator.integers(len(days), size=n).tolist(),
        generator.integers(len(LOCALES), size=n).tolist(),
        generator.integers(len(FORMATS), size=n).tolist(),
        strict=True,
    )
    return [write(days[day], LOCALES[locale], FORMATS[style]) for day, locale, style in draws]


def validation(n: int, seed: int) -> list[DateExample]:
    """As `held_out`, of validation days."""
    return _take_turns(_split_days().validation, n, seed, "validation")


def held_out(n: int, seed: int) -> list[DateExample]:
    """`n` texts, each of another held-out day; locales and formats rotate.

    Raises:
        ValueError: when there are fewer such days than `n`, or `n` is negative.
    """
    return _take_turns(_split_days().held_out, n, seed, "held-out")


def write(day: datetime.date, locale: str, style: str) -> DateExample:
    """A day in one of `LOCALES` and `FORMATS`."""
    return DateExample(format_date(day, style, locale=locale), day.isoformat(), locale)


def alphabet() -> list[str]:
    """Texts that together contain every character of any date."""
    # Names of months and weekdays repeat every year.
    year = [datetime.date(2019, 1, 1) + datetime.timedelta(days=offset) for offset in range(365)]
    return [write(day, locale, style).text for day in year for locale in LOCALES for style in FORMATS] + ["0123456789-"]


class _Days(NamedTuple):
    """Each side's days in order."""

    training: Sequence[datetime.date]
    validation: Sequence[datetime.date]
    held_out: Sequence[datetime.date]


def _share(day: datetime.date) -> int:
    return zlib.crc32(day.isoformat().encode()) % _NUM_SHARES


@cache
def _split_days() -> _Days:
    """All days of the century."""
    first, last = datetime.date(FIRST_YEAR, 1, 1), datetime.date(LAST_YEAR, 12, 31)
    days = [first + datetime.timedelta(days=offset) for offset in range((last - first).days + 1)]
    return _Days(
        tuple(day for day in days if not (is_held_out(day) or is_validation(day))),
        tuple(day for day in days if is_validation(day)),
        tuple(day for day in days if is_held_out(day)),
    )


def _take_turns(days: Sequence[datetime.date], n: int, seed: int, side: str) -> list[DateExample]:
    if not 0 <= n <= len(days):
        raise ValueError(f"n is {n}, must be between 0 and the {len(days)} {side} days")
    chosen = np.random.default_rng(seed).permutation(len(days))[:n].tolist()
    pairs = [(locale, style) for style in FORMATS for locale in LOCALES]
    return [write(days[day], *pairs[index % len(pairs)]) for index, day in enumerate(chosen)]
