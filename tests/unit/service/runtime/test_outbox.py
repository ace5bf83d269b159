"""What the engine thread reports, and when: at once, or several steps together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from service.engine.interfaces import EngineHandle
from service.engine.types import (
    FinishReason,
    GenerationRequest,
    RequestTimings,
    StepOutput,
    TokenEvent,
)
from service.runtime.async_engine import AsyncEngine
from service.runtime.engine_thread import EngineThread
from service.runtime.model_queue import QueueLimits
from service.runtime.outbox import GATHER_SECONDS, Outbox
from service.runtime.stream import _EVENTS_GATHERED
from tests.fakes import FakeRunner, Gate, expected_tokens, fake_engine, request
from tests.unit.service.runtime.started import ENDLESS, MODEL, QUEUE, SLOTS, make_engine, queue, started, tokens

FOREVER = 3600.0
TIMINGS = RequestTimings(arrival_time=0.0, scheduled_time=0.0, first_token_time=0.0, finished_time=1.0)


def outbox() -> tuple[Outbox, list[Callable[[], None]]]:
    posted: list[Callable[[], None]] = []
    return Outbox(posted.append), posted


def test_outbox_wakes_the_loop_once_for_all_that_waits_and_keeps_the_order() -> None:
    box, posted = outbox()
    told: list[int] = []
    for number in range(1000):
        box.send(told.append, number)
    assert len(posted) == 1
    posted.pop()()
    assert told == list(range(1000))
    box.send(told.append, 1000)
    assert len(posted) == 1


def test_outbox_what_is_sent_during_a_delivery_comes_with_the_next() -> None:
    box, posted = outbox()
    told: list[int] = []

    def again(number: int) -> None:
        told.append(number)
        if number < 3:
            box.send(again, number + 1)

    box.send(again, 0)
    for number in range(4):
        posted.pop()()
        assert told == list(range(number + 1))
    assert not posted


def test_outbox_a_callback_at_fault_keeps_nothing_from_those_behind_it() -> None:
    box, posted = outbox()
    told: list[int] = []
    box.send(lambda: 1 / 0)
    box.send(told.append, 1)
    with pytest.raises(ZeroDivisionError):
        posted.pop()()
    posted.pop()()
    assert told == [1]


def test_outbox_what_is_left_goes_with_the_next_that_is_sent_in_order() -> None:
    box, posted = outbox()
    told: list[int] = []
    for number in range(3):
        box.leave(100.0, told.append, number)
    assert not posted
    box.send(told.append, 3)
    assert len(posted) == 1
    posted.pop()()
    assert told == [0, 1, 2, 3]
    box.flush()
    assert not posted, "nothing is left"


def test_outbox_what_is_left_waits_no_longer_than_a_moment() -> None:
    box, posted = outbox()
    told: list[int] = []
    box.leave(100.0, told.append, 0)
    box.leave(100.0 + 0.9 * GATHER_SECONDS, told.append, 1)
    assert not posted
    box.leave(100.0 + 1.1 * GATHER_SECONDS, told.append, 2)
    posted.pop()()
    assert told == [0, 1, 2]
    box.leave(200.0, told.append, 3)
    assert not posted, "the next moment begins with what is left then"
    box.flush()
    posted.pop()()
    assert told == [0, 1, 2, 3]


class Deliveries(AsyncEngine):
    """Counts how often the event loop is told of steps, and of how many."""

    def start(self) -> None:
        super().start()
        outbox = self._running._outbox
        deliver, self.sizes = outbox._deliver, list[int]()

        def counted() -> None:
            self.sizes.append(len(outbox._calls))
            deliver()

        outbox._deliver = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_of_a_request_that_is_not_streamed_single_steps_are_not_told(
    monkeypatch: pytest.MonkeyPatch, *, is_streamed: bool
) -> None:
    # However slow this machine is, no moment is over before the request is.
    for module in ("outbox", "engine_thread"):
        monkeypatch.setattr(f"service.runtime.{module}.GATHER_SECONDS", FOREVER)
    gate = Gate()
    fakes = {MODEL: fake_engine(FakeRunner(before_run=gate), context=ENDLESS + 1)}
    limits = QueueLimits(max_batch_size=SLOTS, max_queue_size=QUEUE)
    engine = cast(Deliveries, make_engine(fakes, limits, kind=Deliveries))
    engine.start()
    try:
        with engine.admit(MODEL, "a") as place, gate.closed():
            place.submit(request("a", max_tokens=100), is_streamed=is_streamed)
            batches = place.events()
            await gate.until_entered()
            gate.open.set()
            told = [events async for events in batches]
        assert tokens(told) == expected_tokens((5,), 100)
        if not is_streamed:
            # The last step brings all before it along; the consumer takes them as one batch.
            assert (engine.sizes, len(told)) == ([100], 1)
    finally:
        await engine.stop()


@pytest.mark.parametrize("how", ["finished", "cancelled", "refused", "failed", "removed", "parked"])
async def test_requests_that_are_not_streamed_are_forgotten_however_they_end(gate: Gate, how: str) -> None:
    gate.open.set()
    runner = FakeRunner(before_run=gate)
    async with started(runner) as engine:

        async def ask(name: str, asked: GenerationRequest) -> None:
            with engine.admit(MODEL, name) as place:
                place.submit(asked, is_streamed=False)
                assert [events async for events in place.events()]

        await ask("before", request("before", max_tokens=3))
        gate.open.clear()
        ahead = asyncio.create_task(ask("ahead", request("ahead", max_tokens=3)))
        await gate.until_entered()
        calls = [engine.call(queue(engine).engine, lambda _: None, FOREVER)] if how == "parked" else []
        called = asyncio.gather(*calls)
        await asyncio.sleep(0)
        if how == "refused":
            # A context is too short for it, which the engine alone knows here.
            task = asyncio.create_task(ask("a", request("a", range(3, ENDLESS + 5), max_tokens=3)))
        else:
            task = asyncio.create_task(ask("a", request("a", max_tokens=3)))
        await asyncio.sleep(0)
        if how in ("cancelled", "parked"):
            task.cancel()
            await asyncio.wait([task])
        if how == "failed":
            runner.poisoned_tokens = set(range(64))
        gone = asyncio.create_task(engine.remove(queue(engine), 0.0)) if how == "removed" else None
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.wait([task, ahead])
        await called
        if gone is not None:
            await (await gone)
        assert (task.exception() if not task.cancelled() else None) is None or how in ("refused", "failed", "removed")
        await engine.wait_idle()
        # The thread has told all that there is to tell once it has answered to this.
        await engine.do(lambda: None)
        assert engine._running._unstreamed == set()


async def test_a_step_that_fails_or_takes_long_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.runtime.engine_thread.GATHER_SECONDS", 1.0)
    told: list[tuple[EngineHandle, StepOutput]] = []

    class Ear:
        def step_done(self, engine: EngineHandle, output: StepOutput, now: float) -> None:
            told.append((engine, output))

    posted: list[Callable[[], None]] = []
    thread = EngineThread({}, cast(Any, Ear()), posted.append, {})
    thread._unstreamed.add("a")
    stats = fake_engine().step().stats
    quick = StepOutput((TokenEvent(request_id="a", token_id=5),), replace(stats, run_seconds=0.5))
    thread._report(EngineHandle(MODEL), quick)
    assert not posted
    for urgent in (
        replace(quick, stats=replace(stats, run_seconds=1.5)),
        replace(quick, error_id="broken"),
        replace(quick, events=(TokenEvent(request_id="b", token_id=5),)),
        replace(quick, events=(TokenEvent(request_id="a", finish_reason=FinishReason.LENGTH, timings=TIMINGS),)),
    ):
        thread._report(EngineHandle(MODEL), urgent)
        posted.pop()()
        assert told[-1][1] is urgent
    assert told[0][1] is quick
    assert not thread._unstreamed


@pytest.mark.parametrize(("is_streamed", "at_least"), [(True, 1), (False, _EVENTS_GATHERED)])
async def test_stream_wakes_its_consumer_when_enough_events_wait(is_streamed: bool, at_least: int) -> None:
    async with started() as engine:
        with engine.admit(MODEL, "a") as place:
            stream = place._stream
            stream.is_streamed = is_streamed
            taken = asyncio.create_task(stream.take())
            for number in range(at_least):
                await asyncio.sleep(0)
                assert not taken.done(), number
                stream.push(TokenEvent(request_id="a", token_id=number))
            assert len(await taken) == at_least
            ended = asyncio.create_task(stream.take())
            await asyncio.sleep(0)
            stream.push(TokenEvent(request_id="a", finish_reason=FinishReason.LENGTH, timings=TIMINGS))
            assert (await ended)[-1].is_terminal
