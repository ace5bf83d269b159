"""The bridge between event loop and engine thread: admission, streams, abort, calls, the end. No sockets."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from service.engine.batch import ScheduledBatch
from service.engine.sessions.cuda_provider import DeviceLost
from service.engine.step_engine import EngineHandle, StepEngine
from service.engine.types import (
    FinishReason,
    GenerationRequest,
    RequestTimings,
    SamplingParams,
    StepOutput,
    TokenEvent,
)
from service.errors import DeadlineUnreachable, EngineFailed, InvalidRequest, NotServing, Overloaded
from service.forecasting.prediction import Prediction
from service.runtime.async_engine import AsyncEngine
from service.runtime.engine_thread import EngineThread
from service.runtime.model_queue import ModelQueue, QueueLimits
from service.runtime.outbox import GATHER_SECONDS, Outbox
from service.runtime.stream import _EVENTS_GATHERED
from service.telemetry.metrics import Metrics
from tests.fakes import Death, FakeRunner, Gate, expected_tokens, fake_costs, fake_engine, request
from tests.scripted import ScriptedEngine, token

MODEL = "fake"
SLOTS, QUEUE = 4, 2
ENDLESS = 60_000
FOREVER = 3600.0
TIMINGS = RequestTimings(arrival_time=0.0, scheduled_time=0.0, first_token_time=0.0, finished_time=1.0)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate that is closed, but not for ever."""
    gate = Gate()
    with gate.closed():
        yield gate


def make_engine(
    engines: Mapping[str, StepEngine],
    limits: QueueLimits,
    registry: CollectorRegistry | None = None,
    kind: type[AsyncEngine] = AsyncEngine,
    **options: Any,
) -> AsyncEngine:
    """Engines with their entries, not started."""
    entries: dict[str, Any] = {}
    made = kind(entries, Metrics(registry or CollectorRegistry()), limits, **options)
    for name, engine in engines.items():
        entries[name] = SimpleNamespace(queue=made.open(name, engine, fake_costs(engine.chunk_rules)))
    return made


def queue(engine: AsyncEngine, model: str = MODEL) -> ModelQueue:
    return engine._queue(model)


@asynccontextmanager
async def started(
    runner: FakeRunner | None = None,
    registry: CollectorRegistry | None = None,
    *,
    admits_by_deadline: bool = False,
    clock: Callable[[], float] = time.monotonic,
    **engines: StepEngine,
) -> AsyncIterator[AsyncEngine]:
    engines = engines or {MODEL: fake_engine(runner, context=ENDLESS + 1)}
    limits = QueueLimits(max_batch_size=SLOTS, max_queue_size=QUEUE, admits_by_deadline=admits_by_deadline)
    engine = make_engine(engines, limits, registry, clock=clock)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def run(engine: AsyncEngine, asked: GenerationRequest) -> list[tuple[TokenEvent, ...]]:
    with engine.admit(asked.model, asked.request_id) as place:
        place.submit(asked)
        return [events async for events in place.events()]


def tokens(batches: list[tuple[TokenEvent, ...]]) -> list[int]:
    return [event.token_id for events in batches for event in events if event.token_id is not None]


async def test_request_gets_its_tokens_and_one_terminal_event() -> None:
    async with started() as engine:
        batches = await run(engine, request("a", max_tokens=6))
    assert tokens(batches) == expected_tokens((5,), 6)
    terminal = [event for events in batches for event in events if event.is_terminal]
    assert [event.finish_reason for event in terminal] == [FinishReason.LENGTH]
    assert batches[-1][-1] is terminal[0]


async def test_consumer_that_is_behind_gets_all_waiting_events_in_one_batch() -> None:
    async with started() as engine:
        asked = request("a", max_tokens=6)
        with engine.admit(MODEL, "a") as place:
            place.submit(asked)
            batches = place.events()
            first = await anext(batches)
            await engine.wait_idle()
            rest = [events async for events in batches]
    assert len(rest) <= 1
    assert tokens([first, *rest]) == expected_tokens((5,), 6)


async def test_requests_beyond_slots_and_queue_are_refused_with_a_time_to_retry(gate: Gate) -> None:
    async with started(FakeRunner(before_run=gate)) as engine:
        places = [engine.admit(MODEL, str(number)) for number in range(SLOTS + QUEUE)]
        with pytest.raises(Overloaded) as refusal:
            engine.admit(MODEL, "one too many")
        with places[0]:
            pass
        engine.admit(MODEL, "fits again")
    assert (refusal.value.num_requests, refusal.value.limit) == (SLOTS + QUEUE, SLOTS + QUEUE)
    assert 0 < refusal.value.retry_after_seconds <= 60


async def test_place_that_was_never_used_is_given_back() -> None:
    async with started() as engine:
        with engine.admit(MODEL, "a"):
            assert engine.num_streams == 1
        assert engine.num_streams == 0
        await engine.wait_idle()
        assert await run(engine, request("a"))


async def test_queue_of_one_model_is_no_other_models(gate: Gate) -> None:
    async with started(one=fake_engine(), two=fake_engine()) as engine:
        for number in range(SLOTS + QUEUE):
            engine.admit("one", str(number))
        assert await run(engine, replace(request("a"), model="two"))


async def test_request_id_in_use_is_refused_until_the_engine_is_done_with_it(gate: Gate) -> None:
    async with started(FakeRunner(before_run=gate)) as engine:
        first = asyncio.create_task(run(engine, request("same")))
        await gate.until_entered()
        with pytest.raises(InvalidRequest, match="request_id"):
            engine.admit(MODEL, "same")
        gate.open.set()
        await first
        assert await run(engine, request("same"))


@pytest.mark.parametrize("how", ["cancelled while waiting", "closed while suspended"])
async def test_leaving_early_aborts_the_request_and_frees_its_place(how: str) -> None:
    registry = CollectorRegistry()
    async with started(registry=registry) as engine:
        if how == "cancelled while waiting":
            task = asyncio.create_task(run(engine, request("a", max_tokens=ENDLESS)))
            while not registry.get_sample_value("onward_generation_tokens_total", {"model_name": MODEL}):  # noqa: ASYNC110
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with engine.admit(MODEL, "a") as place:
                place.submit(request("a", max_tokens=ENDLESS))
                async with aclosing(place.events()) as batches:
                    await anext(batches)
        await engine.wait_idle()
    ended = {"model_name": MODEL, "finish_reason": "cancelled"}
    assert registry.get_sample_value("onward_requests_total", ended) == 1
    assert registry.get_sample_value("onward_num_requests_running", {"model_name": MODEL}) == 0


async def test_request_that_the_engine_refuses_ends_with_the_engines_reason() -> None:
    async with started() as engine:
        with pytest.raises(InvalidRequest, match="prompt"):
            await run(engine, request("a", prompt=()))
        await engine.wait_idle()
        assert await run(engine, request("a"))


async def test_request_that_cannot_be_counted_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started() as engine:
        monkeypatch.setattr(queue(engine).predictor, "submitted", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await run(engine, request("a"))
        assert engine.num_streams == 0
        monkeypatch.undo()
        assert await run(engine, request("a"))
        await engine.wait_idle()


async def test_request_that_breaks_the_engine_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with started() as engine:
        with pytest.raises(EngineFailed) as failure:
            await run(engine, replace(request("a"), sampling=SamplingParams(seed="none")))  # type: ignore[arg-type]
        assert await run(engine, request("b"))
    assert failure.value.error_id in caplog.text


async def test_request_of_several_outputs_is_over_with_the_last_and_counted_as_that_ended() -> None:
    registry = CollectorRegistry()
    # The end of the request may come by itself, after those of its outputs.
    story = [[token(5, 0), token(5, 1, FinishReason.LENGTH)], [token(6, 0, FinishReason.STOP)], [token(None)]]
    asked = request("a", sampling=SamplingParams(n=2))
    async with started(registry=registry, **{MODEL: ScriptedEngine(lambda _: story)}) as engine:
        batches = await run(engine, asked)
    told = [event for events in batches for event in events]
    assert [event.output_index for event in told] == [0, 1, 0, 0]
    assert [event.is_terminal for event in told] == [False, False, False, True]
    labels = {"model_name": MODEL}
    assert registry.get_sample_value("onward_requests_total", {**labels, "finish_reason": "stop"}) == 1
    assert registry.get_sample_value("onward_inter_token_latency_seconds_count", labels) == 1
    assert registry.get_sample_value("onward_request_generation_tokens_sum", labels) == 3
    assert registry.get_sample_value("onward_request_max_num_generation_tokens_sum", labels) == 2


async def test_others_are_heard_between_the_parts_of_a_burst() -> None:
    story = [[*(token(5, 0) for _ in range(1000)), token(6, 0, FinishReason.LENGTH)]]
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with started(**{MODEL: ScriptedEngine(lambda _: story)}) as engine:
        with engine.admit(MODEL, "a") as place:
            place.submit(request("a"))
            await engine.wait_idle()
            task = asyncio.create_task(other())
            batches = [events async for events in place.events()]
            task.cancel()
    assert tokens(batches) == [5] * 1000 + [6]
    assert turns >= len(batches) - 2 > 0


async def test_call_waits_until_the_engine_is_idle_and_requests_wait_behind_it(gate: Gate) -> None:
    order: list[str] = []

    def look(engine: Any) -> int:
        order.append("call")
        assert not engine.has_work
        return 42

    async def ask(name: str) -> None:
        await run(engine, request(name))
        order.append(name)

    async with started(FakeRunner(before_run=gate)) as engine:
        ahead = asyncio.create_task(ask("ahead"))
        await gate.until_entered()
        called = asyncio.create_task(engine.call(queue(engine).engine, look, FOREVER))
        await asyncio.sleep(0)
        behind = asyncio.create_task(ask("behind"))
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(ahead, behind)
        assert await called == 42
    assert order.index("call") < order.index("behind")


@pytest.mark.parametrize("how", ["aborted", "deadline", "end_by", "start_by"])
async def test_request_parked_behind_a_call_counts_as_waiting_and_can_end_before_it(gate: Gate, how: str) -> None:
    registry = CollectorRegistry()
    order: list[str] = []
    third_step = Gate()

    def before_run(batch: ScheduledBatch) -> None:
        gate(batch)
        if len(runner.batches) == 3:
            third_step(batch)

    runner = FakeRunner(before_run=before_run)
    labels = {"model_name": MODEL}
    async with started(runner, registry) as engine:
        with third_step.closed():
            ahead = asyncio.create_task(run(engine, request("ahead", max_tokens=10)))
            await gate.until_entered()
            called = asyncio.create_task(engine.call(queue(engine).engine, lambda _: order.append("call"), FOREVER))
            await asyncio.sleep(0)
            moments = {} if how == "aborted" else {how: time.monotonic()}
            parked = asyncio.create_task(run(engine, request("parked", max_tokens=ENDLESS, **moments)))
            kept = asyncio.create_task(run(engine, request("kept", max_tokens=1)))
            await asyncio.sleep(0)
            if how == "aborted":
                # It leaves without a word from the engine: the abort is in the inbox before the gate opens.
                parked.cancel()
                await asyncio.wait([parked])
            gate.open.set()
            await asyncio.wait([parked])
            while engine.num_streams > 2:  # noqa: ASYNC110 — it is the engine thread that is waited for
                await asyncio.sleep(0)
            assert "call" not in order
            assert registry.get_sample_value("onward_num_requests_waiting", labels) == 1
        await asyncio.gather(ahead, called, kept)
    reason = "cancelled" if how == "aborted" else "deadline"
    assert registry.get_sample_value("onward_requests_total", {**labels, "finish_reason": reason}) == 1
    assert registry.get_sample_value("onward_requests_total", {**labels, "finish_reason": "length"}) == 2


async def test_cancelled_call_never_runs_and_lets_go_of_those_behind_it(gate: Gate) -> None:
    ran: list[str] = []
    async with started(FakeRunner(before_run=gate)) as engine:
        ahead = asyncio.create_task(run(engine, request("ahead", max_tokens=ENDLESS)))
        await gate.until_entered()
        calls = [
            asyncio.create_task(engine.call(queue(engine).engine, lambda _: ran.append("call"), FOREVER))
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        behind = asyncio.create_task(run(engine, request("behind", max_tokens=2)))
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        gate.open.set()
        assert tokens(await behind) == expected_tokens((5,), 2)
        assert not ahead.done()
        ahead.cancel()
        await engine.wait_idle()
        assert await engine.call(queue(engine).engine, lambda _: 42, FOREVER) == 42
    assert ran == []


async def test_call_to_a_model_that_does_not_become_idle_gives_up(gate: Gate) -> None:
    ran: list[str] = []
    async with started(FakeRunner(before_run=gate)) as engine:
        ahead = asyncio.create_task(run(engine, request("ahead", max_tokens=2)))
        await gate.until_entered()
        with pytest.raises(NotServing, match="not idle for 0 s"):
            await engine.call(queue(engine).engine, lambda _: ran.append("call"), 0.0)
        gate.open.set()
        await ahead
    assert ran == []


async def test_stop_is_obeyed_between_two_calls() -> None:
    ran: list[int] = []
    async with started() as engine:
        begun, go_on = threading.Event(), threading.Event()

        def first(_: Any) -> None:
            begun.set()
            go_on.wait()

        calls = [asyncio.create_task(engine.call(queue(engine).engine, first, FOREVER))]
        await asyncio.to_thread(begun.wait)
        calls += [
            asyncio.create_task(engine.call(queue(engine).engine, lambda _: ran.append(1), FOREVER)) for _ in range(3)
        ]
        await asyncio.sleep(0)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        go_on.set()
        await stopping
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert ran == []
    assert [type(outcome) for outcome in outcomes[1:]] == [NotServing] * 3


async def test_fault_while_events_are_handed_out_ends_every_stream_and_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with started() as engine:
        metrics = queue(engine).metrics
        streams = [asyncio.create_task(run(engine, request(str(number), max_tokens=ENDLESS))) for number in range(3)]
        await asyncio.sleep(0)
        for name in ("step_done", "request_done"):
            monkeypatch.setattr(metrics, name, lambda *_: 1 / 0)
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        end = await engine.wait_ended()
        with pytest.raises(EngineFailed):
            engine.admit(MODEL, "late")
        await engine.wait_idle()
    assert end is not None
    assert {str(outcome) for outcome in outcomes} == {f"internal error {end.error_id}"}


async def test_call_that_raises_tells_its_caller_an_id_and_the_engine_lives() -> None:
    async with started() as engine:
        with pytest.raises(EngineFailed):
            await engine.call(queue(engine).engine, lambda _: 1 / 0, FOREVER)
        assert await run(engine, request("a"))


async def test_what_must_not_happen_beside_a_step_is_done_by_the_thread_between_two() -> None:
    inside: list[str] = []
    runner = FakeRunner(SLOTS, before_run=lambda _: inside.append("step"))

    def work() -> str:
        inside.append("errand")
        return threading.current_thread().name

    async with started(runner) as engine:
        running = asyncio.create_task(run(engine, request("a", max_tokens=30)))
        assert await engine.do(work) == "engine"
        await running
    assert inside.count("errand") == 1
    assert inside.count("step") >= 30


async def test_what_such_work_raises_is_told_and_what_it_held_is_let_go_of_by_the_thread() -> None:
    gone: list[str] = []

    class Held:
        def __del__(self) -> None:
            gone.append(threading.current_thread().name)

    def deeper() -> None:
        held = Held()
        raise ValueError(f"with {len([held])} in hand")

    def work() -> None:
        held = Held()
        try:
            deeper()
        except ValueError as cause:
            raise LookupError(f"and {len([held])} more") from cause

    async with started() as engine:
        with pytest.raises(LookupError, match="and 1 more") as caught:
            await engine.do(work)
        assert gone == ["engine", "engine"], "though the error is still held"
        assert isinstance(caught.value.__cause__, ValueError)
        assert tokens(await run(engine, request("a", max_tokens=3))) == expected_tokens((5,), 3)


async def test_what_ends_the_thread_amid_such_work_is_told_as_its_end() -> None:
    def work() -> None:
        raise DeviceLost("the device is gone")

    async with started() as engine:
        with pytest.raises(EngineFailed) as caught:
            await engine.do(work)
        end = await engine.wait_ended()
        assert end is not None
        assert end.error_id == caught.value.error_id


async def test_a_device_that_is_lost_in_a_step_ends_the_thread_and_not_the_step_alone() -> None:
    def lose(_: ScheduledBatch) -> None:
        raise DeviceLost("the device is gone")

    async with started(FakeRunner(SLOTS, before_run=lose)) as engine:
        with pytest.raises(EngineFailed):
            await run(engine, request("a", max_tokens=3))
        assert await engine.wait_ended() is not None
        with pytest.raises(EngineFailed):
            engine.admit(MODEL, "b")


async def test_death_of_the_thread_fails_every_stream_and_all_that_follows() -> None:
    def before_run(batch: ScheduledBatch) -> None:
        raise Death

    async with started(FakeRunner(before_run=before_run)) as engine:
        waiting = engine.admit(MODEL, "not yet submitted")
        streams = [asyncio.create_task(run(engine, request(str(number)))) for number in range(3)]
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        end = await engine.wait_ended()
        with pytest.raises(EngineFailed):
            engine.admit(MODEL, "late")
        with pytest.raises(EngineFailed):
            await engine.call(queue(engine).engine, lambda _: None, FOREVER)
        with pytest.raises(EngineFailed), waiting as place:
            place.submit(request("not yet submitted"))
        await engine.wait_idle()
    assert end is not None
    assert {str(outcome) for outcome in outcomes} == {f"internal error {end.error_id}"}


async def test_draining_refuses_new_requests_and_lets_admitted_ones_end(gate: Gate) -> None:
    async with started(FakeRunner(before_run=gate)) as engine:
        running = asyncio.create_task(run(engine, request("a", max_tokens=3)))
        admitted = engine.admit(MODEL, "b")
        await gate.until_entered()
        engine.drain()
        with pytest.raises(NotServing, match="draining"):
            engine.admit(MODEL, "c")
        gate.open.set()
        assert tokens(await running) == expected_tokens((5,), 3)
        with admitted as place:
            place.submit(request("b"))
            assert [events async for events in place.events()]
        await engine.wait_idle()


async def test_stop_ends_open_streams_with_not_serving() -> None:
    async with started() as engine:
        stream = asyncio.create_task(run(engine, request("a", max_tokens=ENDLESS)))
        await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(NotServing):
            await stream
        assert await engine.wait_ended() is None


async def test_nothing_is_admitted_before_start() -> None:
    engine = make_engine({MODEL: fake_engine()}, QueueLimits(max_batch_size=1, max_queue_size=0))
    with pytest.raises(NotServing, match="starting"):
        engine.admit(MODEL, "a")


async def test_retry_estimate_follows_how_long_requests_took() -> None:
    async with started() as engine:
        found = queue(engine)
        unknown = found.retry_after_seconds
        for _ in range(64):
            found.take()
            found.give_back(8.0)
        slow = found.retry_after_seconds
        for _ in range(64):
            found.take()
            found.give_back(1e-6)
        fast = found.retry_after_seconds
    assert slow == 8.0 / SLOTS
    assert fast < unknown < slow


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
    monkeypatch.setattr("service.runtime.outbox.GATHER_SECONDS", FOREVER)
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


async def test_cost_that_cannot_be_counted_is_none_and_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    # More tokens cached than there are.
    liar = ScriptedEngine(lambda _: [[token(5, 0, FinishReason.LENGTH)]], num_cached_tokens=99)
    async with started(**{MODEL: liar}) as engine:
        for name in "ab":
            with engine.admit(MODEL, name) as place:
                place.submit(request(name))
                assert tokens([events async for events in place.events()]) == [5]
                assert place.cost is None
    assert "what request a cost could not be counted" in caplog.text


async def test_what_is_known_of_a_models_step_times_outlives_a_reload_that_leaves_it_what_it_was() -> None:
    async with started() as engine:
        found = queue(engine)
        known, other = found.predictor, fake_engine(context=64)
        assert await run(engine, request("a"))
        engine.replace(found, fake_engine(context=ENDLESS + 1), known.costs)
        assert found.predictor is known
        engine.replace(found, other, fake_costs(other.chunk_rules))
        assert found.predictor is not known
        assert found.predictor.costs.config.context == 64
        unknown, calibrated = found.predictor, fake_engine(context=64)
        engine.replace(found, calibrated, fake_costs(other.chunk_rules), calibrated.calibrate(10.0))
        assert found.predictor is not unknown
        assert found.predictor.predict_alone(request("c", max_tokens=2)) is not None
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


# Deadlines.


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


# What a clock may read after a minute: that of a machine that just started, one on which 0.61 seconds before a deadline
# are 0.6099999 as a difference of floats, and one that has been up for a third of a year.
ANY_TIME = pytest.mark.parametrize("now", [0.0, 5_416.7188903, 1e7])


def moment(seconds: float) -> Any:
    """Equal to a moment, but for the rounding of a few sums by half a unit in the last place each."""
    return pytest.approx(seconds, rel=0.0, abs=4 * math.ulp(seconds))


@ANY_TIME
async def test_request_that_would_miss_its_deadline_is_refused_before_the_engine_has_it(
    monkeypatch: pytest.MonkeyPatch, now: float
) -> None:
    registry = CollectorRegistry()
    scripted = ScriptedEngine(lambda _: [[token(5, 0, FinishReason.LENGTH)]], clock=lambda: now)
    async with started(registry=registry, admits_by_deadline=True, clock=lambda: now, **{MODEL: scripted}) as engine:
        predicts(monkeypatch, engine, 3600.0)
        with pytest.raises(DeadlineUnreachable) as refusal:
            await run(engine, due_in(60.0, now=now))
        assert engine.num_streams == 0
        assert tokens(await run(engine, replace(request("b")))) == [5], "without a deadline nobody is judged"
    assert refusal.value.prefill_seconds == 3600.0
    # Less gRPC's rounding of a minute, and the way.
    assert now + refusal.value.left_seconds == moment(now + 60.0 - 0.61)
    assert [each.request_id for each in scripted.requests] == ["b"]
    labels = {"model_name": MODEL, "finish_reason": "deadline_unreachable"}
    assert registry.get_sample_value("onward_requests_total", labels) == 1


async def test_nobody_is_refused_for_a_deadline_where_admission_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started() as engine:
        asked = predicts(monkeypatch, engine, 3600.0)
        assert tokens(await run(engine, due_in(60.0))) == expected_tokens((5,), 4)
    assert asked == []


@ANY_TIME
async def test_request_that_takes_what_there_is_ends_early_enough_to_reach_the_client(now: float) -> None:
    scripted = ScriptedEngine(lambda _: [[token(5, 0, FinishReason.DEADLINE)]], clock=lambda: now)
    async with started(clock=lambda: now, **{MODEL: scripted}) as engine:
        await run(engine, due_in(60.0, now=now, partial_on_deadline=True))
        engine._delays.append(5.0)
        await run(engine, due_in(60.0, now=now, partial_on_deadline=True))
        await run(engine, due_in(60.0, now=now))
    quick, slow, whole = scripted.requests
    # gRPC's rounding of a minute, and the way; then what it took to hand a step's events out.
    assert quick.end_by == moment(now + 60.0 - 0.61)
    assert slow.end_by == moment(now + 60.0 - 5.61)
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


async def test_what_was_learned_of_deadlines_goes_with_the_model_it_was_learned_of() -> None:
    async with started(admits_by_deadline=True) as engine:
        found, other = queue(engine), fake_engine(context=64)
        learned = found.admission
        engine.replace(found, fake_engine(context=ENDLESS + 1), found.predictor.costs)
        assert found.admission is learned
        engine.replace(found, other, fake_costs(other.chunk_rules))
        assert found.admission is not None
        assert found.admission is not learned
        assert found.admission._predictor is found.predictor
        assert found.predictor._patience is not None
