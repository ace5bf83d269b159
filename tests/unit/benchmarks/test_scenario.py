"""What the scenarios share: how results are told, and with which command they say that they were taken."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scenario import facts, tell


@dataclass(frozen=True)
class Settings:
    streams: int = 4


def render(results: Mapping[str, Any]) -> str:
    return f"# {results['streams']} of {results['points']}\n"


def test_results_are_told_with_the_command_that_gave_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["somewhere/some.py", "--model", "a b", "--docs"])
    measured = {"streams": 4, "points": 9}
    status = tell("some", lambda: measured, render, tmp_path / "docs", lambda _: "<svg/>", untold=("points",))
    assert status == 0
    assert json.loads(capsys.readouterr().out) == {"streams": 4}
    assert json.loads((tmp_path / "docs" / "some.json").read_text()) == {"streams": 4}
    document = (tmp_path / "docs" / "some.md").read_text()
    assert document == "# 4 of 9\n\nMeasured by `python -m benchmarks.some --model 'a b' --docs`.\n"
    assert (tmp_path / "docs" / "some.svg").read_text() == "<svg/>"


def test_what_cannot_be_measured_is_said_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure() -> Mapping[str, Any]:
        raise RuntimeError("the server ended")

    assert tell("some", measure, render, tmp_path / "docs") == 1
    assert capsys.readouterr().err == "some: the server ended\n"
    assert not (tmp_path / "docs").exists()


def test_facts_say_what_was_measured_with_which_settings_and_where() -> None:
    found = facts("some", Settings(streams=7))
    assert (found["scenario"], found["settings"]) == ("some", {"streams": 7})
    assert "onnxruntime" in found["version"]
    assert found["machine"]["cores"] >= 1
