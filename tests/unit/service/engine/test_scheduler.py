"""Scheduling keeps its promises: single steps by example, whole lives by a state machine."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event as note
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.engine.batch import BeamRow, KVCopy, KVDrop, KVFree, KVRestore, KVSave, SampleRow, ScheduledBatch
from service.engine.engine import Engine, LastRun
from service.engine.kv.reservations import KVBudget
from service.engine.sampling.beam import BeamSearch
from service.engine.sampling.sampler import SampledToken, Sampler, compute_logprobs
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.types import (
    BeamSearchParams,
    FinishReason,
    GenerationRequest,
    PromptScoring,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from service.errors import EngineFailed, InvalidRequest, StartupError
from tests.fakes import CONTEXT, EOS, GREEDY, FakeRunner, fake_engine, fake_model, letters, noise, request
from tests.paged import PagedFakeRunner

LIMITS = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=16)


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


def chunks_of(batch: ScheduledBatch) -> list[tuple[int, int, int]]:
    """Slot, start and length of everything that is prefilled, in a group or not."""
    beginnings = [(row.slot, 0, len(row.token_ids)) for group in batch.prefill_groups for row in group.rows]
    return sorted([*beginnings, *((chunk.slot, chunk.start, len(chunk.token_ids)) for chunk in batch.prefills)])


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


def test_schedule_puts_a_remainder_of_one_token_into_the_batched_run() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", range(3, 12)))
    assert chunks_of(step(scheduler)) == [(0, 0, 8)]
    batch = step(scheduler)
    assert not batch.prefills
    assert [row.position for row in batch.decode] == [8]
    assert [sample.slot for sample in batch.samples] == [0]


def test_schedule_prefill_budget_goes_to_the_oldest_and_nobody_overtakes() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", range(3, 26)))  # 8 + 8 + 7
    scheduler.add(request("b", range(4, 19)))  # 8 + 7
    scheduler.add(request("c", range(3, 5)))
    assert chunks_of(step(scheduler)) == [(0, 0, 8), (0, 8, 8)]
    assert chunks_of(step(scheduler)) == [(0, 16, 7), (1, 0, 8)]
    assert chunks_of(step(scheduler)) == [(1, 8, 7), (2, 0, 2)]


# No beginning is short enough to be computed in a group.
NO_GROUPS = dataclasses.replace(LIMITS, short_prompt=1)


def test_schedule_of_a_prompts_chunks_the_last_alone_wants_logits() -> None:
    scheduler = make_scheduler(NO_GROUPS)
    scheduler.add(request("a", range(3, 23)))
    chunks = [[(chunk.start, chunk.num_logits) for chunk in step(scheduler).prefills] for _ in range(2)]
    assert chunks == [[(0, 0), (8, 0)], [(16, 1)]]


def test_schedule_a_chunk_before_a_single_token_wants_no_logits_and_one_that_is_scored_as_many_as_it_scores() -> None:
    scheduler = make_scheduler(NO_GROUPS)
    scheduler.add(request("a", range(3, 20)))
    assert [(chunk.start, chunk.num_logits) for chunk in step(scheduler).prefills] == [(0, 0), (8, 0)]
    batch = step(scheduler)
    assert (len(batch.decode), batch.prefills) == (1, ())
    scheduler.add(request("b", range(5, 22), scoring=PromptScoring(start=12)))
    assert [(chunk.start, chunk.num_logits) for chunk in scheduler.schedule(0.0).prefills] == [(0, 0), (8, 5)]


def test_schedule_rows_in_the_middle_of_their_prompt_pad_the_batched_run_where_the_next_chunk_will_write() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", [5], max_tokens=2))
    scheduler.add(request("long", range(3, 40)))
    scheduler.add(request("c", [5], max_tokens=20))
    step(scheduler)
    step(scheduler)  # "a" ends; "long" is the last row and takes its slot
    batch = step(scheduler)
    assert chunks_of(batch)[0] == (0, 32, 5)
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


def test_schedule_pads_sources_no_further_than_the_context() -> None:
    pieces = make_scheduler(encoder_decoder=True).pieces
    pieces = dataclasses.replace(pieces, source_padding=16, source_context=40)
    assert [pieces.padded_source_length(length) for length in (0, 1, 16, 33, 40)] == [0, 16, 16, 40, 40]


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


def test_schedule_pads_prompts_no_further_than_the_chunk_and_the_context() -> None:
    pieces = dataclasses.replace(make_scheduler().pieces, chunk=30, context=22, prompt_padding=8, short_prompt=40)
    assert [pieces.padded_prompt_length(length) for length in (2, 8, 9, 17, 22)] == [8, 8, 16, 22, 22]
    assert [pieces.is_short(0, length) for length in (1, 2, 30, 31)] == [False, True, True, False]
    assert not pieces.is_short(30, 2)
    pieces = dataclasses.replace(pieces, chunk=10, context=64)
    assert pieces.padded_prompt_length(9) == 10


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


def test_schedule_row_that_moves_leaves_no_more_behind_than_the_budget_has_room_for() -> None:
    scheduler = Scheduler(LIMITS, fake_model(), letters, KVBudget(num_bytes=3 + 40))
    scheduler.add(request("a", [5], max_tokens=2))
    scheduler.add(request("b", [5] * 20, max_tokens=20))
    step(scheduler)
    step(scheduler)
    assert step(scheduler).kv_operations[-2:] == (KVCopy(1, 0, 20, 0), KVFree(1))


def test_schedule_expired_requests_leave_the_queue_and_the_slots() -> None:
    scheduler = make_scheduler(EngineLimits(max_batch_size=1, prefill_chunk=8, max_prefill_tokens=8))
    scheduler.add(request("runs", deadline=5.0))
    scheduler.add(request("waits", deadline=5.0))
    scheduler.add(request("next"))
    step(scheduler)
    batch = scheduler.schedule(5.0)
    events = commit(scheduler, batch)
    assert [(event.request_id, event.finish_reason) for event in events] == [
        ("runs", FinishReason.DEADLINE),
        ("waits", FinishReason.DEADLINE),
        ("next", None),
    ]


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


def test_schedule_who_cannot_be_over_in_time_any_more_does_not_begin() -> None:
    scheduler = make_scheduler(ALONE)
    scheduler.add(request("runs", start_by=1.0))
    step(scheduler, now=0.5)
    scheduler.add(request("waits", deadline=9.0, start_by=2.0))
    assert commit(scheduler, scheduler.schedule(1.9))[0].request_id == "runs"
    (end, _) = commit(scheduler, scheduler.schedule(2.0))
    assert (end.request_id, end.finish_reason, end.is_terminal) == ("waits", FinishReason.DEADLINE, True)
    assert scheduler.running_ids == ("runs",)


def timed_step(scheduler: Scheduler, began: float, ended: float) -> list[tuple[str, int | None, FinishReason | None]]:
    batch = scheduler.schedule(began)
    sampled = [SampledToken(7, None) for _ in batch.samples]
    events = scheduler.commit(batch, sampled, ended)
    scheduler.check_invariants()
    return [(event.request_id, event.token_id, event.finish_reason) for event in events]


def test_schedule_who_takes_what_there_is_ends_with_the_last_step_that_leaves_time_for_another() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=30, deadline=9.0, partial_on_deadline=True, end_by=8.0))
    # Two seconds a step, one of them between two steps.
    told = [timed_step(scheduler, began, began + 1.0) for began in (0.0, 2.0, 4.0)]
    assert told == [[("a", 7, None)]] * 3
    assert timed_step(scheduler, 6.0, 7.0) == [("a", 7, None), ("a", None, FinishReason.DEADLINE)]
    assert not scheduler.has_work


def test_schedule_who_takes_what_there_is_reckons_with_a_prompt_in_the_next_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("long", range(3, 9), max_tokens=2))
    timed_step(scheduler, 0.0, 5.0)
    scheduler.add(request("a", max_tokens=30, deadline=12.0, partial_on_deadline=True, end_by=11.0))
    assert timed_step(scheduler, 5.0, 5.9)[-1] == ("a", 7, None)
    # Without a prompt a step takes a second, but one took five.
    assert timed_step(scheduler, 5.9, 6.1) == [("a", 7, None), ("a", None, FinishReason.DEADLINE)]


def test_schedule_a_pause_after_who_takes_what_there_is_does_not_count_as_a_step() -> None:
    scheduler = make_scheduler()
    partial = {"max_tokens": 30, "partial_on_deadline": True}
    scheduler.add(request("a", deadline=2.0, end_by=1.5, **partial))
    assert timed_step(scheduler, 0.0, 1.0)[-1] == ("a", None, FinishReason.DEADLINE)
    scheduler.add(request("b", deadline=99.0, end_by=98.0, **partial))
    assert timed_step(scheduler, 90.0, 91.0) == [("b", 7, None)]
    assert timed_step(scheduler, 91.0, 92.0) == [("b", 7, None)]


def test_schedule_a_preempted_request_that_takes_what_there_is_ends_where_it_waits() -> None:
    scheduler = make_scheduler(ALONE)
    scheduler.add(request("saved", max_tokens=30, deadline=9.0, partial_on_deadline=True, end_by=4.0))
    timed_step(scheduler, 0.0, 1.0)
    scheduler.add(request("urgent", max_tokens=30, priority=1))
    timed_step(scheduler, 1.0, 2.0)
    assert timed_step(scheduler, 2.0, 3.5) == [("urgent", 7, None), ("saved", None, FinishReason.DEADLINE)]
    batch = step(scheduler, 4.0)
    assert [type(operation) for operation in batch.kv_operations] == [KVDrop]


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_schedule_a_search_that_takes_what_there_is_tells_its_best_so_far(num_steps: int) -> None:
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


def test_schedule_an_expired_search_that_does_not_take_what_there_is_tells_nothing() -> None:
    now = 0.0
    engine = fake_engine(clock=lambda: now)
    engine.add_request(request("a", max_tokens=30, beam_search=BeamSearchParams(beam_size=2), deadline=3.0))
    engine.step()
    now = 3.0
    (event,) = engine.step().events
    assert (event.token_id, event.score, event.finish_reason) == (None, None, FinishReason.DEADLINE)


@pytest.mark.parametrize(
    ("patience", "order"),
    [
        (None, ["first", "second", "hasty", "late"]),
        (5.0, ["hasty", "first", "second", "late"]),
    ],
)
def test_schedule_the_earliest_deadline_goes_first_where_that_is_let_overtake_and_for_as_long(
    patience: float | None, order: list[str]
) -> None:
    scheduler = make_scheduler(dataclasses.replace(ALONE, patience_seconds=patience))
    scheduler.add(request("runs", max_tokens=2, deadline=99.0))
    step(scheduler)
    scheduler.add(request("first", arrival_time=1.0))
    scheduler.add(request("second", arrival_time=2.0, deadline=99.0))
    scheduler.add(request("hasty", arrival_time=3.0, deadline=5.5))
    # However soon its deadline, it came when the others' patience was over.
    scheduler.add(request("late", arrival_time=7.5, deadline=7.6))
    assert list(scheduler.waiting_ids) == order


def test_schedule_failing_the_running_leaves_the_waiting() -> None:
    scheduler = make_scheduler(EngineLimits(max_batch_size=1, prefill_chunk=8, max_prefill_tokens=8))
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    scheduler.schedule(0.0)
    (event,) = scheduler.fail_running("id", 0.0)
    assert event.request_id == "a"
    assert isinstance(event.error, EngineFailed)
    assert event.error.error_id == "id"
    scheduler.check_invariants()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 1)
    assert len(step(scheduler).samples) == 1


def test_limits_report_every_problem() -> None:
    with pytest.raises(StartupError) as caught:
        EngineLimits(
            max_batch_size=0, prefill_chunk=64, max_prefill_tokens=32, source_padding=-1, patience_seconds=math.inf
        )
    assert len(caught.value.problems) == 4


@given(
    prompts=st.lists(st.integers(1, CONTEXT - 1), min_size=1, max_size=10),
    encoder_decoder=st.booleans(),
)
def test_schedule_first_token_comes_within_the_promised_number_of_steps(
    prompts: list[int], encoder_decoder: bool
) -> None:
    """With a slot free for everyone: after at most as many steps as there are pieces up to and including one's own."""
    limits = EngineLimits(max_batch_size=10, prefill_chunk=8, max_prefill_tokens=16)
    scheduler = make_scheduler(limits, encoder_decoder=encoder_decoder)
    for index, length in enumerate(prompts):
        scheduler.add(request(str(index), [5] * length, max_tokens=CONTEXT))
    first: dict[str, int] = {}
    pieces_ahead = 0
    for number in range(1, 200):
        for event in commit(scheduler, scheduler.schedule(0.0)):
            first.setdefault(event.request_id, number)
    for index, length in enumerate(prompts):
        pieces_ahead += 1 if encoder_decoder else -(-length // limits.prefill_chunk)
        assert first[str(index)] <= pieces_ahead


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
def test_schedule_nobody_is_preempted_for_a_request_that_can_start_beside_it(urgent: list[int]) -> None:
    scheduler = make_scheduler()
    scheduler.add(request("long", range(3, 3 + 21)))
    step(scheduler)
    scheduler.add(request("urgent", urgent, priority=1))
    step(scheduler)
    assert scheduler.num_preemptions == 0
    assert scheduler.running_ids == ("long", "urgent")


def test_schedule_nobody_is_preempted_for_a_request_that_waits_for_an_equals_prompt() -> None:
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


def test_schedule_what_must_make_room_for_a_request_is_not_at_hand_for_it() -> None:
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
        num_beams.append(engine._scheduler.num_rows)
    steps = itertools.pairwise(num_beams)
    assert any(before > after > 0 for before, after in steps)


def test_schedule_failing_a_step_ends_who_was_to_be_saved_in_it_and_nobody_saved_before() -> None:
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


def test_schedule_kv_is_forgotten_only_while_nobody_is_there() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    with pytest.raises(RuntimeError, match="1 requests live"):
        scheduler.forget_kv()


BUDGET = KVBudget(num_bytes=3 * (2 * 2 * CONTEXT + 24), token_bytes=3, source_token_bytes=3, page_tokens=4)
"""Two requests of either family at their longest, and a little: less than four slots could hold."""
PAGED_BUDGET = dataclasses.replace(BUDGET, source_page_tokens=4)
PATIENCE = 8.0
SAMPLED = SamplingParams(temperature=1.5, seed=7)


class Life(RuleBasedStateMachine):
    """Requests come, go, expire and fail in any order; the model of them is a dict from id to what must come next."""

    encoder_decoder = False
    budget = BUDGET
    # How many of a row's last tokens decide what follows, None for all; and how many tokens may be guessed.
    memory: int | None = None
    look_up = 0
    # By name, their weights; and how many priorities there are.
    tenants: Mapping[str, float] = {"": 1.0}
    num_priorities = 3

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.last_failure = 0.0
        self.fails = False
        self.was_run = False
        self.runner = self.make_runner()
        model = fake_model(encoder_decoder=self.encoder_decoder)
        limits = dataclasses.replace(LIMITS, patience_seconds=PATIENCE, look_up=self.look_up)
        self.scheduler = Scheduler(limits, model, letters, self.budget)
        self.scheduler.let_guess(is_proven=True)
        self.engine = Engine(self.scheduler, self.runner, Sampler(), LastRun(), lambda: self.now)
        self.requests: dict[str, GenerationRequest] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.scores: dict[str, list[TokenLogprobs]] = {}
        self.terminal: Counter[str] = Counter()
        self.doomed: set[str] = set()
        self.begun: set[str] = set()
        self.last_end: float | None = None
        self.durations: dict[bool, list[float]] = {False: [], True: []}
        self.has_prompts = False

    def make_runner(self) -> FakeRunner:
        return FakeRunner(LIMITS.max_batch_size, before_run=self.on_batch, memory=self.memory)

    def on_batch(self, batch: ScheduledBatch) -> None:
        """What every batch must satisfy, whatever led to it."""
        busy = [slot for slot, row in enumerate(batch.decode) if not row.is_padding]
        busy += {slot for slot, _, _ in chunks_of(batch)}
        if (drafted := batch.drafted) is not None:
            busy.append(drafted.slot)
            assert (busy, batch.chunks) == ([0], (drafted,)), "who is guessed computes alone"
            assert 1 <= batch.num_draft_tokens <= self.look_up
            assert drafted.start + len(drafted.token_ids) < self.scheduler._ledger.slots[0].group.max_num_tokens
        self.check_fed(sorted(busy), batch)
        groups = (*batch.encodes, *batch.prefill_groups)
        costs = [group.padded_length for group in groups for _ in group.rows]
        costs += [len(chunk.token_ids) for chunk in batch.prefills]
        assert sum(costs) <= LIMITS.max_prefill_tokens or len(costs) == 1
        assert all(start % LIMITS.prefill_chunk == 0 for _, start, _ in chunks_of(batch))
        assert all(length <= LIMITS.prefill_chunk for _, _, length in chunks_of(batch))
        assert all(group.padded_length <= LIMITS.prefill_chunk for group in batch.prefill_groups)
        assert sum(chunk.num_scored for chunk in batch.prefills) <= LIMITS.max_prefill_tokens
        if self.fails:
            raise RuntimeError("the runner fails")
        self.was_run = True
        self.has_prompts = bool(batch.encodes or chunks_of(batch))
        for operation in batch.kv_operations:
            note(f"{type(operation).__name__}{' behind what is shared' if getattr(operation, 'start', 0) else ''}")

    def check_fed(self, busy: list[int], batch: ScheduledBatch) -> None:
        assert busy == list(range(self.scheduler.num_rows)), "every resident row is fed, and fed once"

    @rule(
        # Few lengths, so that sources return.
        length=st.sampled_from([1, 2, 7, 8, 9, 16, 17, 25, 40, CONTEXT - 1]),
        kind=st.integers(0, 1),
        max_tokens=st.integers(0, 20),
        lifetime=st.none() | st.integers(2, 30),
        # How long before its deadline it takes what there is.
        margin=st.none() | st.integers(0, 6),
        start_within=st.none() | st.integers(0, 15),
        prefix_length=st.integers(0, 5),
        is_scored=st.booleans(),
        num_rows=st.integers(1, 3),
        is_search=st.booleans(),
        priority=st.integers(0, 2),
        tenant=st.integers(0, 2),
        # Some of the outputs end early, the first or all of them at once, too.
        stops=st.sampled_from([(), range(3, 14)]),
    )
    def add(
        self,
        length: int,
        kind: int,
        max_tokens: int,
        lifetime: int | None,
        margin: int | None,
        start_within: int | None,
        prefix_length: int,
        is_scored: bool,
        num_rows: int,
        is_search: bool,
        priority: int,
        tenant: int,
        stops: Sequence[int],
    ) -> None:
        name = f"r{len(self.requests)}"
        # Prompts of one kind begin alike.
        prompt = [3 + (length + kind * i if self.encoder_decoder else kind * i) % 29 for i in range(length)]
        deadline = None if lifetime is None else self.now + lifetime
        prefix = range(4, 4 + prefix_length) if self.encoder_decoder else ()
        num_given = 1 + prefix_length if self.encoder_decoder else length
        one = request(
            name,
            prompt,
            # Without a token that could be scored there must be one to generate.
            max_tokens=max_tokens if is_scored and num_given > 1 and num_rows == 1 else max(max_tokens, 1),
            sampling=GREEDY if is_search or num_rows == 1 else dataclasses.replace(SAMPLED, n=num_rows),
            beam_search=BeamSearchParams(beam_size=num_rows, num_hypotheses=1 + num_rows // 2) if is_search else None,
            deadline=deadline,
            target_prefix=prefix,
            scoring=PromptScoring() if is_scored else None,
            priority=priority % self.num_priorities,
            tenant=(owner := list(self.tenants)[tenant % len(self.tenants)]),
            weight=self.tenants[owner],
            arrival_time=self.now,
            partial_on_deadline=margin is not None,
            end_by=None if deadline is None or margin is None else deadline - margin,
            start_by=None if start_within is None else self.now + start_within,
        )
        stopping = dataclasses.replace(one.stopping, stop_token_ids=frozenset(stops))
        if one.beam_search is not None:
            stopping = dataclasses.replace(stopping, max_tokens=max(1, stopping.max_tokens))
        one = dataclasses.replace(one, stopping=stopping)
        source, given = self.given(one)
        longest = min(CONTEXT, len(given) + one.stopping.max_tokens)
        padded = -(-len(source) // LIMITS.source_padding) * LIMITS.source_padding
        if one.num_rows * self.budget.row_bytes(longest, padded) > self.budget.num_bytes:
            with pytest.raises(InvalidRequest, match=r"(sampling\.n|beam_search\.beam_size)"):
                self.engine.add_request(one)
            return
        self.requests[name] = one
        self.scores[name] = []
        for index in range(one.num_outputs):
            self.tokens[name, index] = []
        self.engine.add_request(one)

    @rule(lifetime=st.integers(1, 12), max_tokens=st.integers(1, 6))
    @precondition(lambda self: self.scheduler.num_waiting)
    def add_in_a_hurry(self, lifetime: int, max_tokens: int) -> None:
        """Where somebody waits, a later one that may be due sooner."""
        first = self.requests[self.scheduler.waiting_ids[0]]
        self.step(1)
        name = f"r{len(self.requests)}"
        deadline = self.now + lifetime
        one = dataclasses.replace(
            request(name, [5], max_tokens=max_tokens, deadline=deadline, arrival_time=self.now),
            priority=first.priority,
            tenant=first.tenant,
            weight=first.weight,
        )
        self.requests[name], self.scores[name], self.tokens[name, 0] = one, [], []
        self.engine.add_request(one)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.has_work)
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in self.requests if not self.terminal[name]]))
        self.engine.abort(name)
        self.doomed.add(name)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.now += 1.0
            if self.engine.has_work:
                self.observe()

    @rule()
    @precondition(lambda self: self.scheduler.num_running and self.now >= self.last_failure + 10)
    def fail(self) -> None:
        """Rarely: all that was kept is lost."""
        self.last_failure = self.now
        self.fails = True
        running = self.engine.num_running
        self.observe()
        self.fails = False
        assert self.engine.num_running == 0, f"of {running} requests some survived a failed step"

    def observe(self) -> None:
        expired = {
            name
            for name, one in self.requests.items()
            if not self.terminal[name] and one.deadline is not None and one.deadline <= self.now
        }
        too_late = {
            name
            for name, one in self.requests.items()
            if not self.terminal[name] and name not in self.begun and one.start_by is not None
            if one.start_by <= self.now
        }
        self.was_run = False
        before = set(self.scheduler.running_ids)
        output = self.engine.step()
        if output.stats.num_draft_tokens:
            note(f"guesses come true: {output.stats.num_accepted_tokens}")
        assert self.was_run or self.fails, "the runner refused the batch"
        if not self.fails:
            assert self.runner.num_held_bytes(self.budget) <= self.budget.num_bytes
        longest = self.longest_step()
        for event in output.events:
            self.take(event, expired | too_late)
            one = self.requests[event.request_id]
            if event.finish_reason is FinishReason.DEADLINE and one.request_id not in expired | too_late:
                assert one.end_by is not None, "it had time"
                assert one.end_by <= self.now + longest, "it had time for another step"
        gone = expired | too_late | self.doomed
        assert all(self.terminal[name] == 1 for name in gone), "they leave at the next step boundary"
        self.doomed.clear()
        for name, one in self.requests.items():
            if not self.terminal[name] and not self.fails:
                assert one.end_by is None or one.end_by > self.now + longest, "another step may end too late"
        waiting, running = output.stats.num_waiting, output.stats.num_running
        assert waiting + running == sum(not self.terminal[name] for name in self.requests)
        ranks = {name: self.rank(one) for name, one in self.requests.items()}
        started = set(self.scheduler.running_ids) - before
        # Only who was preempted may go before one that has not begun: what is saved of it may be in the other's way.
        passed_by = [
            (self.requests[name], self.requests[other])
            for name in started
            for other in self.scheduler.waiting_ids
            if name not in self.begun or other in self.begun
            if self.requests[name].tenant == self.requests[other].tenant
        ]
        for one, other in passed_by:
            assert ranks[one.request_id] < ranks[other.request_id]
            if one.priority == other.priority and one.arrival_time > other.arrival_time:
                note("overtaken by an earlier deadline")
                assert one.arrival_time <= other.arrival_time + PATIENCE
        self.begun |= started

    def rank(self, one: GenerationRequest) -> tuple[int, float, int]:
        """Whose turn comes first, smallest first."""
        bound = one.arrival_time + PATIENCE
        return -one.priority, bound if one.deadline is None else min(bound, one.deadline), int(one.request_id[1:])

    def longest_step(self) -> float:
        """How long a step may take, by the steps so far and this one."""
        if self.fails:
            self.last_end = None
        else:
            began = self.now if self.last_end is None else self.last_end
            self.durations[self.has_prompts].append(self.now - began)
            self.last_end = self.now if self.engine.has_work else None
        return max((each for kind in self.durations.values() for each in kind[-16:]), default=0.0)

    def logits(self, source: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """What the runner makes of a row."""
        return noise(source, tokens[-(self.memory or 0) :])

    def take(self, event: TokenEvent, expired: set[str]) -> None:
        name, output = event.request_id, (event.request_id, event.output_index)
        one = self.requests[name]
        assert not self.terminal[name], "an event after the terminal one"
        assert event.error is None or self.fails, "the batch was refused while it ran"
        # A failure ends all outputs at once: its event is the request's, not one output's.
        assert output not in self.reasons or event.error is not None, "an event after an output's last one"
        assert event.num_cached_tokens <= one.num_prompt_tokens
        self.terminal[name] += event.is_terminal
        self.scores[name] += event.prompt_logprobs
        if event.token_id is not None:
            # A search with `partial_on_deadline` still delivers tokens when its time is up.
            assert name not in expired or (one.beam_search is not None and one.partial_on_deadline)
            assert name not in self.doomed or name in expired
            if one.beam_search is None:
                assert event.token_id == self.expected(one, event.output_index)
            self.tokens[output].append(event.token_id)
        if event.finish_reason is not None:
            self.reasons[output] = event.finish_reason
        if event.finish_reason is FinishReason.LENGTH:
            assert self.scores[name] == self.expected_scores(one)
        if event.timings is not None and event.error is None:
            indices = [index for index in range(one.num_outputs) if (name, index) in self.reasons]
            # A search that is stopped may not have found as many hypotheses.
            assert len(indices) == one.num_outputs or event.score is not None, "an output without an end"
            has_tokens = any(self.tokens[name, index] for index in range(one.num_outputs))
            assert (event.timings.first_token_time is not None) == has_tokens
            if one.beam_search is not None and event.score is not None:
                self.check_search(one, len(indices))

    def given(self, one: GenerationRequest) -> tuple[tuple[int, ...], list[int]]:
        prompt, prefix = one.prompt_token_ids, one.target_prefix_token_ids
        return (prompt, [1, *prefix]) if self.encoder_decoder else ((), list(prompt))

    def expected(self, one: GenerationRequest, index: int) -> int:
        source, given = self.given(one)
        tokens = given + self.tokens[one.request_id, index]
        row = self.logits(source, tokens)
        if one.sampling.n == 1:
            return int(row.argmax())
        sample = SampleRow(0, index, len(tokens), one.sampling, 7, None)
        (sampled,) = Sampler().sample(row[np.newaxis], [sample])
        assert sampled is not None
        return sampled.token_id

    def check_search(self, one: GenerationRequest, num_told: int) -> None:
        """The same search, by itself; one that was stopped, after one or another number of steps."""
        told = [tuple(self.tokens[one.request_id, index]) for index in range(num_told)]
        if not one.partial_on_deadline:
            assert told == list(self.searches(one))[-1]
            return
        if FinishReason.DEADLINE in {self.reasons[one.request_id, index] for index in range(num_told)}:
            note(f"a search is stopped {'with' if any(told) else 'without'} tokens")
        assert told in self.searches(one)

    def searches(self, one: GenerationRequest) -> Iterator[list[tuple[int, ...]]]:
        """What a search tells when it is stopped before its first step, after it, and so on until it is over."""
        assert one.beam_search is not None
        source, given = self.given(one)
        max_tokens = min(CONTEXT - len(given), one.stopping.max_tokens)
        search = BeamSearch(one.beam_search, max_tokens, frozenset({EOS}), one.stopping.stop_token_ids)
        beams = [given]
        while not search.is_over:
            yield [hypothesis.token_ids for hypothesis in copy.deepcopy(search).stop(FinishReason.DEADLINE)]
            logits = np.stack([self.logits(source, beam) for beam in beams])
            row = BeamRow(tuple(range(len(beams))), search.num_candidates, (None,) * len(beams), None)
            (expansions,) = Sampler().expand(logits, [row])
            assert expansions is not None
            beams = [[*beams[each.parent], each.token_id] for each in search.advance(expansions)]
        yield [hypothesis.token_ids for hypothesis in search.hypotheses()]

    def expected_scores(self, one: GenerationRequest) -> list[TokenLogprobs]:
        source, tokens = self.given(one)
        if one.scoring is None:
            return []
        return [compute_logprobs(self.logits(source, tokens[:at]), tokens[at], 0) for at in range(1, len(tokens))]

    @invariant()
    def is_consistent(self) -> None:
        self.scheduler.check_invariants()

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.now += 1.0
            self.observe()
        assert all(self.terminal[name] == 1 for name in self.requests), "exactly one terminal event each"
        assert self.engine.num_running == self.engine.num_waiting == 0
        assert self.scheduler.kv_usage_ratio == 0, "memory of requests that are over"


class EncoderDecoderLife(Life):
    """The same life for the other family."""

    encoder_decoder = True


class GuessedLife(Life):
    """The same life where who computes alone is guessed ahead, and texts come back to where they were."""

    memory = 1
    look_up = 5

    @rule(first=st.integers(4, 9), max_tokens=st.integers(10, 50), count=st.integers(1, 20))
    @precondition(lambda self: not self.scheduler.has_work)
    def add_alone(self, first: int, max_tokens: int, count: int) -> None:
        """Nobody else is there, so that most steps are guessed."""
        name = f"r{len(self.requests)}"
        one = request(name, [first, 5, 6, 7] * 2, max_tokens=max_tokens, arrival_time=self.now)
        self.requests[name], self.scores[name], self.tokens[name, 0] = one, [], []
        self.engine.add_request(one)
        self.step(count)


class PagedLife(Life):
    """The same life over blocks: whatever is copied, kept and given back, each row holds what it should."""

    budget = PAGED_BUDGET

    def make_runner(self) -> FakeRunner:
        return PagedFakeRunner(self.budget, LIMITS.max_batch_size, before_run=self.on_batch)


class PagedEncoderDecoderLife(PagedLife):
    """And for the other family."""

    encoder_decoder = True


Life.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
EncoderDecoderLife.TestCase.settings = Life.TestCase.settings
GuessedLife.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
PagedLife.TestCase.settings = settings(max_examples=75, stateful_step_count=30)
PagedEncoderDecoderLife.TestCase.settings = PagedLife.TestCase.settings
TestDecoderOnlyLife = Life.TestCase
TestEncoderDecoderLife = EncoderDecoderLife.TestCase
TestGuessedLife = GuessedLife.TestCase
TestPagedLife = PagedLife.TestCase
TestPagedEncoderDecoderLife = PagedEncoderDecoderLife.TestCase
