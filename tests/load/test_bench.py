"""The command-line benchmark on a fake server with known delays and known faults."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest import bench, capacity
from loadtest.bench import BenchSettings, Result
from loadtest.capacity import capacity_of
from loadtest.core.arrivals import Arrivals, Pattern
from loadtest.core.clients import WireProtocol, connect
from loadtest.core.drive import Driver
from loadtest.core.figures import Run, summarize
from loadtest.core.options import LoadOptions, add_options, read_options
from loadtest.core.records import INCOMPLETE, Outcome
from loadtest.core.wire import Sampling
from loadtest.serving import Server
from tests.environment import ROOT
from tests.load.fake_server import fake_server, read_log
from tests.load.observed import SCALES, delays, holds, pairs
from tests.load.omission import HALF, RATE, SERVICE_SECONDS, observe, percentile
from tests.unit.loadtest.test_load_figures import record

ENDED = tuple(Outcome)


def options(*words: str) -> LoadOptions:
    parser = argparse.ArgumentParser()
    add_options(parser, rate=math.inf, arrivals="gamma")
    return read_options(parser.parse_args(["--prompt-tokens", "16", *words]))


async def measured(target: str, *words: str, **settings: Any) -> Result:
    load = options(*words)
    return await bench.measure(
        BenchSettings(target=target, protocol=WireProtocol.ONWARD, load=load, **{"warmups": 0, **settings})
    )


def counts(run: Run) -> dict[str, int]:
    outcomes = [record.outcome for record in run.records]
    assert run.offered == len(outcomes)
    return {outcome.value: outcomes.count(outcome) for outcome in ENDED if outcome in outcomes}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server with 100 ms to the first token and no time between tokens."""
    with fake_server(ttft=(0.1, 0.1)) as target:
        yield target


async def test_known_delays_are_measured_within_five_percent(tmp_path: Path) -> None:
    for scale in SCALES:
        log = tmp_path / f"log{scale}"
        with fake_server(**delays(scale), log=str(log)) as target:
            result = await measured(
                target, "--request-rate", "14", "--num-prompts", "28", "--max-tokens", "5", connections=2, warmups=1
            )
        done = read_log(log)
        both = pairs(result.run.records, result.began, done)
        assert len(both) == 28
        if holds(both, scale):
            break
    report = summarize(result.run)
    firsts = [pair.record.first_token_seconds or 0.0 for pair in both]
    assert report["median_ttft_ms"] == pytest.approx(1e3 * statistics.median(firsts))
    assert report["completed"] == 28
    assert report["total_output_tokens"] == 140
    assert report["total_input_tokens"] == 28 * 16
    # Two connections took turns; one warm-up went before, with a prompt of its own.
    asked = [done[pair.record.request_id] for pair in both]
    assert len({each["peer"] for each in asked}) == 2
    (warm_up,) = (each for name, each in done.items() if name not in {pair.record.request_id for pair in both})
    assert warm_up["prompt"] not in [each["prompt"] for each in asked]


async def test_requests_are_sent_when_they_are_due_and_every_end_is_counted_as_what_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ("--request-rate", "60", "--burstiness", "0.5", "--num-prompts", "60", "--seed", "3")
    workload = options(*words, "--cancel-share", "0.2").workload(1000)
    # A call that is cancelled must not be answered before: on a busy machine 60 ms may be longer than an answer takes.
    impatient = {number for number in range(60) if workload.prompt(number).patience_seconds is not None}
    assert impatient
    every = {"refuse_every": 5, "break_every": 7, "fail_every": 11, "endless": tuple(impatient)}
    with fake_server(ttft=(0.03, 0.03), itl=(0.02, 0.02), log=str(log), **every) as target:
        result = await measured(target, *words, "--max-tokens", "6", "--cancel-share", "0.2", "--cancel-after", "0.06")
    run = result.run
    schedule = Arrivals(pattern=Pattern.GAMMA, rate=60.0, burstiness=0.5, seed=3).schedule(count=60)
    by_number = {record.number: record for record in run.records}
    assert [by_number[number].intended for number in range(60)] == list(schedule)
    assert all(record.sent >= record.intended for record in run.records)
    # Each outcome follows from the request's number and from whether its client cancelled first.
    done = {int(name.rpartition("-")[2]): each["end"] for name, each in read_log(log).items()}
    for number, ended in by_number.items():
        if ended.outcome is Outcome.CANCELLED:
            assert number in impatient
            assert ended.code == "CANCELLED"
        elif number % 5 == 4:
            assert (ended.outcome, ended.code) == (Outcome.REFUSED, "RESOURCE_EXHAUSTED")
        elif number % 11 == 10:
            assert (ended.outcome, ended.code, ended.generated_tokens) == (Outcome.FAILED, "INTERNAL", 2)
        elif number % 7 == 6:
            assert (ended.outcome, ended.code, ended.generated_tokens) == (Outcome.FAILED, INCOMPLETE, 6)
        else:
            assert (ended.outcome, ended.generated_tokens) == (Outcome.FINISHED, 6), number
        if ended.outcome is Outcome.FINISHED:
            assert done[number] == "finished"
    assert {number for number in impatient if number % 5 != 4 and number % 11 != 10} <= {
        number for number, record in by_number.items() if record.outcome is Outcome.CANCELLED
    }
    ended = counts(run)
    assert sum(ended.values()) == 60
    assert set(ended) == set(ENDED)


async def test_a_closed_loop_keeps_so_many_in_flight_and_no_more(server: str) -> None:
    result = await measured(server, "--num-prompts", "20", "--max-tokens", "3", max_concurrency=4)
    assert counts(result.run) == {"finished": 20}
    assert summarize(result.run)["max_concurrent_requests"] == 4
    assert not result.run.is_open
    # A user sends after its answer: nothing is late.
    assert all(record.lateness == 0.0 for record in result.run.records)


async def test_a_cap_on_an_open_loop_delays_the_sending_and_counts_as_latency(server: str) -> None:
    result = await measured(
        server, "--arrivals", "constant", "--request-rate", "50", "--num-prompts", "8", "--max-tokens", "1",
        max_concurrency=1,
    )  # fmt: skip
    assert counts(result.run) == {"finished": 8}
    by_number = sorted(result.run.records, key=lambda record: record.number)
    for earlier, later in itertools.pairwise(by_number):
        assert later.sent >= earlier.ended
    # Due within 140 ms, done one after the other: the last has waited for seven answers of 100 ms.
    last = by_number[-1]
    assert last.intended == pytest.approx(0.14)
    assert last.end_to_end_seconds >= 8 * 0.1 - 0.14


async def test_everything_at_once_is_due_at_once(server: str) -> None:
    result = await measured(server, "--num-prompts", "20", "--max-tokens", "1")
    assert counts(result.run) == {"finished": 20}
    assert {record.intended for record in result.run.records} == {0.0}


@pytest.mark.parametrize(
    ("words", "outcome", "code"),
    [(("--timeout", "0.01"), "failed", "DEADLINE_EXCEEDED"), (("--drain", "0.3"), "cancelled", "CANCELLED")],
)
async def test_a_passed_deadline_is_a_failure_and_a_passed_end_a_cancellation(
    words: tuple[str, ...], outcome: str, code: str
) -> None:
    with fake_server(ttft=(60.0, 60.0)) as target:
        result = await measured(target, "--num-prompts", "3", "--max-tokens", "2", *words)
    assert counts(result.run) == {outcome: 3}
    assert {record.code for record in result.run.records} == {code}


@asynccontextmanager
async def driving(target: str, *words: str) -> AsyncIterator[Driver]:
    async with connect(WireProtocol.ONWARD, target, "", Sampling()) as client:
        yield bench.new_driver(client, options(*words))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (the test's own timeout is the limit)
        await asyncio.sleep(0.005)


async def test_a_run_that_is_stopped_sends_nothing_more_and_waits_for_what_is_in_flight(server: str) -> None:
    async with driving(server, "--max-tokens", "1") as driver:
        running = asyncio.create_task(driver.open_loop([0.0] * 3 + [60.0] * 3))
        await until(lambda: driver.in_flight == 3)
        driver.stop()
        run = await running
    assert counts(run) == {"finished": 3}


async def test_a_run_that_is_stopped_twice_cancels_what_is_in_flight_and_what_waits(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with fake_server(ttft=(60.0, 60.0), log=str(log)) as target:
        async with driving(target) as driver:
            running = asyncio.create_task(driver.open_loop([0.0] * 9 + [60.0], max_concurrency=2))
            await until(lambda: driver.in_flight == 2)
            driver.stop()
            driver.stop()
            assert counts(await running) == {"cancelled": 9}
    # Seven never were sent.
    assert len(read_log(log)) <= 2
    with fake_server(ttft=(60.0, 60.0)) as target:
        async with driving(target) as driver:
            running = asyncio.create_task(driver.closed_loop(3))
            await until(lambda: driver.in_flight == 3)
            driver.stop()
            driver.stop()
            assert counts(await running) == {"cancelled": 3}


def test_ctrl_c_ends_the_sending_and_the_report_comes_all_the_same(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with fake_server(ttft=(0.05, 0.05), log=str(log)) as target:
        words = f"--target {target} --request-rate 50 --duration 600 --max-tokens 2 --prompt-tokens 4".split()
        command = [sys.executable, "-m", "loadtest", "bench", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            # Beside the warm-up: then the run is on.
            while len(read_log(log)) < 3:
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
    report = json.loads(out.splitlines()[-1])
    assert process.returncode == 0
    assert report["offered"] == report["finished"] == len(read_log(log)) - 1 > 0


async def test_a_stalled_server_is_seen_by_an_open_loop_and_missed_by_a_closed_one() -> None:
    for stall in (1.0, 5.0):
        seen = await observe(seconds=3 * stall, stall_at=stall, stall_seconds=stall)
        # The stall must be much longer than an answer, which may be slow on a busy machine.
        if statistics.median(wait for _, wait in seen.closed) < 2 * SERVICE_SECONDS:
            break
    # Each request due in the first half of the stall waited at least for its second half.
    assert seen.num_slow(seen.open) >= HALF * RATE * stall - 1
    # The one user waited for one answer during the stall.
    assert seen.num_slow(seen.closed) <= 2
    assert len(seen.closed) > 10
    assert percentile(seen.open) > 3.0 * percentile(seen.closed)


def test_the_commands_last_line_is_the_report(tmp_path: Path, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = bench.main(
        [
            "--target", server, "--num-prompts", "6", "--max-concurrency", "2", "--max-tokens", "3",
            "--prompt-tokens", "uniform:4:8", "--goodput", "ttft:10000", "tpot:10000",
            "--metric-percentiles", "50,90", "--percentile-metrics", "ttft,itl", "--save-detailed",
            "--result-dir", str(tmp_path), "--result-filename", "result.json",
        ]
    )  # fmt: skip
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert code == 0
    assert report == json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (report["model_id"], report["backend"], report["request_rate"]) == ("fake", "onward", "inf")
    assert report["request_goodput"] == report["request_throughput"] > 0.0
    assert {"p50_ttft_ms", "p90_itl_ms"} <= set(report)
    assert "mean_tpot_ms" not in report
    assert len(report["ttfts"]) == len(report["itls"]) == len(report["request_ids"]) == 6
    assert all(4 <= length <= 8 for length in report["input_lens"])
    assert "Time to first token (ms)" in out


def test_a_condition_that_holds_fails_the_benchmark(
    tmp_path: Path, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "--target",
        server,
        "--num-prompts",
        "4",
        "--max-tokens",
        "3",
        "--junit",
        str(tmp_path / "ci" / "bench.xml"),
    ]
    command += ["--prompt-tokens", "4", "--fail-if", "ttft_p99>600", "--fail-if"]
    assert bench.main([*command, "failed>0"]) == 0
    assert "failed:" not in capsys.readouterr().err
    assert bench.main([*command, "completed<5"]) == 1
    said = capsys.readouterr()
    assert "failed: completed<5: it is 4" in said.err
    assert json.loads(said.out.splitlines()[-1])["completed"] == 4
    assert 'failures="1"' in (tmp_path / "ci" / "bench.xml").read_text()
    assert bench.main([*command, "sheep"]) == 2


def test_an_unreachable_server_or_unknown_model_is_reported_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.main(["--target", "127.0.0.1:1", "--num-prompts", "1"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err
    with fake_server(refuse_every=1) as target:
        assert bench.main(["--target", target, "--model", "other"]) == 1
        assert "NOT_FOUND: no model other" in capsys.readouterr().err
        assert bench.main(["--target", target]) == 1
        assert "a request of the warm-up ended with RESOURCE_EXHAUSTED" in capsys.readouterr().err


# The capacity curve.


def test_capacity_is_counted_between_the_first_round_s_end_and_the_last_round_s_begin() -> None:
    # Three users in step, rounds of 2 s, a first one of 5 s; the last round is what was in flight at the end.
    ends = [5.0] * 3 + [7.0] * 3 + [9.0] * 3 + [11.0] * 3
    run = Run([record(number=number, ended=end) for number, end in enumerate(ends)], 12, 11.0, (), is_open=False)
    assert capacity_of(run, 3) == pytest.approx(3 / 2.0)
    with pytest.raises(RuntimeError, match="too few to measure a capacity"):
        capacity_of(Run(run.records[:6], 6, 7.0, (), is_open=False), 3)
    lost = record(outcome=Outcome.FAILED, code="INTERNAL", detail="why")
    with pytest.raises(RuntimeError, match="1 of 13 requests of the closed loop ended with INTERNAL: why"):
        capacity_of(Run([*run.records, lost], 13, 11.0, (), is_open=False), 3)


def test_every_request_of_the_capacity_curve_is_accounted_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # On a busy machine less than a second may be too little for two rounds, and is then refused.
    for closed_seconds in ("0.8", "10"):
        log = tmp_path / f"log{closed_seconds}"
        with fake_server(ttft=(0.04, 0.04), itl=(0.02, 0.02), slots=3, queue=4, log=str(log)) as target:
            code = capacity.main(
                [
                    "--target", target, "--max-tokens", "3", "--prompt-tokens", "8", "--loads", "0.5,2.5",
                    "--seconds", "1.2", "--closed-seconds", closed_seconds, "--out", str(tmp_path / "out"),
                ]
            )  # fmt: skip
        if code == 0:
            break
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert report["users"] == 3
    # Three slots, each 80 ms a request, less what the machine adds; two users that have got out of step may each have
    # an end more among the two dozen that are counted.
    assert 0.0 < report["capacity"] <= 1.1 * 3 / 0.08
    assert [each["load"] for each in report["loads"]] == [0.5, 2.5]
    for each in report["loads"]:
        assert each["offered"] == each["scheduled"] == sum(each[outcome] for outcome in ENDED) > 0
        assert each["missing"] == 0
        assert each["offered_rate"] == pytest.approx(each["load"] * report["capacity"])
    over = report["loads"][1]
    assert over["refused"] > 0
    assert over["finished"] > 0
    # By the server's own account too: all that it finished and refused counts.
    ends = [each["end"] for each in read_log(log).values()]
    rounds = [report["closed_loop"], *report["loads"]]
    assert ends.count("refused") == sum(each["refused"] for each in rounds)
    assert ends.count("finished") == sum(each["finished"] for each in rounds) + 1
    document = (tmp_path / "out" / "capacity.md").read_text(encoding="utf-8")
    assert f"| 2.5 | {over['offered_rate']:.2f} | {over['offered']} | {over['finished']} |" in document
    assert "of RESOURCE_EXHAUSTED (the queue is full)" in document
    assert "<svg" in (tmp_path / "out" / "data" / "capacity.svg").read_text(encoding="utf-8")


def test_the_capacity_of_a_folder_of_models_is_that_of_a_server_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Path, ...]] = []

    @contextmanager
    def serving(models: Path, *_: str) -> Iterator[Server]:
        asked.append((models,))
        with fake_server(ttft=(0.01, 0.01), slots=2) as target:
            yield Server(target, "", 0)
        asked.append(())

    monkeypatch.setattr(capacity, "serving", serving)
    words = ["--max-tokens", "1", "--loads", "0.5", "--seconds", "0.5", "--closed-seconds", "0.3"]
    assert capacity.main(["--models", "some/models", "--out", str(tmp_path), *words]) == 0
    # The server ran for the whole sweep and has stopped.
    assert asked == [(Path("some/models"),), ()]
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["model_id"] == "fake"
    assert report["machine"]["cores"]
    assert (tmp_path / "capacity.md").is_file()


def test_no_thread_is_left_behind(server: str) -> None:
    before = threading.active_count()
    asyncio.run(measured(server, "--num-prompts", "3", "--max-tokens", "1"))
    # The test's own timeout is the limit.
    while threading.active_count() > before:
        time.sleep(0.01)
