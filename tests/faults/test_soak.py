"""The check for leaks finds those that are there, on made-up memory and on a real server that leaks on purpose."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from benchmarks.leaky_server import VARIABLE
from benchmarks.soak import server_process, slope, soak, stop
from tests.artifacts import tiny_artifact
from tests.faults.process import MODELS

MEGABYTE = 1e6
# Of megabytes an hour: so short a soak tells only what is far more than a young process grows by itself.
LEAK = 9000.0
SECONDS = np.arange(0, 480.0)


def memory(megabytes_per_hour: float, seed: int) -> list[float]:
    """Eight minutes of resident memory: a slope, a walk that always comes back, and pages that come and go."""
    source = np.random.default_rng(seed)
    wander = np.zeros(len(SECONDS))
    for index in range(1, len(SECONDS)):
        wander[index] = 0.9 * wander[index - 1] + source.normal(0, 0.02)
    return list((200 + megabytes_per_hour * SECONDS / 3600 + wander) * MEGABYTE)


def test_a_leak_of_twice_the_limit_is_found_and_no_leak_is_not() -> None:
    leaks = [slope(SECONDS, memory(20.0, seed)) for seed in range(50)]
    clean = [slope(SECONDS, memory(0.0, seed)) for seed in range(50)]
    assert all(each.high >= 10 * MEGABYTE and each.low > 0 for each in leaks)
    assert all(each.high < 10 * MEGABYTE for each in clean)
    inside = sum(each.low <= 20 * MEGABYTE <= each.high for each in leaks)
    inside += sum(each.low <= 0 <= each.high for each in clean)
    # Blocks end where likeness does not, so that the interval is somewhat narrower than it says.
    assert inside >= 80, f"of 100 intervals {inside} hold the truth"


def test_samples_that_are_alike_make_the_interval_wider() -> None:
    values = memory(0.0, 0)
    by_block, by_sample = slope(SECONDS, values), slope(SECONDS, values, block_seconds=1)
    assert by_block.high - by_block.low > 1.5 * (by_sample.high - by_sample.low)


@pytest.mark.parametrize("leak", [0.0, LEAK])
def test_soak_mixed_with_cancels_ends_with_nothing_held_and_catches_a_seeded_leak(
    tmp_path: Path, soak_seconds: float, leak: float
) -> None:
    for model in MODELS:
        (tmp_path / model).symlink_to(tiny_artifact(model), target_is_directory=True)
    module, environment = ("benchmarks.leaky_server", {VARIABLE: str(leak)}) if leak else ("service", None)
    with server_process(tmp_path, module, environment) as (process, target):
        found = asyncio.run(
            soak(
                target,
                process.pid,
                seconds=soak_seconds,
                warm_up_seconds=soak_seconds / 3,
                load=0.5,
                cancels=0.2,
                capacity_seconds=soak_seconds / 4,
            )
        )
        assert stop(process) == 0
    assert set(found["ends"]) <= {"OK", "CANCELLED"}
    assert found["ends"]["CANCELLED"] > 0
    assert found["descriptors"]["after"] <= found["descriptors"]["before"] + 2
    assert found["threads"]["after"] <= found["threads"]["before"] + 2
    if leak:
        assert found["rss_mb_per_hour_low"] > LEAK / 3
    else:
        assert found["rss_mb_per_hour"] < LEAK / 3
