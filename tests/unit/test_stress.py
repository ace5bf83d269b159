"""The passes of `make stress-test`: what they set, what is kept of them, and what a failure says. One real pytest."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests import stress
from tests.stress import GROUPS, TWENTY, WHOLE, Outcome, Pass

# All that asyncio, threading and queue know of the time, after a wait in each; and the same in a child.
CLOCKS = """
import asyncio, json, os, queue, subprocess, sys, threading, time
async def moment():
    await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0.001))], timeout=60.0)
    return asyncio.get_running_loop().time()
def readings():
    threading.Event().wait(0.001)
    try:
        queue.Queue().get(timeout=0.001)
    except queue.Empty:
        pass
    return [time.monotonic(), time.monotonic_ns() / 1e9, asyncio.run(moment()), threading._time(), queue.time()]
child = [] if sys.argv[1:] else json.loads(subprocess.check_output([sys.executable, *sys.orig_argv[1:], "child"]))
print(json.dumps(readings() + child))
"""


def test_every_clock_of_a_pass_and_of_its_children_is_shifted() -> None:
    shift = stress.SHIFTS[2]
    environment = {**os.environ, **Pass(name="one", shift_seconds=shift).environment()}
    before = time.clock_gettime(time.CLOCK_MONOTONIC)
    found = json.loads(subprocess.check_output([sys.executable, "-c", CLOCKS], env=environment))
    after = time.clock_gettime(time.CLOCK_MONOTONIC)
    assert len(found) == 10
    # At 10^7 seconds a float is exact to two nanoseconds.
    assert all(before - 1e-6 <= moment - shift <= after + 1e-6 for moment in found)


def test_a_pass_whose_clock_is_not_shifted_is_none() -> None:
    one = Pass(name="one", shift_seconds=1e7)
    stress.check_clock(one, {**os.environ, **one.environment()})
    with pytest.raises(SystemExit, match=r"the clock of one is not shifted by 10000000\.0 s"):
        stress.check_clock(one, {**os.environ, "ONWARD_CLOCK_SHIFT_SECONDS": "0"})


def test_passes_differ_in_clock_load_and_hash_seed() -> None:
    assert (len(WHOLE), len(TWENTY)) == (5, 20)
    for passes in GROUPS.values():
        assert {one.shift_seconds for one in passes} == {0.0, 5_476.1, 1e7}
        assert len({replace(one, name="") for one in passes}) == len(passes)
        assert {one.num_busy > 0 for one in passes} == {True, False}
        assert len({one.hash_seed for one in passes}) > 1
    machines = {(one.num_busy, one.num_cores) for one in TWENTY}
    assert machines == {(0, 2), (1, 2), (1, 1)}
    assert {(one.num_busy, one.num_cores, one.shift_seconds) for one in TWENTY} == {
        (*machine, shift) for machine, shift in itertools.product(machines, stress.SHIFTS)
    }


def outcome(name: str, status: int = 0) -> Outcome:
    counts, failures = ({"failed": 1, "passed": 3}, ("tests/a.py::test_it",)) if status else ({"passed": 3}, ())
    return Outcome(name, 7, status, 1.0, counts, failures, "env A=1 pytest")


def test_tree_is_a_hash_of_every_file_that_is_not_ignored(tmp_path: Path) -> None:
    subprocess.run(["git", "init", str(tmp_path)], check=True, capture_output=True)
    (tmp_path / ".gitignore").write_text("build\n")
    trees = [stress.tree_of(tmp_path)]
    (tmp_path / "build").write_text("ignored")
    assert stress.tree_of(tmp_path) == trees[0]
    for content in "ab":
        (tmp_path / "new").write_text(content)
        trees.append(stress.tree_of(tmp_path))
    assert len(set(trees)) == 3


def test_passed_passes_are_not_run_again_and_failed_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    broken = {"core-2"}

    def run(one: Pass, seed: int, log: Path) -> Outcome:
        ran.append(one.name)
        return replace(outcome(one.name, status=int(one.name in broken)), seed=seed)

    monkeypatch.setattr(stress, "run", run)
    monkeypatch.setattr(stress, "tree_of", lambda _: "tree")
    words = ["--only", "core-1", "core-2", "suite-5"]
    assert stress.main(words, tmp_path) == 1
    assert ran == ["core-1", "core-2", "suite-5"]
    out = capsys.readouterr().out
    assert "  tests/a.py::test_it\n  status 1: env A=1 pytest\n" in out
    heads = [line.split()[:2] for line in out.splitlines() if not line.startswith(" ")]
    assert heads == [["passed", "core-1"], ["FAILED", "core-2"], ["passed", "suite-5"]]
    broken.clear()
    assert stress.main(words, tmp_path) == 0
    assert ran[3:] == ["core-2"]
    (tmp_path / "tree" / "core-1.json").write_text('{"name": "co')
    trees = iter(["tree", "tree", "edited"])
    monkeypatch.setattr(stress, "tree_of", lambda _: next(trees))
    with pytest.raises(SystemExit, match="the tree changed during core-4"):
        stress.main(["--only", "core-1", "core-4"], tmp_path)
    assert ran[4:] == ["core-1", "core-4"]
    assert {path.name for path in (tmp_path / "tree").iterdir()} == {"core-1.json", "core-2.json", "suite-5.json"}
    monkeypatch.setattr(stress, "tree_of", lambda _: "another")
    assert stress.main(["--only", "core-2"], tmp_path) == 0
    assert ran[6:] == ["core-2"]


def test_a_pass_that_ran_nothing_or_ended_otherwise_has_not_passed() -> None:
    assert outcome("one").passed
    assert not replace(outcome("one"), counts={}).passed
    assert not replace(outcome("one"), status=3).passed


# Notes its name; one of four fails where the clock is shifted.
TEST = """
import time
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", range(4))
def test_it(number):
    with Path(__file__).with_name("order").open("a") as order:
        order.write(f"{Path(__file__).stem}-{number} ")
    assert number < 3 or time.monotonic() < 1e7, {"a": "b - c"}
"""


@pytest.mark.whole
def test_a_failure_is_named_with_the_command_that_repeats_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Options of the suite's, which these tests do not have.
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    files = [f"test_{letter}" for letter in "abcdefghij"]
    for name in files:
        (tmp_path / f"{name}.py").write_text(TEST)
    one = Pass(name="one", tests=(str(tmp_path),), options=(), shift_seconds=1e7, num_cores=1)
    before, order = os.sched_getaffinity(0), tmp_path / "order"

    def run(seed: int, num_busy: int) -> tuple[Outcome, list[str]]:
        order.write_text("")
        return stress.run(replace(one, num_busy=num_busy), seed, tmp_path / "logs" / "log"), order.read_text().split()

    found, first = run(7, 1)
    assert os.sched_getaffinity(0) == before
    assert (found.status, found.counts) == (1, {"failed": 10, "passed": 30})
    assert sorted(name.rpartition("/")[2] for name in found.failures) == [f"{name}.py::test_it[3]" for name in files]
    order.write_text("")
    again = subprocess.run(found.repeat.split(), cwd=stress.ROOT, capture_output=True, text=True, check=False)
    assert (again.returncode, order.read_text().split()) == (1, first)
    # A file's tests stay together. Of the files, and of the tests in them, the order is the seed's: two seeds give the
    # same once in 10! and once in 4!^10.
    _, other = run(8, 0)
    orders = [[each.rpartition("-")[0] for each in names] for names in (first, other)]
    assert all([*dict.fromkeys(names)] == names[::4] for names in orders)
    assert sorted(orders[0][::4]) == sorted(orders[1][::4]) == files
    assert orders[0] != orders[1]
    within = [[[each for each in names if each.startswith(name)] for name in files] for names in (first, other)]
    assert within[0] != within[1]
