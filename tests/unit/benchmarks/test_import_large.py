"""The benchmark of an import of a real size: what it measures, what it makes of that, what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import import_large
from benchmarks.frame import tables as marks
from benchmarks.import_large import Step, main, promises, run_step, table
from tests.environment import ROOT

KEPT = (
    Step("import", "", 10.0, 10**9),
    Step("export", "fp32", 30.0, 3 * 10**9),
    Step("export", "int8", 50.0, 2 * 10**9),
    Step("start", "fp32", 3.0, 2 * 10**9),
    Step("start", "int8", 2.0, 10**9),
)


def changed(index: int, step: Step) -> list[Step]:
    return [*KEPT[:index], step, *KEPT[index + 1 :]]


def test_a_steps_memory_is_the_most_that_its_process_ever_had() -> None:
    """In a process of its own: a child is counted from the fork on, and the one that runs tests may be large."""
    program = (
        "from benchmarks.import_large import run_step\n"
        "for size in (1, 300_000_000):\n"
        "    step = run_step('a', 'b', 'timeit', '-n1', '-r1', f\"len(b'1' * {size})\")\n"
        "    print(step.peak_bytes, step.seconds)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
    small, large = (float(line.split()[0]) for line in done.stdout.splitlines())
    assert 300e6 < large < 400e6
    assert small < large - 250e6
    assert all(float(line.split()[1]) > 0 for line in done.stdout.splitlines())


def test_a_step_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)python -m timeit 1/0 ended with 1:.*ZeroDivisionError"):
        run_step("a", "b", "timeit", "1/0")


@pytest.mark.parametrize(
    ("index", "step", "broken"),
    [
        (0, Step("import", "", 10.1, 10**9), ["int8"]),
        (0, Step("import", "", 1.0, 4 * 10**9 + 1), ["fp32", "int8"]),
        (1, Step("export", "fp32", 50.1, 10**9), ["fp32"]),
        (2, Step("export", "int8", 1.0, 4 * 10**9 + 1), ["int8"]),
        (3, Step("start", "fp32", 5.1, 10**9), ["fp32"]),
        (4, Step("start", "int8", 5.1, 9 * 10**9), ["int8"]),
    ],
)
def test_promise_is_broken_by_any_step_of_its_precision(index: int, step: Step, broken: list[str]) -> None:
    assert [each.precision for each in promises(KEPT) if not each.is_kept] == []
    steps = changed(index, step)
    assert [each.precision for each in promises(steps) if not each.is_kept] == broken
    assert table(steps).count("**broken**") == len(broken)


def test_program_tells_measures_and_verdict_and_replaces_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "models.md"
    document.write_text(f"before\n{import_large.BEGIN}\nold\n{import_large.END}\nafter\n")
    steps = list(KEPT)
    monkeypatch.setattr(import_large, "DOCUMENT", document)
    monkeypatch.setattr(import_large, "_use_cores", lambda count: count)
    monkeypatch.setattr(import_large, "measure", lambda *_: steps)
    assert main(["--docs", "--build", str(tmp_path / "build")]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["cores"] == 2
    assert [(step["name"], step["seconds"]) for step in said["steps"]][:2] == [("import", 10.0), ("export", 30.0)]
    assert [(each["seconds"], each["kept"]) for each in said["promises"]] == [(40.0, True), (60.0, True)]
    text = document.read_text()
    assert text == f"before\n{import_large.BEGIN}\n{table(KEPT)}\n{import_large.END}\nafter\n"
    steps[3] = Step("start", "fp32", 5.5, 10**9)
    assert main(["--build", str(tmp_path / "build")]) == 1
    assert document.read_text() == text
    assert not json.loads(capsys.readouterr().out.splitlines()[-1])["promises"][0]["kept"]
    with pytest.raises(ValueError, match="the document lacks"):
        marks.replace("no marks", import_large.BEGIN, import_large.END, "")


def test_documented_promise_is_kept() -> None:
    _, begin, rest = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").partition(import_large.BEGIN)
    made, end, _ = rest.partition(import_large.END)
    assert begin
    assert end
    assert "broken" not in made
