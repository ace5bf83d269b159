"""Trace files: steps that took known times, drawn exactly; the rules of the format; one model beside another."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from service.commands.trace import trace_events
from service.engine.batch import ScheduledBatch
from service.engine.engine import LastRun
from service.engine.scheduler import EngineLimits
from service.engine.types import FinishReason, GenerationRequest, TokenEvent
from service.telemetry.debug import encode
from service.telemetry.metrics import RequestRecord
from service.telemetry.recorder import FlightLog, ModelLog, ModelRecorder, RecordedRequest
from tests.fakes import FakeRunner, fake_engine, request
from tests.trace_format import check_trace, counter, slices, spans

# Milliseconds of what each step does.
RUN, BETWEEN, SAMPLE = 3.0, 1.0, 0.5


class Thread:
    """Engines on one thread whose work takes known times: a clock that only they move, and a recorder of what they do.

    A run takes `RUN`, sampling and committing `SAMPLE`, and whatever comes between two steps `BETWEEN`.
    """

    def __init__(self, *models: str, num_kept: int = 100) -> None:
        self.now = 1000.0
        self.recorders = {model: ModelRecorder(model, num_kept) for model in models}
        self._is_failing = False
        self._requests: dict[str, GenerationRequest] = {}
        last_run = LastRun()
        limits = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=16)
        self.engines = {
            name: fake_engine(
                FakeRunner(4, before_run=self._run), limits=limits, last_run=last_run, clock=lambda: self.now
            )
            for name in models
        }

    def add(self, model: str, asked: GenerationRequest) -> None:
        self._requests[asked.request_id] = asked
        self.engines[model].add_request(asked)

    def step(self, model: str, *, fails: bool = False) -> None:
        self._is_failing = fails
        output = self.engines[model].step()
        self.wait(SAMPLE)
        self.recorders[model].step_done(output, self.now)
        for event in output.events:
            if event.timings is not None:
                record = _record(self._requests[event.request_id], event)
                self.recorders[model].request_ended(event.request_id, record, event.num_cached_tokens)
        self.wait(BETWEEN)

    def wait(self, milliseconds: float) -> None:
        self.now += milliseconds / 1e3

    def trace(self, open_requests: Sequence[tuple[str, RecordedRequest]] = ()) -> dict[str, Any]:
        models = {
            model: recorder.taken(each for name, each in open_requests if name == model)
            for model, recorder in self.recorders.items()
        }
        log = FlightLog(self.now, 5000.0, models)
        drawn = trace_events(json.loads(b"".join(encode(log))))
        check_trace(drawn)
        return drawn

    def _run(self, batch: ScheduledBatch) -> None:
        self.wait(RUN)
        if self._is_failing:
            raise RuntimeError("the machine room is on fire")


def _record(asked: GenerationRequest, event: TokenEvent) -> RequestRecord:
    assert event.timings is not None
    return RequestRecord(
        outcome=str(event.finish_reason or "engine_failed"),
        timings=event.timings,
        num_prompt_tokens=asked.num_prompt_tokens,
        num_generated_tokens=0,
        num_longest_tokens=0,
        seconds_per_token=None,
    )


def asked(request_id: str, num_prompt: int, max_tokens: int, thread: Thread) -> GenerationRequest:
    made = request(request_id, tuple(range(5, 5 + num_prompt)), max_tokens=max_tokens)
    return replace(made, arrival_time=thread.now)


def test_steps_are_drawn_as_they_were_host_run_and_sampling() -> None:
    thread = Thread("fake")
    thread.add("fake", asked("a", 20, 2, thread))
    for _ in range(3):
        thread.step("fake")
    drawn = thread.trace()
    # A chunk of 8 and one of 8, then the last 4 with the first token, then another token.
    assert slices(drawn) == [
        ("prefill", 0.0, 3.0), ("sample", 3.0, 0.5),
        ("host", 3.5, 1.0), ("prefill", 4.5, 3.0), ("sample", 7.5, 0.5),
        ("host", 8.0, 1.0), ("decode", 9.0, 3.0), ("sample", 12.0, 0.5),
    ]  # fmt: skip
    assert spans(drawn, "1.0") == [
        ("queue", 0.0, 0.0), ("prefill", 0.0, 7.5), ("decode", 7.5, 12.0), ("request a", 0.0, 12.0)
    ]  # fmt: skip


def test_numbers_of_a_step_go_with_its_run() -> None:
    thread = Thread("fake")
    thread.add("fake", asked("a", 5, 3, thread))
    thread.step("fake")
    thread.add("fake", asked("b", 3, 3, thread))
    thread.step("fake")
    runs = [event for event in thread.trace()["traceEvents"] if event["name"] in ("prefill", "prefill + decode")]
    runs = [event["args"] for event in runs if event["ph"] == "X"]
    assert [(run["num_prefill_tokens"], run["num_decode_rows"], run["num_rows"]) for run in runs] == [
        (5, 0, 1), (3, 1, 2)
    ]  # fmt: skip
    assert runs[1]["run_seconds"] == pytest.approx(RUN / 1e3)
    assert runs[1]["host_seconds"] == pytest.approx((SAMPLE + BETWEEN) / 1e3)


def test_counters_follow_the_steps_and_fall_to_zero_when_all_is_done() -> None:
    thread = Thread("fake")
    thread.add("fake", asked("a", 3, 2, thread))
    thread.add("fake", asked("b", 3, 2, thread))
    thread.step("fake")
    thread.step("fake")
    drawn = thread.trace()
    assert counter(drawn, "rows") == [
        (0.0, {"prefill": 2, "decode": 0}), (4.5, {"prefill": 0, "decode": 2}), (8.0, {"prefill": 0, "decode": 0})
    ]  # fmt: skip
    assert counter(drawn, "requests") == [(3.5, {"running": 2, "waiting": 0}), (8.0, {"running": 0, "waiting": 0})]
    assert [at for at, _ in counter(drawn, "KV use")] == [3.5, 8.0]
    assert counter(drawn, "padding tokens")[-1] == (8.0, {"tokens": 0})


def test_models_that_share_a_thread_have_tracks_of_their_own_that_do_not_overlap() -> None:
    thread = Thread("one", "two")
    thread.add("one", asked("a", 3, 3, thread))
    thread.add("two", asked("b", 3, 3, thread))
    for _ in range(3):
        thread.step("one")
        thread.step("two")
    drawn = thread.trace()
    names = {(event["pid"], event["args"]["name"]) for event in drawn["traceEvents"] if event["name"] == "process_name"}
    assert names == {(1, "one"), (2, "two")}
    # While the other model runs no graph stands still, and no host time is drawn.
    assert slices(drawn, 1)[2:5] == [("host", 7.5, 1.5), ("decode", 9.0, 3.0), ("sample", 12.0, 0.5)]
    assert slices(drawn, 2)[:2] == [("host", 3.0, 1.5), ("prefill", 4.5, 3.0)]
    assert spans(drawn, "1.0")[-1][0] == "request a"
    assert spans(drawn, "2.0")[-1][0] == "request b"


def test_failed_step_and_those_it_ended_are_seen() -> None:
    thread = Thread("fake")
    thread.add("fake", asked("a", 3, 5, thread))
    thread.step("fake")
    thread.step("fake", fails=True)
    drawn = thread.trace()
    failed = next(event for event in drawn["traceEvents"] if event["name"] == "failed")
    assert failed["ph"] == "X"
    assert failed["args"]["error_id"]
    begin = next(event for event in drawn["traceEvents"] if event["name"] == "request a")
    assert begin["args"]["outcome"] == "engine_failed"
    assert [name for name, _, _ in spans(drawn, "1.0")] == ["queue", "prefill", "decode", "request a"]


def test_pause_is_no_host_time() -> None:
    thread = Thread("fake")
    for name in "ab":
        thread.add("fake", asked(name, 3, 1, thread))
        thread.step("fake")
        thread.wait(500.0)
    assert [name for name, _, _ in slices(thread.trace())] == ["prefill", "sample"] * 2


def test_open_request_lasts_until_the_log_was_taken() -> None:
    thread = Thread("fake")
    thread.add("fake", asked("a", 3, 5, thread))
    thread.step("fake")
    opened = RecordedRequest(
        request_id="a",
        outcome=None,
        arrival_time=1000.0,
        scheduled_time=None,
        first_token_time=1000.0035,
        finished_time=None,
        num_prompt_tokens=3,
        num_cached_tokens=None,
        num_generated_tokens=1,
    )
    drawn = thread.trace([("fake", opened)])
    assert spans(drawn, "1.0") == [("request a", 0.0, 4.5)]
    first = next(event for event in drawn["traceEvents"] if event["name"] == "first token")
    assert first["ts"] == pytest.approx(3500.0)


def test_host_time_of_the_oldest_step_is_where_the_file_begins() -> None:
    thread = Thread("fake", num_kept=1)
    thread.add("fake", asked("a", 3, 5, thread))
    thread.step("fake")
    thread.step("fake")
    assert slices(thread.trace()) == [("host", 0.0, 1.5), ("decode", 1.5, 3.0), ("sample", 4.5, 0.5)]


def test_times_count_from_the_first_event_with_its_wall_clock() -> None:
    thread = Thread("fake")
    thread.add("fake", asked("a", 3, 1, thread))
    thread.wait(20.0)
    thread.step("fake")
    drawn = thread.trace()
    assert spans(drawn, "1.0")[0] == ("queue", 0.0, 20.0)
    # The log was taken 24.5 ms after the first event.
    assert drawn["otherData"]["unix_time_of_ts_0"] == pytest.approx(5000.0 - 0.0245)


def test_server_that_did_nothing_yet_has_an_empty_trace() -> None:
    log = FlightLog(5.0, 6.0, {"fake": ModelLog((), ())})
    drawn = trace_events(json.loads(b"".join(encode(log))))
    check_trace(drawn)
    assert {event["ph"] for event in drawn["traceEvents"]} == {"M"}


@pytest.mark.parametrize("seed", range(3))
def test_crowd_that_comes_and_goes_keeps_the_rules(seed: int) -> None:
    draw = random.Random(seed)
    thread = Thread("one", "two", num_kept=40)
    for number in range(60):
        model = draw.choice(("one", "two"))
        thread.add(model, asked(f"r{number}", draw.randint(1, 30), draw.randint(1, 6), thread))
        if draw.random() < 0.2:
            thread.engines[model].abort(f"r{number}")
        for _ in range(draw.randint(0, 4)):
            name = draw.choice(("one", "two"))
            if thread.engines[name].has_work:
                thread.step(name, fails=draw.random() < 0.1)
    drawn = thread.trace()
    assert drawn["otherData"]["steps"] <= 80
    outcomes = {
        event["args"]["outcome"]
        for event in drawn["traceEvents"]
        if event["ph"] == "b" and event["name"].startswith("request")
    }
    assert outcomes >= {str(FinishReason.LENGTH), "engine_failed"}
