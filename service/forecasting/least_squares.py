"""Non-negative weighted least squares, one observation after the other, for quantities that drift: y ≈ θ·x with θ ≥ 0.

A recursive least squares in covariance form (Plackett, 1950; Ljung, *System Identification*, chapter 11) with five
additions:

* Errors count in proportion to what was expected, so that short observations teach as much as long ones; by how much
  they usually err is learned, too, and of each kind of observation by itself: what is hardly ever the same twice must
  neither be believed like what always is, nor be taken for an accident for not being so.
* An observation far beyond that (Huber's criterion, 1964) moves the estimate no more than one at the border would: the
  machine was busy with something else.
* All coefficients may change together, by a common factor that wanders: the machine's speed. So what one term learns of
  it, all do.
* Besides, the past is forgotten as `memory` of observed y goes by, but only in the direction of what was observed
  (Kulhavý and Kárný, 1984): what an observation says nothing about, a term that is not in x or how two that are in it
  share y, stays as well known as it was.
* Coefficients are the estimate given that none is negative, terms that would be are conditioned to zero one by one, the
  most negative first; what is behind them is kept, so that they may come back.

Pure arithmetic on a handful of numbers, some ten microseconds an observation. Knows nothing of what x and y are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

_FIRST_SPREAD = 0.2
_LEAST_SPREAD = 0.01
_SPREAD_RATE = 0.02
# Standard deviations in a mean absolute error, where errors are normal.
_DEVIATIONS = 1.2533
_HUBER = 3.0
_MOST_FORGOTTEN = 0.02


@dataclass(frozen=True, slots=True)
class Fitted:
    """What is known at a moment. It does not change: the next observation makes another one.

    Attributes:
        coefficients: θ, none of them negative.
        spread: by how much observations err, as a standard deviation and a part of what was expected; those of the kind
            that errs most.
        scales: of each coefficient (see `RecursiveFit`).
        covariance: of the errors of θ / scales, in units of `spread`²: if all err by more, all is known less well.
    """

    coefficients: Float64
    spread: float
    scales: Float64
    covariance: Float64

    def value(self, x: Float64) -> float:
        """The y that is expected."""
        return float(self.coefficients @ x)

    def deviation(self, x: Float64) -> float:
        """The standard deviation of that, as far as it comes from what is not known yet."""
        scaled = x * self.scales
        return self.spread * math.sqrt(max(0.0, float(scaled @ self.covariance @ scaled)))


class RecursiveFit:
    """Learns the coefficients of one linear law.

    Args:
        scales: how large each coefficient might be: the standard deviation of what is believed at the start, about
            zero. After a few observations no more than their ratios matter, and these only where x tells too little.
        memory: how much y observed in the same direction it takes until an observation counts 1/e of what it did.
        drift: the variance that all coefficients together gain as y = 1 goes by, as a part of them.
        num_kinds: how many kinds of observations there are.
    """

    def __init__(self, scales: Sequence[float], memory: float, drift: float, num_kinds: int = 1) -> None:
        self._scales = np.asarray(scales, np.float64)
        self._memory = memory
        self._drift = drift
        self._free = np.zeros(len(scales))
        # Of each kind of observations.
        self._spreads = [_FIRST_SPREAD] * num_kinds
        covariance = np.eye(len(scales)) / _FIRST_SPREAD**2
        self.fitted = Fitted(np.zeros(len(scales)), _FIRST_SPREAD, self._scales, covariance)

    def learn(self, x: Float64, y: float, kind: int = 0) -> None:
        """Takes in one observation; anything but finite x ≥ 0, not all of it 0, and finite y > 0 teaches nothing."""
        scaled = x * self._scales
        covariance, spread, own_spread = self.fitted.covariance, self.fitted.spread, self._spreads[kind]
        noise = (own_spread / spread) ** 2
        free_value = float(self._free @ scaled)
        if not 0 < y < math.inf or not math.isfinite(free_value):
            return
        # All may have become faster or slower together: what that adds to the covariance.
        common = self._free * (math.sqrt(self._drift * y) / spread)
        direction = covariance @ scaled + common * float(common @ scaled)
        known = float(scaled @ direction)
        if not known > 0:
            return
        expected = self.fitted.value(x)
        # While little is known, what is seen is a better scale than what was expected.
        scale = max(expected, 0.2 * y)
        known /= scale**2
        forgetting = math.exp(-min(y / self._memory, _MOST_FORGOTTEN))
        unknown = known / forgetting
        error = abs(y - expected) / scale
        surprise = error / (spread * math.sqrt(noise + unknown))
        variance = noise * max(surprise / _HUBER, 1.0)
        gain = 1 / (forgetting * (unknown + variance) * scale**2)
        self._free = self._free + direction * (gain * (y - free_value))
        # What is forgotten widens the covariance along the very direction in which what is learned narrows it.
        change = (1 / forgetting - 1) / (known * scale**2) - gain / forgetting
        covariance = covariance + common[:, np.newaxis] * common + (direction[:, np.newaxis] * direction) * change
        if unknown < noise:
            # Otherwise it is no measure of how observations err, but of what is left to learn.
            own_spread += _SPREAD_RATE * (_DEVIATIONS * min(error, 1.0) - own_spread)
            self._spreads[kind] = max(_LEAST_SPREAD, own_spread)
        coefficients = _without_negatives(self._free, covariance) * self._scales
        self.fitted = Fitted(coefficients, max(self._spreads), self._scales, covariance)


def _without_negatives(free: Float64, covariance: Float64) -> Float64:
    """The estimate on condition that terms which came out negative are zero."""
    if free.min() >= 0:
        return free
    values, covariance = free.copy(), covariance.copy()
    for _ in range(len(values)):
        least = int(values.argmin())
        if values[least] >= 0:
            break
        column = covariance[:, least].copy()
        values -= column * (values[least] / column[least])
        covariance -= np.outer(column, column) / column[least]
        # Rounding must not bring it back.
        covariance[least, :] = covariance[:, least] = values[least] = 0.0
    return np.maximum(values, 0.0)
