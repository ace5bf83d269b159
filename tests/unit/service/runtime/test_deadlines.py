"""Deadlines between event loop and engine: who is refused, and by when a request must begin or end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from service.engine.types import (
    FinishReason,
    GenerationRequest,
)
from service.errors import DeadlineUnreachable
from service.forecasting.prediction import Prediction
from service.runtime.async_engine import AsyncEngine
from tests.fakes import FakeRunner, Gate, expected_tokens, request
from tests.scripted import ScriptedEngine, token
from tests.unit.service.runtime.started import MODEL, queue, run, started, tokens

NOW = 5_416.7188903
"""A clock's time at which 0.61 seconds before a deadline are 0.6099999 as a difference of floats."""


def predicts(monkeypatch: pytest.MonkeyPatch, engine: AsyncEngine, seconds: float) -> list[GenerationRequest]:
    """Has every request foretold to take so long, all of it prefill; the requests that were asked about."""
    asked: list[GenerationRequest] = []

    def predict(one: GenerationRequest, cached_tokens: int = 0) -> Prediction:
        asked.append(one)
        return Prediction(queue_seconds=0.0, prefill_seconds=seconds, decode_seconds=0.0)

    predictor = queue(engine).predictor
    monkeypatch.setattr(predictor, "predict", predict)
    monkeypatch.setattr(predictor, "predict_alone", predict)
    return asked


def due_in(seconds: float, name: str = "a", now: float | None = None, **fields: Any) -> GenerationRequest:
    now = time.monotonic() if now is None else now
    return replace(request(name), arrival_time=now, deadline=now + seconds, **fields)


async def test_request_that_would_miss_its_deadline_is_refused_before_the_engine_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = CollectorRegistry()
    scripted = ScriptedEngine(lambda _: [[token(5, 0, FinishReason.LENGTH)]], clock=lambda: NOW)
    async with started(registry=registry, admits_by_deadline=True, clock=lambda: NOW, **{MODEL: scripted}) as engine:
        predicts(monkeypatch, engine, 3600.0)
        with pytest.raises(DeadlineUnreachable) as refusal:
            await run(engine, due_in(60.0, now=NOW))
        assert engine.num_streams == 0
        assert tokens(await run(engine, replace(request("b")))) == [5], "without a deadline nobody is judged"
    assert refusal.value.prefill_seconds == 3600.0
    # Less gRPC's rounding of a minute, and the way.
    assert refusal.value.left_seconds == pytest.approx(60.0 - 0.61, rel=0, abs=1e-9)
    assert [each.request_id for each in scripted.requests] == ["b"]
    labels = {"model_name": MODEL, "finish_reason": "deadline_unreachable"}
    assert registry.get_sample_value("onward_requests_total", labels) == 1


async def test_nobody_is_refused_for_a_deadline_where_admission_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started() as engine:
        asked = predicts(monkeypatch, engine, 3600.0)
        assert tokens(await run(engine, due_in(60.0))) == expected_tokens((5,), 4)
    assert asked == []


async def test_request_that_takes_what_there_is_ends_early_enough_to_reach_the_client() -> None:
    scripted = ScriptedEngine(lambda _: [[token(5, 0, FinishReason.DEADLINE)]], clock=lambda: NOW)
    async with started(clock=lambda: NOW, **{MODEL: scripted}) as engine:
        await run(engine, due_in(60.0, now=NOW, partial_on_deadline=True))
        engine._delays.append(5.0)
        await run(engine, due_in(60.0, now=NOW, partial_on_deadline=True))
        await run(engine, due_in(60.0, now=NOW))
    quick, slow, whole = scripted.requests
    # gRPC's rounding of a minute, and the way; then what it took to hand a step's events out.
    assert quick.end_by == pytest.approx(NOW + 60.0 - 0.61, rel=0, abs=1e-9)
    assert slow.end_by == pytest.approx(NOW + 60.0 - 5.61, rel=0, abs=1e-9)
    assert whole.end_by is None


async def test_only_who_has_the_model_to_itself_is_alone(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    async with started(FakeRunner(before_run=gate), admits_by_deadline=True) as engine:
        predicts(monkeypatch, engine, 1.0)
        alone = asyncio.create_task(run(engine, due_in(60.0, "first")))
        await gate.until_entered()
        with engine.admit(MODEL, "second") as place:
            place.submit(due_in(60.0, "second"))
            first, second = (engine._streams[name].request for name in ("first", "second"))
            assert first is not None
            assert second is not None
            assert first.start_by is None
            assert second.start_by is not None
        gate.open.set()
        await alone


async def test_what_became_of_a_request_is_learned_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[float, list[FinishReason]]] = []
    async with started(admits_by_deadline=True) as engine:
        predicts(monkeypatch, engine, 2.0)
        predictor, admission = queue(engine).predictor, queue(engine).admission
        monkeypatch.setattr(predictor, "likely_tokens", lambda _: 4)
        monkeypatch.setattr(
            admission, "ended", lambda prediction, _, reasons: ended.append((prediction.finish_seconds, list(reasons)))
        )
        await run(engine, due_in(60.0))
        await run(engine, request("b"))
        monkeypatch.undo()
        for number in range(8):
            await run(engine, request(f"c{number}", max_tokens=6))
        assert predictor.likely_tokens(replace(request("d", max_tokens=50), arrival_time=time.monotonic())) == 6
    assert ended == [(2.0, [FinishReason.LENGTH])]
