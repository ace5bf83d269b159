"""The wire contract's files: ours, complete, commented, and what the stubs were made of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proto.generate import contracts, drift

SCALARS = r"double|float|u?int32|u?int64|bool|string"
# A field, with what stands before it on its line; `oneof` members and maps included.
FIELD = re.compile(r"^\s*(?:(?:optional|repeated)\s+)?(?:map<[^>]*>|[\w.]+)\s+(\w+)\s*=\s*\d+;", re.MULTILINE)


def test_stubs_are_what_the_contracts_generate() -> None:
    assert drift() == []


@pytest.mark.parametrize("contract", contracts().values(), ids=contracts())
def test_every_field_and_value_and_method_has_a_comment(contract: Path) -> None:
    lines = contract.read_text(encoding="utf-8").splitlines()
    declares = re.compile(r"^\s*(?:(?:message|enum|service|oneof|rpc)\s+\w+|[A-Z_]+\s*=\s*\d+;)")
    bare = [
        line.strip()
        for before, line in zip(["", *lines], lines, strict=False)
        if (declares.match(line) or FIELD.match(line)) and not before.strip().startswith("//")
    ]
    assert bare == []


@pytest.mark.parametrize("contract", contracts().values(), ids=contracts())
def test_every_scalar_whose_comment_gives_a_default_other_than_zero_is_optional(contract: Path) -> None:
    text = contract.read_text(encoding="utf-8")
    fields = re.findall(rf"((?:^\s*//.*\n)+)\s*(optional )?({SCALARS}) (\w+) = \d+;", text, re.MULTILINE)
    wrong = []
    for comment, optional, kind, name in fields:
        joined = " ".join(line.strip(" /") for line in comment.splitlines())
        default = re.search(r"Default:?\s+([^;,\s]+)", joined)
        # A string's zero is "absent" wherever the comment explains the default in words.
        zero = default is None or kind == "string" or default.group(1).rstrip(".") in {"0", "false"}
        if zero == bool(optional) and not (optional and default is None):
            wrong.append(f"{name}: {joined}")
    assert wrong == []
