"""The check of batch invariance: it fills every slot, is cheap, and finds bits that depend on the batch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import numpy as np
import pytest

from model.spec.golden import GoldenCase, staggered
from service.engine.batch import ScheduledBatch
from service.engine.chunks import ChunkRules
from service.engine.kv.reservations import KVBudget
from service.engine.proof.batch_proof import MIN_CONTEXT, find_dependence, row_tokens
from service.engine.scheduler import EngineLimits
from tests.fakes import FakeRunner, Float32, fake_engine
from tests.unit.service.engine.proof.test_chunk_proof import long_case
from tests.unit.service.engine.proof.test_replay import make_case

DECODER_ONLY = ChunkRules(
    chunk=128, context=512, prompt_padding=4, short_prompt=32, source_padding=16, source_context=0
)
ENCODER_DECODER = dataclasses.replace(DECODER_ONLY, source_context=64)
LIMITS = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=16, look_up=4)
Condition = Callable[[ScheduledBatch], bool]


class Dependent(FakeRunner):
    """Changes the last bit of a logit of every row that is fed, in batches that meet a condition."""

    def __init__(self, num_slots: int, condition: Condition) -> None:
        super().__init__(num_slots)
        self._condition = condition

    def run(self, batch: ScheduledBatch) -> Float32:
        logits = super().run(batch).copy()
        if self._condition(batch):
            logits[:, 7] = np.nextafter(logits[:, 7], np.float32(9))
        return logits


def dependent(batch: ScheduledBatch) -> bool:
    return len(batch.decode) > 1


def case_for(rules: ChunkRules) -> GoldenCase:
    lengths = (3, 9, 5)
    return make_case(lengths, staggered(lengths), with_sources=rules.source_context > 0)


def dependence(runner: FakeRunner, rules: ChunkRules, num_slots: int, max_prefill_tokens: int = 128) -> str | None:
    """What the check says of a model with two golden cases."""
    cases = [case_for(rules), dataclasses.replace(case_for(rules), name="other")]
    return find_dependence(runner, cases, rules, num_slots=num_slots, max_prefill_tokens=max_prefill_tokens)


@pytest.mark.parametrize(
    ("rules", "context", "chunk", "num_slots"),
    [
        (DECODER_ONLY, 512, 128, 32),
        (DECODER_ONLY, MIN_CONTEXT, 128, 3),
        (DECODER_ONLY, MIN_CONTEXT, 1, 2),
        (ENCODER_DECODER, 512, 128, 4),
        (ENCODER_DECODER, 64, 8, 5),
        (ENCODER_DECODER, MIN_CONTEXT, 1, 32),
    ],
)
def test_check_passes_where_the_batch_changes_nothing_and_fills_every_slot(
    rules: ChunkRules, context: int, chunk: int, num_slots: int
) -> None:
    runner = FakeRunner(num_slots)
    source_context = min(rules.source_context, context)
    rules = dataclasses.replace(rules, context=context, chunk=chunk, source_context=source_context)
    assert dependence(runner, rules, num_slots, max_prefill_tokens=chunk) is None
    assert max(len({*_slots(batch)}) for batch in runner.batches) == num_slots
    for batch in runner.batches:
        padded = sum(group.padded_length * len(group.rows) for group in batch.prefill_groups)
        assert padded + sum(len(each.token_ids) for each in batch.prefills) <= chunk
    tokens, source = row_tokens(rules)
    assert max(map(len, runner._tokens)) <= tokens <= context
    assert max(map(len, runner._sources)) <= source


@pytest.mark.parametrize("rules", [DECODER_ONLY, ENCODER_DECODER], ids=["decoder-only", "encoder-decoder"])
def test_check_costs_as_little_as_is_written(rules: ChunkRules) -> None:
    runner = FakeRunner(32)
    assert dependence(runner, rules, 32) is None
    assert sum(batch.num_prefill_tokens + batch.num_encoder_tokens for batch in runner.batches) <= 100
    decodes = [batch for batch in runner.batches if batch.num_decode_rows]
    assert len(decodes) <= 10
    assert sum(batch.num_decode_rows for batch in decodes) < 60


@pytest.mark.parametrize("num_slots", [2, 3, 8, 32])
@pytest.mark.parametrize(
    ("rules", "condition"),
    [
        (DECODER_ONLY, lambda batch: batch.num_decode_rows == 2),
        (DECODER_ONLY, lambda batch: batch.num_decode_rows > 1 and not batch.has_prompts),
        (DECODER_ONLY, lambda batch: bool(batch.prefills and batch.decode)),
        (ENCODER_DECODER, lambda batch: batch.num_decode_rows == 2),
        (ENCODER_DECODER, lambda batch: any(len(group.rows) > 1 for group in batch.encodes)),
    ],
    ids=["two-rows", "decode", "chunk-beside-decode", "two-rows-from-sources", "sources"],
)
def test_check_finds_bits_that_depend_on_the_batch(rules: ChunkRules, condition: Condition, num_slots: int) -> None:
    found = dependence(Dependent(num_slots, condition), rules, num_slots)
    assert found is not None
    assert "of golden case case has other bits in a batch of" in found


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        (lambda batch: any(len(each.rows) == 4 for each in batch.prefill_groups), "step 0, row 3: position 3"),
        (lambda batch: len(batch.decode) == 31, "step 1, row 3: position 4"),
        (lambda batch: len(batch.decode) % 4 == 3 and not batch.prefills, "step 2, row 3: position 5"),
        (lambda batch: len(batch.decode) == 2, "step 3, row 3: position 6"),
    ],
    ids=["group", "all-slots", "a-rest-of-three", "two-rows"],
)
def test_check_names_the_first_step_and_row_that_differ(condition: Condition, found: str) -> None:
    place = dependence(Dependent(32, condition), DECODER_ONLY, 32)
    assert place is not None
    assert place.startswith(f"{found} of golden case case has other bits in a batch of ")


@pytest.mark.parametrize("is_invariant", [True, False])
def test_engine_that_depends_on_the_batch_warns_once_and_drafts_no_more(
    is_invariant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fake_engine(FakeRunner() if is_invariant else Dependent(4, dependent), limits=LIMITS)
    engine.prove_speculation([long_case(40)])
    engine.prove_merged_chunks([long_case(40)])
    assert (engine.max_draft_tokens, engine.chunk_rules.long_run) == (4, 32)
    assert engine.check_batch_invariance([long_case(40)]) is is_invariant
    assert engine.max_draft_tokens == (4 if is_invariant else 0)
    assert engine.chunk_rules.long_run == (32 if is_invariant else 0)
    engine.calibrate(0.01)
    assert engine.max_draft_tokens == (4 if is_invariant else 0)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    place = "step 1, row 2: position 4 of golden case case has other bits in a batch of 4 rows than alone"
    assert warnings == ([] if is_invariant else [f"engine: not batch-invariant, no prompt-lookup speculation: {place}"])


def test_engine_whose_check_fails_to_run_is_not_taken_for_invariant(caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: ScheduledBatch) -> None:
        if dependent(batch):
            raise RuntimeError("no memory")

    engine = fake_engine(FakeRunner(before_run=fail), limits=LIMITS)
    engine.prove_speculation([long_case(40)])
    assert engine.check_batch_invariance([long_case(40)]) is False
    assert engine.max_draft_tokens == 0
    assert "not batch-invariant, no prompt-lookup speculation: the check failed, " in caplog.text


def test_nothing_is_checked_without_a_case_a_second_row_or_a_context() -> None:
    one_row = dataclasses.replace(LIMITS, max_batch_size=1)
    runner = FakeRunner()
    assert fake_engine(runner, limits=LIMITS).check_batch_invariance([]) is None
    assert fake_engine(runner, limits=one_row).check_batch_invariance([long_case(40)]) is None
    assert fake_engine(runner, limits=LIMITS, context=MIN_CONTEXT - 1).check_batch_invariance([long_case(4)]) is None
    assert not runner.batches


@pytest.mark.parametrize(("num_bytes", "num_rows"), [(64, 4), (40, 3)])
def test_rows_are_as_many_as_fit_into_the_memory(num_bytes: int, num_rows: int) -> None:
    # A row of the check has ten tokens, so three pages of four; one of the whole context has 64.
    runner = FakeRunner(4)
    engine = fake_engine(runner, limits=LIMITS, kv_budget=KVBudget(num_bytes=num_bytes, token_bytes=1, page_tokens=4))
    assert engine.check_batch_invariance([long_case(40)]) is True
    assert max(len({*_slots(batch)}) for batch in runner.batches) == num_rows


def _slots(batch: ScheduledBatch) -> list[int]:
    decoding = [slot for slot, row in enumerate(batch.decode) if not row.is_padding]
    grouped = [row.slot for group in batch.prefill_groups for row in group.rows]
    return [*decoding, *grouped, *(chunk.slot for chunk in batch.prefills)]
