"""Options: flags with environment twins, and the parsers that turn their texts into values.

`--some-name` and `ONWARD_SOME_NAME` set the field `some_name`. A parser raises ValueError that says what is wanted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

_Choice = TypeVar("_Choice", bound=StrEnum)
_Value = TypeVar("_Value")

Shares = tuple[tuple[str, float], ...]
"""Weights by model name, in the order given."""

_MAX_OBJECTIVES = 8
_MAX_OBJECTIVE_SECONDS = 3600.0
_MAX_WEIGHT = 1e6
_UNITS = {"": 1, **{f"{prefix}iB": 1 << (10 * power) for power, prefix in enumerate("KMGT", start=1)}}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Option:
    """One flag: its heading in `--help`, its help text, and the parser of its value."""

    group: str
    help: str
    parse: Callable[[str], Any]

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value: `--name` or `--no-name`."""
        return self.parse is boolean


def options(config: type[Any]) -> dict[str, Option]:
    """The options of a configuration class, by field name."""
    hints = get_type_hints(config, include_extras=True)
    return {name: note for name, hint in hints.items() for note in get_args(hint)[1:] if isinstance(note, Option)}


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a field."""
    return "ONWARD_" + name.upper()


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode a text; a terminal's other bytes arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def nonempty(text: str) -> str:
    """A text of at least one character."""
    if not text:
        raise ValueError("must not be empty")
    if not is_unicode(text):
        raise ValueError("must be UTF-8")
    return text


def any_path(text: str) -> Path:
    """A path, existing or not."""
    return Path(nonempty(text))


def file(text: str) -> Path:
    """The path of a file."""
    path = any_path(text)
    if not path.is_file():
        raise ValueError("must be a file")
    return path


def _parser(convert: Callable[[str], _Value], fits: Callable[[_Value], object], limit: str) -> Callable[[str], _Value]:
    """A parser that raises with `limit` when a text cannot be converted, or its value does not fit."""

    def parse(text: str) -> _Value:
        try:
            value = convert(text)
            is_good = bool(fits(value))
        except (KeyError, ValueError):
            is_good = False
        if not is_good:
            raise ValueError(f"must be {limit}")
        return value

    return parse


def choice(kind: type[_Choice]) -> Callable[[str], _Choice]:
    """Parses an enum's value, in any case."""
    return _parser(lambda text: kind(text.lower()), lambda _: True, f"one of {', '.join(kind)}")


def integer(low: int, high: int) -> Callable[[str], int]:
    """Parses a whole number from `low` to `high`."""
    return _parser(int, lambda value: low <= value <= high, f"a whole number from {low} to {high}")


def number(low: float, high: float) -> Callable[[str], float]:
    """Parses a number from `low` to `high`."""
    return _parser(float, lambda value: low <= value <= high, f"a number from {low:g} to {high:g}")


def _to_bytes(text: str) -> int:
    digits = text.rstrip("BKMGTi")
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError
    return int(digits) * _UNITS[text[len(digits) :]]


def _to_indices(text: str) -> tuple[int, ...]:
    if not all(part.isascii() and part.isdigit() for part in text.split(",")):
        raise ValueError
    return tuple(map(int, text.split(",")))


def _to_shares(text: str) -> Shares:
    pairs = [part.rpartition("=") for part in text.split(",")]
    return tuple((name, float(weight)) for name, _, weight in pairs)


def _are_shares(shares: Shares) -> bool:
    weights = dict(shares)
    are_good = all(name and is_unicode(name) and 0 < weight <= _MAX_WEIGHT for name, weight in shares)
    return are_good and len(weights) == len(shares)


def _to_biases(text: str) -> dict[int, float]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(token_id.isascii() and token_id.isdigit() for token_id, _, _ in pairs):
        raise ValueError
    return {int(token_id): float(bias) for token_id, _, bias in pairs}


def texts(text: str) -> tuple[str, ...]:
    """A JSON list of texts, or one text as it is."""
    try:
        several = json.loads(text)
    except (ValueError, RecursionError):
        several = None
    if isinstance(several, list) and all(isinstance(each, str) and is_unicode(each) for each in several):
        return tuple(several)
    return (nonempty(text),)


def _is_collector(text: str) -> object:
    url = urlsplit(text)
    return url.scheme in ("http", "https") and url.hostname and url.port != 0 and not url.path.strip("/")


def _is_address(text: str) -> object:
    url = urlsplit(f"//{text}")
    return url.netloc == text and url.hostname and url.port


boolean = _parser(lambda text: _BOOLEANS[text.lower()], lambda _: True, "true or false")
num_bytes = _parser(
    _to_bytes,
    lambda value: 0 < value < 1 << 63,
    "a number of bytes above 0, plain or with KiB, MiB, GiB or TiB, as in 2GiB",
)
indices = _parser(_to_indices, lambda values: max(values) < 1 << 31, "whole numbers from 0, as in 0,2")
biases = _parser(
    _to_biases,
    lambda values: all(token_id < 1 << 32 and math.isfinite(bias) for token_id, bias in values.items()),
    "token ids and numbers, as in 42=-100,7=2.5",
)
# Sorted and without duplicates; each costs every model a time series.
objectives = _parser(
    lambda text: tuple(sorted(set(map(float, text.split(","))))),
    lambda values: len(values) <= _MAX_OBJECTIVES and all(0 < value <= _MAX_OBJECTIVE_SECONDS for value in values),
    f"1 to {_MAX_OBJECTIVES} numbers above 0 and at most {_MAX_OBJECTIVE_SECONDS:g}, with commas between them, "
    "as in 0.2,1",
)
shares = _parser(
    _to_shares,
    _are_shares,
    f"names of models, each once and with a weight above 0 and at most {_MAX_WEIGHT:g}, as in dates=1,stdlib=3",
)
otlp_endpoint = _parser(str, _is_collector, "http:// or https:// with a host and a port, as in http://127.0.0.1:4317")
address = _parser(str, _is_address, "a host and a port, as in 127.0.0.1:8002")
