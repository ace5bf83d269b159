"""Polynomial fits of time against length, with confidence intervals and objections to a claimed degree.

A claim of degree d is seconds(n) = k₀ + k₁n + … + k_d·n^d with k ≥ 0 and a significant k_d. `examine` fits it to
samples and collects objections. Pure arithmetic.

* The medians of each length are fitted by non-negative least squares over relative deviations (weight 1 / median), so
  that outliers have no influence and the shortest length counts as much as the longest.
* Intervals are 95 % percentile intervals of a case bootstrap: samples are redrawn with replacement within each length,
  and medians and fit are computed again.
* Degrees are compared by BIC = J·ln(RSS / J) + k·ln J for J lengths and k coefficients. Its likelihood assumes that
  relative deviations of the medians are independent and normal, of one unknown variance.

Sources: Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23; Efron and Tibshirani, "An Introduction
to the Bootstrap" (1993), chapters 9 and 13; Schwarz, "Estimating the Dimension of a Model" (1978); Kass and Raftery,
"Bayes Factors" (1995), section 3.2, for what a difference of 10 means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

Samples: TypeAlias = Sequence[tuple[float, float]]
"""Pairs of length and seconds, in the order of measurement."""

Array: TypeAlias = npt.NDArray[np.float64]

CONFIDENCE = 0.95
DECISIVE_BIC = 10.0
"""A larger difference is very strong evidence."""
LEADING_SHARE = 1 / 3
"""The smallest share of the time at the longest length for a claim's leading term."""
TOLERANCE = 0.10
"""Default tolerance: the share of the time at the longest length below which a term of the next degree is ignored, and
the error at that length that a fit without it may have."""
MAX_MISFIT = 0.25
"""The largest relative error of the curve at any median."""
MAX_DEGREE = 3
"""The highest fitted degree: one above quadratic."""

_ENDS = (round((1.0 - CONFIDENCE) / 2.0, 9), round((1.0 + CONFIDENCE) / 2.0, 9))
_NAMES = ("constant", "linear", "quadratic", "cubic")
# Relative deviations below a millionth are rounding errors.
_LEAST_VARIANCE = 1e-12


@dataclass(frozen=True, slots=True)
class Interval:
    """A `CONFIDENCE` interval; its upper end may be infinite."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Medians:
    """Median seconds `[J]` by ascending length `[J]`."""

    lengths: Array
    seconds: Array

    def without_longest(self) -> Medians:
        """All but the longest length."""
        return Medians(self.lengths[:-1], self.seconds[:-1])


@dataclass(frozen=True, slots=True)
class Curve:
    """A polynomial in the length: coefficients in seconds, seconds per token, seconds per token², and so on."""

    coefficients: tuple[float, ...]

    def at(self, lengths: npt.ArrayLike) -> Array:
        """Seconds at each length."""
        seconds: Array = np.polynomial.polynomial.polyval(np.asarray(lengths, float), self.coefficients)
        return seconds

    def term_at(self, degree: int, lengths: npt.ArrayLike) -> Array:
        """Seconds of one term at each length."""
        return self.coefficients[degree] * np.asarray(lengths, float) ** degree

    def local_slope_at(self, lengths: npt.ArrayLike) -> Array:
        """The local exponent d ln(seconds) / d ln(length): 1 where time is linear, 2 where it is quadratic."""
        weighted = tuple(degree * value for degree, value in enumerate(self.coefficients))
        return Curve(weighted).at(lengths) / self.at(lengths)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Refits: medians `[draws, J]`, coefficients `[draws, degree + 1]`."""

    medians: Array
    coefficients: Array

    def interval(self, degree: int) -> Interval:
        """The interval of one coefficient."""
        return interval(self.coefficients[:, degree])

    def band(self, lengths: npt.ArrayLike) -> tuple[Array, Array]:
        """The curve's interval at each length."""
        powers = np.polynomial.polynomial.polyvander(np.asarray(lengths, float), self.coefficients.shape[1] - 1)
        low, high = np.quantile(self.coefficients @ powers.T, _ENDS, axis=0)
        return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSlopes:
    """Measured local exponents between adjacent lengths, at their geometric means; all `[J - 1]`."""

    lengths: Array
    slopes: Array
    low: Array
    high: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Evidence on the claim that time grows with the length to the power of `degree`.

    `crossover` is the length at which the leading term equals the one below it (n* = b/c for degree 2), infinite
    without a leading term. `bic` is indexed by degree. `leading_share` is the leading term's share of the time at the
    longest length, `next_share` that of a fitted term one degree higher. `misfit` is the largest relative error at a
    median, `extrapolation_error` that of the fit without the longest length at that length.
    """

    degree: int
    medians: Medians
    curve: Curve
    bootstrap: Bootstrap
    intervals: tuple[Interval, ...]
    crossover: float
    crossover_interval: Interval
    bic: tuple[float, ...]
    leading_share: float
    next_share: float
    misfit: float
    extrapolation_error: float
    objections: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether there are no objections."""
        return not self.objections

    @property
    def longest(self) -> float:
        """The longest length."""
        return float(self.medians.lengths[-1])

    @property
    def local_slope(self) -> float:
        """The fitted curve's local exponent at the longest length."""
        return float(self.curve.local_slope_at(self.longest))

    def deviations(self, samples: Samples) -> Array:
        """Relative deviation of each sample from the curve, `[samples]`."""
        lengths, seconds = np.array(samples, float).T
        deviations: Array = seconds / self.curve.at(lengths) - 1.0
        return deviations


def examine(
    samples: Samples,
    degree: int,
    *,
    draws: int = 2000,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    reach: float = 0.0,
) -> Examination:
    """Fits a polynomial of degree 1 or 2 to samples and collects the objections to it.

    Args:
        samples: several for each of at least five lengths, all seconds above zero.
        degree: the claimed degree.
        draws: size of the bootstrap.
        seed: of the bootstrap.
        tolerance: see `TOLERANCE`.
        reach: the longest length must be at least this many crossovers.

    Raises:
        ValueError: if the samples or the degree are invalid.
    """
    if not 1 <= degree < MAX_DEGREE:
        raise ValueError(f"degree is {degree}, must be from 1 to {MAX_DEGREE - 1}")
    medians = medians_of(samples)
    if len(medians.lengths) < MAX_DEGREE + 2:
        raise ValueError(f"samples have {len(medians.lengths)} lengths, a comparison needs {MAX_DEGREE + 2}")
    curve = fit(medians, degree)
    bootstrap = resample(samples, degree, draws, np.random.default_rng(seed))
    longest = medians.lengths[-1]
    above = fit(medians, degree + 1)
    predicted = fit(medians.without_longest(), degree).at(longest)
    found = Examination(
        degree=degree,
        medians=medians,
        curve=curve,
        bootstrap=bootstrap,
        intervals=tuple(bootstrap.interval(each) for each in range(degree + 1)),
        crossover=float(_ratio(curve.coefficients[degree - 1], curve.coefficients[degree])),
        crossover_interval=interval(_ratio(bootstrap.coefficients[:, degree - 1], bootstrap.coefficients[:, degree])),
        bic=tuple(bic(medians, each) for each in range(MAX_DEGREE + 1)),
        leading_share=float(curve.term_at(degree, longest) / curve.at(longest)),
        next_share=float(above.term_at(degree + 1, longest) / above.at(longest)),
        misfit=float(np.max(np.abs(curve.at(medians.lengths) / medians.seconds - 1.0))),
        extrapolation_error=float(abs(predicted / medians.seconds[-1] - 1.0)),
        objections=(),
    )
    return _with_objections(found, tolerance, reach)


def medians_of(samples: Samples) -> Medians:
    """The median of each length.

    Raises:
        ValueError: if there are no samples, or one is not above zero.
    """
    groups = _by_length(samples)
    return Medians(np.array(list(groups)), np.array([np.median(each) for each in groups.values()]))


def fit(medians: Medians, degree: int) -> Curve:
    """The least-squares polynomial in relative deviations, without negative coefficients."""
    scale = medians.lengths[-1]
    powers = np.polynomial.polynomial.polyvander(medians.lengths / scale, degree)
    found, _ = nnls(powers / medians.seconds[:, np.newaxis], np.ones(len(medians.seconds)))
    return Curve(tuple(float(value) for value in found / scale ** np.arange(degree + 1)))


def bic(medians: Medians, degree: int) -> float:
    """The Bayesian information criterion of a degree's fit; lower is better, and only differences are meaningful.

    Zero coefficients count too, so a higher degree never wins without improving the fit.
    """
    deviations = fit(medians, degree).at(medians.lengths) / medians.seconds - 1.0
    variance = max(float(np.mean(deviations**2)), _LEAST_VARIANCE)
    num_lengths = len(medians.lengths)
    return num_lengths * float(np.log(variance)) + (degree + 1) * float(np.log(num_lengths))


def resample(samples: Samples, degree: int, draws: int, rng: np.random.Generator) -> Bootstrap:
    """The case bootstrap: resamples within each length with replacement, then computes medians and fit."""
    groups = _by_length(samples)
    lengths = np.array(list(groups))
    columns = [
        np.median(np.array(each)[rng.integers(0, len(each), (draws, len(each)))], axis=1) for each in groups.values()
    ]
    medians = np.column_stack(columns)
    coefficients = np.array([fit(Medians(lengths, each), degree).coefficients for each in medians])
    return Bootstrap(medians, coefficients)


def local_slopes(found: Examination) -> LocalSlopes:
    """Measured local exponents with intervals, independent of any fitted curve."""
    steps = np.diff(np.log(found.medians.lengths))
    low, high = np.quantile(np.diff(np.log(found.bootstrap.medians), axis=1) / steps, _ENDS, axis=0)
    return LocalSlopes(
        lengths=np.sqrt(found.medians.lengths[1:] * found.medians.lengths[:-1]),
        slopes=np.diff(np.log(found.medians.seconds)) / steps,
        low=low,
        high=high,
    )


def interval(values: Array) -> Interval:
    """The percentile interval of bootstrap draws, which may be infinite."""
    # Interpolating between infinite draws would give nan.
    low, high = np.quantile(values, _ENDS, method="inverted_cdf")
    return Interval(float(low), float(high))


def _with_objections(found: Examination, tolerance: float, reach: float) -> Examination:
    degree = found.degree
    leading, longest = found.intervals[degree], f"{found.longest:g} tokens"
    gain = found.bic[degree - 1] - found.bic[degree]
    loss = found.bic[degree] - found.bic[degree + 1]
    law, lesser, greater = _NAMES[degree], _NAMES[degree - 1], _NAMES[degree + 1]
    objections = []
    if leading.low <= 0.0:
        objections.append(f"the {law} coefficient's interval, {leading.low:.3g} to {leading.high:.3g}, includes 0")
    if gain <= DECISIVE_BIC:
        objections.append(f"BIC prefers {law} to {lesser} by {gain:.1f}, not by more than {DECISIVE_BIC:g}")
    if found.leading_share < LEADING_SHARE:
        share = f"{found.leading_share:.1%} of the time at {longest}"
        objections.append(f"the {law} term is {share}, not {LEADING_SHARE:.0%} or more")
    if loss > DECISIVE_BIC and found.next_share >= tolerance:
        objections.append(
            f"BIC prefers {greater} to {law} by {loss:.1f}, and its term is {found.next_share:.1%} at {longest}"
        )
    if found.misfit > MAX_MISFIT:
        objections.append(f"the curve misses the median of one length by {found.misfit:.1%}")
    if found.extrapolation_error > tolerance:
        objections.append(f"the fit without {longest} misses them by {found.extrapolation_error:.1%}")
    if found.longest < reach * found.crossover:
        objections.append(f"{longest} are {found.longest / found.crossover:.2f} times the crossover, not {reach:g}")
    return replace(found, objections=tuple(objections))


def _by_length(samples: Samples) -> dict[float, list[float]]:
    """Seconds by length, ascending."""
    if not samples:
        raise ValueError("there are no samples")
    groups: dict[float, list[float]] = {}
    for length, seconds in sorted(samples):
        if not (length > 0 and 0 < seconds < float("inf")):
            raise ValueError(f"sample ({length}, {seconds}): length and seconds must be finite and above 0")
        groups.setdefault(float(length), []).append(float(seconds))
    return groups


def _ratio(below: npt.ArrayLike, leading: npt.ArrayLike) -> Array:
    """The length at which two terms are equal; infinite without a leading term."""
    numerator, denominator = np.asarray(below, float), np.asarray(leading, float)
    infinite = np.full(np.broadcast(numerator, denominator).shape, np.inf)
    ratio: Array = np.divide(numerator, denominator, out=infinite, where=denominator > 0.0)
    return ratio
