"""The house stays readable: sizes of modules, entries of rooms, the reading path of CONTRIBUTING.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.environment import ROOT

MAX_ENTRIES = 20
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / each for each in listed if not GENERATED.search(each)]


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(
    ("patterns", "most"),
    [
        (
            [
                f"{room}/*.py"
                for room in ("onward", "proto", "service", "model", "export", "loadtest", "lessons", "deploy")
            ],
            450,
        ),
        (["model/kernels/*.cc", "model/kernels/*.h", "tests/*.py"], 600),
    ],
    ids=["product", "C++ and tests"],
)
def test_no_module_is_too_long(patterns: list[str], most: int) -> None:
    files = tracked(*patterns)
    assert files
    assert {str(each.relative_to(ROOT)): lines for each in files if (lines := num_lines(each)) > most} == {}


@pytest.mark.parametrize("room", ["service", "service/engine"])
def test_rooms_have_few_entries(room: str) -> None:
    entries = {each.relative_to(ROOT / room).parts[0] for each in tracked(f"{room}/*.py")}
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


def test_reading_path_names_modules_that_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Reading path")[1].split("\n## ")[0]
    named = re.findall(r"\| `([\w/]+\.py)` \|", section)
    assert [each for each in named if not (ROOT / each).is_file()] == []
    assert "service/engine/scheduler.py" in named
