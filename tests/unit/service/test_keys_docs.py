"""docs/serve/keys.md has each field of a key, its range and refusal, and each method's permission, as the code does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import pytest

from service.access import ApiKey, KeyAccess, Permission, current_caller
from service.access.keys import read_keys
from service.errors import RequestError, StartupError
from service.transport.permissions import PERMISSIONS
from service.transport.status import to_status
from tests.environment import ROOT

DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
# How the page says a range; the least value in it, and one below or beside it.
RANGES = {
    "64 hexadecimal digits": (f'"{DIGEST}"', f'"{DIGEST[1:]}"'),
    "a list of `generate` and `manage`": ("[]", '["other"]'),
    "an integer from 1": ("1", "0"),
    "a finite number above 0": ("1e-9", "0.0"),
    "an integer of 32 bits": (f"{-(2**31)}", f"{-(2**31) - 1}"),
}
# What is asked of a key with a field at this value: another key, a method, two calls at once, two one after the other,
# or two requests with this priority, one sequence and one token each.
BEYOND: dict[str, tuple[str, str]] = {
    "sha256": ("", "key"),
    "permissions": ("", "method"),
    "max_concurrent_requests": ("1", "calls"),
    "requests_per_second": ("0.001", "rate"),
    "burst": ("1", "rate"),
    "max_priority": ("0", "priority"),
    "max_sequences": ("1", "requests"),
    "max_tokens_in_flight": ("1", "requests"),
}
PAGE = (ROOT / "docs" / "serve" / "keys.md").read_text(encoding="utf-8")


def rows(heading: str) -> Iterator[list[str]]:
    """Cells of the table under a heading, without its head."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    yield from lines[1:]


def test_every_field_of_a_key_is_described_with_its_default() -> None:
    described = {cells[0].strip("`"): cells[2] for cells in rows("Fields of a key")}
    assert described.pop("sha256") == described.pop("permissions") == "required"
    optional = {each.name: each.default for each in fields(ApiKey) if each.name in described}
    assert len(fields(ApiKey)) == len(optional) + len(("name", "digest", "permissions"))
    assert described.pop("burst") == "that rate, rounded up"
    for name, shown in described.items():
        assert shown == ("no limit" if optional[name] is None else f"{optional[name]:g}"), name


def described(name: str) -> list[str]:
    """A field's row: values, default, what it limits, beyond it."""
    return next(cells[1:] for cells in rows("Fields of a key") if cells[0] == f"`{name}`")


def keys_file(folder: Path, **changes: str) -> Path:
    """A key "alice" with fields as in TOML."""
    table = {"sha256": f'"{DIGEST}"', "permissions": '["generate"]', **changes}
    if "burst" in table:
        table.setdefault("requests_per_second", "0.001")
    path = folder / "keys.toml"
    path.write_text("[keys.alice]\n" + "".join(f"{name} = {value}\n" for name, value in table.items()))
    return path


@pytest.mark.parametrize("name", [each[0].strip("`") for each in rows("Fields of a key")])
def test_every_value_of_a_range_is_taken_and_one_below_it_is_a_problem(name: str, tmp_path: Path) -> None:
    least, below = next(found for shown, found in RANGES.items() if described(name)[0].startswith(shown))
    read_keys(keys_file(tmp_path, **{name: least}))
    with pytest.raises(StartupError, match=rf"keys\.alice\.{name}: must be "):
        read_keys(keys_file(tmp_path, **{name: below}))


def ask(access: KeyAccess, what: str) -> None:
    method, key = "LoadModel" if what == "method" else "Generate", "other" if what == "key" else "test"
    with ExitStack() as held:
        for _ in range(2):
            with ExitStack() as call:
                call.enter_context(access.admitted(method, key))
                if what == "priority":
                    current_caller().check(1, 1, 1)
                elif what == "requests":
                    current_caller().hold(1, 1)
                elif what == "calls":
                    held.enter_context(call.pop_all())


@pytest.mark.parametrize("name", BEYOND)
def test_what_is_beyond_a_field_ends_as_the_page_says(name: str, tmp_path: Path) -> None:
    value, what = BEYOND[name]
    path = keys_file(tmp_path, **({name: value} if value else {}))
    with pytest.raises(RequestError) as caught:
        ask(KeyAccess(path, PERMISSIONS), what)
    status = to_status(caught.value)
    shown = described("requests_per_second" if described(name)[3] == "as the rate" else name)[3]
    code, _, detail = shown.partition(", ")
    assert status.code.name == code
    details = b"".join(value for _, value in status.trailing_metadata)
    assert (b"RetryInfo" in details) == (detail == "RetryInfo")
    assert detail in ("", "RetryInfo") or detail.strip("`").encode() in details


def test_every_method_has_its_permission() -> None:
    described = {
        method: Permission(cells[0].strip("`"))
        for cells in rows("Permissions")
        for method in re.findall(r"`(\w+)`", cells[1])
    }
    assert described == PERMISSIONS
