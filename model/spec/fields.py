"""Frozen configuration dataclasses to JSON values and back.

Fields are int, float, bool, str, StrEnum or tuple[str, ...]; a tuple is a list in JSON, or one string alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

C = TypeVar("C")


def to_json_values(config: Any) -> dict[str, Any]:
    """A dataclass instance's fields by name, enum members as their strings."""
    return {field.name: _to_json(getattr(config, field.name)) for field in dataclasses.fields(config)}


def field_problems(kind: Any, values: Mapping[str, Any]) -> list[str]:
    """Every unknown, missing or wrongly typed field of `values` for the dataclass `kind`."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    problems = [f"unknown field {name!r}" for name in values if name not in fields]
    for name, field in fields.items():
        if name not in values:
            if field.default is dataclasses.MISSING:
                problems.append(f"{name} is missing")
            continue
        if not _has_type(values[name], str(field.type)):
            problems.append(f"{name} is {values[name]!r}, must be {_TYPE_NAMES.get(str(field.type), field.type)}")
    return problems


def from_json_values(kind: type[C], values: Mapping[str, Any], error: Callable[[list[str]], Exception]) -> C:
    """The inverse of `to_json_values`: an instance of the dataclass `kind`, which may validate further.

    Raises:
        Exception: `error` of the list of every unknown, missing and wrongly typed field.
    """
    if problems := field_problems(kind, values):
        raise error(problems)
    return kind(**values)


def coerce_enums(config: Any, kinds: Mapping[str, type[StrEnum]]) -> list[str]:
    """Turns strings into enum members in a frozen instance, during its `__post_init__`; returns the problems."""
    problems = []
    for name, kind in kinds.items():
        value = getattr(config, name)
        try:
            object.__setattr__(config, name, kind(value))
        except ValueError:
            problems.append(f"{name} is {value!r}, must be one of {', '.join(kind)}")
    return problems


_TEXTS = "tuple[str, ...]"
_TYPE_NAMES = {_TEXTS: "a string or a list of strings"}


def _to_json(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _has_type(value: object, wanted: str) -> bool:
    if wanted == _TEXTS:
        return isinstance(value, str) or (isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value))
    kinds = {"int": (int,), "float": (int, float), "bool": (bool,)}.get(wanted, (str,))
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
