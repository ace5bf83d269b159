"""What is kept of a model whose engine is replaced or removed."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from service.engine.interfaces import EngineHandle
from service.engine.types import StepOutput
from service.runtime.engine_thread import EngineThread
from service.runtime.model_queue import QueueLimits
from tests.fakes import fake_costs, fake_engine, request
from tests.scripted import ScriptedEngine
from tests.unit.service.runtime.started import ENDLESS, MODEL, QUEUE, SLOTS, make_engine, queue, run, started


async def test_what_is_known_of_latency_and_deadlines_outlives_a_reload_unless_requests_cost_otherwise_since() -> None:
    async with started(admits_by_deadline=True) as engine:
        own = queue(engine)
        predictor, admission, other = own.predictor, own.admission, fake_engine(context=64)
        assert await run(engine, request("a"))
        engine.replace(own, fake_engine(context=ENDLESS + 1), predictor.costs)
        assert (own.predictor, own.admission) == (predictor, admission)
        engine.replace(own, other, fake_costs(other.chunk_rules))
        assert own.predictor is not predictor
        assert own.predictor.costs.config.context == 64
        assert own.admission is not None
        assert own.admission is not admission
        assert own.admission._predictor is own.predictor
        assert own.predictor._patience is not None
        unknown, calibrated = own.predictor, fake_engine(context=64)
        engine.replace(own, calibrated, fake_costs(other.chunk_rules), calibrated.calibrate(10.0))
        assert own.predictor is not unknown
        assert own.predictor.predict_alone(request("c", max_tokens=2)) is not None
        assert await run(engine, request("b"))


async def test_what_a_removed_engine_did_is_not_done_by_the_next_one_of_its_models_name() -> None:
    failing: list[str] = []
    limits = QueueLimits(max_batch_size=SLOTS, max_queue_size=QUEUE)
    engine = make_engine({MODEL: fake_engine()}, limits, failing=failing.append, num_recorded=4)
    engine.start()
    try:
        former = queue(engine).engine
        await (await engine.remove(queue(engine), 1.0))
        successor = fake_engine()
        engine._entries[MODEL].queue = engine.open(MODEL, successor, fake_costs(successor.chunk_rules))
        stats = replace(successor.step().stats, num_running=2, kv_usage_ratio=0.5)
        for _ in range(3):
            engine.step_done(former, StepOutput((), stats, "late"), 0.0)
        assert failing == []
        assert queue(engine).kv_usage_ratio == 0
        assert not engine.flight_log().models[MODEL].steps
        for _ in range(3):
            engine.step_done(queue(engine).engine, StepOutput((), stats, "its own"), 0.0)
        assert failing == [MODEL]
        assert queue(engine).kv_usage_ratio == 0.5
        assert len(engine.flight_log().models[MODEL].steps) == 3
    finally:
        await engine.stop()


def test_removed_engine_is_dropped_before_its_release_is_reported() -> None:
    """A client that is notified of the release may load another model into its memory."""
    handle, engine, reported = EngineHandle(MODEL), ScriptedEngine(lambda _: []), threading.Event()
    former, is_alive = weakref.ref(engine), []

    def released() -> None:
        is_alive.append(former() is not None)
        reported.set()

    listener = cast(Any, SimpleNamespace(ended=lambda error: None))
    thread = EngineThread({handle: engine}, listener, lambda callback: callback(), {})
    del engine
    thread.remove(handle, released)
    thread.start()
    assert reported.wait(60.0)
    thread.stop()
    assert is_alive == [False]


def test_removed_queue_leaves_its_memory_without_garbage_collection() -> None:
    engine = make_engine({MODEL: fake_engine()}, QueueLimits(max_batch_size=SLOTS, max_queue_size=QUEUE))
    former = weakref.ref(queue(engine))
    gc.disable()
    try:
        del engine._entries[MODEL]
        assert former() is None
    finally:
        gc.enable()


async def test_kv_usage_is_of_the_new_engines_memory_while_the_former_one_still_holds_some() -> None:
    def engine_of(num_bytes: int) -> Any:
        return SimpleNamespace(kv_memory_bytes=num_bytes, max_draft_tokens=0, chunk_rules=fake_engine().chunk_rules)

    costs = fake_costs(fake_engine().chunk_rules)
    engine = make_engine({MODEL: engine_of(1000)}, QueueLimits(max_batch_size=SLOTS, max_queue_size=QUEUE))
    own, stats = queue(engine), fake_engine().step().stats
    own.step_done(own.engine, StepOutput((), replace(stats, kv_usage_ratio=0.5)), 0.0)
    own.serve_by(engine_of(4000), costs)
    own.step_done(own.engine, StepOutput((), replace(stats, kv_usage_ratio=0.25)), 0.0)
    assert own.kv_usage_ratio == (500 + 1000) / 4000
