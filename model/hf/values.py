"""A JSON object that others wrote, read field by field: what is wrong with it is collected, not raised.

Standard library only; knows nothing of what the fields mean.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

_MOST = 2**31 - 1


class Values:
    """Typed access to an object's fields. A field that is null counts as absent, as it does to those who wrote it.

    Args:
        source: the file's name, for problems.
        values: the object.
        problems: what is found wrong is added here; a value that will do until then is returned in its place.
    """

    def __init__(self, source: str, values: Mapping[str, Any], problems: list[str]) -> None:
        self._source = source
        self._values = values
        self._problems = problems

    @property
    def names(self) -> Collection[str]:
        """The fields that are there, null ones too."""
        return self._values.keys()

    def get(self, name: str) -> Any:
        """Whatever is there, None for nothing."""
        return self._values.get(name)

    def refuse(self, name: str, wanted: str) -> None:
        """Notes that a field is not what it must be."""
        self._problems.append(f"{self._source}: {name} is {shorten(self.get(name))}, {wanted}")

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        """A whole number; without a default it must be there."""
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
        """A finite number; without a default it must be there."""
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
        """One of these."""
        value = self.get(name)
        if value is None:
            return default
        if value not in allowed if isinstance(value, str) else True:
            self.refuse(name, f"must be one of {', '.join(allowed)}")
            return default
        return str(value)

    def token(self, name: str) -> int | None:
        """A token id, None where there is none; a list of one is as good."""
        tokens = self.tokens(name)
        if len(tokens) > 1:
            self.refuse(name, "must be a single token id")
        return tokens[0] if tokens else None

    def tokens(self, name: str) -> tuple[int, ...]:
        """Token ids: one, a list of them, or none."""
        value = self.get(name)
        given = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in given):
            self.refuse(name, "must be a token id or a list of them")
            return ()
        return tuple(dict.fromkeys(given))

    def table(self, name: str) -> Mapping[str, Any]:
        """An object within the object, an empty one where there is none."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(name, "must be an object")
            return {}
        return value


def shorten(value: object, limit: int = 80) -> str:
    """A value as it is written, or as much of it as a line can take."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
