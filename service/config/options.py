"""Options: flags with environment twins, and the parsers that turn their texts into values.

`--some-name` and `ONWARD_SOME_NAME` set the field `some_name`. A parser raises ValueError that says what is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

_Choice = TypeVar("_Choice", bound=StrEnum)

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


def boolean(text: str) -> bool:
    """A switch's value."""
    if (value := _BOOLEANS.get(text.lower())) is None:
        raise ValueError("must be true or false")
    return value


def choice(kind: type[_Choice]) -> Callable[[str], _Choice]:
    """Parses an enum's value, in any case."""

    def parse(text: str) -> _Choice:
        try:
            return kind(text.lower())
        except ValueError:
            raise ValueError(f"must be one of {', '.join(kind)}") from None

    return parse


def integer(low: int, high: int) -> Callable[[str], int]:
    """Parses a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"must be a whole number from {low} to {high}") from None
        if not low <= value <= high:
            raise ValueError(f"must be from {low} to {high}")
        return value

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """Parses a number from `low` to `high`."""

    def parse(text: str) -> float:
        value = _float(text)
        if not low <= value <= high:
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        return value

    return parse


def num_bytes(text: str) -> int:
    """A size in bytes, with or without a binary unit."""
    digits = text.rstrip("BKMGTi")
    unit = _UNITS.get(text[len(digits) :])
    if unit is None or not digits.isascii() or not digits.isdigit() or not 0 < int(digits) * unit < 1 << 63:
        raise ValueError("must be a number of bytes above 0, plain or with KiB, MiB, GiB or TiB, as in 2GiB")
    return int(digits) * unit


def indices(text: str) -> tuple[int, ...]:
    """Whole numbers from 0, separated by commas."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) < 1 << 31 for part in parts):
        raise ValueError("must be whole numbers from 0, as in 0,2")
    return tuple(map(int, parts))


def objectives(text: str) -> tuple[float, ...]:
    """Seconds, sorted and without duplicates; each costs every model a time series."""
    values = sorted({_float(part) for part in text.split(",")})
    if len(values) > _MAX_OBJECTIVES or not all(0 < value <= _MAX_OBJECTIVE_SECONDS for value in values):
        limits = f"1 to {_MAX_OBJECTIVES} numbers above 0 and at most {_MAX_OBJECTIVE_SECONDS:g}"
        raise ValueError(f"must be {limits}, with commas between them, as in 0.2,1")
    return tuple(values)


def shares(text: str) -> Shares:
    """Weights by model name."""
    weights: dict[str, float] = {}
    parts = text.split(",")
    for part in parts:
        name, _, weight = part.rpartition("=")
        if name and is_unicode(name) and 0 < _float(weight) <= _MAX_WEIGHT:
            weights[name] = float(weight)
    if len(weights) < len(parts):
        limits = f"each once and with a weight above 0 and at most {_MAX_WEIGHT:g}"
        raise ValueError(f"must be names of models, {limits}, as in dates=1,stdlib=3")
    return tuple(weights.items())


def otlp_endpoint(text: str) -> str:
    """The URL of an OTLP/gRPC collector."""
    try:
        url = urlsplit(text)
        is_good = url.scheme in ("http", "https") and url.hostname and url.port != 0 and not url.path.strip("/")
    except ValueError:
        is_good = False
    if not is_good:
        raise ValueError("must be http:// or https:// with a host and a port, as in http://127.0.0.1:4317")
    return text


def address(text: str) -> str:
    """A host and a port."""
    try:
        url = urlsplit(f"//{text}")
        is_good = url.netloc == text and url.hostname and url.port
    except ValueError:
        is_good = False
    if not is_good:
        raise ValueError("must be a host and a port, as in 127.0.0.1:8002")
    return text


def _float(text: str) -> float:
    """A number; NaN, which no range holds, for any other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan
