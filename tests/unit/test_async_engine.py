"""The bridge between event loop and engine thread: admission, streams, abort, calls, the end. No sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from service.async_engine import AsyncEngine
from service.engine.batch import ScheduledBatch
from service.engine.engine import Engine
from service.engine.types import FinishReason, GenerationRequest, TokenEvent
from service.errors import EngineFailed, InvalidRequest, NotServing, Overloaded
from service.metrics import Metrics
from tests.fakes import FakeRunner, expected_tokens, fake_engine, request

MODEL = "fake"
SLOTS, QUEUE = 4, 2
ENDLESS = 60_000


class Gate:
    """Lets the engine's steps pass or holds them back; `entered` is set when one is held."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()

    def __call__(self, batch: ScheduledBatch) -> None:
        self.entered.set()
        self.open.wait()

    async def until_entered(self) -> None:
        await asyncio.to_thread(self.entered.wait)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


@asynccontextmanager
async def started(
    runner: FakeRunner | None = None, registry: CollectorRegistry | None = None, **engines: Engine
) -> AsyncIterator[AsyncEngine]:
    engines = engines or {MODEL: fake_engine(runner, context=ENDLESS + 1)}
    metrics = Metrics(registry or CollectorRegistry())
    engine = AsyncEngine(engines, metrics, max_batch_size=SLOTS, max_queue_size=QUEUE)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def run(engine: AsyncEngine, asked: GenerationRequest) -> list[tuple[TokenEvent, ...]]:
    with engine.admit(asked.model, asked.request_id) as place:
        async with aclosing(place.generate(asked)) as batches:
            return [events async for events in batches]


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
            async with aclosing(place.generate(asked)) as batches:
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
    assert (refusal.value.waiting, refusal.value.limit) == (SLOTS + QUEUE, SLOTS + QUEUE)
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
                batches = place.generate(request("a", max_tokens=ENDLESS))
                await anext(batches)
                await batches.aclose()
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


async def test_request_that_breaks_the_engine_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with started() as engine:
        with pytest.raises(EngineFailed) as failure:
            await run(engine, replace(request("a"), stopping=None))  # type: ignore[arg-type]
        assert await run(engine, request("b"))
    assert failure.value.error_id in caplog.text


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
        called = asyncio.create_task(engine.call(MODEL, look))
        await asyncio.sleep(0)
        behind = asyncio.create_task(ask("behind"))
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(ahead, behind)
        assert await called == 42
    assert order.index("call") < order.index("behind")


async def test_request_parked_behind_a_call_can_still_be_aborted(gate: Gate) -> None:
    async with started(FakeRunner(before_run=gate)) as engine:
        ahead = asyncio.create_task(run(engine, request("ahead")))
        await gate.until_entered()
        called = asyncio.create_task(engine.call(MODEL, lambda _: None))
        await asyncio.sleep(0)
        parked = asyncio.create_task(run(engine, request("parked", max_tokens=ENDLESS)))
        await asyncio.sleep(0)
        parked.cancel()
        gate.open.set()
        await asyncio.gather(ahead, called)
        await engine.wait_idle()
    assert parked.cancelled()


async def test_call_that_raises_tells_its_caller_an_id_and_the_engine_lives() -> None:
    async with started() as engine:
        with pytest.raises(EngineFailed):
            await engine.call(MODEL, lambda _: 1 / 0)
        assert await run(engine, request("a"))


class Death(BaseException):
    """What no engine survives."""


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
            await engine.call(MODEL, lambda _: None)
        with pytest.raises(EngineFailed), waiting as place:
            await anext(place.generate(request("not yet submitted")))
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
            assert [events async for events in place.generate(request("b"))]
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
    engine = AsyncEngine({MODEL: fake_engine()}, Metrics(CollectorRegistry()), max_batch_size=1, max_queue_size=0)
    with pytest.raises(NotServing, match="starting"):
        engine.admit(MODEL, "a")


async def test_retry_estimate_follows_how_long_requests_took() -> None:
    async with started() as engine:
        lane = engine._lanes[MODEL]
        unknown = lane.retry_after_seconds
        for _ in range(64):
            lane.take()
            lane.give_back(8.0)
        slow = lane.retry_after_seconds
        for _ in range(64):
            lane.take()
            lane.give_back(1e-6)
        fast = lane.retry_after_seconds
    assert slow == 8.0 / SLOTS
    assert fast < unknown < slow
