"""By how much models that share the cores lengthen each other's requests: the formula held to turns that are taken."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.forecasting.sharing import CoreUse, Rival, stretched
from service.runtime.weighted_fair import WeightedFairScheduler

STEP = 0.002


def taken_turns(seconds: float, rivals: list[Rival]) -> float:
    """After how long we had so many seconds, were every step as long and nothing to come."""
    names = [f"rival{number}" for number in range(len(rivals))]
    turns = WeightedFairScheduler({name: rival.weight for name, rival in zip(names, rivals, strict=True)})
    left = {"us": seconds, **{name: rival.work_seconds for name, rival in zip(names, rivals, strict=True)}}
    now = 0.0
    while left["us"] > STEP / 2:
        model = turns.next([name for name, work in left.items() if work > STEP / 2])
        assert model is not None
        left[model] -= STEP
        turns.charge(model, STEP)
        now += STEP
    return now


@given(
    seconds=st.floats(0.01, 0.5),
    rivals=st.lists(st.builds(Rival, st.sampled_from([0.25, 1.0, 3.0]), st.floats(0.0, 1.0), st.just(0.0)), max_size=3),
)
def test_what_is_foretold_is_what_turns_come_to(seconds: float, rivals: list[Rival]) -> None:
    slack = STEP * (2 + sum(2 + rival.weight for rival in rivals))
    assert stretched(seconds, rivals) == pytest.approx(taken_turns(seconds, rivals), abs=slack)


def test_who_was_busy_lately_is_taken_to_be_so_though_its_present_work_is_short() -> None:
    assert stretched(2.0, [Rival(1.0, 0.1, 0.75)]) == 2.0 + 1.5
    assert stretched(0.1, [Rival(1.0, 5.0, 0.75)]) == 0.2


def rival_at(use: CoreUse, now: float, work: float = 5.0) -> Rival | None:
    return use.as_rival(2.0, lambda: work, now)


def test_a_model_is_a_rival_while_it_has_work_and_for_a_while_after() -> None:
    use = CoreUse(3.0)
    assert rival_at(use, 0.0) is None
    use.begun(10.0)
    assert rival_at(use, 10.0) == Rival(1.5, 5.0, 0.0)
    busy = rival_at(use, 12.0)
    assert busy is not None
    assert busy.busy_share == pytest.approx(1 - math.exp(-1))
    use.begun(30.0)
    use.ended(31.0)
    assert rival_at(use, 32.0) == Rival(1.5, 5.0, pytest.approx(1.0, abs=1e-4))
    use.ended(32.0)
    assert rival_at(use, 34.0) == Rival(1.5, 0.0, pytest.approx(math.exp(-1), abs=1e-4))
    assert rival_at(use, 50.0) is None


def test_requests_that_follow_each_other_closely_are_one_busy_stretch() -> None:
    use = CoreUse(1.0)
    for number in range(200):
        use.begun(0.1 * number)
        use.ended(0.1 * number + 0.08)
    rival = rival_at(use, 20.0)
    assert rival is not None
    assert rival.busy_share == pytest.approx(0.8, abs=0.02)
