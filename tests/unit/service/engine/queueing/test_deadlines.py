"""Deadlines come up in their order, those of requests that are over not at all, and nothing piles up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.engine.queueing.deadlines import MomentHeap
from service.engine.sequence import SequenceGroup
from tests.fakes import request


def group(deadline: float | None) -> SequenceGroup:
    return SequenceGroup(
        request=request(deadline=deadline),
        order=0,
        due=0.0,
        source_token_ids=(),
        prompt_token_ids=(5,),
        max_num_tokens=9,
        eos_ids=frozenset(),
        beams=None,
    )


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 9), st.booleans()), max_size=30),
    st.lists(st.integers(0, 9), max_size=5).map(sorted),
)
def test_deadlines_expire_in_order_and_once_unless_discarded(
    members: list[tuple[int | None, bool]], times: list[int]
) -> None:
    deadlines = MomentHeap()
    kept: list[SequenceGroup] = []
    for deadline, is_over in members:
        one = group(deadline)
        deadlines.add(one, one.request.deadline)
        if is_over:
            deadlines.discard(one)
        elif deadline is not None:
            kept.append(one)
    kept.sort(key=lambda one: one.request.deadline or 0)
    taken: list[SequenceGroup] = []
    for now in times:
        taken += deadlines.take_expired(now)
        assert taken == [one for one in kept if (one.request.deadline or 0) <= now]


def test_deadlines_of_requests_that_are_over_do_not_pile_up() -> None:
    deadlines = MomentHeap()
    for _ in range(10_000):
        one = group(1e9)
        deadlines.add(one, 1e9)
        deadlines.discard(one)
    assert len(deadlines._heap) < 100
