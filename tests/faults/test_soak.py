"""The check for leaks finds those that are there, on made-up memory and on a real server that leaks on purpose."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.frame.statistics import slope
from benchmarks.scenarios.soak import LIMIT_MB_PER_HOUR, Still, difference, judge, problems, server_process, soak, stop
from tests.artifacts import tiny_artifact
from tests.environment import ROOT, environment
from tests.faults.process import MODELS

MEGABYTE = 1e6
# Megabytes an hour: a short soak only finds far more than the growth of a young process.
LEAK = 9000.0
SECONDS = np.arange(0, 600.0)
QUIET = Still(held=0.0, descriptors=20, threads=12, tasks=5)


def memory(megabytes_per_hour: float, seed: int, likeness: float = 0.9) -> list[float]:
    """Ten minutes of resident memory: a slope, and pages that come and go, alike from one second to the next."""
    source = np.random.default_rng(seed)
    wander = np.zeros(len(SECONDS))
    for index in range(1, len(SECONDS)):
        wander[index] = likeness * wander[index - 1] + source.normal(0, 0.02)
    return list((200 + megabytes_per_hour * SECONDS / 3600 + wander) * MEGABYTE)


def test_a_leak_of_twice_the_limit_is_found_and_no_leak_is_not() -> None:
    for seed in range(50):
        for leak in (0.0, 2 * LIMIT_MB_PER_HOUR):
            found = slope(SECONDS, memory(leak, seed))
            reported = {
                "mb_per_hour_low": found.low / MEGABYTE,
                "mb_per_hour_high": found.high / MEGABYTE,
                "problems": [],
                "exit_status": 0,
            }
            assert judge(reported, leak) == ("leaks" if leak else "bounded", True), (seed, leak, found)
            # And the other way round: the leak fails a server that should have none.
            assert judge(reported, 2 * LIMIT_MB_PER_HOUR - leak)[1] is False


def test_a_control_is_judged_by_what_it_grew_more_than_the_run_without() -> None:
    clean = {"mb_per_hour": 6.0, "mb_per_hour_low": 3.0, "mb_per_hour_high": 9.0}
    seeded = {"mb_per_hour": 27.0, "mb_per_hour_low": 23.0, "mb_per_hour_high": 31.0}
    assert difference(seeded, clean) == {"mb_per_hour": 21.0, "low": 16.0, "high": 26.0}


@pytest.mark.parametrize("likeness", [0.0, 0.9, 0.95])
def test_the_interval_holds_the_truth_as_often_as_it_says_however_alike_samples_are(likeness: float) -> None:
    inside = 0
    for seed in range(200):
        found = slope(SECONDS, memory(5.0, seed, likeness))
        inside += found.low <= 5.0 * MEGABYTE <= found.high
    # Of 200, 190 are expected; fewer than 180 would have a chance of one in a thousand.
    assert inside >= 180


def test_samples_that_are_alike_make_the_interval_wider_than_the_same_in_any_order() -> None:
    for seed in range(20):
        alike = memory(0.0, seed, 0.95)
        shuffled = list(np.random.default_rng(seed).permutation(alike))
        widths = [found.high - found.low for found in (slope(SECONDS, alike), slope(SECONDS, shuffled))]
        assert widths[0] > 1.5 * widths[1]


_GROWTH = """
import json
from pathlib import Path

import numpy as np

from benchmarks.scenarios.soak import Resident
from service.engine.kv.pages import Pages


def resident():
    return Resident.of(Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace"))


size = 64 << 20
before = resident()
pages = Pages((size,), np.uint8, is_sparse=True)
mapped = resident()
pages.array[:] = 1
other = np.ones(size, np.uint8)
written = resident()
pages.release(pages.array)
print(json.dumps([[(x.kv_bytes - before.kv_bytes) / size for x in (mapped, written, resident())],
                  (written.other_bytes - before.other_bytes) / size]))
"""


def test_memory_for_keys_and_values_is_counted_apart() -> None:
    """In a process of its own: what other tests left may be freed at any moment."""
    grown = subprocess.run(
        [sys.executable, "-c", _GROWTH], cwd=ROOT, env=environment(), capture_output=True, check=True
    )
    (mapped, written, released), other = json.loads(grown.stdout)
    assert mapped < 1 / 4
    assert written == pytest.approx(1, rel=0.25)
    assert other == pytest.approx(1, rel=0.25)
    assert released < 1 / 4


@pytest.mark.parametrize(
    ("ends", "after", "words"),
    [
        ({"OK": 8, "CANCELLED": 2}, QUIET, []),
        ({"OK": 8, "CANCELLED": 2, "INTERNAL": 1}, QUIET, ["1 requests ended with INTERNAL"]),
        ({"OK": 8}, QUIET, ["no request was canceled"]),
        ({"OK": 8, "CANCELLED": 2}, replace(QUIET, held=1.5), ["1.5 of requests and K/V are held at the end"]),
        ({"OK": 8, "CANCELLED": 2}, replace(QUIET, tasks=6), ["6 tasks at the end, 5 before"]),
        ({"OK": 8, "CANCELLED": 2}, replace(QUIET, descriptors=21), ["21 descriptors at the end, 20 before"]),
        ({"OK": 8, "CANCELLED": 2}, replace(QUIET, threads=13), ["13 threads at the end, 12 before"]),
    ],
)
def test_whatever_is_left_is_a_problem(ends: dict[str, int], after: Still, words: list[str]) -> None:
    assert problems(ends, QUIET, after) == words


@pytest.mark.parametrize("leak", [0.0, LEAK])
@pytest.mark.whole
def test_soak_mixed_with_cancels_ends_with_nothing_held_and_catches_a_seeded_leak(
    tmp_path: Path, soak_seconds: float, leak: float
) -> None:
    for model in MODELS:
        (tmp_path / model).symlink_to(tiny_artifact(model), target_is_directory=True)
    with server_process(tmp_path, leak) as server:
        found = asyncio.run(
            soak(
                server,
                seconds=soak_seconds,
                warm_up_seconds=soak_seconds / 2,
                load=0.5,
                cancels=0.2,
                capacity_seconds=soak_seconds / 4,
            )
        )
        assert stop(server.process) == 0
    assert found["problems"] == []
    if leak:
        assert found["mb_per_hour_low"] > LEAK / 3
    else:
        assert found["mb_per_hour"] < LEAK / 3
