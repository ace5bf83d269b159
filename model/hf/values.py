"""Typed, checked access to a JSON object's fields; problems are collected, not raised. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
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
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self._problems.append(f"{self._source} lacks {name}")
        elif not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(name, f"must be a whole number of at least {least}")
        elif value > most:
            self.refuse(name, f"must be at most {most}")
        else:
            return value
        return least

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; required if there is no default."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self._problems.append(f"{self._source} lacks {name}")
        elif not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
            self.refuse(name, "must be a finite number")
        else:
            return float(value)
        return 1.0

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false")
            return default
        return value

    def word(self, name: str, default: str, allowed: Collection[str]) -> str:
        """One of the allowed words."""
        value = self.get(name)
        if value is None:
            return default
        if value not in allowed if isinstance(value, str) else True:
            self.refuse(name, f"must be one of {', '.join(allowed)}")
            return default
        return str(value)

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
