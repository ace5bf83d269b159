"""Locust on a fake server: in one process, with workers, and behind its web page.

Locust patches its interpreter, so it always runs in a child process.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadtest.core.arrivals import Arrivals, Pattern
from loadtest.core.records import Outcome, Record
from tests.environment import ROOT, environment
from tests.load.fake_server import fake_server, fake_servers, read_log
from tests.load.observed import SCALES, delays, holds, pairs
from tests.ports import free_port
from tests.servers import running, served_model

TIMEOUT_SECONDS = 240
SHORT = ("--prompt-tokens", "8", "--max-tokens", "5")
FAULTS = {"refuse_every": 5, "break_every": 7, "fail_every": 11}


@contextmanager
def locust(*words: str, cwd: Path = ROOT) -> Iterator[subprocess.Popen[str]]:
    """Runs Locust with our file; kills it if it outlives the block."""
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py"), *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env=environment()
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def run(*words: str, cwd: Path = ROOT) -> tuple[int, str]:
    with locust("--headless", "--only-summary", *words, cwd=cwd) as process:
        out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode, out


def records_of(report: dict[str, Any]) -> list[Record]:
    return [Record.from_dict(each) for each in report["requests"]]


def hold_faults(records: list[Record], count: int) -> None:
    """Every number once, each with the outcome that the server's faults give it."""
    by_number = {record.number: record for record in records}
    assert sorted(by_number) == list(range(count))
    assert len(records) == count
    for number, record in by_number.items():
        if number % 5 == 4:
            expected = (Outcome.REFUSED, "RESOURCE_EXHAUSTED")
        elif number % 11 == 10:
            expected = (Outcome.FAILED, "INTERNAL")
        elif number % 7 == 6:
            expected = (Outcome.FAILED, "INCOMPLETE")
        else:
            expected = (Outcome.FINISHED, "OK")
        assert (record.outcome, record.code) == expected, number


@pytest.mark.parametrize(("way", "connections"), [("direct", 8), ("envoy", 2)])
@pytest.mark.sampled(1)
def test_known_delays_are_measured_within_five_percent_with_pausing_users(
    way: str, connections: int, tmp_path: Path
) -> None:
    for scale in SCALES:
        log, report_file, stats_file = (tmp_path / f"{scale}-{name}" for name in ("log", "report", "stats.json"))
        with fake_servers(way, tmp_path, **delays(scale), log=str(log)) as target:
            code, out = run(
                "--host", target, *SHORT, "-u", "8", "-r", "8", "--num-prompts", "28", "--think", "0.05",
                "--report", str(report_file), "--report-detailed", "--json-file", str(stats_file.with_suffix("")),
            )  # fmt: skip
        assert code == 0, out
        report = json.loads(report_file.read_text(encoding="utf-8"))
        records, done = records_of(report), read_log(log)
        hold_faults_none(records, 28)
        if holds(pairs(records, report["began_monotonic"][0], done), scale):
            break
    # Each user has a connection of its own; Envoy has one to each server.
    assert len({each["peer"] for each in done.values()}) == connections
    assert (report["offered"], report["finished"], report["missing"]) == (28, 28, 0)
    assert report["output_throughput"] == pytest.approx(140 / report["duration"])
    assert "Output token throughput" in out
    # Locust's own table has the same requests; its histogram has three digits.
    entries = {entry["name"]: entry for entry in json.loads(stats_file.read_text(encoding="utf-8"))}
    assert {name: entry["num_requests"] for name, entry in entries.items()} == {"TTFT": 28, "ITL": 112, "E2E": 28}
    assert {entry["method"] for entry in entries.values()} == {"grpc"}
    for name, metric in (("TTFT", "ttft"), ("ITL", "itl"), ("E2E", "e2el")):
        classes = sorted((int(at), count) for at, count in entries[name]["response_times"].items())
        times = [at for at, count in classes for _ in range(count)]
        middle = len(times) // 2
        median = report[f"median_{metric}_ms"]
        assert (times[middle - 1] + times[middle]) / 2 == pytest.approx(median, abs=max(1.0, 0.006 * median))


def hold_faults_none(records: list[Record], count: int) -> None:
    assert sorted(record.number for record in records) == list(range(count))
    assert {record.outcome for record in records} == {Outcome.FINISHED}


@dataclass(frozen=True, slots=True)
class Outputs:
    """A scenario's outputs."""

    code: int
    out: str
    reports: list[dict[str, Any]]
    log: dict[str, dict[str, Any]]


Scenario = Callable[[Path], Outputs]


def with_workers(folder: Path, way: str = "direct") -> Outputs:
    """A master and two workers, a schedule, a server with faults."""
    log, report_file = folder / "log", folder / "report"
    port = str(free_port())
    with fake_servers(way, folder, ttft=(0.02, 0.05), itl=(0.01, 0.02), log=str(log), **FAULTS) as target:
        # The master's options override the workers' own.
        worker = ("--worker", "--master-host", "127.0.0.1", "--master-port", port, "--seed", "99", "--max-tokens", "1")
        with locust(*worker) as one, locust(*worker) as other:
            code, out = run(
                "--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "2",
                "--host", target, *SHORT, "--arrivals", "gamma", "--rate", "40", "--burstiness", "0.5", "--seed", "3",
                "--num-prompts", "60", "--report", str(report_file), "--report-detailed",
            )  # fmt: skip
            for process in (one, other):
                process.communicate(timeout=TIMEOUT_SECONDS)
    return Outputs(code, out, [json.loads(report_file.read_text(encoding="utf-8"))], read_log(log))


def with_workers_behind_envoy(folder: Path) -> Outputs:
    """The same, with two servers behind an Envoy."""
    return with_workers(folder, "envoy")


def behind_the_page(folder: Path) -> Outputs:
    """Two processes behind the web page: a run with the form's options, and one that the button stops."""
    log, report_file = folder / "log", folder / "report"
    port, master_port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        fake_server(ttft=(0.02, 0.05), itl=(0.01, 0.02), log=str(log), **FAULTS) as target,
        locust(
            "--web-host", "127.0.0.1", "--web-port", str(port), "--processes", "2", "--host", target, *SHORT,
            "--master-bind-port", str(master_port), "--master-port", str(master_port),
            "--report", str(report_file), "--report-detailed",
        ) as process,
    ):  # fmt: skip
        until(lambda: get(f"{url}/stats/requests")["workers"][1:])
        with urllib.request.urlopen(url, timeout=30) as answer:
            page = answer.read().decode()
        form = {"user_count": "4", "spawn_rate": "4", "host": target}
        # A count, and a length that the command line does not have.
        assert post(f"{url}/swarm", {**form, "requests": "22", "prompt_tokens": "6"})["success"]
        until(report_file.exists)
        reports = [json.loads(report_file.read_text(encoding="utf-8"))]
        report_file.unlink()
        until(lambda: get(f"{url}/stats/requests")["state"] in {"stopped", "ready"})
        # Long enough for the button, and for users to be there on a busy machine before the first length is over.
        lengths = ",".join(["3"] * 4 + ["7"] * 200)
        sweep = {"requests": "0", "shape": "length", "steps": lengths, "stage_seconds": "1"}
        assert post(f"{url}/swarm", {**form, **sweep})["success"]
        until(lambda: "7 tokens" in get(f"{url}/load").get("stages", {}))
        post(f"{url}/stop", {})
        until(report_file.exists)
        reports.append(json.loads(report_file.read_text(encoding="utf-8")))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_SECONDS)
    return Outputs(process.returncode, page, reports, read_log(log))


def out_of_time(folder: Path) -> Outputs:
    """A run that ends before all of its answers."""
    report_file = folder / "report"
    # The second of four takes a second, the others two to eight: so much is left to either side of the end.
    with fake_server(ttft=(0.0, 8.0)) as target:
        code, out = run(
            "--host", target, "--prompt-tokens", "8", "--max-tokens", "1", "--arrivals", "constant", "--rate", "2",
            "-t", "2s", "--drain", "1", "--report", str(report_file),
        )  # fmt: skip
    return Outputs(code, out, [json.loads(report_file.read_text(encoding="utf-8"))], {})


def interrupted(folder: Path) -> Outputs:
    """Two processes with an endless schedule, interrupted by Ctrl-C."""
    log, report_file = folder / "log", folder / "report"
    port = str(free_port())
    with (
        fake_server(ttft=(0.8, 0.8), log=str(log)) as target,
        locust(
            "--headless", "--only-summary", "--processes", "2", "--master-bind-port", port, "--master-port", port,
            "--host", target, *SHORT, "--arrivals", "poisson", "--rate", "20", "-t", "1h", "--report", str(report_file),
        ) as process,
    ):  # fmt: skip
        until(lambda: len(read_log(log)) > 2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    return Outputs(process.returncode, out, [json.loads(report_file.read_text(encoding="utf-8"))], read_log(log))


def post(url: str, form: dict[str, str]) -> dict[str, Any]:
    with urllib.request.urlopen(url, urllib.parse.urlencode(form).encode(), timeout=30) as answer:
        return dict(json.loads(answer.read()))


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


def until(condition: Callable[[], Any]) -> None:
    """Polls until the condition holds."""
    limit = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < limit:
        with suppress(urllib.error.URLError, ConnectionError):
            if condition():
                return
        time.sleep(0.1)
    raise TimeoutError(f"not within {TIMEOUT_SECONDS} s")


def short_of_a_file(folder: Path) -> Outputs:
    """A master and two workers, one of which lacks the file of prompt lengths."""
    log, report_file = folder / "log", folder / "report"
    (folder / "lengths").write_text("3\n", encoding="utf-8")
    (folder / "elsewhere").mkdir()
    port = str(free_port())
    worker = ("--worker", "--master-host", "127.0.0.1", "--master-port", port)
    with (
        fake_server(log=str(log)) as target,
        locust(*worker, cwd=folder),
        locust(*worker, cwd=folder / "elsewhere") as lost,
    ):
        code, out = run(
            "--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "2",
            "--host", target, "--prompt-tokens", "file:lengths", "--max-tokens", "2", "--arrivals", "constant",
            "--rate", "20", "--num-prompts", "40", "--report", str(report_file), "--report-detailed", cwd=folder,
        )  # fmt: skip
        said, _ = lost.communicate(timeout=TIMEOUT_SECONDS)
    assert lost.returncode == 2, said
    return Outputs(code, out + said, [json.loads(report_file.read_text(encoding="utf-8"))], read_log(log))


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[Scenario, Future[Outputs]]]:
    """Starts all scenarios of this run's tests at once: they mostly wait, and none of them measures time."""
    asked = {
        item.callspec.params["outputs"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and "outputs" in item.fixturenames
    }
    with ThreadPoolExecutor(len(asked)) as pool:
        yield {each: pool.submit(each, tmp_path_factory.mktemp(each.__name__)) for each in asked}


@pytest.fixture
def outputs(started: dict[Scenario, Future[Outputs]], request: pytest.FixtureRequest) -> Outputs:
    return started[request.param].result()


def of(*scenarios: Scenario) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("outputs", scenarios, indirect=True)


@of(with_workers, with_workers_behind_envoy)
@pytest.mark.sampled(1)
def test_a_master_and_two_workers_send_one_schedule_completely(
    outputs: Outputs, request: pytest.FixtureRequest
) -> None:
    report, done = outputs.reports[0], outputs.log
    records = records_of(report)
    # Refused and failed requests are errors to Locust.
    assert outputs.code == 1, outputs.out
    hold_faults(records, 60)
    schedule = Arrivals(pattern=Pattern.GAMMA, rate=40.0, burstiness=0.5, seed=3).schedule(count=60)
    assert [record.intended for record in sorted(records, key=lambda record: record.number)] == list(schedule)
    assert report["offered"] == sum(report[outcome] for outcome in Outcome) == 60
    assert report["missing"] == 0
    assert (len(report["client"]), len(report["began_monotonic"]), report["silent"]) == (2, 2, 0)
    # Each worker sent its half, from the same begin; behind Envoy both servers got requests.
    peers = [each["peer"] for each in done.values()]
    assert len(set(peers)) == 2
    if request.node.callspec.params["outputs"] is with_workers:
        assert peers.count(peers[0]) == 30
    one, other = report["began_monotonic"]
    assert one == pytest.approx(other, abs=0.1)
    for record in records:
        began = report["began_monotonic"][record.number % 2]
        assert began + record.intended <= began + record.sent <= done[record.request_id]["arrived"]


@of(behind_the_page)
@pytest.mark.whole
def test_the_web_page_starts_runs_with_its_form_s_options_in_several_processes_and_loses_nothing(
    outputs: Outputs,
) -> None:
    first, second = outputs.reports
    # Our options are in the form.
    assert "prompt_tokens" in outputs.out
    hold_faults(records_of(first), 22)
    assert {len(outputs.log[each["request_id"]]["prompt"]) for each in first["requests"]} == {6}
    assert second["offered"] == len(second["requests"]) == sum(second[outcome] for outcome in Outcome) > 0
    # No stream was cut when the button was pressed.
    assert (second["missing"], second["cancelled"]) == (0, 0)
    # A sweep changes what workers ask while it lasts.
    assert set(second["stages"]) == {"3 tokens", "7 tokens"}
    for record in second["requests"]:
        assert f"{len(outputs.log[record['request_id']]['prompt'])} tokens" == record["stage"]
    assert second["offered"] == sum(stage["offered"] for stage in second["stages"].values())


@of(out_of_time)
def test_the_time_limit_waits_for_requests_in_flight_and_cancels_slow_ones(outputs: Outputs) -> None:
    (report,) = outputs.reports
    assert report["offered"] == 4, outputs.out
    assert report["finished"] > 0
    assert report["cancelled"] > 0
    assert report["finished"] + report["cancelled"] == 4
    assert report["missing"] == 0
    assert outputs.code == 1


@of(short_of_a_file)
def test_a_worker_without_its_files_leaves_the_run_and_is_reported(outputs: Outputs) -> None:
    (report,) = outputs.reports
    assert "--prompt-tokens: [Errno 2] No such file or directory" in outputs.out
    assert "1 of the client's processes never reported" in outputs.out
    # The other has sent its half, and no request was sent twice.
    assert (report["offered"], report["finished"], report["missing"], report["silent"]) == (20, 20, 0, 1)
    assert len({each["number"] % 2 for each in report["requests"]}) == 1
    assert len({each["number"] for each in report["requests"]}) == 20
    assert outputs.code == 1


@of(interrupted)
def test_ctrl_c_in_the_middle_of_a_schedule_cuts_no_stream_in_any_process(outputs: Outputs) -> None:
    (report,) = outputs.reports
    # At 20 a second, each taking most of a second, many were in flight.
    assert report["max_concurrent_requests"] > 5
    assert report["finished"] == report["offered"] == len(outputs.log) > 5
    assert (report["missing"], report["cancelled"], outputs.code) == (0, 0, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--steps", "x"), "--steps: 'x'"),
        (("--host", "127.0.0.1:1"), "127.0.0.1:1: UNAVAILABLE"),
    ],
)
def test_an_impossible_run_is_refused_in_a_line(words: tuple[str, ...], said: str) -> None:
    code, out = run(*words)
    assert said in out
    assert code == 2
    assert "Traceback" not in out
    assert "gevent" not in sys.modules


async def test_run_on_one_of_several_models_needs_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running([served_model("dates"), served_model("stdlib")]) as server:
        host = f"{server.endpoint.host}:{server.endpoint.port}"
        words = ("--host", host, "--num-prompts", "2", *SHORT)
        code, out = await asyncio.to_thread(run, *words)
        assert (code, out.splitlines()[-1]) == (
            2, f"{host} serves several models, name one with --model or LOCUST_MODEL: dates, stdlib"
        )  # fmt: skip
        monkeypatch.setenv("LOCUST_MODEL", "stdlib")
        code, out = await asyncio.to_thread(run, *words)
        assert code == 0, out
        assert server.ended("stdlib") == {"length": 2}
