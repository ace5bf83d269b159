"""Deadlines over real gRPC on fake models: which one counts, refusals, and `partial_on_deadline`."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from onward.v1 import generation_pb2 as pb
from service.app import App
from service.config import Admission
from service.engine.engine import Engine
from service.engine.scheduler import EngineLimits
from service.engine.types import FinishReason, GenerationRequest
from service.forecasting.deadline_margin import deadline_margin
from service.forecasting.prediction import Prediction
from service.repository.loading import build_engines
from tests.fakes import FakeRunner, Gate, expected_tokens
from tests.scripted import ScriptedEngine, Steps, token
from tests.servers import (
    CONFIG,
    MODEL,
    PROMPT,
    SLOTS,
    Running,
    engine_for,
    generate_request,
    kinds,
    read,
    read_accepted,
    rich_details,
    running,
    served_model,
    status_of,
    stream_request,
    tokens_of,
)

HOUR = 3600.0
MINUTE = 60.0


def at_once(_: GenerationRequest) -> Steps:
    return [[token(5, 0, FinishReason.LENGTH)]]


@pytest.mark.parametrize(
    ("timeout_seconds", "call_timeout", "counts"),
    [(100.0, 50.0, 50.0), (50.0, 100.0, 50.0), (None, 50.0, 50.0), (50.0, None, 50.0), (None, None, None)],
)
async def test_earlier_of_both_deadlines_counts(
    timeout_seconds: float | None, call_timeout: float | None, counts: float | None
) -> None:
    engine = ScriptedEngine(at_once)
    async with running(engines={MODEL: engine}, trust=True) as server:
        fields = {} if timeout_seconds is None else {"timeout_seconds": timeout_seconds}
        await server.generation.Generate(generate_request(**fields), timeout=call_timeout)
        await read(server.generation.GenerateStream(stream_request(**fields), timeout=call_timeout))
        score = pb.ScoreRequest(text="ab", model=MODEL)
        await status_of(server.generation.Score(score, timeout=call_timeout))
    for asked in engine.requests[:2]:
        left = None if asked.deadline is None else asked.deadline - asked.arrival_time
        # gRPC may round a timeout up by a hundredth; what the way took is gone.
        assert (left is None) == (counts is None)
        assert left is None or counts is None or 0.6 * counts < left <= 1.011 * counts
    assert (engine.requests[2].deadline is None) == (call_timeout is None)


def predicts(server: Running, monkeypatch: pytest.MonkeyPatch, prediction: Callable[[GenerationRequest], Any]) -> None:
    predictor = server.app.models.find(MODEL).queue.predictor
    for name in ("predict", "predict_alone"):
        monkeypatch.setattr(predictor, name, lambda one, cached_tokens=0: prediction(one))


@pytest.mark.parametrize(("prefill", "retries"), [(50.0, True), (200.0, False)])
async def test_unreachable_deadline_is_refused_at_once_with_numbers_and_a_retry_delay_if_that_helps(
    monkeypatch: pytest.MonkeyPatch, prefill: float, retries: bool
) -> None:
    engine = ScriptedEngine(at_once)
    prediction = Prediction(queue_seconds=70.0, prefill_seconds=prefill, decode_seconds=1.0)
    async with running(engines={MODEL: engine}, trust=True) as server:
        predicts(server, monkeypatch, lambda _: prediction)
        began = time.monotonic()
        request = generate_request(timeout_seconds=100.0, max_tokens=4, ignore_eos=True)
        unary = await status_of(server.generation.Generate(request))
        stream = await status_of(server.stream(timeout_seconds=100.0))
        score = await status_of(server.generation.Score(pb.ScoreRequest(text="ab", model=MODEL), timeout=100.0))
        partial = await status_of(server.stream(timeout_seconds=100.0, partial_on_deadline=True))
        assert await server.until_ended(4) == {"deadline_unreachable": 4}
        passed = time.monotonic() - began
        handled = {"grpc_method": "GenerateStream", "grpc_code": "RESOURCE_EXHAUSTED"}
        assert server.metric("grpc_server_handled_total", **handled) == 2
    assert engine.requests == []
    # gRPC may round 100 s up to 101; of them the allowance for rounding and transit goes, and what has passed since.
    most = 101.0 - deadline_margin(101.0)
    least = 100.0 - deadline_margin(100.0) - passed
    for error in (unary, stream, score, partial):
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        details = rich_details(error)
        assert details[0].Unpack(info)
        assert info.reason == "DEADLINE_UNREACHABLE"
        # Rounded to a thousandth.
        assert least - 0.001 <= float(info.metadata["left_seconds"]) <= most + 0.001
        assert len(details) == 1 + retries
        if retries:
            assert details[1].Unpack(retry)
            # Queue and prefill come to 120 s; an answer of tokens is decoded for a second besides.
            assert 120.0 - most - 0.001 <= retry.retry_delay.ToSeconds() <= 121.0 - least + 0.001
    assert "queue 70.000, prefill 50.000, decode 1.000" in str(unary.details()) or not retries


async def test_deadlines_only_cancel_where_admission_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction = Prediction(queue_seconds=1e6, prefill_seconds=0.0, decode_seconds=0.0)
    async with running(engines={MODEL: ScriptedEngine(at_once)}, trust=True, admission=Admission.OFF) as server:
        predicts(server, monkeypatch, lambda _: prediction)
        assert kinds(await read(server.stream(timeout_seconds=100.0)))[-1] == "summary"


async def test_waiting_request_that_can_no_longer_meet_its_deadline_leaves_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, model, has_passed = Gate(), served_model(), threading.Event()
    runner = FakeRunner(SLOTS, before_run=gate)
    engine = engine_for(model, runner, clock=lambda: time.monotonic() + 8 * MINUTE * has_passed.is_set())
    async with running([model], {MODEL: engine}) as server:

        def predict(one: GenerationRequest) -> Prediction:
            """As much as is left of its time but for the way, and for five minutes in which it may begin."""
            assert one.deadline is not None
            on_the_way = deadline_margin(one.deadline - one.arrival_time)
            needed = one.deadline - time.monotonic() - on_the_way - 5 * MINUTE
            return Prediction(queue_seconds=0.0, prefill_seconds=needed, decode_seconds=0.0)

        predicts(server, monkeypatch, predict)
        with gate.closed():
            ahead = [await read_accepted(server.stream()) for _ in range(SLOTS)]
            late = await read_accepted(server.stream(timeout_seconds=HOUR))
            # To the engine, which waits at the gate, eight minutes have passed when it takes the next step.
            has_passed.set()
        error = await status_of(late)
        for call in ahead:
            assert kinds(await read(call))[-1] == "summary"
        assert await server.until_ended(SLOTS + 1) == {"length": SLOTS, "deadline": 1}
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert str(error.details()).startswith("waited until the deadline, 3")


def by_the_minute() -> Callable[[], float]:
    """A clock that goes on by a minute whenever it is looked at."""
    started, ticks = time.monotonic(), itertools.count()
    return lambda: started + MINUTE * next(ticks)


async def test_partial_on_deadline_returns_the_tokens_so_far() -> None:
    model, outputs = served_model(context=512), 2
    fields: dict[str, Any] = {
        "max_tokens": 500,
        "timeout_seconds": 2 * HOUR,
        "partial_on_deadline": True,
        "sampling": pb.SamplingParams(temperature=0.0, n=outputs),
    }
    async with running([model], {MODEL: engine_for(model, clock=by_the_minute())}) as server:
        events = await read(server.stream(**fields))
    async with running([model], {MODEL: engine_for(model, clock=by_the_minute())}) as server:
        answer = await server.generation.Generate(generate_request(**fields))
        assert await server.until_ended(1) == {"deadline": 1}
    assert kinds(events)[-1] == "summary"
    ends = [event.finished for event in events if event.HasField("finished")]
    assert {end.finish_reason for end in ends} == {pb.FINISH_REASON_DEADLINE}
    assert len(ends) == len(answer.outputs) == outputs
    for output in answer.outputs:
        assert output.finish_reason == pb.FINISH_REASON_DEADLINE
        assert 2 < len(output.token_ids) < 500
        assert list(output.token_ids) == expected_tokens(PROMPT, len(output.token_ids))
    # Less than a step of it was left: what a step takes, on this clock, was learned from the steps before.
    assert 2 * HOUR - 6 * MINUTE < answer.timings.total < 2 * HOUR - 72.0
    assert events[-1].summary.usage.generated_tokens == len(tokens_of(events))


async def test_partial_on_deadline_returns_a_searchs_best_so_far() -> None:
    model = served_model(context=512)
    async with running([model], {MODEL: engine_for(model, clock=by_the_minute())}) as server:
        answer = await server.generation.Generate(
            generate_request(
                max_tokens=500,
                timeout_seconds=HOUR,
                partial_on_deadline=True,
                sampling=None,
                beam_search=pb.BeamSearchParams(beam_size=3, num_hypotheses=2),
            )
        )
    assert [output.finish_reason for output in answer.outputs] == [pb.FINISH_REASON_DEADLINE] * 2
    assert len({len(output.token_ids) for output in answer.outputs}) == 1
    assert answer.outputs[0].score >= answer.outputs[1].score
    assert len(answer.outputs[0].token_ids) > 2


async def test_partial_on_deadline_returns_nothing_if_it_was_never_scheduled() -> None:
    gate = Gate()
    async with running(runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            ahead = [await read_accepted(server.stream()) for _ in range(SLOTS)]
            late = await read_accepted(server.stream(timeout_seconds=1e-6, partial_on_deadline=True))
        events = await read(late)
        for call in ahead:
            await read(call)
    assert kinds(events) == ["finished", "summary"]
    assert events[0].finished.finish_reason == pb.FINISH_REASON_DEADLINE
    assert events[1].summary.usage.generated_tokens == 0


async def test_partial_on_deadline_can_be_canceled() -> None:
    def endless(_: GenerationRequest) -> Steps:
        return [[token(5, 0)] for _ in range(20_000)]

    engine = ScriptedEngine(endless, before_step=lambda: time.sleep(0.002))
    async with running(engines={MODEL: engine}, trust=True) as server:
        call = await read_accepted(server.stream(timeout_seconds=HOUR, partial_on_deadline=True))
        await call.read()
        call.cancel()
        assert await server.until_ended(1) == {"cancelled": 1}


@pytest.mark.parametrize(("admission", "overtakes"), [(Admission.DEADLINE, True), (Admission.OFF, False)])
async def test_early_deadlines_overtake_in_engine_and_prediction_alike_where_admission_is_by_deadline(
    admission: Admission, overtakes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[EngineLimits] = []

    def build(*arguments: Any) -> Engine:
        given.extend(each for each in arguments if isinstance(each, EngineLimits))
        return engine_for(served_model())

    monkeypatch.setattr("service.repository.loading.build_engine", build)
    config = replace(CONFIG, admission=admission)
    engines = build_engines(Path(), [served_model()], config)
    app = App(config, [served_model()], engines)
    (limits,) = given
    assert (limits.patience_seconds is not None) == overtakes
    assert app.models.find(MODEL).queue.predictor._patience == limits.patience_seconds
