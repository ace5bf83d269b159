"""The queue's order is that of urgency, then of arrival."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.sequence import SequenceGroup
from service.engine.waiting import WaitingQueue
from tests.fakes import request


def group(order: int, priority: int = 0) -> SequenceGroup:
    return SequenceGroup(
        request=request(f"r{order}", priority=priority),
        order=order,
        source_token_ids=(),
        prompt_token_ids=(5,),
        max_num_tokens=9,
        eos_ids=frozenset(),
        beams=None,
    )


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=20))
def test_waiting_takes_turns_by_priority_then_arrival_whoever_comes_back(members: list[tuple[int, bool]]) -> None:
    groups = [group(order, priority) for order, (priority, _) in enumerate(members)]
    queue = WaitingQueue()
    for each in groups:
        queue.add(each)
    for each, (_, comes_back) in zip(groups, members, strict=True):
        queue.remove(each)
        assert each not in queue
        if comes_back:
            queue.add(each)
    expected = [each for each, (_, comes_back) in zip(groups, members, strict=True) if comes_back]
    expected.sort(key=lambda each: (-each.request.priority, each.order))
    assert list(queue) == expected
    assert queue.first is (expected[0] if expected else None)
    assert len(queue) == len(expected)


def test_waiting_nobody_is_removed_twice() -> None:
    queue, one = WaitingQueue(), group(0)
    queue.add(one)
    queue.remove(one)
    with pytest.raises(ValueError, match="request r0 does not wait"):
        queue.remove(one)
