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


@pytest.mark.parametrize("seed", range(10))
def test_elements_are_those_outside_of_strings(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(bodies, "_STEP_BYTES", rng.choice([1, 7, 1000, 1 << 15]))
    value = {"padding": "x" * 5000, "value": draw(rng)}
    data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
    most = count(value)
    list(count_elements(data, most))
    with pytest.raises(InvalidRequest, match="must have at most"):
        list(count_elements(data, most - 1))
    assert parse(data) == value


@pytest.mark.parametrize("part", [b'\\"', b'""', b'","', b"\\\\"], ids=["quotes", "strings", "commas", "escapes"])
def test_steps_are_as_many_as_the_bytes_need_whatever_they_are(part: bytes) -> None:
    data = b'{"a": "' + part * 300_000
    assert len(list(count_elements(data, 1_000_000))) <= 1 + len(data) // (32 << 10)


def test_a_name_that_occurs_twice_is_found_without_comparing_all_names() -> None:
    num_compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

    names = [str(index) for index in range(1000)]
    with pytest.raises(ValueError, match="'999' occurs twice"):
        bodies._unique([(Name(name), None) for name in (*names, "999")])
    assert num_compared < 10 * len(names)
