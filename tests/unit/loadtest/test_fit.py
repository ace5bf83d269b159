"""The fit against known truths: it finds them, refuses wrong degrees, and its intervals cover as claimed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from loadtest.scaling import fit, judge, study
from loadtest.scaling.claims import CACHE_TOLERANCE
from loadtest.scaling.fit import Curve, Regimes, Samples, examine

LENGTHS = tuple(round(64 * 1.5**step) for step in range(12))
"""64 to 5536 tokens."""
LINEAR = Curve((2e-3, 4e-6))
QUADRATIC = Curve((2e-3, 2e-6, 1e-9))
"""Both terms are equal at 2000 tokens."""


def noisy(
    truth: Curve,
    seed: int,
    *,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = 15,
    noise: float = 0.05,
    outliers: float = 0.02,
) -> Samples:
    """Normal relative noise, and now and then a sample that took five times as long."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        factors = 1.0 + noise * rng.standard_normal(repeats)
        factors[rng.random(repeats) < outliers] *= 5.0
        samples += [(float(length), float(truth.at(length) * factor)) for factor in factors]
    return samples


def exact(truth: Curve, lengths: Sequence[int] = LENGTHS) -> Samples:
    return [(float(length), float(truth.at(length))) for length in lengths]


def test_what_has_no_noise_is_found_exactly() -> None:
    found = examine(exact(QUADRATIC), 2, draws=20)
    assert found.curve.coefficients == pytest.approx(QUADRATIC.coefficients, rel=1e-6)
    assert found.crossover == pytest.approx(2000.0)
    assert found.extrapolation_error < 1e-9
    assert found.holds
    assert found.bic[2] < found.bic[1] < found.bic[0]
    assert found.bic[3] - found.bic[2] == pytest.approx(math.log(len(LENGTHS)))


def test_a_term_that_would_be_negative_is_zero() -> None:
    bent = [(length, 1e-3 + 1e-6 * length - 5e-11 * length**2) for length in LENGTHS]
    assert examine(bent, 2, draws=5).curve.coefficients[2] == 0.0


def test_the_crossover_lies_in_its_interval_despite_noise_and_outliers() -> None:
    lengths = tuple(length * 4 for length in LENGTHS)
    found = examine(noisy(QUADRATIC, 1, lengths=lengths), 2)
    assert found.holds
    assert found.crossover_interval.low < 2000.0 < found.crossover_interval.high
    assert found.crossover == pytest.approx(2000.0, rel=0.2)
    assert found.curve.coefficients[2] == pytest.approx(1e-9, rel=0.1)
    assert found.bic[1] - found.bic[2] > 50.0
    assert found.deviations(exact(QUADRATIC, lengths)) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("seed", range(2))
def test_no_quadratic_is_found_in_linear_times(seed: int) -> None:
    found = examine(noisy(LINEAR, seed), 2, draws=200, seed=seed)
    assert not found.holds
    assert any(objection.startswith("BIC prefers quadratic to linear by") for objection in found.objections)
    assert found.intervals[2].low == 0.0 or found.leading_share < 0.1
    assert math.isinf(found.crossover_interval.high) or found.crossover_interval.high > max(LENGTHS)
    assert examine(noisy(LINEAR, seed), 1, draws=200, seed=seed).holds


def test_a_quadratic_term_that_is_real_and_next_to_nothing_makes_no_law() -> None:
    found = examine(exact(Curve((1e-3, 1e-6, 1e-11))), 2, draws=20)
    assert found.bic[1] - found.bic[2] > fit.DECISIVE_BIC
    assert found.objections == ("the quadratic term is 4.5% of the time at 5536 tokens, not 33% or more",)


@pytest.mark.parametrize(("cubic_share", "holds"), [(0.05, True), (0.3, False)])
def test_a_cubic_term_is_reported_and_refutes_only_from_a_tenth_of_the_time_on(cubic_share: float, holds: bool) -> None:
    longest = LENGTHS[-1]
    cubic = cubic_share / (1 - cubic_share) * float(QUADRATIC.at(longest)) / longest**3
    truth = Curve((*QUADRATIC.coefficients, cubic))
    found = examine(noisy(truth, 0, noise=0.001, outliers=0.0), 2, draws=50)
    assert found.bic[2] - found.bic[3] > fit.DECISIVE_BIC
    assert found.next_share == pytest.approx(cubic_share, abs=0.01)
    assert found.holds is holds
    assert any("BIC prefers cubic to quadratic" in objection for objection in found.objections) is not holds


def test_a_fit_that_misses_the_longest_length_is_refused() -> None:
    samples = [(length, seconds * (1.25 if length == LENGTHS[-1] else 1.0)) for length, seconds in exact(QUADRATIC)]
    found = examine(samples, 2, draws=20)
    assert found.extrapolation_error == pytest.approx(0.2, abs=0.01)
    assert any("misses them by 20" in objection for objection in found.objections)


def test_a_curve_that_misses_one_length_is_refused() -> None:
    samples = [(length, seconds * (1.6 if length == LENGTHS[5] else 1.0)) for length, seconds in exact(QUADRATIC)]
    found = examine(samples, 2, draws=20)
    assert found.misfit == pytest.approx(0.36, abs=0.03)
    assert any(objection.startswith("the curve misses the median of one length by 3") for objection in found.objections)
    assert examine(exact(QUADRATIC), 2, draws=20).misfit < 1e-9


@pytest.mark.parametrize(("reach", "holds"), [(2.7, True), (2.8, False)])
def test_lengths_that_do_not_go_far_enough_beyond_the_crossover_prove_nothing(reach: float, holds: bool) -> None:
    # 5536 tokens are 2.768 times 2000, where both terms are equal.
    found = examine(exact(QUADRATIC), 2, draws=20, reach=reach)
    assert found.holds is holds
    assert holds or found.objections == ("at 5536 tokens the quadratic term is 2.77 times the linear one, not 2.8",)
    assert any(
        "0.00 times the linear one" in each for each in examine(exact(LINEAR), 2, draws=20, reach=1.0).objections
    )


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    lengths = tuple(length * 4 for length in LENGTHS)
    num_datasets = 120
    covered = np.zeros(4)
    for seed in range(num_datasets):
        found = examine(noisy(QUADRATIC, seed, lengths=lengths), 2, draws=150, seed=seed)
        truths = (*QUADRATIC.coefficients, 2000.0)
        intervals = (*found.intervals, found.crossover_interval)
        covered += [each.low <= truth <= each.high for each, truth in zip(intervals, truths, strict=True)]
    shares = covered / num_datasets
    # Of 120 intervals that say 95 %, from 88 to 100 % cover the truth but once in a thousand times.
    assert (shares >= 0.88).all(), shares
    # Twice as wide they would cover it always.
    assert shares.mean() < 0.995


def test_the_local_exponent_is_one_and_a_half_where_both_terms_are_equal() -> None:
    assert Curve((0.0, 2e-6, 1e-9)).local_slope_at(2000.0) == pytest.approx(1.5)
    assert Curve((0.0, 0.0, 1e-9)).local_slope_at([10.0, 1e5]) == pytest.approx(2.0)
    found = examine(exact(QUADRATIC), 2, draws=20)
    measured = fit.local_slopes(found)
    assert measured.slopes == pytest.approx(QUADRATIC.local_slope_at(measured.lengths), abs=0.01)
    assert len(measured.slopes) == len(LENGTHS) - 1
    noise = fit.local_slopes(examine(noisy(QUADRATIC, 0), 2, draws=200))
    assert (noise.low < noise.slopes).all()
    assert (noise.slopes < noise.high).all()


def test_the_band_holds_the_curve_and_the_same_seed_gives_the_same_bootstrap() -> None:
    samples = noisy(QUADRATIC, 2)
    found = examine(samples, 2, draws=100, seed=7)
    low, high = found.bootstrap.band(LENGTHS)
    assert (low < found.curve.at(LENGTHS)).all()
    assert (found.curve.at(LENGTHS) < high).all()
    again = examine(list(reversed(samples)), 2, draws=100, seed=7)
    assert (again.bootstrap.coefficients == found.bootstrap.coefficients).all()


LONG = tuple(4 * length for length in LENGTHS)
KNEE = (2048.0,)
REGIMES = Curve((1.3e-4, 36e-9, 12e-9), Regimes(1, KNEE))
"""Steps that read weights and K/V from a cache up to the knee."""


def test_a_line_by_regimes_is_found_and_a_single_line_bends_away_from_it() -> None:
    samples = noisy(REGIMES, 0, lengths=LONG, noise=0.02)
    found = examine(samples, 1, draws=200, judged=50, tolerance=0.2, knees=KNEE)
    assert found.holds
    assert found.refused.mean() <= 0.1
    assert found.curve.coefficients == pytest.approx(REGIMES.coefficients, rel=0.2)
    # The mean slope up to the longest length, and where the slopes' part equals the constant.
    assert found.coefficients[1] == pytest.approx((36e-9 * 2048 + 12e-9 * (LONG[-1] - 2048)) / LONG[-1], rel=0.1)
    assert found.crossover == pytest.approx(2048 + (1.3e-4 - 36e-9 * 2048) / 12e-9, rel=0.15)
    line = examine(samples, 1, draws=50)
    assert line.extrapolation_error > 0.1 > found.extrapolation_error
    assert line.bic[1] - found.bic[1] > fit.DECISIVE_BIC


def test_a_square_beside_regimes_is_seen_and_draws_are_judged_like_the_samples() -> None:
    square = Curve((*REGIMES.coefficients, 4e-4 / LONG[-1] ** 2), REGIMES.regimes)
    found = examine(noisy(square, 0, lengths=LONG), 1, draws=50, judged=50, tolerance=0.2, knees=KNEE)
    assert any(objection.startswith("BIC prefers quadratic to linear by") for objection in found.objections)
    assert found.refused.all()
    single = examine(noisy(square, 0, lengths=LONG), 1, draws=50, tolerance=0.2)
    assert not any("BIC prefers quadratic" in objection for objection in single.objections)


PROMPTS = Curve((1e-3, 2e-6, 2e-9, 5e-9), Regimes(2, KNEE))
"""Prompts whose positions read keys and values from a slower cache beyond the knee."""


def test_a_prompt_is_the_sum_of_its_positions() -> None:
    line = Curve((0.0, *PROMPTS.coefficients[2:]), Regimes(1, KNEE))
    for length in (100, 2048, 6000):
        positions = np.arange(length) + 0.5
        assert PROMPTS.term_at(2, length) == pytest.approx(2 * line.at(positions).sum())


def test_a_quadratic_by_regimes_is_found_and_a_single_one_misses_it() -> None:
    samples = noisy(PROMPTS, 0, lengths=LONG, noise=0.02)
    found = examine(samples, 2, draws=200, judged=50, reach=5.0, knees=KNEE)
    assert found.holds
    assert found.refused.mean() <= 0.1
    assert found.curve.coefficients[2:] == pytest.approx(PROMPTS.coefficients[2:], rel=0.15)
    assert found.crossover == pytest.approx(2e-6 / 2e-9, rel=0.2)
    single = examine(samples, 2, draws=50)
    assert single.extrapolation_error > 0.1 > found.extrapolation_error


@pytest.mark.parametrize("rival", [lambda n: n**2 * np.log(n), lambda n: n**2.5, lambda n: n**3])
def test_no_rival_passes_as_a_quadratic_by_regimes(rival: fit.Law) -> None:
    times = rival(np.array(LONG, float))
    found = examine(list(zip(LONG, times / times[-1], strict=True)), 2, draws=20, knees=KNEE)
    assert any(objection.startswith("BIC prefers") for objection in found.objections)


@pytest.mark.parametrize("rival", ["linearithmic", "three_halves", "quadratic", "square"])
def test_no_rival_passes_as_a_cached_token(rival: str) -> None:
    lengths = study.geometric(64, 16288, 32, 16)
    truth = judge.cached_rivals(Curve((1.3e-4, 2e-8)), lengths[-1])[rival]
    assert float(truth(lengths[-1])) == pytest.approx(1.3e-4 + 2e-8 * lengths[-1])
    samples = judge.synthetic(truth, lengths, 15, 0)
    found = examine(samples, 1, draws=50, tolerance=CACHE_TOLERANCE, knees=[2048.0])
    assert not found.holds
    # Two slopes come within a quarter of n ln n everywhere.
    assert rival != "linearithmic" or any("BIC prefers n ln n to linear by" in each for each in found.objections)


def test_the_median_is_steady_where_a_machine_has_two_speeds() -> None:
    fast, slow = (fit.medians_of([(64.0, 1e-4)] * count + [(64.0, 2e-4)] * (15 - count)).seconds[0] for count in (8, 7))
    assert fast == pytest.approx(slow, rel=0.01)


@pytest.mark.parametrize(
    ("samples", "degree", "said"),
    [
        ([], 2, "no samples"),
        ([(64.0, 0.0)], 2, r"sample \(64.0, 0.0\)"),
        ([(64.0, math.inf)], 2, "must be finite"),
        ([(0.0, 1.0)], 2, "above 0"),
        (exact(LINEAR, LENGTHS[:4]), 2, "4 lengths, a comparison needs 5"),
        (exact(LINEAR), 3, "degree is 3, must be from 1 to 2"),
    ],
)
def test_samples_that_cannot_be_fitted_are_refused(samples: Samples, degree: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        examine(samples, degree)


def test_an_interval_leaves_out_one_draw_in_forty_at_either_end_and_may_be_endless() -> None:
    draws = np.arange(1.0, 1001.0)
    assert fit.interval(draws) == fit.Interval(25.0, 975.0)
    draws[900:] = math.inf
    assert fit.interval(draws) == fit.Interval(25.0, math.inf)
