"""The flight recorder of a running server: over HTTP beside the metrics, and as a file by `python -m service trace`."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from service.__main__ import main
from service.engine.batch import ScheduledBatch
from tests.fakes import Death, FakeRunner
from tests.servers import (
    MODEL,
    SLOTS,
    Running,
    engine_for,
    eventually,
    generate_request,
    read,
    read_accepted,
    running,
    served_model,
    status_of,
)
from tests.trace_format import check_trace, slices

ON = {"metrics": True, "metrics_port": 0}


async def get(server: Running, path: str = "/debug/steps", method: str = "GET") -> tuple[int, str, bytes]:
    """Status, content type and body of an HTTP answer."""

    def ask() -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server.endpoint.metrics_port, timeout=30)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.headers["Content-Type"], answer.read()
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


async def tables(server: Running, model: str = MODEL) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps and requests, as dicts."""
    status, kind, body = await get(server)
    assert (status, kind) == (200, "application/json")
    log = json.loads(body)["models"][model]
    steps, requests = (
        [dict(zip(log[name]["columns"], row, strict=True)) for row in log[name]["rows"]]
        for name in ("steps", "requests")
    )
    return steps, requests


async def trace(server: Running, out: Path) -> int:
    return await asyncio.to_thread(
        main, ["trace", "--metrics-target", f"127.0.0.1:{server.endpoint.metrics_port}", "--out", str(out)]
    )


async def test_every_step_of_the_runner_is_recorded_with_its_numbers() -> None:
    runner = FakeRunner(SLOTS)
    began = time.monotonic()
    async with running(runner=runner, trust=True, **ON) as server:
        await asyncio.gather(*(read(server.stream("abcdefghijklm", max_tokens=5)) for _ in range(SLOTS + 2)))
        await server.until_ended(SLOTS + 2)
        steps, requests = await tables(server)
    worked = [batch for batch in runner.batches if batch.num_tokens]
    recorded = [step for step in steps if step["num_tokens"]]
    names = ("num_rows", "num_tokens", "num_padding_tokens", "num_prefill_tokens", "num_prefill_pairs")
    names += ("num_decode_rows", "num_decode_pairs")
    assert [[step[name] for name in names] for step in recorded] == [
        [getattr(batch, name) for name in names] for batch in worked
    ]
    assert sum(step["num_decode_rows"] for step in steps) == (SLOTS + 2) * 4
    assert began < steps[0]["start_time"]
    for step, after in itertools.pairwise(steps):
        assert step["start_time"] + step["run_seconds"] <= step["end_time"] <= after["start_time"]
    assert steps[-1]["end_time"] < time.monotonic()
    assert [request["outcome"] for request in requests] == ["length"] * (SLOTS + 2)
    for request in requests:
        times = [request[f"{name}_time"] for name in ("arrival", "scheduled", "first_token", "finished")]
        assert times == sorted(times)
        assert (request["num_prompt_tokens"], request["num_generated_tokens"]) == (14, 5)


async def test_running_requests_are_recorded_and_no_text_is() -> None:
    go_on = threading.Event()

    def before_run(batch: ScheduledBatch) -> None:
        if len(runner.batches) > 5:
            go_on.wait()

    runner = FakeRunner(SLOTS, before_run=before_run)
    async with running(runner=runner, trust=True, **ON) as server:
        try:
            call = await read_accepted(server.stream("secret", request_id="mine", max_tokens=50))
            await eventually(lambda: server.metric("generation_tokens_total", model_name=MODEL) == 5)
            _, (request,) = await tables(server)
            _, _, body = await get(server)
            call.cancel()
            await server.until_handled("GenerateStream", "CANCELLED")
        finally:
            go_on.set()
        await server.until_ended(1)
        _, (cancelled,) = await tables(server)
    assert request["request_id"] == "mine"
    assert request["outcome"] is None
    assert request["finished_time"] is None
    assert request["arrival_time"] < request["first_token_time"]
    assert request["num_generated_tokens"] == 5
    assert (cancelled["request_id"], cancelled["outcome"]) == ("mine", "cancelled")
    assert b"secret" not in body


async def test_trace_file_shows_every_step_and_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [served_model("one"), served_model("two")]
    runners = {model.name: FakeRunner(SLOTS) for model in models}
    engines = {model.name: engine_for(model, runners[model.name]) for model in models}
    async with running(models, engines, trust=True, **ON) as server:
        names = [model.name for model in models] * SLOTS
        await asyncio.gather(*(read(server.stream("abcdefghijklm", model=name, max_tokens=9)) for name in names))
        for name in runners:
            await server.until_ended(SLOTS, name)
        status = await trace(server, tmp_path / "t.json")
    assert status == 0
    drawn = json.loads((tmp_path / "t.json").read_text())
    check_trace(drawn)
    for pid, runner in enumerate(runners.values(), start=1):
        runs = [name for name, _, _ in slices(drawn, pid) if name not in ("host", "sample")]
        assert len(runs) == len(runner.batches)
    begun = [event for event in drawn["traceEvents"] if event["ph"] == "b" and event["name"].startswith("request ")]
    assert [event["args"]["outcome"] for event in begun] == ["length"] * 2 * SLOTS
    assert f"and {2 * SLOTS} requests of one, two" in capsys.readouterr().out
    assert abs(drawn["otherData"]["unix_time_of_ts_0"] - time.time()) < 600


async def test_recorder_that_is_off_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(recorder_steps=0, **ON) as server:
        await server.generation.Generate(generate_request(max_tokens=2))
        status, _, _ = await get(server)
        failed = await trace(server, tmp_path / "t.json")
        # An answer's headers are its own: the length of the one before would cut this one's reader off.
        refused, _, _ = await get(server, method="POST")
    assert (status, failed, refused) == (404, 1, 405)
    assert "nothing is recorded: the server runs with --recorder-steps 0" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


async def test_trace_without_a_metrics_server_fails_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "t.json")]
    with socket.socket() as silent:  # bound, not listening
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        assert await asyncio.to_thread(main, ["trace", "--metrics-target", f"127.0.0.1:{port}", *out]) == 1
    assert f"no trace from 127.0.0.1:{port}" in capsys.readouterr().err
    async with running(**ON) as server:
        # The port for calls, which speaks HTTP/2.
        assert (
            await asyncio.to_thread(main, ["trace", "--metrics-target", f"127.0.0.1:{server.endpoint.port}", *out]) == 1
        )
        assert "no trace from" in capsys.readouterr().err
        unwritable = tmp_path / "nowhere" / "t.json"
        assert await trace(server, unwritable) == 1
        assert str(unwritable) in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


async def test_failed_step_leaves_the_last_steps_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fail = threading.Event()

    def before_run(batch: ScheduledBatch) -> None:
        if fail.is_set():
            fail.clear()
            raise RuntimeError("no more")

    async with running(runner=FakeRunner(SLOTS, before_run=before_run), trust=True, **ON) as server:
        await server.generation.Generate(generate_request(max_tokens=4))
        fail.set()
        error = await status_of(server.stream())
        await server.generation.Generate(generate_request(max_tokens=4))
        steps, requests = await tables(server)
    error_id = str(error.details()).removeprefix("internal error ")
    (entry,) = [entry.getMessage() for entry in caplog.records if entry.name == "service.telemetry.recorder"]
    first, *lines = entry.splitlines()
    assert first == f"{error_id}: the last steps of {MODEL}"
    assert len(lines) == 5
    assert ": failed, " in lines[-1]
    assert [step["error_id"] for step in steps] == [None] * 4 + [error_id] + [None] * 4
    assert [request["outcome"] for request in requests] == ["length", "engine_failed", "length"]


async def test_death_of_the_engine_leaves_the_last_steps_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    die = threading.Event()

    def before_run(batch: ScheduledBatch) -> None:
        if die.is_set():
            raise Death

    models = [served_model(context=100_000)]
    engines = {MODEL: engine_for(models[0], FakeRunner(SLOTS, before_run=before_run))}
    async with running(models, engines, trust=True, **ON) as server:
        call = await read_accepted(server.stream(max_tokens=60_000))
        await eventually(lambda: server.metric("generation_tokens_total", model_name=MODEL) > 30)
        die.set()
        error = await status_of(call)
        steps, requests = await tables(server)
    assert error.code() is grpc.StatusCode.INTERNAL
    (entry,) = [entry.getMessage() for entry in caplog.records if entry.name == "service.telemetry.recorder"]
    assert len(entry.splitlines()) == 1 + 16
    assert len(steps) > 30
    assert [request["outcome"] for request in requests] == ["engine_failed"]
