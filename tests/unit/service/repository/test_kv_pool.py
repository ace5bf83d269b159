"""One budget for all models: who gets which part, who is refused and with which numbers; never more than there is."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from service.engine.kv.budget import MemoryNeeds
from service.errors import StartupError
from service.repository.kv_pool import KVPool, Part


def needs(whole: int, least: int = 1, besides: int = 0) -> MemoryNeeds:
    return MemoryNeeds(whole=whole, least=least, besides=besides)


def refusal(pool: KVPool, model: str, wanted: MemoryNeeds) -> str:
    with pytest.raises(StartupError) as caught:
        pool.take(model, wanted)
    (problem,) = caught.value.problems
    return problem


def num_left(pool: KVPool) -> int | None:
    """Bytes of the budget that are neither taken nor kept."""
    return None if pool.num_bytes is None else pool._room("")


def part_of(pool: KVPool, model: str) -> Part:
    part = pool.part_of(model)
    assert part is not None
    return part


def test_without_a_budget_every_model_gets_what_it_needs() -> None:
    pool = KVPool(None, {}, None, {"a": needs(700), "b": needs(30)})
    assert pool.parts == {"a": 700, "b": 30}
    assert pool.take("c", needs(5_000)).kv_bytes == 5_000
    assert (num_left(pool), pool.kept) == (None, {})


def test_by_default_models_can_run_the_same_share_of_their_rows() -> None:
    pool = KVPool(1_000, {}, None, {"a": needs(300), "b": needs(100), "c": needs(600)})
    assert pool.parts == {"a": 300, "b": 100, "c": 600}
    assert KVPool(500, {}, None, {"a": needs(300), "b": needs(100)}).parts == {"a": 375, "b": 125}


@pytest.mark.parametrize("num_bytes", [1_000, 1_001, 1_002])
@pytest.mark.parametrize("weights", [{}, {"a": 0.1, "later": 0.7}])
def test_a_budget_is_dealt_out_to_the_last_byte(num_bytes: int, weights: dict[str, float]) -> None:
    pool = KVPool(num_bytes, weights, None, {name: needs(500) for name in "abc"})
    assert sum(pool.parts.values()) + sum(pool.kept.values()) == num_bytes


def test_weights_deal_the_budget_out_and_whoever_is_not_named_counts_one() -> None:
    pool = KVPool(1_000, {"a": 3.0, "b": 1.0}, None, {"a": needs(1), "b": needs(10**6), "c": needs(7)})
    assert pool.parts == {"a": 600, "b": 200, "c": 200}
    assert num_left(pool) == 0


def test_the_part_of_a_named_model_is_kept_for_it_whether_it_is_served_or_not() -> None:
    pool = KVPool(1_000, {"a": 1.0, "later": 1.0}, None, {"a": needs(900)})
    assert (pool.parts, pool.kept, num_left(pool)) == ({"a": 500}, {"later": 500}, 0)
    assert refusal(pool, "c", needs(10)) == (
        "kv_memory: c gets 0 of 1000 bytes beside a 500, later 500, must get at least 1, for one sequence of full "
        "length"
    )
    assert pool.take("later", needs(10)).kv_bytes == 500
    pool.give_back(part_of(pool, "a"))
    assert refusal(pool, "c", needs(10)).startswith("kv_memory: c gets 0 of 1000 bytes beside a 500, later 500,")


def test_a_model_that_comes_later_gets_what_it_needs_of_what_is_left_and_gives_it_back() -> None:
    pool = KVPool(1_000, {}, None, {"a": needs(600), "b": needs(400)})
    assert refusal(pool, "c", needs(50, least=8)).startswith("kv_memory: c gets 0 of 1000 bytes beside a 600, b 400,")
    pool.give_back(part_of(pool, "b"))
    assert num_left(pool) == 400
    third = pool.take("c", needs(150, least=8))
    assert (third.kv_bytes, num_left(pool)) == (150, 250)
    assert pool.take("d", needs(9_000, least=250)).kv_bytes == 250
    # Its part at the start was 400, but others have come meanwhile.
    assert refusal(pool, "b", needs(400, least=4)) == (
        "kv_memory: b gets 0 of 1000 bytes beside a 600, c 150, d 250, must get at least 4, for one sequence of full "
        "length"
    )
    pool.give_back(third)
    assert pool.take("b", needs(400, least=4)).kv_bytes == 150


def test_a_model_comes_back_to_the_part_that_it_had() -> None:
    """Though that is more than it needs: the rest keeps prompts for later."""
    pool = KVPool(1_000, {}, None, {"a": needs(6), "b": needs(4)})
    pool.give_back(part_of(pool, "b"))
    assert pool.take("b", needs(4)).kv_bytes == 400


def test_a_model_that_has_outgrown_its_part_gets_more_unless_it_was_named() -> None:
    pool = KVPool(1_000, {}, None, {"a": needs(100), "b": needs(900)})
    for model in ("a", "b"):
        pool.give_back(part_of(pool, model))
    assert pool.take("a", needs(700, least=101)).kv_bytes == 700
    named = KVPool(1_000, {"a": 1.0, "b": 9.0}, None, {})
    assert refusal(named, "a", needs(700, least=101)).startswith("kv_memory: a gets 100 of 1000 bytes beside b 900,")


def test_engines_of_one_model_share_its_part_until_the_former_is_gone() -> None:
    pool = KVPool(1_000, {}, None, {"a": needs(600), "b": needs(400)})
    former = part_of(pool, "a")
    later = pool.take("a", needs(100))
    assert (later.kv_bytes, pool.parts, num_left(pool)) == (600, {"a": 600, "b": 400}, 0)
    pool.give_back(former)
    assert (pool.parts, num_left(pool)) == ({"a": 600, "b": 400}, 0)
    pool.give_back(later)
    assert (pool.parts, num_left(pool)) == ({"b": 400}, 600)
    with pytest.raises(ValueError, match="not in list"):
        pool.give_back(later)


def test_parts_too_small_for_a_sequence_are_refused_at_the_start_all_at_once() -> None:
    with pytest.raises(StartupError) as caught:
        KVPool(100, {"a": 1.0, "b": 1.0, "c": 2.0}, None, {name: needs(900, least=40) for name in "abc"})
    assert [problem.split(",")[0] for problem in caught.value.problems] == [
        "kv_memory: a gets 25 of 100 bytes beside b 25",
        "kv_memory: b gets 25 of 100 bytes beside a 25",
    ]


def test_a_budget_too_small_for_all_is_told_by_the_part_that_each_would_get() -> None:
    with pytest.raises(StartupError) as caught:
        KVPool(100, {}, None, {"small": needs(100, least=15), "large": needs(900, least=91)})
    assert caught.value.problems == (
        "kv_memory: small gets 10 of 100 bytes, must get at least 15, for one sequence of full length",
        "kv_memory: large gets 90 of 100 bytes, must get at least 91, for one sequence of full length",
    )


def test_what_all_models_take_must_fit_into_memory_together() -> None:
    both = {"a": needs(300, besides=50), "b": needs(500, besides=25)}
    assert KVPool(None, {}, 875, both).parts == {"a": 300, "b": 500}
    with pytest.raises(StartupError) as caught:
        KVPool(None, {}, 874, both)
    assert caught.value.problems == (
        "all models need 875 bytes, there are 874: 75 besides K/V, the rest for those (a 300, b 500); "
        "--kv-memory and --max-batch-size bound them",
    )
    assert KVPool(160, {}, 235, both).parts == {"a": 60, "b": 100}


def test_a_model_that_memory_has_no_room_for_is_refused_and_takes_nothing() -> None:
    pool = KVPool(None, {}, 1_000, {"a": needs(600, besides=100)})
    assert refusal(pool, "b", needs(300, besides=1)).startswith(
        "all models need 1001 bytes, there are 1000: 101 besides"
    )
    assert pool.parts == {"a": 600}
    # While it is reloaded a model has two engines: logits twice, K/V once.
    assert refusal(pool, "a", needs(600, besides=301)).startswith("all models need 1001 bytes")
    assert pool.take("a", needs(600, besides=300)).kv_bytes == 600


NAMES = st.sampled_from("abcde")
NEEDS = st.builds(
    lambda least, rows, besides: needs(least * rows, least, besides),
    st.integers(1, 60),
    st.integers(1, 8),
    st.integers(0, 50),
)


class Life(RuleBasedStateMachine):
    """Models come, are reloaded and go in any order, and are refused; the model of it is a list of parts."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool: KVPool | None = None
        self.parts: list[Part] = []

    @initialize(
        target=held,
        num_bytes=st.none() | st.integers(1, 1_000),
        memory=st.none() | st.integers(1, 1_500),
        weights=st.dictionaries(NAMES, st.floats(0.01, 100.0), max_size=3),
        there=st.dictionaries(NAMES, NEEDS, max_size=4),
    )
    def begin(
        self,
        num_bytes: int | None,
        memory: int | None,
        weights: dict[str, float],
        there: dict[str, MemoryNeeds],
    ) -> MultipleResults[Part]:
        """A server that is refused does not begin."""
        try:
            self.pool = KVPool(num_bytes, weights, memory, there)
        except StartupError:
            return multiple()
        self.num_bytes, self.memory = num_bytes, memory
        # What was named stays kept, to the end.
        self.kept = {} if num_bytes is None else {name: self.pool.kept.get(name, 0) for name in weights}
        self.kept |= {name: self.pool.parts[name] for name in self.kept if name in self.pool.parts}
        self.parts = [part for name in there if (part := self.pool.part_of(name))]
        assert {part.model for part in self.parts} == set(there)
        return multiple(*self.parts)

    @rule(target=held, model=NAMES, wanted=NEEDS)
    def take(self, model: str, wanted: MemoryNeeds) -> MultipleResults[Part]:
        if self.pool is None:
            return multiple()
        before = dict(self.pool.parts)
        try:
            part = self.pool.take(model, wanted)
        except StartupError:
            assert self.pool.parts == before
            assert self.is_tight(model, wanted)
            return multiple()
        assert part.kv_bytes >= wanted.least
        self.parts.append(part)
        return multiple(part)

    @rule(part=consumes(held))
    def give_back(self, part: Part) -> None:
        assert self.pool is not None
        self.pool.give_back(part)
        self.parts.remove(part)

    def taken(self, model: str) -> int:
        return max((part.kv_bytes for part in self.parts if part.model == model), default=0)

    def is_tight(self, model: str, wanted: MemoryNeeds) -> bool:
        """Whether there really is no room for a sequence, or for all of it in memory."""
        names = {part.model for part in self.parts} | {model}
        besides = sum(part.besides for part in self.parts) + wanted.besides
        if self.num_bytes is None:
            whole = sum(max(self.taken(name), wanted.whole if name == model else 0) for name in names)
            return self.memory is not None and whole + besides > self.memory
        others = sum(max(self.taken(name), self.kept.get(name, 0)) for name in names | set(self.kept) if name != model)
        is_planned_small = self.kept.get(model, self.num_bytes) < wanted.least
        most = sum(max(self.taken(name), self.num_bytes if name == model else 0) for name in names)
        no_memory = self.memory is not None and most + besides > self.memory
        return self.num_bytes - others < wanted.least or is_planned_small or no_memory

    @invariant()
    def never_more_than_there_is(self) -> None:
        if self.pool is None:
            return
        names = {part.model for part in self.parts}
        assert self.pool.parts == {name: self.taken(name) for name in names}
        total = sum(max(self.taken(name), self.kept.get(name, 0)) for name in names | set(self.kept))
        if self.num_bytes is not None:
            assert total <= self.num_bytes
            assert num_left(self.pool) == self.num_bytes - total
        if self.memory is not None:
            assert sum(self.pool.parts.values()) + sum(part.besides for part in self.parts) <= self.memory


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=30)
