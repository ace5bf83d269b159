"""`Cost` and `Estimate` over real gRPC on fake models: counts, predictions, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from model.spec import cost
from model.spec.cost import RequestShape
from onward.v1 import generation_pb2 as pb
from service.config import RequestLimits
from service.engine.batch import ScheduledBatch
from tests.fakes import FakeRunner, Gate
from tests.servers import (
    MODEL,
    PROMPT,
    SLOTS,
    eventually,
    generate_request,
    read,
    read_accepted,
    running,
    served_model,
    status_of,
    stream_request,
)

COST = pb.ResponseOptions(cost=True)
COUNTS = ("attended_pairs", "padded_pairs", "linear_flops", "attention_flops", "kv_byte_steps")


def same_counts(one: pb.Cost, other: pb.Cost) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in COUNTS)


async def answer_of(call: Any) -> Any:
    return await call


class Slow(FakeRunner):
    """Steps that take a while, so that seconds mean something: so long for each token, and for each run."""

    def __init__(self, seconds: float) -> None:
        super().__init__(SLOTS, before_run=self._wait)
        self._seconds = seconds

    def _wait(self, batch: ScheduledBatch) -> None:
        time.sleep(self._seconds * (1 + batch.num_prefill_tokens / 8))


async def test_answer_has_its_cost_if_requested() -> None:
    async with running(runner=Slow(0.004), calibrate=True) as server:
        asked = generate_request("ab", max_tokens=9, ignore_eos=True, response=COST)
        answer = await server.generation.Generate(asked)
        silent = await server.generation.Generate(generate_request("ab", max_tokens=9, ignore_eos=True))
        stream = await read(server.generation.GenerateStream(stream_request("ab", max_tokens=9, response=COST)))
    shape = RequestShape(
        prompt_tokens=len(PROMPT), generated_tokens=(9,), chunk=8, padded_prompt_tokens=4, padded_source_tokens=None
    )
    counts = cost.request_cost(served_model().manifest.config, shape)
    assert {name: getattr(answer.cost, name) for name in COUNTS} == {name: getattr(counts, name) for name in COUNTS}
    assert counts.padded_pairs == 4
    timings = answer.timings
    assert answer.cost.measured_seconds == pytest.approx(timings.prefill + timings.decode)
    # Nine steps of four milliseconds and more; a machine of many processes says no more than that.
    assert answer.cost.predicted_seconds > 0.02
    assert not silent.HasField("cost")
    summary = stream[-1].summary
    assert same_counts(summary.cost, answer.cost)
    assert summary.cost.measured_seconds == pytest.approx(summary.timings.prefill + summary.timings.decode)


async def test_prediction_is_for_max_tokens_and_counts_are_actual() -> None:
    async with running(runner=Slow(0.002), calibrate=True) as server:
        stopped = await server.generation.Generate(
            generate_request("ab", max_tokens=40, stop_token_ids=list(range(3, 32)), response=COST)
        )
        whole = await server.generation.Generate(generate_request("ab", max_tokens=40, ignore_eos=True, response=COST))
    assert len(stopped.outputs[0].token_ids) == 1
    assert len(whole.outputs[0].token_ids) == 40
    assert stopped.cost.linear_flops < 0.2 * whole.cost.linear_flops
    assert stopped.cost.predicted_seconds > 0.3 * whole.cost.predicted_seconds


async def test_estimate_has_the_requests_later_cost_and_runs_nothing() -> None:
    runner = FakeRunner(SLOTS)
    async with running(runner=runner, calibrate=True) as server:
        asked = generate_request("abcdefghijklmnopqrstuvwxyz", max_tokens=12, ignore_eos=True, response=COST)
        num_batches = len(runner.batches)
        cold = await server.generation.Estimate(pb.EstimateRequest(request=asked))
        assert len(runner.batches) == num_batches
        first = await server.generation.Generate(asked)
        warm = await server.generation.Estimate(pb.EstimateRequest(request=asked))
        second = await server.generation.Generate(asked)
        ended = server.ended()
    assert same_counts(cold.cost, first.cost)
    assert same_counts(warm.cost, second.cost)
    # What the first left behind need not be computed again.
    assert second.usage.cached_tokens == 24
    assert warm.cost.linear_flops < cold.cost.linear_flops
    assert warm.cost.kv_byte_steps < cold.cost.kv_byte_steps
    assert not cold.cost.HasField("measured_seconds")
    assert cold.queue_seconds == 0
    assert cold.finish_seconds == pytest.approx(cold.cost.predicted_seconds)
    assert sum(ended.values()) == 2


async def test_estimate_of_an_encoder_decoder_counts_source_prefix_outputs_and_beams() -> None:
    async with running([served_model(encoder_decoder=True)], calibrate=True) as server:
        for fields in (
            {"target_prefix": "xyz"},
            {"sampling": pb.SamplingParams(n=3, temperature=0.0)},
            {"sampling": None, "beam_search": pb.BeamSearchParams(beam_size=3, patience=100.0)},
        ):
            asked = generate_request("abcdefg", max_tokens=6, ignore_eos=True, response=COST, **fields)
            estimate = await server.generation.Estimate(pb.EstimateRequest(request=asked))
            answer = await server.generation.Generate(asked)
            assert same_counts(estimate.cost, answer.cost), fields


class Turnstile(Slow):
    """Lets steps pass as they come, or one by one."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.is_shut = False
        self._turns = threading.Semaphore(0)

    def turn(self, count: int = 1) -> None:
        self._turns.release(count)

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        self.is_shut = True
        try:
            yield
        finally:
            self.is_shut = False
            self.turn(1000)

    def _wait(self, batch: ScheduledBatch) -> None:
        if self.is_shut:
            self._turns.acquire()
        super()._wait(batch)


async def test_estimate_answers_while_the_model_is_busy_and_predicts_the_queue() -> None:
    runner = Turnstile(0.002)
    asked = pb.EstimateRequest(request=generate_request("a", max_tokens=5))
    # So long that none ends while the estimate is on its way.
    async with running([served_model(context=4096)], runner=runner, calibrate=True, max_queue_size=8) as server:
        with runner.shut():
            streams = [server.stream(max_tokens=4000, ignore_eos=True) for _ in range(SLOTS + 2)]
            for stream in streams:
                await read_accepted(stream)
            # Every running request has a token, and the others never will.
            runner.turn(SLOTS)
            await eventually(lambda: server.metric("generation_tokens_total", model_name=MODEL) >= 2 * SLOTS)
            estimating = asyncio.create_task(answer_of(server.generation.Estimate(asked)))
            while not estimating.done():
                # The engine is asked between two steps.
                await asyncio.sleep(0.01)
                runner.turn()
            estimate = await estimating
            for stream in streams:
                stream.cancel()
        await server.until_ended(SLOTS + 2)
        alone = await server.generation.Estimate(asked)
    # A running request must end first.
    assert estimate.queue_seconds > 0.02
    assert estimate.finish_seconds == pytest.approx(estimate.queue_seconds + estimate.cost.predicted_seconds)
    assert alone.queue_seconds == 0


async def test_nothing_is_predicted_before_any_step_was_measured() -> None:
    async with running() as server:
        asked = generate_request("ab", max_tokens=3, response=COST)
        estimate = await server.generation.Estimate(pb.EstimateRequest(request=asked))
        answer = await server.generation.Generate(asked)
    for message in (estimate.cost, answer.cost):
        assert not message.HasField("predicted_seconds")
        assert message.attended_pairs > 0
    assert not estimate.HasField("queue_seconds")
    assert not estimate.HasField("finish_seconds")
    assert answer.cost.HasField("measured_seconds")


BAD: dict[str, pb.GenerateRequest] = {
    "a field beyond its limit": generate_request("ab", sampling=pb.SamplingParams(top_p=2.0)),
    "a model that is not served": generate_request("ab", model="other"),
    "a feature that is not offered": pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="ab")])
    ),
    "a prompt that leaves no room": generate_request("a" * 64),
    "more outputs than there are rows": generate_request("ab", sampling=pb.SamplingParams(n=SLOTS + 1)),
    "more outputs than the operator allows": generate_request("ab", sampling=pb.SamplingParams(n=SLOTS + 2)),
    "an id in use": generate_request("ab", request_id="mine"),
}


@pytest.mark.parametrize("request_", BAD.values(), ids=BAD.keys())
async def test_estimate_refuses_like_generate_and_counts_no_request(
    request_: pb.GenerateRequest,
) -> None:
    gate = Gate()
    limits = replace(RequestLimits(), max_outputs=SLOTS + 1)
    async with running(runner=FakeRunner(SLOTS, before_run=gate), limits=limits) as server:
        with gate.closed():
            busy = await read_accepted(server.stream(request_id="mine"))
            generated = asyncio.ensure_future(status_of(server.generation.Generate(request_)))
            estimated = asyncio.ensure_future(
                status_of(server.generation.Estimate(pb.EstimateRequest(request=request_)))
            )
            # Only the engine refuses some of them, at the end of the step in which it is held.
            await eventually(lambda: server.app._calls.num_open == 3 - generated.done() - estimated.done())
        errors = await generated, await estimated
        await read(busy)
        await eventually(lambda: sum(server.ended().values()) >= 1)
        ended = server.ended()
    assert errors[0].code() is errors[1].code() is not grpc.StatusCode.OK
    assert errors[0].details() == errors[1].details()
    assert sum(ended.values()) <= 2


async def test_estimate_of_a_full_or_a_draining_server_is_refused_as_a_request_would_be() -> None:
    gate = Gate()
    async with running(runner=FakeRunner(SLOTS, before_run=gate), max_queue_size=0) as server:
        with gate.closed():
            streams = [await read_accepted(server.stream()) for _ in range(SLOTS)]
            full = await status_of(server.generation.Estimate(pb.EstimateRequest(request=generate_request("ab"))))
        for stream in streams:
            await read(stream)
        server.app._engine.drain()
        drained = await status_of(server.generation.Estimate(pb.EstimateRequest(request=generate_request("ab"))))
    assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert drained.code() is grpc.StatusCode.UNAVAILABLE


async def test_cost_model_and_its_error_are_metrics() -> None:
    labels = {"model_name": MODEL}
    async with running(runner=Slow(0.003), calibrate=True) as server:
        # What a busy machine adds is not all taken for the step's.
        assert server.metric("cost_model_coefficient", term="decode_step_1", **labels) > 0.001
        assert server.registry.get_sample_value("onward_cost_model_relative_error", labels) is None
        for number in range(3):
            await server.generation.Generate(generate_request("ab", max_tokens=5 + number))
        assert server.metric("cost_model_relative_error", **labels) > 0
        # Calibration steps are not requests.
        assert server.metric("prompt_tokens_total", **labels) == 3 * len(PROMPT)
        assert server.metric("step_batch_size_sum", **labels) == 5 + 6 + 7


@pytest.mark.parametrize("fails", [False, True])
async def test_server_that_cannot_be_calibrated_serves_all_the_same(fails: bool, caplog: Any) -> None:
    calls = 0

    def fail_at_first(batch: ScheduledBatch) -> None:
        nonlocal calls
        calls += 1
        if fails and calls == 1:
            raise RuntimeError("no luck")

    async with running(runner=FakeRunner(SLOTS, before_run=fail_at_first), calibrate=True) as server:
        answer = await server.generation.Generate(generate_request("ab", max_tokens=3))
    assert len(answer.outputs[0].token_ids) == 3
