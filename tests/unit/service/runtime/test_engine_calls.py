"""Functions that are run on the engine thread: on an idle engine, between two steps, or not at all."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from service.engine.batch import ScheduledBatch
from service.engine.sessions.cuda_provider import DeviceLost
from service.errors import EngineFailed, NotServing
from tests.fakes import FakeRunner, Gate, expected_tokens, request
from tests.unit.service.runtime.started import ENDLESS, MODEL, SLOTS, queue, run, started, tokens

FOREVER = 3600.0


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
