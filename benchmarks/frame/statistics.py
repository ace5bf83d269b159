"""Percentiles, intervals and trends of samples."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

_HOUR = 3600.0
_NUM_BATCHES = 12
_LEAST_ROUNDS = 5
_RESAMPLES = 2000


def percentile(values: Collection[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def percentiles(values: Collection[float], *shares: int) -> dict[str, float]:
    """By name: `p50`."""
    return {f"p{share}": percentile(values, share / 100) for share in shares}


def bootstrap(statistic: Callable[..., float], *series: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of a statistic of rounds, drawn again with replacement: the same rounds from every series.

    Args:
        statistic: of all series.
        series: of one length, a number for each round.

    Returns:
        None for fewer than five rounds.
    """
    if len(series[0]) < _LEAST_ROUNDS:
        return None
    drawn = random.Random(0)  # noqa: S311 (not for secrets)
    rounds = range(len(series[0]))
    found = []
    for _ in range(_RESAMPLES):
        chosen = drawn.choices(rounds, k=len(rounds))
        found.append(statistic(*([each[number] for number in chosen] for each in series)))
    found.sort()
    tail = round(0.025 * _RESAMPLES)
    return found[tail], found[-1 - tail]


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and its 95 % interval by Student's t; a single value is its own interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    from scipy import stats

    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of two systems in the same rounds."""
    return statistics.median(ours) / statistics.median(theirs)


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth in units an hour, with a 95 % interval."""

    per_hour: float
    low: float
    high: float


def slope(seconds: Sequence[float], values: Sequence[float], num_batches: int = _NUM_BATCHES) -> Slope:
    """Least-squares slope of autocorrelated samples, with an interval by Student's t over batch means.

    Batch means are nearly independent where batches are much longer than the autocorrelation. Where their residuals are
    still correlated, as for memory that grows in steps, the lag-1 autocorrelation widens the interval as it would for a
    first-order autoregression.

    Args:
        seconds: rising.
        values: one for each time.
        num_batches: at least 4.

    Source: Law, "Simulation Modeling and Analysis", on batch means.
    """
    import numpy as np
    from scipy import stats

    batches = [part for part in np.array_split(np.arange(len(values)), num_batches) if len(part)]
    times = np.array([np.mean(np.asarray(seconds, np.float64)[part]) for part in batches]) / _HOUR
    means = np.array([np.mean(np.asarray(values, np.float64)[part]) for part in batches])
    centered = times - times.mean()
    spread = float(centered @ centered)
    per_hour = float(centered @ means) / spread
    residuals = means - means.mean() - per_hour * centered
    freedom = len(batches) - 2
    scatter = float(residuals @ residuals)
    correlation = max(0.0, float(residuals[1:] @ residuals[:-1]) / scatter) if scatter else 0.0
    error = math.sqrt(scatter / freedom / spread * (1 + correlation) / (1 - correlation))
    half = float(stats.t.ppf(0.975, freedom)) * error
    return Slope(per_hour, per_hour - half, per_hour + half)
