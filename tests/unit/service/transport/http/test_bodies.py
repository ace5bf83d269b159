"""JSON is counted before it is built."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from service.errors import InvalidRequest
from service.transport.http import bodies
from service.transport.http.bodies import count_elements, parse


def count(value: Any) -> int:
    """Elements as `count_elements` counts: lists, objects, and what follows a first entry."""
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(0, len(value) - 1) + sum(map(count, inner))
    return 0


def draw(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(5 if depth < 4 else 3):
        case 0:
            return "".join(rng.choice('",[{\\}]: aé\n') for _ in range(rng.randint(0, 300)))
        case 1:
            return rng.randint(-9, 9)
        case 2:
            return rng.choice([True, None, 0.5])
        case 3:
            return [draw(rng, depth + 1) for _ in range(rng.randint(0, 30))]
        case _:
            return {f'{index}",[\\': draw(rng, depth + 1) for index in range(rng.randint(0, 30))}


@pytest.mark.parametrize("seed", range(40))
def test_elements_are_those_outside_of_strings(seed: int) -> None:
    rng = random.Random(seed)
    value = {"padding": "x" * 5000, "value": draw(rng)}
    data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
    most = count(value)
    list(count_elements(data, most))
    with pytest.raises(InvalidRequest, match="must have at most"):
        list(count_elements(data, most - 1))
    assert parse(data) == value


def test_a_string_that_does_not_end_is_not_searched_again_and_again() -> None:
    # One step for each 512 quotes: as many steps as there are quotes would be quadratic.
    data = b'{"a": "' + b'\\"' * 100_000
    assert len(list(count_elements(data, 10))) < 200


class CountedName(str):
    """A name that counts with how many others it was compared."""

    __slots__ = ()
    num_compared = 0

    def __eq__(self, other: object) -> bool:
        CountedName.num_compared += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = str.__hash__


def test_name_that_occurs_twice_is_found_without_comparing_all_with_all() -> None:
    names = [CountedName(f"k{index}") for index in range(1000)]
    pairs = [(name, 0) for name in (*names, CountedName("k999"))]
    with pytest.raises(ValueError, match="'k999' occurs twice"):
        bodies._unique(pairs)
    assert CountedName.num_compared < 10 * len(names)
    with pytest.raises(InvalidRequest, match="'b' occurs twice"):
        parse(b'{"a": 1, "b": 2, "c": 3, "b": 4}')
