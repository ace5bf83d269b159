"""Calibration suffices to predict requests, is bounded in time, and leaves nothing behind."""

from __future__ import annotations

import random

import pytest

from service.engine.batch import ScheduledBatch
from service.engine.chunks import ChunkRules
from service.engine.engine import Engine, LastRun
from service.engine.proof.calibration import rounds
from service.engine.types import StoppingParams
from tests.fakes import FakeRunner, fake_engine, request
from tests.unit.model.spec.test_cost import encoder_decoder
from tests.unit.service.forecasting.machine import FAMILIES, LIMITS, Law, Machine, draw, machine


@FAMILIES
def test_after_calibration_the_first_request_is_foretold(family: object) -> None:
    new = machine(family)
    steps = new.engine.calibrate(60.0)
    new.predictor.calibrated(steps)
    source = random.Random(2)
    for rows in (1, 1, 1, 3, 8):
        asked = draw(source, f"r{rows}{new.now}", rows)
        prediction = new.predictor.predict(asked)
        assert prediction is not None
        assert prediction.service_seconds == pytest.approx(new.run(asked), rel=0.1)


@FAMILIES
def test_calibration_ends_in_time_and_leaves_nothing_behind(family: object) -> None:
    new = machine(family)
    longest = 0.05
    began = new.now
    steps = new.engine.calibrate(longest)
    # To the end of the step in progress.
    assert new.now - began < longest + 0.1
    seconds = new.now - began
    assert 0 < len(steps) < len(new.engine.calibrate(60.0))
    assert new.now - began > 3 * seconds
    assert not new.engine.has_work
    assert new.engine._scheduler.kv_usage_ratio == 0.0
    assert new.engine._scheduler._ledger.num_cached_bytes == 0
    # What it fed is not cached.
    chunks = [chunk.token_ids for batch in new.runner.batches for chunk in batch.prefills]
    sources = [row.token_ids for batch in new.runner.batches for group in batch.encodes for row in group.rows]
    prompt = sources[0] if sources else (*max(chunks, key=len), 5)
    assert new.engine.num_cached_tokens(request("a", prompt)) == 0
    new.run(request("a", (5, 6, 7), stopping=StoppingParams(max_tokens=3, ignore_eos=True)))


def test_an_engine_with_work_is_not_calibrated() -> None:
    engine = fake_engine()
    engine.add_request(request("a"))
    with pytest.raises(RuntimeError, match="idle"):
        engine.calibrate(1.0)
    engine.step()
    assert engine.has_work


def test_the_first_step_of_each_size_is_left_out() -> None:
    runner = FakeRunner(LIMITS.max_batch_size)
    engine: Engine = fake_engine(runner, limits=LIMITS, context=256)
    steps = engine.calibrate(60.0)
    sizes = [(batch.num_prefill_tokens, batch.num_encoder_tokens, batch.num_decode_rows) for batch in runner.batches]
    assert len(steps) == len([size for size in sizes if any(size)]) - len({size for size in sizes if any(size)})
    assert {stats.num_decode_rows for stats in steps if not stats.num_prefill_runs} >= {1, 2, 4, 8}


def test_calibration_goes_on_only_as_long_as_it_may_and_is_nobody_elses() -> None:
    shared = LastRun(ended=5.0)
    begun: list[ScheduledBatch] = []
    runner = FakeRunner(LIMITS.max_batch_size, before_run=begun.append)
    engine = fake_engine(runner, limits=LIMITS, context=256, last_run=shared)
    steps = engine.calibrate(60.0, lambda: len(begun) < 12)
    # One more step, which ends what ran.
    assert 0 < len(steps) < len(begun) <= 13
    assert not engine.has_work
    assert shared.ended is None, "another engine's next run is not timed from there"
    engine.add_request(request("a"))
    engine.step()
    assert shared.ended is not None


def test_source_that_might_take_longer_than_what_is_left_is_left_out() -> None:
    slow = Machine(encoder_decoder(vocab_size=32, context=256), Law(prompt_pair=1e-4))
    # 128 tokens take 1.6 s and a little, twice as many 6.5 s.
    slow.engine.calibrate(3.0)
    lengths = {len(row.token_ids) for batch in slow.runner.batches for group in batch.encodes for row in group.rows}
    assert lengths == {8, 32, 128}
    quick = Machine(encoder_decoder(vocab_size=32, context=256))
    quick.engine.calibrate(60.0)
    assert 256 in {
        len(row.token_ids) for batch in quick.runner.batches for group in batch.encodes for row in group.rows
    }


# Of each size the least, an odd one and the largest; every pair of values once.
@pytest.mark.parametrize(
    ("context", "source_context", "max_batch_size"),
    [(4, 0, 1), (4, 3, 5), (4, 9000, 32), (96, 0, 5), (96, 3, 32), (96, 9000, 1), (4096, 0, 32), (4096, 3, 1),
     (4096, 9000, 5)],
)  # fmt: skip
def test_rounds_fit_every_model_and_reach_the_largest_batch(
    context: int, source_context: int, max_batch_size: int
) -> None:
    rules = ChunkRules(
        chunk=1 if source_context else 128,
        context=context,
        prompt_padding=4,
        short_prompt=32,
        source_padding=16,
        source_context=source_context,
    )
    made = list(rounds(rules, max_batch_size, 128))
    assert max(each.num_requests for each in made) == max_batch_size
    for each in made:
        assert 1 <= each.num_prompt_tokens <= (source_context or context - 1)
        assert each.num_new_tokens >= 1
    longest = source_context or max(1, min(context - 5, 6 * 128))
    assert max(each.num_prompt_tokens for each in made) == longest
