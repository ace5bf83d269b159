"""docs/keys.md has every field of a key and every method's permission, as the code has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from service.access import ApiKey, Permission
from service.transport.permissions import PERMISSIONS

PAGE = (Path(__file__).parents[2] / "docs" / "keys.md").read_text(encoding="utf-8")


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


def test_every_method_has_its_permission() -> None:
    described = {
        method: Permission(cells[0].strip("`"))
        for cells in rows("Permissions")
        for method in re.findall(r"`(\w+)`", cells[1])
    }
    assert described == PERMISSIONS
