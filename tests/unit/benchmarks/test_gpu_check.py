"""The orchestration of the GPU check: its commands, how parts end, and the promises of speed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.frame.roofline import read_parameters, roofline
from model.spec import cost
from model.training.presets import resolve


@pytest.fixture(autouse=True)
def no_options_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the options of this very run from the tests that the check starts."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


def rows_of_speed(**changes: float) -> list[dict[str, Any]]:
    values = {"decode": 0.7, "prefill": 0.5, "theirs": 0.6} | changes
    rows = [
        {"system": system, "metric": "decode", "batch": batch, "prompt": 128, "value": values[share], "roofline": 1.0}
        for batch in (1, 8, 32, 128)
        for system, share in (("onward-engine", "decode"), ("transformers", "theirs"))
    ]
    prefill = {"system": "onward-engine", "metric": "prefill", "batch": 1, "prompt": 4096, "roofline": 2.0}
    return [*rows, prefill | {"value": 2 * values["prefill"]}]


@pytest.mark.parametrize(
    ("rows", "num_kept"),
    [
        (rows_of_speed(), 6),
        (rows_of_speed(decode=0.599), 1),
        (rows_of_speed(prefill=0.39), 5),
        (rows_of_speed(theirs=0.71), 2),
        ([row for row in rows_of_speed() if row["system"] != "transformers"], 2),
        ([], 0),
    ],
)
def test_promises_of_speed_are_kept_by_what_was_measured(rows: list[dict[str, Any]], num_kept: int) -> None:
    kept = gpu_check.promises(rows)
    assert (len(kept), sum(kept.values())) == (6, num_kept)


@pytest.mark.parametrize(
    ("script", "passed", "why"),
    [
        ("""echo '{"rows": [{"value": 1.0}]}'""", True, ""),
        ("""echo '{"rows": [{"value": null}]}'""", False, ""),
        ("""echo '{"passed": false}'""", False, ""),
        ("echo fine; exit 3", False, "exit status 3"),
        ("kill -ABRT $$", False, "exit status -6"),
    ],
)
def test_a_part_passes_if_it_ends_well_and_measured_everything(script: str, passed: bool, why: str) -> None:
    found = gpu_check.run_part(["/bin/sh", "-c", script], 60.0)
    assert (found["passed"], found["why"]) == (passed, why)


def test_a_part_that_exceeds_its_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_STOP_SECONDS", 0.2)
    found = gpu_check.run_part(["/bin/bash", "-c", "trap '' TERM; sleep 60 & wait; sleep 60"], 0.3)
    assert (found["passed"], found["why"]) == (False, "not done in 0 s")


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("def test_it(): pass", ""),
        (
            "import pytest\ndef test_it(): pass\ndef test_card(): pytest.skip('no card')",
            "1 of 2 tests were skipped: no card",
        ),
    ],
)
def test_a_part_fails_whose_tests_were_skipped(tests: str, why: str, tmp_path: Path) -> None:
    path, report = tmp_path / "test_it.py", tmp_path / "report.xml"
    path.write_text(tests)
    command = [sys.executable, "-m", "pytest", str(path), "-q", "--rootdir", str(tmp_path), f"--junitxml={report}"]
    found = gpu_check.run_part(command, 60.0, report)
    assert (found["passed"], found["why"]) == (not why, why)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device answers")
def test_without_a_card_the_check_of_cuda_fails_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--quick", "--only", "captured", "--out", str(tmp_path)]) == 1
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (verdict["passed"], verdict["parts"]) == (False, {"captured": False})
    assert "tests were skipped: needs a CUDA device that answers" in verdict["details"]["captured"]["why"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_correctness_comes_first_and_a_failing_part_does_not_stop_the_next(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run_part(command: list[str], *_: object) -> dict[str, Any]:
        ran.append(command[4:])
        is_speed = "bench" in command and gpu_check.LARGE in command
        return {"passed": len(ran) != 2, "why": "", "found": {"rows": rows_of_speed()} if is_speed else {}}

    monkeypatch.setattr(gpu_check, "run_part", run_part)
    assert gpu_check.main(["--device", device, "--out", str(tmp_path)]) == 1
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(verdict["parts"]) == list(gpu_check.PARTS)
    assert [name for name, passed in verdict["parts"].items() if passed is not True] == ["captured"]
    tested, measured = ran[: len(gpu_check.TESTED)], ran[len(gpu_check.TESTED) :]
    assert [command[1] for command in tested] == [f"tests/gpu/test_{name}.py" for name in gpu_check.TESTED]
    assert all("run" in command and device in command for command in measured)
    assert ("promises" in verdict["details"]["speed"]) == (device == "cuda")
    assert gpu_check.main(["--device", device, "--only", "law", "--out", str(tmp_path)]) == 0


def test_the_large_model_reads_a_billion_weights_in_a_step() -> None:
    config = resolve(gpu_check.LARGE).model
    assert cost.num_parameters(config) == 1_100_048_384
    assert read_parameters(config) == 1_100_048_384 - 32000 * 2048
    assert read_parameters(replace(config, tie_embeddings=True)) == read_parameters(config)
    # With bandwidth alone a step takes as long as weights and keys and values take to be read.
    limits = {"read_gb_per_second": [[1, 1000.0]], "gemm": {"bf16": 1e12}}
    kv = 22 * 2 * 4 * 64 * 2 * 192
    rate = roofline(config, limits, "bf16", ("decode", 8, 128), 128)
    assert rate == pytest.approx(8 * 1e12 / (2 * read_parameters(config) + 8 * kv))
