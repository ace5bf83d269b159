"""Interleaved rounds: every system once a round, in an order drawn anew, so that a drifting machine favors none."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

_Thing = TypeVar("_Thing")


def say(text: str) -> None:
    """Prints progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def counted(number: int, what: str = "round") -> Iterator[int]:
    """Round numbers from 0; prints each."""
    for index in range(number):
        say(f"{what} {index + 1}/{number}")
        yield index


def shuffled(things: Iterable[_Thing], *seed: object) -> list[_Thing]:
    """An order that the seed decides."""
    order = list(things)
    random.Random("/".join(map(str, seed))).shuffle(order)  # noqa: S311 (not for secrets)
    return order


def interleaved(rounds: int, things: Iterable[_Thing], seed: int) -> Iterator[tuple[int, _Thing]]:
    """All things in every round, in a new order each time."""
    known = list(things)
    for number in counted(rounds):
        for thing in shuffled(known, seed, number):
            yield number, thing
