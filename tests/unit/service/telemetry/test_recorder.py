"""The flight recorder: what it keeps, what it forgets, what it logs when a step fails, and the phases of requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import asdict
from wsgiref.simple_server import demo_app
from wsgiref.util import setup_testing_defaults

import pytest

from service.engine.types import RequestTimings, StepOutput, StepStats
from service.telemetry.debug import encode, from_loop, with_debug
from service.telemetry.lifecycle import Phase, phases
from service.telemetry.metrics import RequestRecord
from service.telemetry.recorder import (
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    FlightLog,
    ModelRecorder,
    RecordedRequest,
    flight_log,
)
from service.telemetry.ring import Ring

MODELS = ("one", "two")


def recorders(models: Iterable[str], num_kept: int) -> dict[str, ModelRecorder]:
    return {model: ModelRecorder(model, num_kept) for model in models}


def taken(found: dict[str, ModelRecorder], **open_requests: RecordedRequest) -> FlightLog:
    return flight_log(
        {name: each.taken([open_requests[name]] if name in open_requests else []) for name, each in found.items()}
    )


def stats(number: int = 0) -> StepStats:
    return StepStats(
        start_time=float(number),
        num_rows=number,
        num_tokens=number,
        num_padding_tokens=0,
        run_seconds=0.25,
        host_seconds=None if number == 0 else 0.125,
        num_preemptions=0,
        num_running=1,
        num_waiting=2,
        kv_usage_ratio=0.5,
    )


def step(number: int, error_id: str | None = None) -> StepOutput:
    return StepOutput((), stats(number), error_id)


def record(
    outcome: str = "length", *, scheduled: float | None = 2.0, first: float | None = 3.0, finished: float = 5.0
) -> RequestRecord:
    return RequestRecord(
        outcome=outcome,
        timings=RequestTimings(
            arrival_time=1.0, scheduled_time=scheduled, first_token_time=first, finished_time=finished
        ),
        num_prompt_tokens=7,
        num_generated_tokens=3,
        num_longest_tokens=3,
        seconds_per_token=1.0,
    )


def open_request() -> RecordedRequest:
    return RecordedRequest(
        request_id="open",
        outcome=None,
        arrival_time=1.0,
        scheduled_time=None,
        first_token_time=None,
        finished_time=None,
        num_prompt_tokens=2,
        num_cached_tokens=None,
        num_generated_tokens=0,
    )


def test_last_steps_and_requests_of_each_model_are_kept() -> None:
    recorder = recorders(MODELS, 3)
    for number in range(5):
        recorder["one"].step_done(step(number), number + 0.5)
        recorder["one"].request_ended(f"r{number}", record(), 4)
    recorder["two"].step_done(step(9), 9.5)
    log = taken(recorder, two=open_request())
    one, two = log.models["one"], log.models["two"]
    assert [dict(zip(STEP_COLUMNS, row, strict=True)) for row in one.steps] == [
        {"end_time": number + 0.5, "error_id": None, **asdict(stats(number))} for number in (2, 3, 4)
    ]
    assert [row[0] for row in one.requests] == ["r2", "r3", "r4"]
    assert [row[STEP_COLUMNS.index("end_time")] for row in two.steps] == [9.5]
    assert len(two.requests) == 0
    assert two.open_requests == (open_request(),)


def test_recorder_that_keeps_nothing_accepts_everything() -> None:
    recorder = recorders(MODELS, 0)
    recorder["one"].step_done(step(1), 1.5)
    recorder["one"].request_ended("r", record(), 4)
    log = taken(recorder, one=open_request())
    kept = [(*model.steps, *model.requests, *model.open_requests) for model in log.models.values()]
    assert kept == [(), ()]


def test_memory_is_allocated_once() -> None:
    num_kept = 1000
    outputs = [step(number) for number in range(3 * num_kept)]
    ended = record()

    def fill(recorder: dict[str, ModelRecorder]) -> None:
        for number, output in enumerate(outputs):
            recorder["one"].step_done(output, number + 0.5)
            recorder["one"].request_ended(f"{number:032x}", ended, 4)

    # Fills the free list of tuples: the interpreter keeps up to 2000 of a length.
    fill(recorders(("one",), num_kept))
    tracemalloc.start()
    try:
        recorder = recorders(("one",), num_kept)
        begun, _ = tracemalloc.get_traced_memory()
        fill(recorder)
        filled, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    log = taken(recorder).models["one"]
    assert [row[STEP_COLUMNS.index("num_rows")] for row in log.steps] == list(range(2 * num_kept, 3 * num_kept))
    assert len(log.requests) == num_kept
    assert [row[0] for row in log.requests] == [f"{number:032x}" for number in range(2 * num_kept, 3 * num_kept)]
    # One number that is kept of each as an object would be ten times as much.
    assert filled - begun < 5000 < begun


def test_ring_has_the_last_rows_in_their_order() -> None:
    def name(number: int) -> str | None:
        """Every other row has one, some of them too long to be packed."""
        return f"r{number:>{50 if number in (1, 7, 11) else 4}}" if number % 2 else None

    rows = [(name(number), number, number / 8 if number % 3 else None) for number in range(23)]
    for num_added, count in itertools.product((0, 1, 4, 5, 6, 10, 11, 23), (None, 0, 1, 3, 5, 8)):
        ring = Ring(5, 1, ("int", "float | None"))
        for own, *numbers in rows[:num_added]:
            ring.append((own,), numbers)
        kept = rows[:num_added][-5:]
        wanted = kept if count is None else kept[len(kept) - min(count, len(kept)) :]
        taken = ring.last(count)
        assert (len(taken), list(taken)) == (len(wanted), wanted)
        # A copy: later rows do not change it.
        ring.append(("later",), (99, 0.5))
        assert list(taken) == wanted


def test_log_is_json_in_tables() -> None:
    recorder = recorders(MODELS, 200)
    for number in range(130):
        recorder["one"].step_done(step(number, "f00d" if number == 7 else None), number + 0.5)
    recorder["one"].request_ended('quo"ted', record(), 4)
    pieces = list(encode(taken(recorder)))
    log = json.loads(b"".join(pieces))
    assert log["format"] == 1
    assert log["unix_time"] > log["monotonic_time"] - 1e12
    steps, requests = log["models"]["one"]["steps"], log["models"]["one"]["requests"]
    assert log["models"]["two"] == {
        "steps": {"columns": list(STEP_COLUMNS), "rows": []},
        "requests": {"columns": list(REQUEST_COLUMNS), "rows": []},
    }
    rows = [dict(zip(steps["columns"], row, strict=True)) for row in steps["rows"]]
    assert [row["num_rows"] for row in rows] == list(range(130))
    assert [row["error_id"] for row in rows if row["error_id"]] == ["f00d"]
    assert rows[0]["host_seconds"] is None
    assert rows[1]["host_seconds"] == 0.125
    (row,) = requests["rows"]
    assert dict(zip(requests["columns"], row, strict=True)) == {
        "request_id": 'quo"ted',
        "outcome": "length",
        "arrival_time": 1.0,
        "scheduled_time": 2.0,
        "first_token_time": 3.0,
        "finished_time": 5.0,
        "num_prompt_tokens": 7,
        "num_cached_tokens": 4,
        "num_generated_tokens": 3,
    }


def test_long_log_is_encoded_in_many_small_pieces() -> None:
    recorder = recorders(("one",), 1000)
    for number in range(1000):
        recorder["one"].step_done(step(number), number + 0.5)
    sizes = [len(piece) for piece in encode(taken(recorder))]
    assert max(sizes) * 10 < sum(sizes)


def test_failed_step_is_logged_with_the_last_ones_before_it_once(caplog: pytest.LogCaptureFixture) -> None:
    recorder = recorders(MODELS, 100)
    with caplog.at_level(logging.ERROR):
        for number in range(1, 31):
            recorder["one"].step_done(step(number), number + 0.5)
        assert not caplog.records
        recorder["one"].step_done(step(31, "f00d"), 31.5)
        recorder["one"].step_done(step(32), 32.5)
        recorder["one"].step_done(step(33, "beef"), 33.5)
        for each in recorder.values():
            each.log("dead")
    first, second = [entry.getMessage().splitlines() for entry in caplog.records]
    assert first[0] == "f00d: the last steps of one"
    assert len(first) == 1 + 16
    assert first[1].startswith("-15.000000 s: run 250.000 ms, host 125.000 ms, rows 16,")
    assert first[-1].startswith("+0.000000 s: failed, host 125.000 ms, rows 31,")
    # An entry has only steps that no entry had before.
    assert second[0] == "beef: the last steps of one"
    assert [line.split(":")[0] for line in second[1:]] == ["-1.000000 s", "+0.000000 s"]


def test_engine_failure_logs_the_last_steps_of_every_model(caplog: pytest.LogCaptureFixture) -> None:
    recorder = recorders(MODELS, 100)
    recorder["one"].step_done(step(1), 1.5)
    recorder["two"].step_done(step(2), 2.5)
    with caplog.at_level(logging.ERROR):
        for each in recorder.values():
            each.log("dead")
    heads = [entry.getMessage().splitlines()[0] for entry in caplog.records]
    assert heads == ["dead: the last steps of one", "dead: the last steps of two"]


def timings(scheduled: float | None, first: float | None) -> RequestTimings:
    return RequestTimings(arrival_time=1.0, scheduled_time=scheduled, first_token_time=first, finished_time=5.0)


def test_phases_are_back_to_back_and_the_last_ends_with_the_request() -> None:
    queue, prefill, decode = Phase("queue", 1.0, 2.0), Phase("prefill", 2.0, 3.0), Phase("decode", 3.0, 5.0)
    assert phases(timings(2.0, 3.0), "stop") == (queue, prefill, decode)
    assert phases(timings(2.0, None), "cancelled") == (queue, Phase("prefill", 2.0, 5.0))
    assert phases(timings(None, None), "deadline") == (Phase("queue", 1.0, 5.0),)


@pytest.mark.parametrize("outcome", ["engine_failed", "not_serving"])
def test_no_phase_is_claimed_of_a_request_that_was_lost_with_its_engine(outcome: str) -> None:
    assert phases(timings(None, None), outcome) == ()
    assert len(phases(timings(2.0, 3.0), outcome)) == 3


def answer(take: Callable[[], FlightLog]) -> tuple[str, bytes]:
    """Status and body of `/debug/steps`."""
    environ: dict[str, object] = {}
    setup_testing_defaults(environ)
    environ["PATH_INFO"] = "/debug/steps"
    statuses: list[str] = []
    pieces = with_debug(demo_app, take, is_on=True)(
        environ, lambda status, headers, error=None: statuses.append(status)
    )
    body = b"".join(pieces)
    return statuses[0], body


async def test_log_is_taken_on_the_event_loop() -> None:
    recorder = recorders(("one",), 10)
    threads: list[threading.Thread] = []

    def take() -> FlightLog:
        threads.append(threading.current_thread())
        return taken(recorder)

    status, body = await asyncio.to_thread(answer, from_loop(asyncio.get_running_loop(), take))
    assert status == "200 OK"
    assert json.loads(body)["models"].keys() == {"one"}
    assert threads == [threading.current_thread()]


def test_event_loop_that_is_held_up_or_over_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.telemetry.debug._LOOP_SECONDS", 0.01)
    loop = asyncio.new_event_loop()
    take = from_loop(loop, lambda: taken(recorders((), 1)))
    for _ in range(2):
        assert answer(take) == ("503 Service Unavailable", b"the event loop does not answer\n")
        loop.close()
