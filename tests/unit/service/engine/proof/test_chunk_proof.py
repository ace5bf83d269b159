"""The proof of speculation: it meets every chunk length, costs what is documented, and finds any other bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from model.spec.golden import Feed, GoldenCase
from service.engine.batch import ScheduledBatch
from service.engine.engine import Engine, LastRun
from service.engine.proof.chunk_proof import describe_foreign, find_difference, find_merged_difference
from service.engine.sampling.sampler import Sampler
from service.engine.scheduler import EngineLimits, Scheduler
from tests.environment import ROOT
from tests.fakes import CONTEXT, FakeRunner, Float32, drain, fake_engine, fake_model, letters, request
from tests.unit.service.engine.proof.test_replay import make_case


class Rounding(FakeRunner):
    """Changes the last bit of a logit at one position, in chunks of some length or longer."""

    def __init__(self, length: int, position: int) -> None:
        super().__init__()
        self._length, self._position = length, position

    def run(self, batch: ScheduledBatch) -> Float32:
        logits = super().run(batch).copy()
        chunk = next(iter(batch.prefills), None)
        if chunk is not None and chunk.num_scored and len(chunk.token_ids) >= self._length:
            index = self._position - chunk.start
            if 0 <= index < len(chunk.token_ids):
                row = logits[4 + index]
                row[7] = np.nextafter(row[7], np.float32(9))
        return logits


def long_case(length: int) -> GoldenCase:
    return make_case((3, length), ((Feed(1, 0, length),),), with_sources=False)


def differs(
    runner: FakeRunner, length: int, longest_chunk: int, max_tokens: int = 16, context: int = CONTEXT
) -> str | None:
    """What the proof says on a sequence of so many tokens."""
    return find_difference(
        runner,
        [long_case(length)],
        num_slots=4,
        longest_chunk=longest_chunk,
        max_tokens=max_tokens,
        context=context,
    )


@pytest.mark.parametrize("length", [1, 2, 9, 16, 17, 40])
@pytest.mark.parametrize("longest_chunk", [2, 5, 16])
def test_proof_passes_where_chunks_change_nothing_and_meets_every_length(length: int, longest_chunk: int) -> None:
    runner = FakeRunner()
    assert differs(runner, length, longest_chunk) is None
    met = {len(chunk.token_ids) for batch in runner.batches for chunk in batch.prefills if chunk.num_scored}
    assert met >= set(range(2, longest_chunk + 1))
    assert max(met) <= 16


def test_proof_needs_no_row_that_is_longer_than_the_context() -> None:
    runner = FakeRunner()
    assert differs(runner, 3, 16, context=5) is None
    chunks = [chunk for batch in runner.batches for chunk in batch.prefills]
    assert {len(chunk.token_ids) for chunk in chunks} == {2, 3, 4, 5}
    assert max(chunk.start + len(chunk.token_ids) for chunk in chunks) == 5


@pytest.mark.parametrize(
    ("longest_chunk", "num_tokens", "num_alone", "num_logits"), [(9, 722, 74, 312), (17, 1294, 82, 581)]
)
def test_proof_costs_as_many_tokens_as_is_written(
    longest_chunk: int, num_tokens: int, num_alone: int, num_logits: int
) -> None:
    runner = FakeRunner(32)
    case = long_case(200)
    found = find_difference(runner, [case], num_slots=32, longest_chunk=longest_chunk, max_tokens=128, context=512)
    assert found is None
    chunks = [chunk for batch in runner.batches for chunk in (*batch.prefills, *batch.drafted)]
    alone = sum(len(batch.decode) for batch in runner.batches)
    assert alone == num_alone
    assert alone + sum(len(chunk.token_ids) for chunk in chunks) == 200 - longest_chunk + num_tokens
    assert alone + sum(chunk.num_logits for chunk in chunks) == num_logits, "none of what is only to lie in the cache"
    document = " ".join((ROOT / "docs" / "serve" / "engine.md").read_text(encoding="utf-8").split())
    assert f"{num_tokens} tokens with K = {longest_chunk - 1}, {num_alone} of them one by one" in document


@pytest.mark.parametrize(("length", "position"), [(2, 1), (5, 4), (2, 15), (16, 9), (3, 39), (5, 35)])
def test_proof_names_where_a_chunk_has_other_bits(length: int, position: int) -> None:
    found = differs(Rounding(length, position), 40, 5)
    assert found is not None
    assert found.startswith(f"position {position} of golden case case has other bits in a chunk of ")


class RoundingRows(FakeRunner):
    """Changes the last bit of one row's logits among so many rows with draft tokens."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(32)
        self._num_rows = num_rows

    def run(self, batch: ScheduledBatch) -> Float32:
        logits = super().run(batch).copy()
        if len(batch.drafted) == self._num_rows:
            logits[-1, 7] = np.nextafter(logits[-1, 7], np.float32(9))
        return logits


@pytest.mark.parametrize("num_rows", [2, 4, 8, 16])
def test_proof_finds_other_bits_among_rows_with_drafts(num_rows: int) -> None:
    found = find_difference(
        RoundingRows(num_rows), [long_case(40)], num_slots=32, longest_chunk=9, max_tokens=128, context=CONTEXT
    )
    assert found == f"golden case case has other bits among {num_rows} rows with drafts than by itself"


class Forgetful(FakeRunner):
    """Short chunks leave no K/V behind: the row keeps what it had."""

    def run(self, batch: ScheduledBatch) -> Float32:
        chunk = next(iter(batch.prefills), None)
        before = list(self._tokens[0])
        logits = super().run(batch)
        if chunk is not None and len(chunk.token_ids) < 8 <= len(before):
            self._tokens[0] = before
        return logits


def test_proof_finds_that_a_chunk_left_no_kv() -> None:
    found = differs(Forgetful(), 12, 3)
    assert found is not None
    # The first chunk of two is right, and what follows is computed upon something else.
    assert found.startswith("position 2 of golden case case has other bits")


class RoundingRuns(FakeRunner):
    """Runs of some length or longer change the last bit, of their logits or of those that their K/V give."""

    def __init__(self, length: int, *, in_kv: bool) -> None:
        super().__init__()
        self._length, self._in_kv, self._is_wrong = length, in_kv, False

    def run(self, batch: ScheduledBatch) -> Float32:
        logits = super().run(batch).copy()
        is_long = any(len(chunk.token_ids) >= self._length for chunk in batch.prefills)
        if self._is_wrong if self._in_kv and batch.decode else is_long and not self._in_kv:
            logits[0, 7] = np.nextafter(logits[0, 7], np.float32(9))
        self._is_wrong = is_long
        return logits


def merged_difference(runner: FakeRunner, context: int = CONTEXT, num_chunks: int = 4) -> str | None:
    return find_merged_difference(runner, [long_case(5)], chunk=8, num_chunks=num_chunks, context=context)


def test_merged_chunks_are_computed_both_ways() -> None:
    runner = FakeRunner()
    assert merged_difference(runner) is None
    lengths = [len(chunk.token_ids) for batch in runner.batches for chunk in batch.prefills]
    assert lengths == [8] * 4 + [8] * 4 + [32]
    assert [row.position for batch in runner.batches for row in batch.decode] == [32] * 3


@pytest.mark.parametrize(("context", "num_tokens"), [(CONTEXT, 32), (33, 32), (32, 24), (17, 16)])
@pytest.mark.parametrize("in_kv", [False, True])
def test_other_bits_of_merged_chunks_are_found(context: int, num_tokens: int, in_kv: bool) -> None:
    found = merged_difference(RoundingRuns(9, in_kv=in_kv), context)
    assert found == f"golden case case has other bits in one run of {num_tokens} tokens than in chunks of 8"


LIMITS = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=8, short_prompt=1)


@pytest.mark.parametrize("is_honest", [True, False])
def test_an_engine_merges_chunks_once_that_is_proven(is_honest: bool, caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner() if is_honest else RoundingRuns(9, in_kv=True)
    engine = fake_engine(runner, limits=LIMITS)
    assert not engine.chunk_rules.long_run
    engine.prove_merged_chunks([long_case(40)])
    assert engine.chunk_rules.long_run == (32 if is_honest else 0)
    problem = "golden case case has other bits in one run of 32 tokens than in chunks of 8"
    warnings = [] if is_honest else [f"engine: no merged chunks: {problem}"]
    assert [record.getMessage() for record in caplog.records] == warnings
    runner.batches.clear()
    engine.add_request(request("a", range(3, 40), max_tokens=1))
    drain(engine)
    lengths = [len(chunk.token_ids) for batch in runner.batches for chunk in batch.prefills]
    assert lengths == ([32, 5] if is_honest else [8, 8, 8, 8, 5])


def test_an_engine_merges_no_chunks_while_another_of_its_thread_has_work() -> None:
    last_run = LastRun()
    runner = FakeRunner()
    engine, other = (
        Engine(Scheduler(LIMITS, fake_model(), letters), each, Sampler(), last_run) for each in (runner, FakeRunner())
    )
    engine.prove_merged_chunks([long_case(40)])
    for name, lengths in (("beside", [8, 8, 8, 8, 5]), ("alone", [32, 5])):
        if name == "beside":
            other.add_request(request("other", [5], max_tokens=9))
        runner.batches.clear()
        engine.add_request(request(name, [ord(name[0]) % 29 + 3, *range(3, 39)], max_tokens=1))
        drain(engine)
        assert [len(chunk.token_ids) for batch in runner.batches for chunk in batch.prefills] == lengths
        drain(other)


def test_an_engine_whose_proof_fails_to_run_merges_no_chunks(caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: ScheduledBatch) -> None:
        if any(len(chunk.token_ids) > 8 for chunk in batch.prefills):
            raise RuntimeError("no memory")

    engine = fake_engine(FakeRunner(before_run=fail), limits=LIMITS)
    engine.prove_merged_chunks([long_case(40)])
    assert not engine.chunk_rules.long_run
    assert "engine: no merged chunks: the proof failed, " in caplog.text


@pytest.mark.parametrize(
    "options",
    [{"limits": dataclasses.replace(LIMITS, merged_chunks=1)}, {"context": 16}, {"encoder_decoder": True}],
)
def test_nothing_is_tested_where_a_run_is_one_chunk(options: dict[str, Any]) -> None:
    runner = FakeRunner()
    fake_engine(runner, **{"limits": LIMITS, **options}).prove_merged_chunks([long_case(5)])
    assert not runner.batches


def test_what_standard_operators_compute_is_named() -> None:
    own = {"onward.Linear", "onward.GroupQueryAttention", "Gather", "Add"}
    assert describe_foreign(own) == []
    (problem,) = describe_foreign({*own, "MatMul", "com.microsoft.GroupQueryAttention"})
    assert problem.startswith("the decoder has standard operators for MatMul, com.microsoft.GroupQueryAttention, and ")
    (problem,) = describe_foreign({"Gather"})
    assert "all operators" in problem
