"""A token chosen by the highest logits of a row is what the whole row would have given, or is not chosen so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.batch import BeamRow, SampleRow, ScheduledBatch
from service.engine.logits import make_rules
from service.engine.sampling.sampler import Sampler
from service.engine.sampling.top_logits import TopLogits, are_decided, needs_by_slot, num_needed
from service.engine.types import SamplingParams, StoppingParams

Float32 = npt.NDArray[np.float32]
GREEDY = SamplingParams(temperature=0.0)
NUM_KEPT = 8


def sample(slot: int = 0, position: int = 3, **wishes: object) -> SampleRow:
    params = wishes.pop("params", GREEDY)
    given = {"seed": 7, "logprobs": None, "rules": None, **wishes}
    return SampleRow(slot, 0, position, params, **given)  # type: ignore[arg-type]


def highest_of(rows: Float32, count: int = NUM_KEPT) -> tuple[npt.NDArray[np.int64], Float32, Float32]:
    """What the graph singles out, by definition: in falling order, and among equals the lowest id first."""
    order = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    with np.errstate(invalid="ignore"):
        wide = rows.astype(np.float64)
        normalizers = np.where(np.isfinite(rows).all(1), np.log(np.exp(wide - wide.max(1)[:, None]).sum(1)), np.nan)
    return order, np.take_along_axis(rows, order, 1), normalizers.astype(np.float32)


def is_decided(row: Float32, drawn: Sequence[SampleRow], count: int = NUM_KEPT) -> bool:
    needed = num_needed(drawn)
    _, values, normalizers = highest_of(row[None], count)
    return needed is not None and are_decided([needed], values, normalizers, len(row))


def by_highest(row: Float32, drawn: Sequence[SampleRow], count: int = NUM_KEPT) -> list[int]:
    top = TopLogits()
    token_ids, values, _ = highest_of(row[None], count)
    top.put([0], token_ids, values)
    # A look at the row itself would find nothing to choose.
    nothing = np.full((1, len(row)), np.nan, np.float32)
    return [token.token_id for token in Sampler(top).sample(nothing, drawn) if token is not None]


def by_row(row: Float32, drawn: Sequence[SampleRow]) -> list[int]:
    return [token.token_id for token in Sampler().sample(row[None], drawn) if token is not None]


# Few distinct values, so that ties are common, at the top and where the highest end.
TIED = st.lists(st.sampled_from([-3.0, 0.0, 0.5, 1.0, 2.0, 4.0]), min_size=NUM_KEPT, max_size=300)
APART = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).normal(0, 3, 300).tolist())
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([1, 2, 5, NUM_KEPT - 1, NUM_KEPT]),
    top_p=st.sampled_from([0.4, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
)


@given(values=TIED | APART, params=PARAMS, position=st.integers(0, 10_000))
def test_highest_logits_give_the_tokens_of_the_whole_row(
    values: list[float], params: SamplingParams, position: int
) -> None:
    row = np.array(values, np.float32)
    drawn = [sample(position=position + step, params=params) for step in range(20)]
    if is_decided(row, drawn):
        assert by_highest(row, drawn) == by_row(row, drawn)
    else:
        order = np.sort(row)[::-1]
        needed = num_needed(drawn)
        assert needed is not None
        assert len(row) > NUM_KEPT
        assert order[needed - 1] == order[NUM_KEPT - 1], "that could have been decided"


def test_the_lowest_of_equals_is_chosen_wherever_it_stands_among_them() -> None:
    top = TopLogits()
    token_ids, values = np.array([[9, 4, 30, 2]]), np.array([[1.5, 1.5, 1.5, 1.0]], np.float32)
    top.put([5], token_ids, values)
    token_ids[:] = 0  # memory of the device's, used again
    (token,) = Sampler(top).sample(np.zeros((6, 40), np.float32), [sample(5)])
    assert token is not None
    assert token.token_id == 4


def test_a_small_vocabulary_is_known_whole() -> None:
    row = np.zeros(NUM_KEPT, np.float32)
    drawn = [sample(position=step, params=SamplingParams(top_k=3)) for step in range(9)]
    assert is_decided(row, drawn)
    assert by_highest(row, drawn) == by_row(row, drawn)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_looked_at_whole(value: float) -> None:
    row = np.linspace(0, 1, 100, dtype=np.float32)
    assert is_decided(row, [sample()])
    row[17] = value
    assert not is_decided(row, [sample()])


def test_requests_that_need_more_than_the_highest_need_the_whole_row() -> None:
    biased = make_rules(SamplingParams(logit_bias=((3, 1.0),)), StoppingParams(), (), ())
    late = make_rules(SamplingParams(), StoppingParams(min_tokens=2), (1,), ())
    assert late is not None
    assert num_needed([sample()]) == 1
    assert num_needed([sample(), sample(params=SamplingParams(top_k=9)), sample()]) == 9
    for whole in (
        {"params": SamplingParams()},
        {"params": SamplingParams(top_p=0.9)},
        {"logprobs": 0},
        {"rules": biased},
        {"rules": late},
    ):
        assert num_needed([sample(), sample(**whole)]) is None
    late.add(5)
    late.add(6)
    assert num_needed([sample(rules=late)]) == 1, "which has nothing to say any more"


def test_a_step_says_what_each_slot_needs() -> None:
    drawn = (sample(2), sample(0, params=SamplingParams(top_k=4)), sample(2, params=SamplingParams(top_k=6)))
    beams = BeamRow((3, 4), 8, (None, None), None)
    batch = ScheduledBatch(samples=(*drawn, sample(1, logprobs=2)), beams=(beams,))
    assert needs_by_slot(batch) == {0: 4, 1: None, 2: 6, 3: None, 4: None}


def test_rows_known_by_their_highest_and_whole_ones_are_distinguished_in_one_step() -> None:
    rows = np.random.default_rng(3).normal(0, 1, (4, 200)).astype(np.float32)
    drawn = [sample(slot, params=params) for slot, params in enumerate([GREEDY, SamplingParams(), GREEDY, GREEDY])]
    wanted = Sampler().sample(rows, drawn)
    top = TopLogits()
    token_ids, values, _ = highest_of(rows[[0, 2]])
    top.put([0, 2], token_ids, values)
    spoiled = rows.copy()
    spoiled[[0, 2]] = np.nan
    assert Sampler(top).sample(spoiled, drawn) == wanted
    top.discard(2)
    assert Sampler(top).sample(spoiled, drawn)[2] is None
    top.clear()
    assert Sampler(top).sample(rows, drawn) == wanted
