"""Polynomial fits of time against length, with confidence intervals and objections to a claimed degree.

A claim of degree d is seconds(n) = k₀ + k₁n + … + k_d·n^d with k ≥ 0 and a significant k_d. `examine` fits it to
samples and collects objections. Pure arithmetic.

A claim may be one by regimes: what a position takes is linear in the keys before it, with a slope of its own between
given knees. Of degree 1 that is a token's time, a continuous line; of degree 2 a prompt's, the sum over its positions.

* The median of each length is that of Hodges and Lehmann: of the means of all pairs of samples. Outliers hardly move
  it, and it is steady where a machine has two speeds; a plain median jumps from one to the other.
* The medians are fitted by non-negative least squares over relative deviations (weight 1 / median), so that the
  shortest length counts as much as the longest.
* Intervals are 95 % percentile intervals of a case bootstrap: samples are redrawn with replacement within each length,
  and medians and fit are computed again.
* Degrees, and a claim by regimes with other laws, are compared by BIC = J·ln(RSS / J) + k·ln J for J lengths and k
  coefficients. Its likelihood assumes that relative deviations of the medians are independent and normal, of one
  unknown variance.

Sources: Hodges and Lehmann, "Estimates of Location Based on Rank Tests" (1963); Lawson and Hanson, "Solving Least
Squares Problems" (1974), chapter 23; Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapters 9 and
13; Schwarz, "Estimating the Dimension of a Model" (1978); Kass and Raftery, "Bayes Factors" (1995), section 3.2, for
what a difference of 10 means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

Samples: TypeAlias = Sequence[tuple[float, float]]
"""Pairs of length and seconds, in the order of measurement."""

Array: TypeAlias = npt.NDArray[np.float64]
Law: TypeAlias = Callable[[Array], Array]
"""Growth with the length, but for a factor."""

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
_RIVALS: Mapping[int, Mapping[str, Law]] = {
    1: {"n ln n": lambda n: n * np.log(n), "n^1.5": lambda n: n**1.5},
    2: {"n² ln n": lambda n: n**2 * np.log(n), "n^2.5": lambda n: n**2.5},
}
"""By degree, growth that a claim by regimes could be mistaken for: it is compared with each, plus the lower powers."""
# Relative deviations below a millionth are rounding errors.
_LEAST_VARIANCE = 1e-12
_FARTHEST, _HALVINGS = 1e12, 80


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
class Regimes:
    """One power of the length, 1 or 2, has a coefficient of its own between ascending lengths, the knees."""

    power: int = 1
    knees: tuple[float, ...] = ()


ONE = Regimes()
"""A plain polynomial."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A polynomial in the length: coefficients in seconds, seconds per token, seconds per token², and so on.

    With knees, one coefficient for each regime replaces that of the divided power.
    """

    coefficients: tuple[float, ...]
    regimes: Regimes = ONE

    @property
    def degree(self) -> int:
        """The highest power."""
        return len(self.coefficients) - len(self.regimes.knees) - 1

    def at(self, lengths: npt.ArrayLike) -> Array:
        """Seconds at each length."""
        seconds: Array = _terms(lengths, self.degree, self.regimes) @ np.array(self.coefficients)
        return seconds

    def term_at(self, degree: int, lengths: npt.ArrayLike) -> Array:
        """Seconds of the terms of one degree at each length."""
        kept = np.where(_powers(self.degree, self.regimes) == degree, self.coefficients, 0.0)
        return Curve(tuple(kept.tolist()), self.regimes).at(lengths)

    def local_slope_at(self, lengths: npt.ArrayLike) -> Array:
        """The local exponent d ln(seconds) / d ln(length): 1 where time is linear, 2 where it is quadratic."""
        lengths, step = np.asarray(lengths, float), 1e-4
        rise = np.log(self.at(lengths * (1.0 + step)) / self.at(lengths * (1.0 - step)))
        slope: Array = rise / (np.log1p(step) - np.log1p(-step))
        return slope


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Refits: medians `[draws, J]`, coefficients `[draws, terms]` of curves with these regimes."""

    medians: Array
    coefficients: Array
    regimes: Regimes = ONE

    def interval(self, term: int) -> Interval:
        """The interval of one coefficient."""
        return interval(self.coefficients[:, term])

    def band(self, lengths: npt.ArrayLike) -> tuple[Array, Array]:
        """The curve's interval at each length."""
        degree = self.coefficients.shape[1] - len(self.regimes.knees) - 1
        low, high = np.quantile(self.coefficients @ _terms(lengths, degree, self.regimes).T, _ENDS, axis=0)
        return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSlopes:
    """Measured local exponents between adjacent lengths, at their geometric means; all `[J - 1]`."""

    lengths: Array
    slopes: Array
    low: Array
    high: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What decides on a claim, but for intervals. All are computed from the medians.

    `bic` is indexed by degree, `rivals` has that of other laws by name. `leading_share` is the leading term's share of
    the time at the longest length, `next_share` that of a fitted term one degree higher. `misfit` is the largest
    relative error at a median, `extrapolation_error` that of the fit without the longest length at that length.
    """

    curve: Curve
    bic: tuple[float, ...]
    rivals: Mapping[str, float]
    leading_share: float
    next_share: float
    misfit: float
    extrapolation_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination(Figures):
    """Evidence on the claim that time grows with the length to the power of `degree`.

    `coefficients` are in seconds, seconds per token, and so on; one by regimes is its mean up to the longest length.
    `crossover` is the length at which the leading term equals the one below it (of degree 2, n*; b/c in one regime),
    infinite without a leading term. `refused` says of each judged draw of the bootstrap whether it has objections.
    """

    degree: int
    medians: Medians
    bootstrap: Bootstrap
    coefficients: tuple[float, ...]
    intervals: tuple[Interval, ...]
    crossover: float
    crossover_interval: Interval
    objections: tuple[str, ...]
    refused: npt.NDArray[np.bool_]

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
    judged: int = 0,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    reach: float = 0.0,
    knees: Sequence[float] | None = None,
) -> Examination:
    """Fits a polynomial of degree 1 or 2 to samples and collects the objections to it.

    Args:
        samples: several for each of at least five lengths, all seconds above zero.
        degree: the claimed degree.
        draws: size of the bootstrap.
        judged: how many of the draws are judged as the samples are, see `Examination.refused`.
        seed: of the bootstrap.
        tolerance: see `TOLERANCE`.
        reach: at the longest length the leading term must be at least this many times the one below it.
        knees: if given, the claim is one by regimes: ascending lengths, or none for a single regime.

    Raises:
        ValueError: if the samples or the degree are invalid.
    """
    if not 1 <= degree < MAX_DEGREE:
        raise ValueError(f"degree is {degree}, must be from 1 to {MAX_DEGREE - 1}")
    medians = medians_of(samples)
    if len(medians.lengths) < MAX_DEGREE + 2:
        raise ValueError(f"samples have {len(medians.lengths)} lengths, a comparison needs {MAX_DEGREE + 2}")
    regimes, rivals = Regimes(degree, tuple(knees or ())), {} if knees is None else _RIVALS[degree]
    bootstrap = resample(samples, degree, draws, np.random.default_rng(seed), regimes)
    leading = bootstrap.interval(-1)

    def object_to(medians: Medians) -> tuple[Figures, tuple[str, ...]]:
        figures = _figures(medians, degree, regimes, rivals)
        return figures, _objections(figures, medians.lengths[-1], leading, tolerance, reach)

    figures, objections = object_to(medians)
    # Means by power: of one regime each, the coefficients themselves.
    longest, powers = medians.lengths[-1], _powers(degree, regimes)
    shares = _terms(longest, degree, regimes) / longest**powers
    means = np.array([shares * (powers == each) for each in range(degree + 1)])
    coefficients, drawn = means @ figures.curve.coefficients, bootstrap.coefficients @ means.T
    return Examination(
        **{each.name: getattr(figures, each.name) for each in fields(figures)},
        degree=degree,
        medians=medians,
        bootstrap=bootstrap,
        coefficients=tuple(coefficients.tolist()),
        intervals=tuple(interval(each) for each in drawn.T),
        crossover=float(_crossovers(np.array(figures.curve.coefficients), degree, regimes)),
        crossover_interval=interval(_crossovers(bootstrap.coefficients, degree, regimes)),
        objections=objections,
        refused=np.array([bool(object_to(Medians(medians.lengths, each))[1]) for each in bootstrap.medians[:judged]]),
    )


def medians_of(samples: Samples) -> Medians:
    """The median of each length, as of Hodges and Lehmann.

    Raises:
        ValueError: if there are no samples, or one is not above zero.
    """
    groups = _by_length(samples)
    return Medians(np.array(list(groups)), np.array([_median(np.array(each)) for each in groups.values()]))


def fit(medians: Medians, degree: int, regimes: Regimes = ONE) -> Curve:
    """The least-squares polynomial in relative deviations, without negative coefficients."""
    scale = medians.lengths[-1]
    regimes = regimes if degree >= regimes.power else ONE
    scaled = Regimes(regimes.power, tuple(knee / scale for knee in regimes.knees))
    found = _least_squares(_terms(medians.lengths / scale, degree, scaled), medians)
    return Curve(tuple((found / scale ** _powers(degree, regimes)).tolist()), regimes)


def resample(samples: Samples, degree: int, draws: int, rng: np.random.Generator, regimes: Regimes = ONE) -> Bootstrap:
    """The case bootstrap: resamples within each length with replacement, then computes medians and fit."""
    groups = _by_length(samples)
    lengths = np.array(list(groups))
    columns = [_median(np.array(each)[rng.integers(0, len(each), (draws, len(each)))]) for each in groups.values()]
    medians = np.column_stack(columns)
    coefficients = np.array([fit(Medians(lengths, each), degree, regimes).coefficients for each in medians])
    return Bootstrap(medians, coefficients, regimes)


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


def _figures(medians: Medians, degree: int, regimes: Regimes, rivals: Mapping[str, Law]) -> Figures:
    lengths, longest = medians.lengths, medians.lengths[-1]
    curves = [fit(medians, each, regimes) for each in range(MAX_DEGREE + 1)]
    curve, above = curves[degree], curves[degree + 1]
    deviations = [each.at(lengths) / medians.seconds - 1.0 for each in curves]
    predicted = fit(medians.without_longest(), degree, regimes).at(longest)
    others, lower = {}, _terms(lengths / longest, degree - 1, ONE)
    for name, law in rivals.items():
        terms = np.column_stack([lower, law(lengths) / law(longest)])
        others[name] = _bic(terms @ _least_squares(terms, medians) / medians.seconds - 1.0, terms.shape[1])
    return Figures(
        curve=curve,
        bic=tuple(_bic(off, len(each.coefficients)) for off, each in zip(deviations, curves, strict=True)),
        rivals=others,
        leading_share=float(curve.term_at(degree, longest) / curve.at(longest)),
        next_share=float(above.term_at(degree + 1, longest) / above.at(longest)),
        misfit=float(np.max(np.abs(deviations[degree]))),
        extrapolation_error=float(abs(predicted / medians.seconds[-1] - 1.0)),
    )


def _objections(found: Figures, length: float, leading: Interval, tolerance: float, reach: float) -> tuple[str, ...]:
    curve, degree, longest = found.curve, found.curve.degree, f"{length:g} tokens"
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
    for name, value in found.rivals.items():
        if (loss := found.bic[degree] - value) > DECISIVE_BIC:
            objections.append(f"BIC prefers {name} to {law} by {loss:.1f}")
    if found.misfit > MAX_MISFIT:
        objections.append(f"the curve misses the median of one length by {found.misfit:.1%}")
    if found.extrapolation_error > tolerance:
        objections.append(f"the fit without {longest} misses them by {found.extrapolation_error:.1%}")
    if (leads := float(curve.term_at(degree, length))) < reach * (below := float(curve.term_at(degree - 1, length))):
        objections.append(f"at {longest} the {law} term is {leads / below:.2f} times the {lesser} one, not {reach:g}")
    return tuple(objections)


def _terms(lengths: npt.ArrayLike, degree: int, regimes: Regimes) -> Array:
    """The terms of a polynomial without their coefficients, `[..., terms]`."""
    n = np.asarray(lengths, float)
    terms = [n**power for power in range(degree + 1)]
    if degree >= regimes.power:
        pieces = []
        for low, high in pairwise((0.0, *regimes.knees, np.inf)):
            within = np.clip(n, low, high) - low
            # The square is twice the sum of the line over all positions.
            pieces.append(within if regimes.power == 1 else within * (2 * (n - low) - within))
        terms[regimes.power : regimes.power + 1] = pieces
    return np.stack(terms, axis=-1)


def _powers(degree: int, regimes: Regimes) -> npt.NDArray[np.int_]:
    """The power of the length of each of these terms."""
    times = [len(regimes.knees) + 1 if power == regimes.power else 1 for power in range(degree + 1)]
    return np.repeat(np.arange(degree + 1), times)


def _least_squares(terms: Array, medians: Medians) -> Array:
    """The coefficients over relative deviations, without negative ones."""
    found: Array = nnls(terms / medians.seconds[:, np.newaxis], np.ones(len(medians.seconds)))[0]
    return found


def _bic(deviations: Array, num_coefficients: int) -> float:
    """The Bayesian information criterion; lower is better, and only differences are meaningful.

    Zero coefficients count too, so a higher degree never wins without improving the fit.
    """
    variance = max(float(np.mean(deviations**2)), _LEAST_VARIANCE)
    num_lengths = len(deviations)
    return num_lengths * float(np.log(variance)) + num_coefficients * float(np.log(num_lengths))


def _median(values: Array) -> Array:
    """The median of the means of all pairs along the last axis, each value with itself included."""
    first, second = np.triu_indices(values.shape[-1])
    medians: Array = np.median((values[..., first] + values[..., second]) / 2, axis=-1)
    return medians


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


def _crossovers(coefficients: Array, degree: int, regimes: Regimes) -> Array:
    """Where the leading term of each curve `[..., terms]` begins to exceed the one below it; infinite if nowhere."""
    powers, shape = _powers(degree, regimes), coefficients.shape[:-1]
    low, high = np.zeros(shape), np.full(shape, _FARTHEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        parts = _terms(middle, degree, regimes) * coefficients
        leads = parts[..., powers == degree].sum(-1) > parts[..., powers == degree - 1].sum(-1)
        low, high = np.where(leads, low, middle), np.where(leads, middle, high)
    return np.where(high < _FARTHEST, high, np.inf)
