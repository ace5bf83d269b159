"""Dates written out in twelve languages, and what they are in ISO 8601: "vendredi 20 novembre 2026" → "2026-11-20".

The texts come from the CLDR data that Babel carries, so nothing is downloaded. One day in sixteen, chosen by a hash, is
held out: no text of it, in any language, is ever trained on. Every text names exactly one day, hence an answer is
right or wrong and can be scored by exact match.

Knows nothing of tokens, batches or models.
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
ISO_FORMAT = "YYYY-MM-DD"
SOURCE = f"CLDR date formats of Babel {babel.__version__}"

_HELD_OUT_SHARE = 16


class DateExample(NamedTuple):
    """`text` as CLDR writes it in `locale` (no-break blanks included), and `iso`, the same day as YYYY-MM-DD."""

    text: str
    iso: str
    locale: str


def is_held_out(day: datetime.date) -> bool:
    """Whether no text of this day is trained on; the same on every machine and for every seed."""
    return zlib.crc32(day.isoformat().encode()) % _HELD_OUT_SHARE == 0


def training(n: int, seed: int) -> list[DateExample]:
    """`n` texts of training days; day, language and format are drawn independently, and texts may repeat."""
    days, _ = _split_days()
    generator = np.random.default_rng(seed)
    draws = zip(
        generator.integers(len(days), size=n).tolist(),
        generator.integers(len(LOCALES), size=n).tolist(),
        generator.integers(len(FORMATS), size=n).tolist(),
        strict=True,
    )
    return [write(days[day], LOCALES[locale], FORMATS[style]) for day, locale, style in draws]


def held_out(n: int, seed: int) -> list[DateExample]:
    """`n` texts, each of another held-out day; languages and formats take turns, so that all count alike.

    Raises:
        ValueError: when `n` is negative or there are not so many held-out days.
    """
    _, days = _split_days()
    if not 0 <= n <= len(days):
        raise ValueError(f"n is {n}, must be between 0 and the {len(days)} held-out days")
    chosen = np.random.default_rng(seed).permutation(len(days))[:n].tolist()
    pairs = [(locale, style) for style in FORMATS for locale in LOCALES]
    return [write(days[day], *pairs[index % len(pairs)]) for index, day in enumerate(chosen)]


def write(day: datetime.date, locale: str, style: str) -> DateExample:
    """A day in one of `LOCALES` and `FORMATS`."""
    return DateExample(format_date(day, style, locale=locale), day.isoformat(), locale)


def alphabet() -> list[str]:
    """Texts that between them hold every character that any text can hold."""
    # Names of months and weekdays repeat every year; the digits all occur.
    year = [datetime.date(2019, 1, 1) + datetime.timedelta(days=offset) for offset in range(365)]
    return [write(day, locale, style).text for day in year for locale in LOCALES for style in FORMATS] + ["0123456789-"]


@cache
def _split_days() -> tuple[Sequence[datetime.date], Sequence[datetime.date]]:
    """All days of the century, in order: those to train on and those held out."""
    first, last = datetime.date(FIRST_YEAR, 1, 1), datetime.date(LAST_YEAR, 12, 31)
    days = [first + datetime.timedelta(days=offset) for offset in range((last - first).days + 1)]
    return tuple(day for day in days if not is_held_out(day)), tuple(day for day in days if is_held_out(day))
