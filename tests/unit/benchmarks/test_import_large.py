"""The import of a real size: memory and seconds of a step, and the promise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.scenarios._import_large import Step, promises, run_step
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


def test_a_steps_memory_is_the_most_that_its_process_had() -> None:
    """In a process of its own, as a child is counted from the fork on; held for as long as some looks take."""
    program = (
        "from benchmarks.scenarios._import_large import run_step\n"
        "for size in (1, 300_000_000):\n"
        "    held = f\"kept = b'1' * {size}; __import__('time').sleep(0.3)\"\n"
        "    step = run_step('a', 'b', 'timeit', '-n1', '-r1', held)\n"
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
    assert all(each["kept"] for each in promises(KEPT))
    assert [each["precision"] for each in promises(changed(index, step)) if not each["kept"]] == broken
