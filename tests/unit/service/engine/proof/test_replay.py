"""Golden cases replayed on a fake model: every feed's logits, whatever the slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.spec.golden import Feed, GoldenCase, Step, Tolerance, staggered
from service.engine.chunks import ChunkRules
from service.engine.proof.replay import replay, replay_all
from tests.fakes import VOCAB_SIZE, FakeRunner, fake_engine, noise

RULES = ChunkRules(chunk=8, context=64, prompt_padding=4, short_prompt=6, source_padding=16, source_context=64)
LENGTHS = (3, 9, 1, 6, 4)


def make_case(lengths: tuple[int, ...], steps: tuple[Step, ...], *, with_sources: bool) -> GoldenCase:
    """A case that PyTorch would answer as `noise` does."""
    sequences = tuple(np.arange(3, 3 + length) + row for row, length in enumerate(lengths))
    sources = tuple(np.arange(3, 5 + 7 * row) for row in range(len(lengths))) if with_sources else ()
    logits = [
        noise(
            sources[feed.row].tolist() if with_sources else (), sequences[feed.row][: feed.start + feed.count].tolist()
        )
        for step in steps
        for feed in step
    ]
    return GoldenCase("case", sequences, sources, steps, np.stack(logits))


@pytest.mark.parametrize("with_sources", [False, True], ids=["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize("num_slots", [1, 3, 32])
def test_cases_side_by_side_give_what_each_gives_by_itself(num_slots: int, with_sources: bool) -> None:
    shapes: list[tuple[tuple[int, ...], tuple[Step, ...]]] = [
        (LENGTHS, staggered(LENGTHS)),
        ((1,), staggered((1,))),
        ((4, 4), staggered((4, 4))),
    ]
    if not with_sources:
        shapes.append(((7, 12), (*_chunks(0, (5,)), *_chunks(1, (4, 6)), *_together(5, 10, 2))))
        # Decodes, reads on, decodes.
        shapes.append(((9,), (*_chunks(0, (3,)), (Feed(0, 3, 1),), (Feed(0, 4, 4),), (Feed(0, 8, 1),))))
    cases = [make_case(lengths, steps, with_sources=with_sources) for lengths, steps in shapes]
    some = (0, 3, len(cases[0].logits) - 1)
    cases.append(replace(cases[0], logits=cases[0].logits[list(some)], compared=some))
    runner, alone = FakeRunner(num_slots), FakeRunner(num_slots)
    for case, logits in zip(cases, replay_all(runner, cases, RULES, num_slots), strict=True):
        np.testing.assert_array_equal(logits, case.logits)
        np.testing.assert_array_equal(replay(alone, case, RULES, num_slots), case.logits)
    if num_slots == 32 and not with_sources:
        assert len(runner.batches) < len(alone.batches) * 2 / 3
    assert max(len(batch.decode) for batch in runner.batches) <= num_slots
    assert replay_all(runner, [], RULES, num_slots) == []


def test_engine_verifies_golden_cases_and_notices_wrong_ones() -> None:
    engine = fake_engine(FakeRunner(4))
    case = make_case(LENGTHS, staggered(LENGTHS), with_sources=False)
    wrong = GoldenCase("wrong", case.sequences, case.sources, case.steps, case.logits + np.float32(1))
    results = engine.verify_golden((case, wrong), Tolerance(absolute=1e-6))
    assert [(result.name, result.passed) for result in results] == [("case", True), ("wrong", False)]
    assert case.logits.shape[1] == VOCAB_SIZE


def _chunks(row: int, counts: tuple[int, ...]) -> list[Step]:
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [(Feed(row, start, count),) for start, count in zip(starts, counts, strict=True)]


def _together(first: int, second: int, count: int) -> list[Step]:
    return [(Feed(0, first + index, 1), Feed(1, second + index, 1)) for index in range(count)]
