"""What is read of the machine of a measurement: its caches, and the load of other processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest import machine


def test_the_system_reports_the_caches_of_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (("1", "Data", "32K"), ("1", "Instruction", "64K"), ("3", "Unified", "32768K"), ("2", "Unified", "1024K"))
    for index, values in enumerate(kinds):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in zip(("level", "type", "size"), values, strict=True):
            (folder / name).write_text(f"{value}\n")
    (tmp_path / "index9").mkdir()
    monkeypatch.setattr(machine, "_CACHES", str(tmp_path))
    assert machine.caches() == [32 << 10, 1 << 20, 32 << 20]
    monkeypatch.setattr(machine, "_CACHES", str(tmp_path / "nowhere"))
    assert machine.caches() == []


def test_our_own_load_and_that_of_our_children_is_not_that_of_others() -> None:
    others = machine.watch_others()
    began = time.process_time()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    while time.process_time() - began < 0.3:
        pass
    share = others()
    assert share is not None
    assert 0.0 <= share <= 1.0
