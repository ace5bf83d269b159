"""Small tasks that lessons train on: sequences to reverse, and dates of words. Batch i depends on seed and i alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model.data.batches import Batch, Pair, pad
from model.spec.tokenizer import EOS_ID

FIRST_ID = 3
"""After padding, start and end."""
_ROWS = 32
_HELD_OUT = 1 << 30


@dataclass(frozen=True, slots=True)
class Reversal:
    """Random symbols, to be written from the last to the first."""

    num_symbols: int
    length: int
    seed: int

    @property
    def vocab_size(self) -> int:
        """Symbols and control tokens."""
        return FIRST_ID + self.num_symbols

    def batch(self, index: int) -> Batch:
        """Pairs to train on."""
        return pad(self._pairs(_ROWS, index))

    def held_out(self, count: int) -> list[Pair]:
        """Pairs drawn apart from those of any batch."""
        return self._pairs(count, _HELD_OUT)

    def _pairs(self, count: int, index: int) -> list[Pair]:
        symbols = np.random.default_rng((self.seed, index)).integers(self.num_symbols, size=(count, self.length))
        return [Pair([*row, EOS_ID], row[::-1]) for row in (symbols + FIRST_ID).tolist()]


@dataclass(frozen=True, slots=True)
class Mirror:
    """Each output names two symbols of the source at once: the one at its own place, and the one at the mirrored."""

    num_symbols: int
    length: int
    seed: int

    @property
    def vocab_size(self) -> int:
        """Pairs of symbols and control tokens."""
        return FIRST_ID + self.num_symbols**2

    def batch(self, index: int) -> Batch:
        """Pairs to train on."""
        return pad(self._pairs(_ROWS, index))

    def held_out(self, count: int) -> list[Pair]:
        """Pairs drawn apart from those of any batch."""
        return self._pairs(count, _HELD_OUT)

    def _pairs(self, count: int, index: int) -> list[Pair]:
        symbols = np.random.default_rng((self.seed, index)).integers(self.num_symbols, size=(count, self.length))
        targets = symbols * self.num_symbols + symbols[:, ::-1] + FIRST_ID
        rows = zip((symbols + FIRST_ID).tolist(), targets.tolist(), strict=True)
        return [Pair([*source, EOS_ID], target) for source, target in rows]


MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october")
_YEARS = tuple(str(year) for year in range(1980, 2000))
_DAYS = tuple(f"{day:02}" for day in range(1, 29))
_FORMS: tuple[Callable[[str, str, str], Sequence[str]], ...] = (
    lambda year, month, day: (day, month, year),
    lambda year, month, day: (month, day, ",", year),
    lambda year, month, day: ("the", day, "of", month, ",", year),
)


@dataclass(frozen=True, slots=True)
class Dates:
    """Dates in three forms, a token per word, to be written as year, month, day."""

    seed: int
    words: tuple[str, ...] = ("<pad>", "<start>", "<end>", "the", "of", ",", *MONTHS, *_DAYS, *_YEARS)

    def pair(self, text: str) -> Pair:
        """A date in any of the forms, for example `the 03 of may , 1987`, with its target."""
        source = text.split()
        order = [next(word for word in source if word in kind) for kind in (_YEARS, MONTHS, _DAYS)]
        return Pair([*self.ids(source), EOS_ID], self.ids(order))

    def ids(self, words: Sequence[str]) -> list[int]:
        """Token ids of words."""
        return [self.words.index(word) for word in words]

    def batch(self, index: int) -> Batch:
        """Pairs to train on."""
        return pad(self._pairs(_ROWS, index))

    def held_out(self, count: int) -> list[Pair]:
        """Pairs drawn apart from those of any batch."""
        return self._pairs(count, _HELD_OUT)

    def _pairs(self, count: int, index: int) -> list[Pair]:
        generator = np.random.default_rng((self.seed, index))
        drawn = [[str(generator.choice(kind)) for kind in (_YEARS, MONTHS, _DAYS)] for _ in range(count)]
        forms = generator.integers(len(_FORMS), size=count).tolist()
        return [self.pair(" ".join(_FORMS[form](*date))) for form, date in zip(forms, drawn, strict=True)]
