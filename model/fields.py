"""Frozen configurations to JSON values and back: what `ModelConfig` and `TrainConfig` share.

Fields are int, float, bool, str or StrEnum. Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any


def to_json_values(config: Any) -> dict[str, Any]:
    """A dataclass instance's fields by name, enum members as their strings."""
    return {
        field.name: str(value) if isinstance(value := getattr(config, field.name), StrEnum) else value
        for field in dataclasses.fields(config)
    }


def field_problems(kind: Any, values: Mapping[str, Any]) -> list[str]:
    """Every unknown, missing or wrongly typed field, were `values` given to the dataclass `kind`."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    problems = [f"unknown field {name!r}" for name in values if name not in fields]
    for name, field in fields.items():
        if name not in values:
            if field.default is dataclasses.MISSING:
                problems.append(f"{name} is missing")
            continue
        kinds = {"int": (int,), "float": (int, float), "bool": (bool,)}.get(str(field.type), (str,))
        value = values[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            problems.append(f"{name} is {value!r}, must be {field.type}")
    return problems
