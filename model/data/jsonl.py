"""JSON lines: one object per line with texts in configured fields; blank lines are skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from model.data.files import DataError, numbered_lines

SUFFIXES = frozenset({".jsonl", ".ndjson"})


def read(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Line number and texts of `fields`, in their order, for each line.

    Raises:
        DataError: naming file and line of invalid UTF-8, a line that is not an object, or a missing text.
    """
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise DataError(f"{where}: {type(values).__name__}, must be an object")
        yield number, [_text(values, field, where) for field in fields]


def _text(values: dict[str, object], field: str, where: str) -> str:
    if field not in values:
        raise DataError(f"{where}: no field {field!r}, there are {', '.join(map(repr, values)) or 'none'}")
    value = values[field]
    if not isinstance(value, str):
        raise DataError(f"{where}: field {field!r} is {type(value).__name__}, must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # JSON can escape half of a surrogate pair, which is not a character.
        raise DataError(f"{where}: field {field!r} holds U+{ord(value[error.start]):04X}, half a character") from error
    return value
