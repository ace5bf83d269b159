"""The file of API keys: TOML tables whose keys are SHA-256 digests, so that the file reveals no key.

    [keys.alice]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    permissions = ["generate"]

The other fields of a table are `ApiKey`'s limits; docs/serve/keys.md describes each to operators.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from service.errors import StartupError

_DIGEST_LENGTH = 64


class Permission(StrEnum):
    """What a key allows: `MANAGE` is for methods that change or occupy a model."""

    GENERATE = "generate"
    MANAGE = "manage"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One caller's permissions and limits. None is no limit.

    Args:
        burst: requests that may come at once; `requests_per_second` rounded up by default.
        weight: share of a busy engine beside other keys'.
        max_priority: highest `priority` of a request, which goes before any share. Below 0 it is also the priority of
            requests that name none.
        max_sequences: sequences that may run or wait at once: `n` or beams of each request.
        max_tokens_in_flight: sum over these sequences of the prompt's tokens and `max_tokens`.
    """

    name: str
    digest: bytes
    permissions: frozenset[Permission]
    max_concurrent_requests: int | None = None
    requests_per_second: float | None = None
    burst: int | None = None
    weight: float = 1.0
    max_priority: int = 0
    max_sequences: int | None = None
    max_tokens_in_flight: int | None = None

    @property
    def capacity(self) -> float:
        """How many requests may come at once."""
        return self.burst or math.ceil(self.requests_per_second or 1)


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file.

    Raises:
        StartupError: listing everything wrong with it, without digests.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StartupError([f"{path}: {error}"]) from error
    problems = [f"{path}: {name}: is not known" for name in content if name != "keys"]
    tables = content.get("keys", {})
    keys = []
    if not isinstance(tables, dict) or not tables:
        problems.append(f"{path}: keys: must have a table for each key, as in [keys.alice]")
        tables = {}
    for name, table in tables.items():
        found = [f"{path}: keys.{name}.{problem}" for problem in _problems(table)]
        problems += found
        if not found:
            limits = {field: value for field, value in table.items() if field not in _REQUIRED}
            digest, permissions = bytes.fromhex(table["sha256"]), frozenset(map(Permission, table["permissions"]))
            keys.append(ApiKey(name=name, digest=digest, permissions=permissions, **limits))
    digests = [key.digest for key in keys]
    problems += [
        f"{path}: keys.{key.name}.sha256: is another key's too" for key in keys if digests.count(key.digest) > 1
    ]
    if problems:
        raise StartupError(problems)
    return tuple(keys)


def _problems(table: Any) -> Iterator[str]:
    if not isinstance(table, dict):
        yield "must be a table"
        return
    yield from (f"{name}: is not known" for name in table if name not in _FIELDS)
    yield from (f"{name}: is missing" for name in _REQUIRED if name not in table)
    yield from (
        f"{name}: {limit}" for name, (fits, limit) in _FIELDS.items() if name in table and not fits(table[name])
    )
    if "burst" in table and "requests_per_second" not in table:
        yield "burst: means nothing without requests_per_second"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == _DIGEST_LENGTH and set(value.lower()) <= set("0123456789abcdef")


def _are_permissions(value: Any) -> bool:
    return isinstance(value, list) and all(each in list(Permission) for each in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_priority(value: Any) -> bool:
    return type(value) is int and -(2**31) <= value < 2**31


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


_COUNT = (_is_count, "must be an integer of at least 1")
_POSITIVE = (_is_positive, "must be a finite number above 0")
_REQUIRED = ("sha256", "permissions")
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "sha256": (_is_digest, f"must be {_DIGEST_LENGTH} hexadecimal digits"),
    "permissions": (_are_permissions, f"must be a list of {', '.join(Permission)}"),
    "max_concurrent_requests": _COUNT,
    "requests_per_second": _POSITIVE,
    "burst": _COUNT,
    "weight": _POSITIVE,
    "max_priority": (_is_priority, "must be an integer of 32 bits"),
    "max_sequences": _COUNT,
    "max_tokens_in_flight": _COUNT,
}
