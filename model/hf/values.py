"""Typed, checked access to a JSON object's fields; problems are collected, not raised. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

_MOST = 2**31 - 1


class Values:
    """Typed access to an object's fields. As in transformers, a null field counts as absent.

    Args:
        source: the file's name, for problems.
        values: the object.
        problems: appended to; a valid stand-in is then returned for the value.
    """

    def __init__(self, source: str, values: Mapping[str, Any], problems: list[str]) -> None:
        self._source = source
        self._values = values
        self._problems = problems

    @property
    def names(self) -> Collection[str]:
        """The names of all fields, null ones included."""
        return self._values.keys()

    def get(self, name: str) -> Any:
        """The raw value, or None."""
        return self._values.get(name)

    def refuse(self, name: str, wanted: str) -> None:
        """Reports that a field has a wrong value."""
        self._problems.append(f"{self._source}: {name} is {shorten(self.get(name))}, {wanted}")

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        """An integer; required if there is no default."""

        def problem(value: Any) -> str:
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                return f"must be a whole number of at least {least}"
            return f"must be at most {most}" if value > most else ""

        return int(self._read(name, default, least, problem))

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; required if there is no default."""

        def problem(value: Any) -> str:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return "" if is_number and abs(value) <= sys.float_info.max else "must be a finite number"

        return float(self._read(name, default, 1.0, problem))

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        wanted = "must be true or false"
        return bool(self._read(name, default, default, lambda value: "" if isinstance(value, bool) else wanted))

    def word(self, name: str, default: str, allowed: Collection[str]) -> str:
        """One of the allowed words."""
        wanted = f"must be one of {', '.join(allowed)}"
        return str(self._read(name, default, default, lambda value: "" if value in tuple(allowed) else wanted))

    def _read(self, name: str, default: Any, stand_in: Any, problem: Callable[[Any], str]) -> Any:
        """A field's value if there is no problem with it; `default` if it is absent."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self._problems.append(f"{self._source} lacks {name}")
        elif found := problem(value):
            self.refuse(name, found)
        else:
            return value
        return stand_in

    def token(self, name: str) -> int | None:
        """A token id, or None; a list of one id is accepted."""
        tokens = self.tokens(name)
        if len(tokens) > 1:
            self.refuse(name, "must be a single token id")
        return tokens[0] if tokens else None

    def tokens(self, name: str) -> tuple[int, ...]:
        """Token ids: none, one, or a list."""
        value = self.get(name)
        given = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in given):
            self.refuse(name, "must be a token id or a list of them")
            return ()
        return tuple(dict.fromkeys(given))

    def table(self, name: str) -> Mapping[str, Any]:
        """A nested object, by default an empty one."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(name, "must be an object")
            return {}
        return value


def shorten(value: object, limit: int = 80) -> str:
    """A value's repr, shortened to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
