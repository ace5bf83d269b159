"""Predictions on a machine whose law is known (`machine.py`)."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from service.engine.types import (
    BeamSearchParams,
    FinishReason,
    GenerationRequest,
    PromptScoring,
    StoppingParams,
)
from service.forecasting.costing import CostModel
from service.forecasting.sharing import Rival
from service.forecasting.step_times import BatchLoad
from tests.fakes import request
from tests.unit.model.spec.test_cost import decoder_only
from tests.unit.service.forecasting.machine import CONTEXT, FAMILIES, LIMITS, Law, Machine, draw, machine, seconds_of


@FAMILIES
def test_a_request_takes_what_was_predicted(family: object) -> None:
    warm = machine(family)
    warm.warm()
    source = random.Random(9)
    for number in range(30):
        asked = draw(source, f"r{number}")
        prediction = warm.predictor.predict(asked)
        assert prediction is not None
        assert prediction.queue_seconds == 0.0
        assert warm.predictor.likely_tokens(asked) == asked.stopping.max_tokens
        taken = warm.run(asked)
        assert prediction.service_seconds == pytest.approx(taken, rel=0.03, abs=0.001)
        timings = warm.ends[asked.request_id].timings
        assert timings is not None
        assert timings.first_token_time is not None
        assert prediction.prefill_seconds == pytest.approx(
            timings.first_token_time - (timings.scheduled_time or 0.0), rel=0.05, abs=0.001
        )


def test_coefficients_are_those_of_the_machine() -> None:
    warm = machine()
    warm.warm()
    source = random.Random(3)
    for number in range(200):
        warm.submit(draw(source, f"r{number}"))
        for _ in range(source.randrange(12)):
            warm.step()
    warm.drain()
    law, found = warm.law, warm.predictor.coefficients
    expected = {
        "prefill_run": law.prompt_run,
        "prefill_token": law.prompt_token,
        "prefill_pair": law.prompt_pair,
        "decode_pair": law.decode_pair,
        "host_step": law.host,
        "host_row": law.host_row,
        "wake": law.wake,
        **{f"decode_step_{rows}": law.decode_row + (rows - 1) * law.more_rows for rows in (1, 2, 4, 8)},
    }
    assert set(found) == set(expected)
    for term, seconds in expected.items():
        assert found[term] == pytest.approx(seconds, rel=0.15, abs=2e-5), term


def test_short_steps_are_predicted_by_their_mean_and_not_by_that_of_the_long_ones_among_them() -> None:
    """Each eighth step takes five times as long: whoever looked now and then would rather see one of those."""
    law = Law(*(each / 20 for each in (0.004, 3e-4, 2e-6, 0.006, 4e-4, 1e-5, 2e-4, 3e-5)))
    hectic = Machine(decoder_only(vocab_size=32, context=CONTEXT), law)
    hectic.hiccups = 1 / 8
    hectic.warm(120)
    source = random.Random(8)
    expected = taken = 0.0
    for number in range(150):
        asked = draw(source, f"r{number}")
        prediction = hectic.predictor.predict(asked)
        assert prediction is not None
        expected += prediction.decode_seconds
        hectic.run(asked)
        timings = hectic.ends[asked.request_id].timings
        assert timings is not None
        assert timings.first_token_time is not None
        taken += timings.finished_time - timings.first_token_time
    assert expected == pytest.approx(taken, rel=0.1)


def test_prefill_in_the_batch_stretches_steps_by_the_share_that_its_prompts_take() -> None:
    """Short steps that decode and, one in five, a long prompt in between: all of them count alike."""
    law = Law(*(each / 20 for each in (0.02, 3e-4, 2e-6, 0.006, 0.0, 0.0, 2e-4, 3e-5)))
    busy = Machine(decoder_only(vocab_size=32, context=CONTEXT), law)
    busy.warm()
    endless = StoppingParams(max_tokens=CONTEXT, ignore_eos=True)
    with_prompts = decoding = 0.0
    for number in range(200):
        if number % 50 == 0:
            busy.submit(request(f"long{number}", (5,), stopping=endless))
        if number % 5 == 0:
            busy.submit(request(f"short{number}", range(3, 13), stopping=StoppingParams(max_tokens=1)))
        stats = busy.step()
        if number >= 100 and stats.num_decode_rows:
            with_prompts += stats.run_seconds
            decoding += law.decode_row
    assert with_prompts > 1.3 * decoding
    assert busy.predictor._times.stretch == pytest.approx(with_prompts / decoding, rel=0.15)


def test_what_a_pause_adds_to_the_first_run_is_predicted_for_requests_after_one() -> None:
    sleepy = machine(law=Law(wake=0.003))
    sleepy.warm()
    stopping = StoppingParams(max_tokens=3, ignore_eos=True)
    prompt = tuple(3 + (7 * i) % 27 for i in range(33))
    sleepy.run(request("a", prompt, stopping=stopping))
    # Two of its chunks are cached, and what is left is one token: no prompt's run shares in the pause.
    again = request("b", prompt, stopping=stopping)
    prediction = sleepy.predictor.predict(again, 32)
    assert prediction is not None
    assert prediction.service_seconds == pytest.approx(sleepy.run(again), rel=0.1)
    assert sleepy.predictor.coefficients["wake"] == pytest.approx(0.003, rel=0.3)


def test_cached_tokens_are_counted_in_the_prediction_and_the_estimate() -> None:
    warm = machine()
    warm.warm()
    prompt = tuple(3 + (7 * i) % 27 for i in range(120))
    stopping = StoppingParams(max_tokens=3, ignore_eos=True)
    first, second = (request(name, prompt, stopping=stopping) for name in "ab")
    cold = warm.run(first)
    cached = warm.engine.num_cached_tokens(second)
    assert cached == 112
    estimate = warm.predictor.estimate(second, cached)
    taken = warm.run(second)
    assert taken < 0.5 * cold
    assert estimate.cost.predicted_seconds == pytest.approx(taken, rel=0.05)
    settled = warm.costs["b"]
    assert settled is not None
    assert settled.predicted_seconds == pytest.approx(estimate.cost.predicted_seconds)
    assert settled.measured_seconds == pytest.approx(taken)
    assert settled.counts == estimate.cost.counts
    assert warm.costs["a"] is not None
    assert settled.counts.linear_flops < warm.costs["a"].counts.linear_flops
    assert warm.predictor.relative_error is not None
    assert warm.predictor.relative_error < 0.05


def test_nothing_is_predicted_until_enough_is_known() -> None:
    cold = machine()
    short = request("a", (5,) * 4, max_tokens=20, stopping=StoppingParams(max_tokens=20, ignore_eos=True))
    long = request("b", tuple(3 + i % 20 for i in range(150)))
    assert cold.predictor.predict(short) is None
    assert cold.predictor.relative_error is None
    estimate = cold.predictor.estimate(short)
    assert (estimate.cost.predicted_seconds, estimate.prediction) == (None, None)
    assert estimate.cost.counts.attended_pairs > 0
    cold.run(short)
    cost = cold.costs["a"]
    assert cost is not None
    assert cost.predicted_seconds is None
    assert cost.measured_seconds == pytest.approx(seconds_of(cold.ends["a"]))
    assert cold.predictor.predict(replace(short, request_id="c")) is not None
    # One short prompt says nothing of what a chunk takes.
    assert cold.predictor.predict(long) is None
    cold.run(replace(long, request_id="d"))
    cold.run(replace(long, request_id="e", prompt_token_ids=long.prompt_token_ids[:90]))
    assert cold.predictor.predict(long) is not None


def test_an_output_is_taken_to_be_as_long_as_it_may_and_lately_was() -> None:
    warm = machine()
    warm.warm()
    stopping = StoppingParams(max_tokens=80)
    asked = request("a", range(3, 20), stopping=stopping)
    before = warm.predictor.predict(asked)
    assert before is not None
    assert warm.predictor.likely_tokens(asked) is None
    for _ in range(8):
        warm.predictor.output_ended(asked, 0.0, 50, FinishReason.END_OF_SEQUENCE)
        warm.predictor.output_ended(asked, 0.0, 20, FinishReason.DEADLINE)
        # Neither says anything of where an answer ends.
        warm.predictor.output_ended(ended_by(asked, ignore_eos=True), 0.0, 80, FinishReason.LENGTH)
        warm.predictor.output_ended(asked, 0.0, 0, FinishReason.DEADLINE)
    assert warm.predictor.likely_tokens(asked) == 50
    assert warm.predictor.predict(asked) == before
    assert warm.predictor.likely_tokens(ended_by(asked, max_tokens=5)) == 5
    assert warm.predictor.likely_tokens(ended_by(asked, min_tokens=60)) == 60
    assert warm.predictor.likely_tokens(replace(asked, arrival_time=1e6)) is None


@pytest.mark.parametrize(
    ("stopping", "is_known"),
    [
        ({"ignore_eos": True}, True),
        ({"min_tokens": 80}, True),
        ({"max_tokens": 1}, True),
        ({"ignore_eos": True, "stop": ("x",)}, False),
        ({"ignore_eos": True, "stop_token_ids": frozenset({7})}, False),
        ({}, False),
    ],
)
def test_an_output_has_all_its_tokens_only_if_nothing_can_stop_it(stopping: dict[str, Any], is_known: bool) -> None:
    asked = ended_by(request("a", max_tokens=80), **stopping)
    assert machine().predictor.likely_tokens(asked) == (asked.stopping.max_tokens if is_known else None)


def ended_by(asked: GenerationRequest, **changes: Any) -> GenerationRequest:
    """The request with another way to end."""
    return replace(asked, stopping=replace(asked.stopping, **changes))


def test_who_is_due_later_does_not_wait_ahead_where_deadlines_overtake() -> None:
    first_come, by_deadline = machine(), machine(patience=10.0)
    for warm in (first_come, by_deadline):
        warm.warm()
        fill(warm, 2 * LIMITS.max_batch_size, new=60)
        for _ in range(LIMITS.max_batch_size):
            warm.step()
    for deadline, is_ahead in ((5.0, True), (None, False)):
        asked = request("late", (5,) * 12, max_tokens=4, arrival_time=by_deadline.now)
        asked = replace(asked, deadline=None if deadline is None else by_deadline.now + deadline)
        predictions = [warm.predictor.predict(asked) for warm in (first_come, by_deadline)]
        waits = [prediction.queue_seconds for prediction in predictions if prediction is not None]
        assert (waits[1] < 0.8 * waits[0]) == is_ahead


def test_a_request_that_is_predicted_alone_does_not_know_of_others() -> None:
    warm = machine()
    warm.warm()
    asked = request("a", (5,) * 12, stopping=StoppingParams(max_tokens=30, ignore_eos=True))
    before = warm.predictor.predict(asked)
    fill(warm, 20, new=60)
    crowded, alone = warm.predictor.predict(asked), warm.predictor.predict_alone(asked)
    assert crowded is not None
    assert alone == before != crowded
    assert alone is not None
    assert alone.service_seconds < crowded.service_seconds
    assert machine().predictor.predict_alone(asked) is None


def fill(warm: Machine, count: int, new: int) -> None:
    for number in range(count):
        stopping = StoppingParams(max_tokens=new, ignore_eos=True)
        prompt = [3 + (number + 3 * i) % 27 for i in range(12)]
        warm.submit(request(f"f{number}", prompt, stopping=stopping))


@pytest.mark.parametrize("count", [0, 8, 20])
def test_the_queue_is_as_long_as_it_then_is(count: int) -> None:
    warm = machine()
    warm.warm()
    fill(warm, 12, 20)
    warm.drain()
    fill(warm, count, 40)
    for _ in range(12):
        warm.engine.has_work and warm.step()
    asked = request("last", (5, 6, 7, 8), stopping=StoppingParams(max_tokens=30, ignore_eos=True))
    prediction = warm.predictor.predict(asked)
    assert prediction is not None
    warm.submit(asked)
    submitted = warm.now
    warm.drain()
    timings = warm.ends["last"].timings
    assert timings is not None
    assert timings.scheduled_time is not None
    queued = timings.scheduled_time - submitted
    assert prediction.queue_seconds == pytest.approx(queued, rel=0.25, abs=0.02)
    if count < 8:
        assert prediction.queue_seconds < 0.1
    if count == 8:
        # Those whose end it waits for are gone when it runs, which is not predicted: it errs on the long side.
        assert prediction.finish_seconds > timings.finished_time - submitted
    else:
        assert prediction.finish_seconds == pytest.approx(timings.finished_time - submitted, rel=0.25)


@pytest.mark.parametrize("fields", [{"priority": 1}, {"tenant": "b"}], ids=["urgent", "another tenant"])
def test_the_less_urgent_and_other_tenants_requests_are_no_queue(fields: dict[str, Any]) -> None:
    warm = machine()
    warm.warm()
    fill(warm, 20, 40)
    for _ in range(12):
        warm.step()
    asked = request("a", (5, 6))
    equal, other = warm.predictor.predict(asked), warm.predictor.predict(replace(asked, **fields))
    assert equal is not None
    assert other is not None
    assert equal.queue_seconds > 0.3
    assert other.queue_seconds == 0.0


def test_in_a_batch_a_request_takes_longer_and_that_is_predicted() -> None:
    """Always six others, of whom each is followed by another."""
    crowded, alone = machine(), machine()
    alone.warm()
    source = random.Random(4)
    asked = request("a", range(3, 30), stopping=StoppingParams(max_tokens=60, ignore_eos=True))
    by_itself = alone.run(asked)
    names = {f"a{number}" for number in range(6)}
    wanted = sorted(names, reverse=True)
    expected: dict[str, float] = {}
    for number in range(10_000):
        while len(crowded.quotes) - len(crowded.ends) - len(expected.keys() - crowded.ends.keys()) < 6:
            crowded.submit(draw(source, f"busy{len(crowded.quotes)}"))
        if number > 600 and expected.keys() <= crowded.ends.keys():
            if not wanted:
                break
            name = wanted.pop()
            prediction = crowded.predictor.predict(asked)
            assert prediction is not None
            expected[name] = prediction.service_seconds
            crowded.submit(replace(asked, request_id=name))
        crowded.step()
    taken = {name: seconds_of(crowded.ends[name]) for name in names}
    assert min(taken.values()) > 1.2 * by_itself
    assert sum(expected.values()) == pytest.approx(sum(taken.values()), rel=0.2)


@pytest.mark.parametrize("kind", ["outputs", "beams"])
def test_several_rows_are_counted(kind: str) -> None:
    warm = machine()
    warm.warm()
    source = random.Random(1)
    for number in range(20):
        warm.run(draw(source, f"rows{number}", rows=4))
    asked = draw(source, "a", rows=4)
    if kind == "beams":
        asked = replace(asked, beam_search=BeamSearchParams(beam_size=4, patience=50.0))
    prediction = warm.predictor.predict(asked)
    assert prediction is not None
    taken = warm.run(asked)
    assert prediction.service_seconds == pytest.approx(taken, rel=0.05)
    cost = warm.costs["a"]
    assert cost is not None
    assert cost.counts == warm.predictor.estimate(asked).cost.counts


def test_a_request_that_ended_before_its_first_token_costs_nothing_and_judges_nothing() -> None:
    warm = machine()
    warm.submit(request("a", range(3, 60)))
    warm.step()
    warm.engine.abort("a")
    warm.drain()
    assert warm.costs["a"] is None
    assert warm.predictor.relative_error is None


def test_a_prompt_that_is_only_scored_can_be_predicted() -> None:
    warm = machine()
    warm.warm()
    asked = request("a", range(3, 30), stopping=StoppingParams(max_tokens=0), scoring=PromptScoring())
    prediction = warm.predictor.predict(asked)
    assert prediction is not None
    assert prediction.decode_seconds == 0.0
    assert prediction.service_seconds == pytest.approx(warm.run(asked), rel=0.05)
    assert warm.costs["a"] is None


def test_nine_of_ten_requests_are_predicted_within_a_fifth_on_a_noisy_machine() -> None:
    noisy = machine(noise=0.1)
    noisy.warm()
    source = random.Random(5)
    errors = []
    for number in range(90):
        # A neighbour comes, and goes.
        noisy.speed = 1.4 if 30 <= number < 60 else 1.0
        asked = draw(source, f"r{number}")
        prediction = noisy.predictor.predict(asked)
        assert prediction is not None
        errors.append(abs(prediction.service_seconds / noisy.run(asked) - 1))
    assert sum(error <= 0.2 for error in errors) >= 0.9 * len(errors)
    assert noisy.predictor.relative_error is not None
    assert noisy.predictor.relative_error == pytest.approx(sum(errors[-20:]) / 20, abs=0.1)


def test_a_prompt_alone_is_predicted_to_take_fewer_runs() -> None:
    limits = replace(LIMITS, short_prompt=1)
    warm = machine(law=Law(prompt_run=0.02), limits=limits, merges_chunks=True)
    warm.warm()
    for length in (10, 41, 90, 145):
        asked = request(f"r{length}", range(length, 2 * length), stopping=StoppingParams(max_tokens=2, ignore_eos=True))
        prediction = warm.predictor.predict(asked)
        assert prediction is not None
        assert prediction.service_seconds == pytest.approx(warm.run(asked), rel=0.03)
        cost = warm.costs[asked.request_id]
        assert cost is not None
        assert cost.predicted_seconds == pytest.approx(prediction.service_seconds, rel=0.03)
    lengths = [len(chunk.token_ids) for batch in warm.runner.batches for chunk in batch.prefills]
    assert lengths[-6:] == [64, 16, 10, 64, 64, 16]


def test_an_empty_batch_changes_nothing() -> None:
    warm = machine()
    warm.warm()
    asked = request("a", range(3, 40))
    work = CostModel(decoder_only(vocab_size=32, context=CONTEXT), warm.engine.chunk_rules).work(asked)
    rates = warm.quotes["warm39"][1].rates
    for phase in (work.prefill, work.decode):
        assert rates.seconds(phase) == rates.seconds(phase, BatchLoad(0.0, 50.0, 1.0))
        assert rates.seconds(phase) < rates.seconds(phase, BatchLoad(2.0, 50.0, 1.0))
    assert rates.seconds(work.decode, BatchLoad(2.0, 50.0, 1.5)) > 1.3 * rates.seconds(
        work.decode, BatchLoad(2.0, 50.0)
    )


def test_a_step_without_work_teaches_nothing() -> None:
    cold = machine()
    before = cold.predictor.coefficients
    cold.predictor.step_done(replace(cold.engine.step().stats, run_seconds=5.0))
    assert cold.predictor.coefficients == before


# Beside other models.


def test_work_is_what_all_requests_then_take() -> None:
    warm = machine()
    warm.warm()
    assert warm.predictor.work_seconds() == 0.0
    for count in (1, 5, 20):
        fill(warm, count, new=40)
        predicted, began = warm.predictor.work_seconds(), warm.now
        warm.drain()
        assert predicted == pytest.approx(warm.now - began, rel=0.2)
    assert machine().predictor.work_seconds() == 0.0


def test_other_models_lengthen_every_part_of_a_prediction_by_what_they_take() -> None:
    warm = machine()
    warm.warm()
    fill(warm, 12, new=60)
    asked = request("a", (5,) * 40, stopping=StoppingParams(max_tokens=30, ignore_eos=True))
    alone = warm.predictor.predict(asked)
    assert alone is not None
    assert alone.sharing_factor == 1.0
    assert alone.queue_seconds > 0
    # One that has work for longer than we do, and one whose work is over while we wait for a place.
    warm.predictor._rivals = lambda: (Rival(2.0, math.inf, 0.0), Rival(1.0, 0.01, 0.0))
    shared = warm.predictor.predict(asked)
    assert shared is not None
    assert shared.queue_seconds == pytest.approx(3 * alone.queue_seconds + 0.01)
    assert shared.prefill_seconds == pytest.approx(3 * alone.prefill_seconds)
    assert shared.decode_seconds == pytest.approx(3 * alone.decode_seconds)
    assert shared.sharing_factor == pytest.approx(3.0 + 0.01 / alone.finish_seconds)
    assert warm.predictor.estimate(asked).cost.predicted_seconds == pytest.approx(shared.service_seconds)
    unshared = warm.predictor.predict_alone(asked)
    assert unshared is not None
    assert unshared.sharing_factor == 1.0


def test_a_request_is_held_to_what_was_predicted_beside_other_models() -> None:
    warm = machine()
    warm.warm()
    asked = request("a", (5,) * 40, stopping=StoppingParams(max_tokens=30, ignore_eos=True))
    warm.predictor._rivals = lambda: (Rival(1.0, math.inf, 0.0),)
    # As if every step of ours were followed by one of theirs that takes as long.
    warm.speed = 2.0
    warm.run(asked)
    cost = warm.costs["a"]
    assert cost is not None
    assert cost.predicted_seconds == pytest.approx(cost.measured_seconds, rel=0.05)
