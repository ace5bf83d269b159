"""The benchmark of what scaling out costs: its arithmetic, and all of it in short on real servers and a real Envoy."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from subprocess import PIPE

import pytest

from benchmarks import scaling_out, scenario
from benchmarks.peers.protocol import Options
from benchmarks.scaling_out import DIRECT, ENVOY, Round, Settings
from tests.artifacts import tiny_artifact


def test_what_envoy_adds_is_told_beside_the_direct_way() -> None:
    rounds = {
        DIRECT: [Round([0.001] * 9, [0.0001] * 9, 1000.0, None), Round([0.003] * 10, [0.0003] * 10, 3000.0, None)],
        ENVOY: [Round([0.004] * 9, [0.0005] * 9, 500.0, 0.02), Round([0.005] * 10, [0.0006] * 10, 1500.0, 0.04)],
    }
    ways = scaling_out.judge_transport(rounds, num_messages=1000)["ways"]
    assert ways[DIRECT]["call_seconds"] == {"p50": 0.003, "p90": 0.003, "p99": 0.003}
    assert ways[ENVOY]["added_call_seconds"] == pytest.approx(0.002)
    assert ways[ENVOY]["added_message_seconds"] == pytest.approx(0.0003)
    assert (ways[DIRECT]["messages_per_second"], ways[ENVOY]["throughput_share"]) == (2000.0, 0.5)
    assert ways[ENVOY]["cpu_seconds_per_message"] == pytest.approx(0.03 / 1000)
    assert (ways[DIRECT]["cpu_seconds_per_message"], ways[DIRECT]["added_call_seconds"]) == (None, 0.0)


@pytest.mark.parametrize(("with_key", "passed"), [(0.48, True), (0.479, False)])
def test_the_promise_is_about_the_key_and_one_server(with_key: float, passed: bool) -> None:
    found = scaling_out.judge_shares({"single": 0.6, "with_key": with_key, "without_key": 0.3})
    assert found["passed"] is passed
    assert found["kept"]["without_key"] == pytest.approx(0.5)


@pytest.mark.parametrize(("with_key", "passed"), [(0.48, True), (0.479, False)])
def test_the_promise_holds_on_ray_too_where_that_is_measured(with_key: float, passed: bool) -> None:
    shares = {"single": 0.6, "with_key": 0.6, "without_key": 0.1, "ray_with_key": with_key, "ray_without_key": 0.1}
    assert scaling_out.judge_shares(shares)["passed"] is passed


def test_prompts_begin_in_so_many_ways_and_all_end_differently() -> None:
    settings = Settings(families=4, requests=30, prefix=6, suffix=3)
    made = scaling_out.prompts(settings, 1000, random.Random(1))
    assert sorted(Counter(tuple(prompt[:6]) for prompt in made).values()) == [7, 7, 8, 8]
    assert len({prompt[6] for prompt in made}) == 30
    assert {len(prompt) for prompt in made} == {9}


def test_a_process_is_read_as_the_system_counts_it() -> None:
    pid, before = os.getpid(), scaling_out.cpu_seconds(os.getpid())
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    assert scaling_out.cpu_seconds(pid) - before >= 0.05
    # A process of its own, that maps little: of what others map too, a part is counted, and they come and go.
    program = "block = b'x' * 200_000_000; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert scaling_out.proportional_bytes(child.pid) == pytest.approx(200_000_000, rel=0.2)
        child.kill()


def test_all_of_it_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "fp32" / "model"
    place.parent.mkdir()
    place.symlink_to(tiny_artifact("decoder-only", context=512), target_is_directory=True)
    options = Options(tmp_path, tmp_path, "fp32", threads=1, max_batch=4, context=0)
    monkeypatch.setattr(scenario, "make_artifact", lambda *_, **__: options)
    settings = Settings(
        precision="fp32", rounds=1, calls=10, paced_streams=2, paced_messages=5, pace_seconds=0.001,
        full_streams=4, full_messages=50, idle_seconds=0.1, families=4, requests=16, prefix=128, suffix=4,
    )  # fmt: skip
    results = scaling_out.measure(settings, tmp_path)
    for way in scaling_out.WAYS:
        found = results["ways"][way]
        assert 0 < found["call_seconds"]["p50"] <= found["call_seconds"]["p99"]
        assert 0 < found["message_seconds"]["p50"] <= found["message_seconds"]["p99"]
        assert found["messages_per_second"] > 0
    assert results["ways"][ENVOY]["pss_bytes"] > 1_000_000
    # Every one but the first of a family finds its beginning.
    assert results["cached"]["single"] == results["cached"]["with_key"] == pytest.approx(12 * 128 / (16 * 132))
    assert results["passed"]
    assert "| envoy |" in scaling_out.render(results)
    json.dumps(results, allow_nan=False)
