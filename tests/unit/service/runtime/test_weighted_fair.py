"""Weighted fair scheduling: shares by weight whatever steps take, bounded waits, no credit and no escape."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from service.runtime.weighted_fair import WeightedFairScheduler

LONG, SHORT = 0.4, 0.01


def test_requests_of_one_long_step_each_do_not_get_more_than_a_long_prompt_does() -> None:
    """It leaves after every step, and is back when the other has had a turn."""
    turns, now, got, last = WeightedFairScheduler({}), 0.0, dict.fromkeys(("long", "short"), 0.0), ""
    while now < 60.0:
        last = turns.next(["short"] if last == "long" else ["short", "long"]) or ""
        seconds = {"long": LONG, "short": SHORT}[last]
        turns.charge(last, seconds)
        now += seconds
        got[last] += seconds
    assert got["long"] <= 0.5 * now + LONG


def test_what_was_paid_too_much_is_forgotten_once_nobody_else_has_work() -> None:
    turns = WeightedFairScheduler({})
    assert turns.next(["a", "b"]) == "a"
    turns.charge("a", 100.0)
    assert turns.next(["b"]) == "b"
    turns.charge("b", 0.1)
    assert turns.next(["a"]) == "a", "b has nothing to do"
    turns.charge("a", 0.1)
    assert turns.next(["a", "b"]) == "b"


def test_turns_that_take_no_time_that_a_clock_could_see_go_round() -> None:
    turns, got = WeightedFairScheduler({}), defaultdict(int)
    for _ in range(300):
        model = turns.next(["a", "b", "c"])
        assert model is not None
        got[model] += 1
        turns.charge(model, 0.0)
    assert got == {"a": 100, "b": 100, "c": 100}


def test_a_model_that_is_gone_leaves_nothing_behind() -> None:
    turns = WeightedFairScheduler({})
    turns.next(["a", "b"])
    turns.charge("a", 5.0)
    turns.forget("a")
    assert turns.next(["b"]) == "b"
    turns.charge("b", 1.0)
    assert turns.next(["a", "b"]) == "a", "it owes nothing under its name"


MODELS = "abcd"
TURNS = st.lists(
    st.tuples(
        # How long each model's next turn would take, and which others come and go before it.
        st.tuples(*[st.floats(0.001, 2.0)] * len(MODELS)),
        st.sets(st.sampled_from(MODELS)),
    ),
    min_size=1,
    max_size=150,
)
WEIGHTS = st.tuples(*[st.floats(0.1, 10.0)] * len(MODELS))


@given(weights=WEIGHTS, turns=TURNS)
def test_shares_of_models_that_both_have_work_differ_by_a_turn_of_each_at_most(
    weights: tuple[float, ...], turns: list[tuple[tuple[float, ...], set[str]]]
) -> None:
    """The bound of the module's docstring, over every stretch in which two of them have work without a break."""
    weighed = dict(zip(MODELS, weights, strict=True))
    table, longest = WeightedFairScheduler(weighed), dict.fromkeys(MODELS, 0.0)
    # By pair: what the first has got over its weight more than the second, and the extremes of that since both began.
    ahead: dict[tuple[str, str], tuple[float, float, float]] = {}
    busy: set[str] = set()
    for seconds, flips in turns:
        busy ^= flips
        both = {(i, j) for i in busy for j in busy if i < j}
        ahead = {pair: ahead.get(pair, (0.0, 0.0, 0.0)) for pair in both}
        model = table.next(sorted(busy))
        assert (model is None) == (not busy)
        if model is None:
            continue
        took = dict(zip(MODELS, seconds, strict=True))[model]
        table.charge(model, took)
        longest[model] = max(longest[model], took)
        for (i, j), (before, least, most) in ahead.items():
            now = before + took / weighed[model] * ((model == i) - (model == j))
            ahead[i, j] = now, min(least, now), max(most, now)
        for (i, j), (_, least, most) in ahead.items():
            assert most - least <= longest[i] / weighed[i] + longest[j] / weighed[j] + 1e-6


@given(weights=WEIGHTS, turns=TURNS, newcomers=st.integers(1, 3))
def test_a_model_that_owes_nothing_waits_for_one_turn_of_each_other_at_most(
    weights: tuple[float, ...], turns: list[tuple[tuple[float, ...], set[str]]], newcomers: int
) -> None:
    """Newcomers, after any history: whoever has had a turn since does not have another before they have had theirs."""
    table = WeightedFairScheduler(dict(zip(MODELS, weights, strict=True)))
    busy: set[str] = {"a"}
    for seconds, flips in turns:
        busy = busy ^ flips or {"a"}
        model = table.next(sorted(busy))
        assert model is not None
        table.charge(model, dict(zip(MODELS, seconds, strict=True))[model])
    waiting = {f"new{number}" for number in range(newcomers)}
    everybody = [*sorted(busy), *sorted(waiting)]
    seen: list[str] = []
    while waiting:
        model = table.next(everybody)
        assert model is not None
        seen.append(model)
        table.charge(model, 0.5)
        waiting.discard(model)
    assert len(seen) == len(set(seen))
