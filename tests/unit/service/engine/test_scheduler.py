"""Scheduling keeps its promises: single steps by example, whole lives by a state machine."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.batch import KVCopy, KVDrop, KVFree, KVRestore, KVSave, ScheduledBatch
from service.engine.kv.reservations import KVBudget
from service.engine.sampling.sampler import SampledToken
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.types import (
    BeamSearchParams,
    FinishReason,
    PromptScoring,
    SamplingParams,
    TokenEvent,
)
from service.errors import InvalidRequest, StartupError
from tests.engine_life import LIMITS, chunks_of
from tests.fakes import CONTEXT, FakeRunner, fake_engine, fake_model, letters, request

# No beginning is short enough to be computed in a group.
NO_GROUPS = dataclasses.replace(LIMITS, short_prompt=1)


def make_scheduler(limits: EngineLimits = LIMITS, *, encoder_decoder: bool = False) -> Scheduler:
    return Scheduler(limits, fake_model(encoder_decoder=encoder_decoder), letters)


def commit(scheduler: Scheduler, batch: ScheduledBatch, token_id: int = 7) -> tuple[TokenEvent, ...]:
    return scheduler.commit(batch, [SampledToken(token_id, None) for _ in batch.samples], 0.0)


def step(scheduler: Scheduler, now: float = 0.0) -> ScheduledBatch:
    """One step in which every sampled token is the same; the batch that was run."""
    batch = scheduler.schedule(now)
    commit(scheduler, batch)
    scheduler.check_invariants()
    return batch


def test_schedule_cuts_a_prompt_at_multiples_of_the_chunk_within_the_budget() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", range(3, 23)))
    first, second, third = step(scheduler), step(scheduler), step(scheduler)
    assert chunks_of(first) == [(0, 0, 8), (0, 8, 8)]
    assert not first.samples
    assert chunks_of(second) == [(0, 16, 4)]
    assert [(sample.slot, sample.position) for sample in second.samples] == [(0, 20)]
    assert not third.prefills
    assert [(row.position, row.token_id) for row in third.decode] == [(20, 7)]


def test_schedule_prefill_budget_goes_to_the_oldest_and_none_overtakes() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", range(3, 26)))  # 8 + 8 + 7
    scheduler.add(request("b", range(4, 19)))  # 8 + 7
    scheduler.add(request("c", range(3, 5)))
    assert chunks_of(step(scheduler)) == [(0, 0, 8), (0, 8, 8)]
    assert chunks_of(step(scheduler)) == [(0, 16, 7), (1, 0, 8)]
    assert chunks_of(step(scheduler)) == [(1, 8, 7), (2, 0, 2)]


def test_schedule_merges_the_chunks_of_a_prompt_that_nothing_runs_beside() -> None:
    scheduler = make_scheduler(NO_GROUPS)
    scheduler.merge_chunks(is_proven=True)
    scheduler.add(request("a", range(3, 40), max_tokens=9))
    assert [chunks_of(step(scheduler)) for _ in range(2)] == [[(0, 0, 32)], [(0, 32, 5)]]
    scheduler.add(request("b", range(4, 41), max_tokens=1))
    assert chunks_of(step(scheduler)) == [(1, 0, 8), (1, 8, 8)], "the first one decodes"
    assert scheduler.num_cached_tokens(request("c", range(3, 40))) == 32, "chunk by chunk"


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "other"},
        {"partial_on_deadline": True, "deadline": 90.0, "end_by": 80.0},
        {"scoring": PromptScoring()},
    ],
)
def test_schedule_merges_no_chunks_where_others_have_a_turn_or_steps_are_timed(other: dict[str, Any]) -> None:
    scheduler = make_scheduler(NO_GROUPS)
    scheduler.merge_chunks(is_proven=True)
    if "tenant" in other:
        scheduler.add(request("b", range(4, 41), **other))
        other = {}
    scheduler.add(request("a", range(3, 40), **other))
    assert chunks_of(scheduler.schedule(0.0)) == [(0, 0, 8), (0, 8, 8)]


def test_schedule_logits_are_wanted_of_a_prompts_last_chunk_and_of_scored_tokens() -> None:
    def chunks(scheduler: Scheduler) -> list[tuple[int, int]]:
        return [(chunk.start, chunk.num_logits) for chunk in step(scheduler).prefills]

    scheduler = make_scheduler(NO_GROUPS)
    scheduler.add(request("a", range(3, 23)))
    assert [chunks(scheduler) for _ in range(2)] == [[(0, 0), (8, 0)], [(16, 1)]]
    scheduler = make_scheduler(NO_GROUPS)
    scheduler.add(request("a", range(3, 20)))
    assert [chunks(scheduler) for _ in range(2)] == [[(0, 0), (8, 0)], []], "the last token decodes"
    scheduler.add(request("b", range(5, 22), scoring=PromptScoring(start=12)))
    assert [(chunk.start, chunk.num_logits) for chunk in scheduler.schedule(0.0).prefills] == [(0, 0), (8, 5)]


def test_schedule_rows_in_the_middle_of_their_prompt_pad_the_batched_run_where_the_next_chunk_will_write() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("x", [5], max_tokens=9))
    scheduler.add(request("long", range(3, 40)))
    step(scheduler)
    scheduler.abort("x")
    scheduler.add(request("y", [5]))
    batch = step(scheduler)
    assert batch.kv_operations[-1:] == (KVCopy(source=1, target=0, num_tokens=16, num_source_tokens=0),)
    assert chunks_of(batch) == [(0, 16, 8), (0, 24, 8)]
    batch = step(scheduler)
    assert [(row.position, row.is_padding) for row in batch.decode] == [(32, True), (0, False)]
    assert chunks_of(batch) == [(0, 32, 5)]
    assert batch.num_padding_tokens == 1


def test_schedule_rows_that_do_not_decode_at_the_end_are_left_out_of_the_batched_run() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", [5]))
    scheduler.add(request("long", range(3, 40)))
    step(scheduler)
    batch = step(scheduler)
    assert len(batch.decode) == 1
    assert batch.num_padding_tokens == 0


def test_schedule_encodes_sources_of_one_padded_length_together_and_decodes_them_at_once() -> None:
    scheduler = make_scheduler(EngineLimits(prefill_chunk=8, max_prefill_tokens=64), encoder_decoder=True)
    for name, length in {"a": 3, "b": 17, "c": 16}.items():
        scheduler.add(request(name, range(3, 3 + length)))
    batch = step(scheduler)
    assert [(group.padded_length, [row.slots for row in group.rows]) for group in batch.encodes] == [
        (16, [(0,), (2,)]),
        (32, [(1,)]),
    ]
    assert [row.source_length for row in batch.decode] == [3, 17, 16]
    assert len(batch.samples) == 3
    assert not batch.prefills
    assert not step(scheduler).encodes


def test_schedule_computes_short_prompts_of_one_padded_length_together() -> None:
    limits = EngineLimits(max_batch_size=8, prefill_chunk=32, max_prefill_tokens=64, prompt_padding=4, short_prompt=16)
    scheduler = make_scheduler(limits)
    for name, length in {"a": 3, "b": 16, "c": 17, "d": 4, "e": 1, "f": 2}.items():
        scheduler.add(request(name, range(3, 3 + length)))
    batch = step(scheduler)
    assert [(group.padded_length, [row.slot for row in group.rows]) for group in batch.prefill_groups] == [
        (4, [0, 3, 5]),
        (16, [1]),
    ]
    assert [(chunk.slot, chunk.start, len(chunk.token_ids)) for chunk in batch.prefills] == [(2, 0, 17)]
    assert len(batch.samples) == 6
    assert (batch.num_rows, batch.num_tokens) == (6, 43)
    assert batch.num_padding_tokens == 1 + 2 + 4, "in groups, and the slots before the one that decodes"


def test_schedule_pads_what_begins_a_prompt_and_neither_the_rest_nor_what_is_scored() -> None:
    scheduler = make_scheduler(dataclasses.replace(LIMITS, max_prefill_tokens=64))
    scheduler.add(request("a", range(3, 17)))
    scheduler.add(request("b", range(3, 9), scoring=PromptScoring()))
    scheduler.add(request("c", range(3, 9), scoring=PromptScoring(start=5)))
    batch = scheduler.schedule(0.0)
    assert [(group.padded_length, [row.slot for row in group.rows]) for group in batch.prefill_groups] == [(8, [0])]
    assert [(chunk.slot, chunk.start, len(chunk.token_ids), chunk.num_scored) for chunk in batch.prefills] == [
        (0, 8, 6, 0),
        (1, 0, 6, 6),
        (2, 0, 6, 2),
    ]


def test_schedule_padding_of_prompts_takes_from_the_budget() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(request(name, range(3, 8)))
    assert chunks_of(step(scheduler)) == [(0, 0, 5), (1, 0, 5)]
    assert chunks_of(step(scheduler)) == [(2, 0, 5)]


def test_schedule_a_source_longer_than_the_budget_still_runs_but_alone() -> None:
    scheduler = make_scheduler(encoder_decoder=True)
    scheduler.add(request("a", range(3, 43)))
    scheduler.add(request("b", range(4, 44)))
    assert [group.padded_length for group in step(scheduler).encodes] == [48]
    assert scheduler.num_waiting == 1
    assert [row.slots for group in step(scheduler).encodes for row in group.rows] == [(1,)]


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_schedule_rows_that_outlive_those_that_end_together_move_at_most_once(ends: list[bool]) -> None:
    scheduler = make_scheduler(EngineLimits(max_batch_size=8, prefill_chunk=8, max_prefill_tokens=8))
    for index, is_end in enumerate(ends):
        scheduler.add(request(f"r{index}", [5], max_tokens=2 if is_end else 9))
    step(scheduler)
    step(scheduler)
    num_left = ends.count(False)
    batch = step(scheduler)
    survivors = [slot for slot, is_end in enumerate(ends) if not is_end]
    moves = [operation for operation in batch.kv_operations if isinstance(operation, KVCopy)]
    assert [move.target for move in moves] == [slot for slot in range(num_left) if slot not in survivors]
    assert sorted(move.source for move in moves) == [slot for slot in survivors if slot >= num_left]
    assert all(move.num_tokens == 2 for move in moves)
    assert [row.position for row in batch.decode] == [2] * num_left


def test_schedule_expired_deadline_wins_over_an_abort() -> None:
    """A transport's deadline cancels the call at the same moment; the client must hear of the deadline."""
    scheduler = make_scheduler()
    scheduler.add(request("a", deadline=2.0))
    scheduler.add(request("b", deadline=2.5))
    for name in "ab":
        scheduler.abort(name)
    events = commit(scheduler, scheduler.schedule(2.0))
    assert [event.finish_reason for event in events] == [FinishReason.DEADLINE, FinishReason.CANCELLED]
    assert not scheduler.has_work


def test_schedule_deadline_of_a_finished_request_does_not_touch_the_next_of_its_id() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=1, deadline=5.0))
    step(scheduler)
    scheduler.add(request("a", deadline=9.0))
    assert [event.finish_reason for event in commit(scheduler, scheduler.schedule(6.0))] == [None]
    (event,) = commit(scheduler, scheduler.schedule(9.0))
    assert event.finish_reason is FinishReason.DEADLINE


ALONE = EngineLimits(max_batch_size=1, prefill_chunk=8, max_prefill_tokens=8)


def timed_step(scheduler: Scheduler, began: float, ended: float) -> list[tuple[str, int | None, FinishReason | None]]:
    batch = scheduler.schedule(began)
    sampled = [SampledToken(7, None) for _ in batch.samples]
    events = scheduler.commit(batch, sampled, ended)
    scheduler.check_invariants()
    return [(event.request_id, event.token_id, event.finish_reason) for event in events]


def test_schedule_a_partial_answer_ends_with_the_last_step_that_leaves_time_for_another() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=30, deadline=9.0, partial_on_deadline=True, end_by=8.0))
    # Two seconds a step, one of them between two steps.
    reported = [timed_step(scheduler, began, began + 1.0) for began in (0.0, 2.0, 4.0)]
    assert reported == [[("a", 7, None)]] * 3
    assert timed_step(scheduler, 6.0, 7.0) == [("a", 7, None), ("a", None, FinishReason.DEADLINE)]
    assert not scheduler.has_work


def test_schedule_a_partial_answer_allows_for_a_prompt_in_the_next_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("long", range(3, 9), max_tokens=2))
    timed_step(scheduler, 0.0, 5.0)
    scheduler.add(request("a", max_tokens=30, deadline=12.0, partial_on_deadline=True, end_by=11.0))
    assert timed_step(scheduler, 5.0, 5.9)[-1] == ("a", 7, None)
    # Without a prompt a step takes a second, but one took five.
    assert timed_step(scheduler, 5.9, 6.1) == [("a", 7, None), ("a", None, FinishReason.DEADLINE)]


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_schedule_a_partial_answer_of_a_search_is_its_best_so_far(num_steps: int) -> None:
    now = 0.0
    engine = fake_engine(clock=lambda: now)
    search = BeamSearchParams(beam_size=3, num_hypotheses=2)
    partial = {"deadline": num_steps + 1.0, "partial_on_deadline": True, "end_by": num_steps + 0.5}
    engine.add_request(request("a", max_tokens=30, beam_search=search, **partial))
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step().events
        now += 1.0
    ends = [event for event in events if event.finish_reason is not None]
    assert {event.finish_reason for event in ends} == {FinishReason.DEADLINE}
    lengths = Counter(event.output_index for event in events if event.token_id is not None)
    steps = num_steps + 1
    assert lengths == dict.fromkeys(range(2), steps)
    scores = [event.score for event in ends if event.score is not None]
    assert len(scores) == len(ends) == 2
    assert scores == sorted(scores, reverse=True)
    assert ends[-1].timings is not None
    assert ends[-1].timings.first_token_time is not None


def test_limits_report_every_problem() -> None:
    with pytest.raises(StartupError) as caught:
        EngineLimits(
            max_batch_size=0,
            prefill_chunk=64,
            max_prefill_tokens=32,
            source_padding=-1,
            patience_seconds=math.inf,
            look_up=-1,
        )
    assert len(caught.value.problems) == 5


@given(
    prompts=st.lists(st.integers(1, CONTEXT - 1), min_size=1, max_size=10),
    encoder_decoder=st.booleans(),
)
def test_schedule_first_token_comes_within_the_promised_number_of_steps(
    prompts: list[int], encoder_decoder: bool
) -> None:
    """With free slots, after at most as many steps as there are chunks up to and including its own."""
    limits = EngineLimits(max_batch_size=10, prefill_chunk=8, max_prefill_tokens=16)
    scheduler = make_scheduler(limits, encoder_decoder=encoder_decoder)
    for index, length in enumerate(prompts):
        scheduler.add(request(str(index), [5] * length, max_tokens=CONTEXT))
    first: dict[str, int] = {}
    chunks_ahead = 0
    for number in range(1, 200):
        for event in commit(scheduler, scheduler.schedule(0.0)):
            first.setdefault(event.request_id, number)
    for index, length in enumerate(prompts):
        chunks_ahead += 1 if encoder_decoder else -(-length // limits.prefill_chunk)
        assert first[str(index)] <= chunks_ahead


TIGHT = EngineLimits(max_batch_size=2, prefill_chunk=8, max_prefill_tokens=16)


def tight_scheduler(num_bytes: int, limits: EngineLimits = TIGHT, *, encoder_decoder: bool = False) -> Scheduler:
    """A byte holds a token, and there are few."""
    return Scheduler(limits, fake_model(encoder_decoder=encoder_decoder), letters, KVBudget(num_bytes=num_bytes))


def test_schedule_a_more_urgent_request_takes_the_place_of_the_least_urgent_that_came_last() -> None:
    scheduler = make_scheduler(TIGHT)
    scheduler.add(request("first", [5], max_tokens=30))
    scheduler.add(request("last", [6], max_tokens=30))
    step(scheduler)
    scheduler.add(request("urgent", [7], max_tokens=2, priority=1))
    batch = step(scheduler)
    assert scheduler.running_ids == ("first", "urgent")
    assert scheduler.num_preemptions == 1
    assert [type(operation) for operation in batch.kv_operations] == [KVSave]
    step(scheduler)
    batch = step(scheduler)
    assert scheduler.running_ids == ("first", "last")
    assert [type(operation) for operation in batch.kv_operations] == [KVRestore, KVDrop]
    assert [row.position for row in batch.decode] == [3, 1]


def test_schedule_a_more_urgent_request_is_prefilled_before_the_rest_of_a_long_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("long", range(3, 63)))
    step(scheduler)
    scheduler.add(request("urgent", range(4, 20), priority=1))
    assert chunks_of(step(scheduler)) == [(0, 0, 8), (0, 8, 8)]
    assert scheduler.waiting_ids == ("long",)
    batch = step(scheduler)
    assert [(row.position, row.is_padding) for row in batch.decode] == [(16, False)]
    assert chunks_of(batch) == [(1, 16, 8), (1, 24, 8)]


@pytest.mark.parametrize("urgent", [[5], [5] * 8], ids=["no-chunk", "a-chunk-that-fits"])
def test_schedule_none_is_preempted_for_a_request_that_can_start_beside_it(urgent: list[int]) -> None:
    scheduler = make_scheduler()
    scheduler.add(request("long", range(3, 3 + 21)))
    step(scheduler)
    scheduler.add(request("urgent", urgent, priority=1))
    step(scheduler)
    assert scheduler.num_preemptions == 0
    assert scheduler.running_ids == ("long", "urgent")


def test_schedule_none_is_preempted_for_a_request_that_waits_for_an_equals_prompt() -> None:
    scheduler = make_scheduler(TIGHT)
    scheduler.add(request("lesser", [5], max_tokens=30))
    step(scheduler)
    scheduler.add(request("long", range(3, 63), priority=1))
    step(scheduler)
    scheduler.add(request("urgent", range(4, 12), priority=1))
    for _ in range(2):
        step(scheduler)
        assert scheduler.running_ids == ("lesser", "long")
    while scheduler.num_preemptions == 0:
        step(scheduler)
    assert scheduler.running_ids == ("long", "urgent")


def test_schedule_saved_requests_go_first_where_they_leave_no_room_for_a_more_urgent_one() -> None:
    """Otherwise each would wait for the other: what is saved gives its memory back only when its request ends."""
    scheduler = tight_scheduler(40)
    scheduler.add(request("saved", [5] * 20, max_tokens=20))
    for _ in range(3):
        step(scheduler)
    scheduler.add(request("stepping-stone", [6], max_tokens=2, priority=1))
    step(scheduler)
    scheduler.add(request("large", [7] * 15, max_tokens=15, priority=1))
    order = []
    for _ in range(60):
        order += [name for name in scheduler.running_ids if name not in order]
        step(scheduler)
    assert order == ["stepping-stone", "saved", "large"]
    assert not scheduler.has_work


def test_schedule_what_is_evicted_for_a_request_is_no_cache_hit_for_it() -> None:
    """It would have to be computed after all, in a step that has no budget for it."""
    limits = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=16)
    scheduler = tight_scheduler(16 + 16 + 10 + 10, limits, encoder_decoder=True)
    scheduler.add(request("a", [5] * 16, max_tokens=1))
    step(scheduler)
    scheduler.add(request("b", [6] * 16, max_tokens=9))
    scheduler.add(request("c", [5] * 16, max_tokens=9))
    for source in (6, 5):
        ((group,),) = [step(scheduler).encodes]
        assert [row.token_ids[0] for row in group.rows] == [source]


@pytest.mark.parametrize("lengths", [(64, 2), (2, 64)], ids=["a-source-then-tokens", "tokens-then-a-source"])
def test_schedule_rows_hold_no_more_than_the_budget_whatever_their_owners_had_of_each_kind(
    lengths: tuple[int, int],
) -> None:
    limits = EngineLimits(max_batch_size=1, prefill_chunk=8, max_prefill_tokens=64)
    budget, runner = KVBudget(num_bytes=70), FakeRunner(1)
    engine = fake_engine(runner, encoder_decoder=True, limits=limits, kv_budget=budget)
    for length in lengths:
        engine.add_request(request(f"r{length}", [5] * length, max_tokens=5 if length == 64 else 53))
        while engine.has_work:
            engine.step()
            assert runner.num_held_bytes(budget) <= budget.num_bytes


def test_schedule_a_row_that_moves_leaves_nothing_behind_that_has_no_room() -> None:
    scheduler = tight_scheduler(4 + 24 + 2)
    scheduler.add(request("small", [5], max_tokens=3))
    scheduler.add(request("large", [6] * 7, max_tokens=17))
    step(scheduler)
    scheduler.abort("small")
    assert step(scheduler).kv_operations == (KVCopy(1, 0, 7, 0), KVFree(1))


def test_schedule_a_preempted_request_that_is_aborted_leaves_nothing() -> None:
    limits = EngineLimits(max_batch_size=1, prefill_chunk=8, max_prefill_tokens=8)
    scheduler = make_scheduler(limits)
    scheduler.add(request("saved", [5], max_tokens=9))
    step(scheduler)
    scheduler.add(request("urgent", [5], max_tokens=2, priority=1))
    step(scheduler)
    scheduler.abort("saved")
    batch = scheduler.schedule(0.0)
    assert [type(operation) for operation in batch.kv_operations] == [KVDrop]
    assert [(event.request_id, event.is_terminal) for event in commit(scheduler, batch)] == [
        ("saved", True),
        ("urgent", True),
    ]
    assert scheduler.kv_usage_ratio == 0


def test_schedule_a_source_that_several_begin_with_is_encoded_and_counted_once() -> None:
    limits = EngineLimits(max_batch_size=5, prefill_chunk=8, max_prefill_tokens=32)
    scheduler = make_scheduler(limits, encoder_decoder=True)
    for name, token in zip("abcd", (5, 5, 5, 6), strict=True):
        scheduler.add(request(name, [token] * 16))
    ((group,),) = [step(scheduler).encodes]
    assert [row.slots for row in group.rows] == [(0, 1, 2), (3,)]


def test_schedule_beams_that_become_fewer_leave_their_rows() -> None:
    """Where n-grams must not return, a small vocabulary leaves fewer and fewer continuations."""
    runner = FakeRunner(vocab_size=6)
    engine = fake_engine(runner)
    search = BeamSearchParams(beam_size=4, no_repeat_ngram_size=2, patience=9.0)
    engine.add_request(request("a", [5], max_tokens=60, beam_search=search))
    num_beams = []
    while engine.has_work:
        engine.step()
        engine._scheduler.check_invariants()
        num_beams.append(len(engine._scheduler._ledger.slots))
    steps = itertools.pairwise(num_beams)
    assert any(before > after > 0 for before, after in steps)


def test_schedule_a_failed_step_ends_requests_saved_in_it_and_none_saved_before() -> None:
    limits = EngineLimits(max_batch_size=1, prefill_chunk=8, max_prefill_tokens=8)
    scheduler = make_scheduler(limits)
    for priority, name in enumerate(("saved", "in-flight", "urgent")):
        scheduler.add(request(name, [5], max_tokens=9, priority=priority))
        batch = scheduler.schedule(0.0)
        if name != "urgent":
            commit(scheduler, batch)
    events = scheduler.fail_running("id", 0.0)
    assert [event.request_id for event in events] == ["urgent", "in-flight"]
    assert scheduler.waiting_ids == ("saved",)
    scheduler.check_invariants()
    assert [row.position for row in step(scheduler).decode] == [1]


@pytest.mark.parametrize(
    "wanted", [{"sampling": SamplingParams(n=2)}, {"beam_search": BeamSearchParams(beam_size=2)}], ids=["n", "beams"]
)
def test_schedule_refuses_several_outputs_where_nothing_is_generated(wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"stopping\.max_tokens: must be at least 1"):
        make_scheduler().add(request("a", [5, 6], max_tokens=0, scoring=PromptScoring(), **wanted))


def test_schedule_kv_is_forgotten_only_while_no_request_lives() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    with pytest.raises(RuntimeError, match="1 requests live"):
        scheduler.forget_kv()
