"""Requests between event loop and engine thread: places, streams, abort, failure, the end. No sockets."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from service.engine.batch import ScheduledBatch
from service.engine.types import (
    FinishReason,
    SamplingParams,
)
from service.errors import EngineFailed, InvalidRequest, NotServing, Overloaded
from service.runtime.model_queue import QueueLimits
from tests.fakes import Death, FakeRunner, Gate, expected_tokens, fake_engine, request
from tests.scripted import ScriptedEngine, token
from tests.unit.service.runtime.started import ENDLESS, MODEL, QUEUE, SLOTS, make_engine, queue, run, started, tokens


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


async def test_requests_that_have_not_ended_are_counted_while_the_first_step_hangs(gate: Gate) -> None:
    registry = CollectorRegistry()

    def gauge(name: str) -> float | None:
        return registry.get_sample_value(f"onward_num_requests_{name}", {"model_name": MODEL})

    async with started(FakeRunner(before_run=gate), registry) as engine:
        running = [asyncio.create_task(run(engine, request(name))) for name in "abc"]
        await gate.until_entered()
        assert (gauge("admitted"), gauge("running"), gauge("waiting")) == (3, 0, 0)
        gate.open.set()
        await asyncio.gather(*running)
        await engine.wait_idle()
        assert gauge("admitted") == 0


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
            await engine.call(queue(engine).engine, lambda _: None, None)
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
