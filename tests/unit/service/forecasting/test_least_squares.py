"""Recursive non-negative least squares: it finds a law, through noise and beyond outliers, and keeps what it knows."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.forecasting.least_squares import RecursiveFit

LAW = np.array((0.01, 2e-4, 3e-7))
SCALES = (1.0, 0.1, 1e-3)


def observe(source: random.Random) -> np.ndarray:
    length = source.randint(1, 128)
    return np.array((1.0, length, length * (length + source.choice((0, 128, 512)))))


def taught(source: random.Random, count: int, law: np.ndarray = LAW, noise: float = 0.0) -> RecursiveFit:
    fit = RecursiveFit(SCALES, memory=60.0, drift=3e-4)
    for _ in range(count):
        x = observe(source)
        fit.learn(x, float(law @ x) * math.exp(source.gauss(0.0, noise)))
    return fit


def worst_error(fit: RecursiveFit, law: np.ndarray, source: random.Random) -> float:
    return max(abs(fit.fitted.value(x) / float(law @ x) - 1) for x in (observe(source) for _ in range(200)))


def test_a_law_without_noise_is_found_to_the_digit() -> None:
    fit = taught(random.Random(0), 200)
    np.testing.assert_allclose(fit.fitted.coefficients, LAW, rtol=1e-3)


def test_a_law_is_found_through_noise_and_known_as_well_as_it_says() -> None:
    source = random.Random(1)
    fit = taught(source, 500, noise=0.1)
    assert worst_error(fit, LAW, source) < 0.05
    inside = 0
    for seed in range(40):
        each = taught(random.Random(seed), 100, noise=0.1)
        x = np.array((1.0, 64.0, 64.0 * 300))
        inside += abs(each.fitted.value(x) - LAW @ x) < 2 * each.fitted.deviation(x)
    assert inside >= 34


def test_an_observation_of_a_busy_machine_moves_little() -> None:
    source = random.Random(2)
    fit = taught(source, 300, noise=0.02)
    x = np.array((1.0, 100.0, 10_000.0))
    before = fit.fitted.value(x)
    for _ in range(3):
        fit.learn(x, 50 * before)
    assert fit.fitted.value(x) < 1.1 * before
    many = RecursiveFit(SCALES, memory=60.0, drift=3e-4)
    for number in range(600):
        x = observe(source)
        many.learn(x, float(LAW @ x) * (10.0 if number % 20 == 0 else 1.0))
    assert worst_error(many, LAW, source) < 0.1


def test_what_varies_by_much_is_known_by_its_mean_and_disturbs_nobody() -> None:
    """One of twenty observations is of the second kind, and every fourth of these takes 1.6 times as long."""
    source = random.Random(10)
    fit = RecursiveFit((1.0, 1.0), memory=60.0, drift=3e-4, num_kinds=2)
    steady, rough = np.array((1.0, 0.0)), np.array((0.0, 1.0))
    worst = 0.0
    for number in range(6000):
        if number % 20 == 0:
            fit.learn(rough, 0.05 * (1.6 if source.random() < 0.25 else 1.0), kind=1)
        fit.learn(steady, 0.01 * math.exp(source.gauss(0.0, 0.02)))
        if number > 1000:
            worst = max(worst, abs(fit.fitted.value(steady) / 0.01 - 1))
    assert fit.fitted.value(rough) == pytest.approx(0.05 * 1.15, rel=0.06)
    assert worst < 0.06


def test_a_machine_that_has_become_slower_is_believed_after_a_while() -> None:
    source = random.Random(3)
    fit = taught(source, 1000, noise=0.02)
    seconds = 0.0
    while seconds < 15.0:
        x = observe(source)
        fit.learn(x, y := 2 * float(LAW @ x) * math.exp(source.gauss(0.0, 0.02)))
        seconds += y
    assert worst_error(fit, 2 * LAW, source) < 0.05


def test_what_one_term_learns_of_the_machine_s_speed_all_do() -> None:
    source = random.Random(8)
    fit = RecursiveFit((1.0, 1.0), memory=60.0, drift=3e-4)
    one, two = np.array((1.0, 0.0)), np.array((0.0, 1.0))
    for _ in range(200):
        fit.learn(one, 0.01 * math.exp(source.gauss(0.0, 0.02)))
        fit.learn(two, 0.3 * math.exp(source.gauss(0.0, 0.02)))
    for _ in range(1000):
        fit.learn(one, 0.02 * math.exp(source.gauss(0.0, 0.02)))
    assert fit.fitted.value(one) == pytest.approx(0.02, rel=0.03)
    assert fit.fitted.value(two) == pytest.approx(0.6, rel=0.05)


def test_a_term_that_has_changed_by_itself_is_learned_anew() -> None:
    source = random.Random(9)
    fit = RecursiveFit((1.0, 1.0), memory=60.0, drift=0.0)
    one, two = np.array((1.0, 0.0)), np.array((0.5, 1.0))
    for _ in range(3000):
        fit.learn(one, 0.2 * math.exp(source.gauss(0.0, 0.05)))
        fit.learn(two, 0.3 * math.exp(source.gauss(0.0, 0.05)))
    for _ in range(600):
        fit.learn(one, 0.2 * math.exp(source.gauss(0.0, 0.05)))
        fit.learn(two, 0.6 * math.exp(source.gauss(0.0, 0.05)))
    assert fit.fitted.value(one) == pytest.approx(0.2, rel=0.05)
    assert fit.fitted.value(two) == pytest.approx(0.6, rel=0.05)


def test_what_is_not_observed_is_not_forgotten() -> None:
    source = random.Random(4)
    fit = RecursiveFit((1.0, 1.0, 1.0), memory=1.0, drift=1e-3)
    for _ in range(100):
        x = np.array((source.random(), source.random(), source.random()))
        fit.learn(x, float(x @ (1e-3, 2e-3, 3e-3)))
    before = fit.fitted.coefficients.copy()
    # For as long as it takes to forget everything: one term alone, then two always in the same proportion.
    for _ in range(20_000):
        fit.learn(np.array((1.0, 0.0, 0.0)), 1e-3 * math.exp(source.gauss(0.0, 0.05)))
    for _ in range(20_000):
        fit.learn(np.array((1.0, 4.0, 0.0)), 9e-3 * math.exp(source.gauss(0.0, 0.05)))
    np.testing.assert_allclose(fit.fitted.coefficients, before, rtol=0.05)
    assert np.linalg.eigvalsh(fit.fitted.covariance).min() > 0


def test_a_term_that_would_be_negative_is_zero_and_the_others_make_up_for_it() -> None:
    source = random.Random(5)
    # Falls with the second term: no non-negative law fits, the best one has only the first.
    fit = RecursiveFit((1.0, 1.0), memory=1e9, drift=0.0)
    xs = [np.array((1.0, source.uniform(0.0, 1.0))) for _ in range(500)]
    for x in xs:
        fit.learn(x, 1.0 - 0.2 * x[1])
    coefficients = fit.fitted.coefficients
    assert coefficients[1] == 0.0
    assert coefficients[0] == pytest.approx(0.9, abs=0.02)
    # What was behind it is not lost: it comes back when it is true again.
    for _ in range(5):
        for x in xs:
            fit.learn(x, 1.0 + 0.2 * x[1])
    assert fit.fitted.coefficients[1] > 0.05


def test_nothing_is_known_before_the_first_observation_and_less_of_what_was_not_seen() -> None:
    fit = RecursiveFit((1.0, 1.0), memory=60.0, drift=3e-4)
    assert fit.fitted.value(np.ones(2)) == 0.0
    assert fit.fitted.deviation(np.array((1.0, 0.0))) == pytest.approx(1.0)
    for _ in range(10):
        fit.learn(np.array((1.0, 0.0)), 0.5)
    assert fit.fitted.deviation(np.array((1.0, 0.0))) < 0.05
    assert fit.fitted.deviation(np.array((0.0, 1.0))) > 0.5


@pytest.mark.parametrize("y", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_observation_teaches_nothing(y: float) -> None:
    fit = taught(random.Random(6), 50)
    before = fit.fitted
    fit.learn(np.array((1.0, 2.0, 3.0)), y)
    fit.learn(np.zeros(3), 1.0)
    fit.learn(np.array((1.0, math.nan, 3.0)), 1.0)
    assert fit.fitted is before


def test_what_was_known_at_a_moment_does_not_change_with_what_is_learned_later() -> None:
    source = random.Random(7)
    fit = taught(source, 20, noise=0.1)
    before = fit.fitted
    kept = before.coefficients.copy(), before.covariance.copy()
    for _ in range(20):
        fit.learn(observe(source), 1.0)
    assert fit.fitted is not before
    np.testing.assert_array_equal(before.coefficients, kept[0])
    np.testing.assert_array_equal(before.covariance, kept[1])


@given(
    st.lists(
        st.tuples(st.lists(st.floats(0.0, 1e6), min_size=3, max_size=3), st.floats(1e-7, 1e4)),
        min_size=1,
        max_size=60,
    )
)
def test_coefficients_are_finite_and_never_negative_whatever_is_observed(seen: list[tuple[list[float], float]]) -> None:
    fit = RecursiveFit(SCALES, memory=1.0, drift=1e-3)
    for x, y in seen:
        fit.learn(np.array(x), y)
    assert np.isfinite(fit.fitted.coefficients).all()
    assert (fit.fitted.coefficients >= 0).all()
    assert np.isfinite(fit.fitted.covariance).all()
