"""The table of faults names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "operate" / "reliability.md"


def test_every_row_has_its_tests() -> None:
    table, *_ = TABLE.read_text(encoding="utf-8").partition("\n## ")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 25
    defined = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"(?:def |^)(test_\w+|Test\w+)\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for row in rows:
        named = re.findall(r"`(test_\w+|Test\w+)`", row)
        assert named, row
        assert set(named) <= defined, set(named) - defined
