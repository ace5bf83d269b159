"""The queue's order is priority, then due time; no request is overtaken beyond its patience."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.queueing.waiting import WaitingQueue, due_time
from service.engine.sequence import SequenceGroup
from tests.fakes import request

PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class Member:
    """One that waits: `after` seconds after the one before, with `timeout` seconds to live."""

    after: float
    timeout: float | None
    priority: int
    comes_back: bool


MEMBERS = st.lists(
    st.builds(
        Member,
        after=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
        timeout=st.none() | st.sampled_from([0.0, 0.5, 2.0, 9.5, 10.0, 40.0]),
        priority=st.integers(-1, 1),
        comes_back=st.booleans(),
    ),
    max_size=20,
)


def group(order: int, member: Member, arrival: float, patience: float | None = PATIENCE) -> SequenceGroup:
    deadline = None if member.timeout is None else arrival + member.timeout
    one = request(f"r{order}", priority=member.priority, deadline=deadline, arrival_time=arrival)
    return SequenceGroup(
        request=one,
        order=order,
        due=due_time(one, patience),
        source_token_ids=(),
        prompt_token_ids=(5,),
        max_num_tokens=9,
        eos_ids=frozenset(),
        beams=None,
    )


def fill(members: list[Member], patience: float | None) -> tuple[WaitingQueue, list[SequenceGroup]]:
    """The queue after all members were added, removed, and some added again; and these, in the order of arrival."""
    arrivals = itertools.accumulate(member.after for member in members)
    groups = [group(order, *each, patience) for order, each in enumerate(zip(members, arrivals, strict=True))]
    queue = WaitingQueue()
    for each in groups:
        queue.add(each)
    for each, member in zip(groups, members, strict=True):
        assert queue.discard(each)
        assert not queue.discard(each)
        if member.comes_back:
            queue.add(each)
    return queue, [each for each, member in zip(groups, members, strict=True) if member.comes_back]


@given(MEMBERS)
def test_waiting_takes_turns_by_priority_then_arrival_where_none_may_overtake(members: list[Member]) -> None:
    queue, left = fill(members, patience=None)
    expected = sorted(left, key=lambda each: (-each.request.priority, each.order))
    assert list(queue) == expected
    assert queue.first is (expected[0] if expected else None)
    assert len(queue) == len(expected)


@given(MEMBERS)
def test_waiting_takes_the_earliest_deadline_first_and_none_is_overtaken_beyond_its_patience(
    members: list[Member],
) -> None:
    queue, left = fill(members, PATIENCE)
    assert sorted(queue, key=lambda each: each.order) == left
    for before, behind in itertools.combinations(queue, 2):
        assert before.request.priority >= behind.request.priority
        if before.request.priority > behind.request.priority:
            continue
        if before.order > behind.order:
            assert before.request.arrival_time <= behind.request.arrival_time + PATIENCE
            assert before.request.deadline is not None
        # Within everybody's patience it is earliest deadline first.
        deadlines = [one.request.deadline for one in (before, behind)]
        bounds = [one.request.arrival_time + PATIENCE for one in (before, behind)]
        if all(deadline is not None and deadline <= bound for deadline, bound in zip(deadlines, bounds, strict=True)):
            assert deadlines == sorted(deadlines)


@pytest.mark.parametrize(("timeout", "patience", "due"), [(2.0, 10.0, 5.0), (20.0, 10.0, 13.0), (None, 10.0, 13.0)])
def test_waiting_is_due_at_the_deadline_or_when_patience_ends(
    timeout: float | None, patience: float, due: float
) -> None:
    deadline = None if timeout is None else 3.0 + timeout
    assert due_time(request(arrival_time=3.0, deadline=deadline), patience) == due
