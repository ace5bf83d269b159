"""Sampling against its definition, written out the slow way, and its independence from company."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from service.engine.batch import BeamRow, SampleRow
from service.engine.logits import make_beam_rules, make_rules
from service.engine.sampling.filters import truncate
from service.engine.sampling.sampler import Draws, Expansion, SampledToken, Sampler, compute_logprobs
from service.engine.types import BeamSearchParams, SamplingParams, StoppingParams

Float32 = npt.NDArray[np.float32]
LEAST_WEIGHT = float(np.finfo(np.float32).smallest_subnormal)
GREEDY = SamplingParams(temperature=0.0)

# Few distinct values, so that ties are common.
ROWS = hnp.arrays(
    np.float32, st.integers(1, 40), elements=st.sampled_from([-30.0, -2.0, -1.5, 0.0, 0.25, 1.0, 3.0, 9.0])
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-5, 0.1, 0.7, 1.0, 2.5]),
    top_p=st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


def row_of(slot: int, position: int = 9, seed: int = 1, logprobs: int | None = None, **params: float) -> SampleRow:
    return SampleRow(slot, 0, position, SamplingParams(**params), seed, logprobs)  # type: ignore[arg-type]


def truncated_weights(row: Float32, params: SamplingParams) -> Float32:
    """`[V] float32`, 0 for those left out."""
    candidates = truncate(row, params, row.max())
    weights = np.zeros_like(row)
    weights[slice(None) if candidates.token_ids is None else candidates.token_ids] = candidates.weights
    return weights


def fresh_draw(seed: int, position: int, output_index: int = 0) -> float:
    """The definition of a draw: a stream of its own, 128 bits of key, for each seed and output."""
    return float(np.random.Generator(np.random.Philox(key=seed + (output_index << 64), counter=position)).random())


def softmax(values: list[float]) -> list[float]:
    highest = max(values)
    weights = [math.exp(value - highest) for value in values]
    return [weight / math.fsum(weights) for weight in weights]


def survivors_by_definition(row: Float32, params: SamplingParams) -> list[int]:
    """Temperature, min-p, top-k, top-p, each on what is left and renormalised; ties with the last one kept stay."""
    highest = float(row.max())
    scaled = [(float(value) - highest) / params.temperature for value in row]
    left = list(range(len(scaled)))
    if params.min_p > 0:
        best = max(softmax(scaled))
        left = [i for i in left if math.exp(scaled[i]) * best >= params.min_p * best]
    if params.top_k > 0:
        ranked = sorted((scaled[i] for i in left), reverse=True)
        left = [i for i in left if scaled[i] >= ranked[min(params.top_k, len(ranked)) - 1]]
    if params.top_p < 1:
        mass = dict(zip(left, softmax([scaled[i] for i in left]), strict=True))
        ranked = sorted(left, key=lambda i: -mass[i])
        size = next((n for n in range(1, len(ranked)) if math.fsum(mass[i] for i in ranked[:n]) >= params.top_p), None)
        if size is not None:
            left = [i for i in left if mass[i] >= mass[ranked[size - 1]]]
    return [i for i in left if math.exp(scaled[i]) > LEAST_WEIGHT]


@given(ROWS, PARAMS)
def test_sampler_filters_leave_what_their_definition_leaves(row: Float32, params: SamplingParams) -> None:
    weights = truncated_weights(row, params)
    token_ids = np.flatnonzero(weights)
    expected = survivors_by_definition(row, params)
    # A nucleus whose mass meets top_p exactly may be decided either way by rounding: nudge it and accept both.
    nudged = [
        survivors_by_definition(row, dataclasses.replace(params, top_p=params.top_p * factor))
        for factor in (1 - 1e-5, 1 + 1e-5)
        if params.top_p < 1
    ]
    assert token_ids.tolist() in [expected, *nudged]
    # By definition too: a kept token's share is that of the softmax over the kept.
    scaled = [(float(row[i]) - float(row.max())) / params.temperature for i in token_ids]
    np.testing.assert_allclose(weights[token_ids] / weights.sum(), softmax(scaled), rtol=1e-5, atol=1e-37)


@given(ROWS, PARAMS, st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_sampler_draws_a_token_that_survived_and_has_weight(
    row: Float32, params: SamplingParams, seed: int, position: int
) -> None:
    (result,) = Sampler().sample(row[np.newaxis], [SampleRow(0, 0, position, params, seed, None)])
    assert isinstance(result, SampledToken)
    assert truncated_weights(row, params)[result.token_id] > 0


@pytest.mark.parametrize("vocab_size", [1, 4, 255, 256, 257, 1000])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=9, temperature=1.7)], ids=["all", "few"])
def test_sampler_draw_is_the_inverse_of_the_cumulative_distribution(vocab_size: int, params: SamplingParams) -> None:
    row = np.random.default_rng(vocab_size).standard_normal(vocab_size, dtype=np.float32)
    left = survivors_by_definition(row, params)
    shares = np.cumsum(softmax([float(row[i]) / params.temperature for i in left]))
    for position in range(300):
        (result,) = Sampler().sample(row[np.newaxis], [SampleRow(0, 0, position, params, 5, None)])
        assert isinstance(result, SampledToken)
        draw = fresh_draw(5, position)
        # Single precision moves the steps of the distribution by less than this.
        places = np.searchsorted(shares, [draw - 1e-6, draw, draw + 1e-6], side="right")
        assert left.index(result.token_id) in places


def test_sampler_never_draws_what_has_no_weight() -> None:
    row = np.full(600, -1e30, np.float32)
    row[[3, 300]] = 0.0
    results = Sampler().sample(np.stack([row] * 100), [row_of(slot, slot) for slot in range(100)])
    assert {result.token_id for result in results if isinstance(result, SampledToken)} == {3, 300}


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 2**40)), max_size=20))
def test_sampler_uniform_draws_are_those_of_a_fresh_generator(keys: list[tuple[int, int, int]]) -> None:
    """Bit for bit, whatever was drawn before."""
    draws = Draws()
    for seed, output_index, position in [(0, 0, 0), (2**64 - 1, 0, 0), *keys]:
        assert draws.uniform(seed, output_index, position) == fresh_draw(seed, position, output_index)


def test_sampler_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = np.array([[1, 3, 3, 0], [5, 5, 5, 5]], np.float32)
    results = Sampler().sample(logits, [SampleRow(slot, 0, 1, GREEDY, 0, None) for slot in (0, 1)])
    assert [result.token_id for result in results if isinstance(result, SampledToken)] == [1, 0]


def test_sampler_vanishing_temperature_is_greedy_and_quiet() -> None:
    row = np.array([[-3e38, 1.0, 1.5, 3e38]], np.float32)
    for temperature in (5e-324, 1e-5):
        (result,) = Sampler().sample(row, [row_of(0, temperature=temperature, logprobs=1)])
        assert isinstance(result, SampledToken)
        assert result.token_id == 3
        assert result.logprobs is not None
        assert result.logprobs.logprob == 0.0


def test_sampler_any_temperature_leaves_masked_tokens_masked() -> None:
    """Beyond float32's range, too."""
    for temperature in (1e30, 1e38, 1e39, 1e300):
        params = SamplingParams(temperature=temperature, allowed_token_ids=(1, 2))
        rules = make_rules(params, StoppingParams(), (), ())
        rows = [SampleRow(0, 0, position, params, 1, None, rules) for position in range(40)]
        results = Sampler().sample(np.array([[9.0, 5.0, -5.0, 9.0]], np.float32), rows)
        assert {result.token_id for result in results if result is not None} == {1, 2}


@given(
    logits=st.tuples(st.integers(0, 99), st.sampled_from([33, 257, 1021])).map(
        lambda key: np.random.default_rng(key).standard_normal((6, key[1]), dtype=np.float32) * 4
    ),
    order=st.permutations(range(6)),
    count=st.integers(1, 6),
)
def test_sampler_results_do_not_depend_on_company_slot_or_order(logits: Float32, order: list[int], count: int) -> None:
    """Each row alone, and among others in other slots: same tokens, same bits of the logprobs."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 2.0, "top_p": 0.95, "top_k": 20},
    ]
    alone = [
        Sampler().sample(logits[row : row + 1], [row_of(0, 3 + row, seed=row, logprobs=4, **kinds[row])])[0]
        for row in range(6)
    ]
    chosen = order[:count]
    crowded = Sampler().sample(
        logits[chosen],
        [row_of(slot, 3 + row, seed=row, logprobs=4, **kinds[row]) for slot, row in enumerate(chosen)],
    )
    assert list(crowded) == [alone[row] for row in chosen]


def test_sampler_looks_only_at_the_rows_it_is_asked_for() -> None:
    logits = np.full((4, 3), np.nan, np.float32)
    logits[2] = [0, 9, 1]
    assert Sampler().sample(logits, [SampleRow(2, 0, 1, GREEDY, 0, None)]) == (SampledToken(1, None),)
    assert Sampler().sample(logits, []) == ()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampler_non_finite_row_fails_alone(bad: float, temperature: float) -> None:
    logits = np.array([[1, 2, 3], [1, bad, 3], [3, 2, 1]], np.float32)
    samples = [row_of(slot, temperature=temperature, top_k=1) for slot in range(3)]
    first, failed, last = Sampler().sample(logits, samples)
    assert (first, last) == (SampledToken(2, None), SampledToken(0, None))
    assert failed is None


@given(hnp.arrays(np.float32, st.integers(1, 30), elements=st.sampled_from([-5.0, 0.0, 0.5, 2.0])), st.integers(0, 35))
def test_logprobs_are_raw_and_ranked_with_ties_by_lower_id(row: Float32, num_top: int) -> None:
    token_id = len(row) // 2
    result = compute_logprobs(row, token_id, num_top)
    expected = [math.log(share) for share in softmax(row.tolist())]
    assert result.logprob == pytest.approx(expected[token_id], abs=1e-6)
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))[:num_top]
    assert list(result.top_token_ids) == ranked
    assert list(result.top_logprobs) == pytest.approx([expected[i] for i in ranked], abs=1e-6)


@pytest.mark.parametrize("vocab_size", [63, 64, 1000, 4099])
@pytest.mark.parametrize("num_levels", [2, 40, 10**6])
def test_highest_of_a_long_row_are_those_of_a_sort(vocab_size: int, num_levels: int) -> None:
    """However few levels there are to tie on, and wherever the row is folded."""
    rng = np.random.default_rng([vocab_size, num_levels])
    row = rng.integers(-num_levels, num_levels, vocab_size).astype(np.float32) / np.float32(num_levels)
    ranked = sorted(range(vocab_size), key=lambda i: (-row[i], i))
    for count in (1, 2, 30, 31, 62, vocab_size // 33, vocab_size - 1, vocab_size):
        assert list(compute_logprobs(row, 0, count).top_token_ids) == ranked[:count]
        least = row[ranked[count - 1]]
        kept = np.flatnonzero(truncated_weights(row, SamplingParams(top_k=count)))
        assert kept.tolist() == [i for i in range(vocab_size) if row[i] >= least]


def beams_of(logits: Float32, num_candidates: int, num_top: int | None = None) -> BeamRow:
    return BeamRow(tuple(range(len(logits))), num_candidates, (None,) * len(logits), num_top)


def as_lists(expansion: Expansion) -> tuple[list[int], list[float], tuple[int, ...], tuple[float, ...]]:
    return (
        expansion.token_ids.tolist(),
        expansion.logprobs.tolist(),
        expansion.top_token_ids,
        expansion.top_logprobs,
    )


@given(ROWS, st.integers(1, 45), st.integers(0, 5))
def test_expansion_is_the_most_probable_continuations(row: Float32, num_candidates: int, num_top: int) -> None:
    ((expansion,),) = Sampler().expand(row[np.newaxis], [beams_of(row[np.newaxis], num_candidates, num_top)])  # type: ignore[misc]
    expected = [math.log(share) for share in softmax(row.tolist())]
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    assert expansion.token_ids.tolist() == ranked[:num_candidates]
    assert expansion.logprobs.dtype == np.float64
    np.testing.assert_allclose(expansion.logprobs, [expected[i] for i in ranked[:num_candidates]], atol=1e-6)
    for index, token_id in enumerate(ranked[:num_candidates]):
        assert expansion.describe(index) == compute_logprobs(row, token_id, num_top)


def test_expansion_leaves_out_what_is_masked_and_renormalises_nothing() -> None:
    row = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32)
    rules = make_beam_rules(BeamSearchParams(beam_size=3, no_repeat_ngram_size=1), StoppingParams(), (), [0, 2])
    nothing = make_beam_rules(BeamSearchParams(beam_size=3, no_repeat_ngram_size=1), StoppingParams(), (), range(4))
    (results,) = Sampler().expand(row, [BeamRow((0, 0, 0), 3, (None, rules, nothing), None)])
    assert results is not None
    free, ruled, empty = results
    assert free.token_ids.tolist() == [0, 1, 2]
    assert ruled.token_ids.tolist() == [1, 3]
    assert ruled.logprobs[0] == free.logprobs[1]
    assert ruled.top_token_ids == ()
    assert len(empty.token_ids) == len(empty.logprobs) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_expansion_of_a_non_finite_row_fails_with_its_request_alone(bad: float) -> None:
    logits = np.array([[1, 2, 3], [1, bad, 3], [3, 2, 1]], np.float32)
    good = BeamRow((2, 0), 2, (None, None), None)
    assert [each is None for each in Sampler().expand(logits, [BeamRow((0, 1), 2, (None, None), None), good])] == [
        True,
        False,
    ]
    assert Sampler().expand(logits, []) == ()


@given(
    key=st.integers(0, 99),
    vocab_size=st.sampled_from([33, 257, 2050]),
    order=st.permutations(range(6)),
    sizes=st.lists(st.integers(1, 3), min_size=2, max_size=4).filter(lambda sizes: sum(sizes) <= 6),
)
def test_expansion_does_not_depend_on_company_slot_or_order(
    key: int, vocab_size: int, order: list[int], sizes: list[int]
) -> None:
    """Bit for bit."""
    logits = np.random.default_rng(key).standard_normal((6, vocab_size), dtype=np.float32) * 4
    alone = []
    for row in logits:
        ((expansion,),) = Sampler().expand(row[np.newaxis], [beams_of(row[np.newaxis], 7, 3)])  # type: ignore[misc]
        alone.append(as_lists(expansion))
    # Row order[s] lies in slot s, and the slots are shared out among groups.
    ends = np.cumsum(sizes)
    groups = [tuple(range(end - size, end)) for end, size in zip(ends.tolist(), sizes, strict=True)]
    crowded = Sampler().expand(logits[order], [BeamRow(slots, 7, (None,) * len(slots), 3) for slots in groups])
    for slots, expansions in zip(groups, crowded, strict=True):
        assert expansions is not None
        assert [as_lists(each) for each in expansions] == [alone[order[slot]] for slot in slots]


def test_logprobs_do_not_feel_temperature_or_truncation() -> None:
    logits = np.array([[0.5, 1.5, -2.0, 0.25]], np.float32)
    (result,) = Sampler().sample(logits, [row_of(0, temperature=0.2, top_k=1, logprobs=4)])
    assert isinstance(result, SampledToken)
    assert result.logprobs == compute_logprobs(logits[0], result.token_id, 4)
    assert math.fsum(map(math.exp, result.logprobs.top_logprobs)) == pytest.approx(1.0)
