"""Non-negative weighted least squares, one observation after the other, for quantities that drift: y ≈ θ·x with θ ≥ 0.

Recursive least squares in covariance form (Plackett, 1950; Ljung, *System Identification*, chapter 11) with five
additions:

* Errors are relative to the expected value, so that short observations teach as much as long ones. Their usual size is
  learned for each kind of observation: a noisy kind must neither be trusted like a precise one, nor have its errors
  taken for outliers.
* An outlier (Huber's criterion, 1964) moves the estimate no more than an observation at the border does: the machine
  was busy with something else.
* All coefficients may drift by a common factor, the machine's speed: what one term learns of it, all do.
* The past is forgotten as `memory` of observed y goes by, but only in the direction of x (Kulhavý and Kárný, 1984):
  terms that an observation says nothing about stay as well known as they were.
* Coefficients are the estimate on condition that none is negative: negative terms are conditioned to zero one by one,
  the most negative first. The unconditioned estimate is kept, so that they may come back.

Pure arithmetic, some ten microseconds an observation. Does not know what x and y are.
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
    """What is known at a moment. Immutable.

    Attributes:
        coefficients: θ, none of them negative.
        spread: relative standard deviation of observations, of the kind that errs most.
        scales: of each coefficient (see `RecursiveFit`).
        covariance: of the errors of θ / scales, in units of `spread`².
    """

    coefficients: Float64
    spread: float
    scales: Float64
    covariance: Float64

    def value(self, x: Float64) -> float:
        """The expected y."""
        return float(self.coefficients @ x)

    def deviation(self, x: Float64) -> float:
        """The standard deviation of `value` that is due to what is not known yet."""
        scaled = x * self.scales
        return self.spread * math.sqrt(max(0.0, float(scaled @ self.covariance @ scaled)))


class RecursiveFit:
    """Learns the coefficients of one linear law.

    Args:
        scales: prior standard deviation of each coefficient, about zero. After a few observations only their ratios
            matter, and only for terms that x does not separate.
        memory: observed y after which an observation in the same direction counts 1/e.
        drift: relative variance that the common factor of all coefficients gains as y = 1 goes by.
        num_kinds: of observations.
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
        """Learns from an observation; ignored unless x ≥ 0 is finite and not all 0, and y > 0 is finite."""
        scaled = x * self._scales
        covariance, spread, own_spread = self.fitted.covariance, self.fitted.spread, self._spreads[kind]
        noise = (own_spread / spread) ** 2
        free_value = float(self._free @ scaled)
        if not 0 < y < math.inf or not math.isfinite(free_value):
            return
        # What a change of the common factor adds to the covariance.
        common = self._free * (math.sqrt(self._drift * y) / spread)
        direction = covariance @ scaled + common * float(common @ scaled)
        known = float(scaled @ direction)
        if not known > 0:
            return
        expected = self.fitted.value(x)
        # While little is known, y is a better scale than the expected value.
        scale = max(expected, 0.2 * y)
        known /= scale**2
        forgetting = math.exp(-min(y / self._memory, _MOST_FORGOTTEN))
        unknown = known / forgetting
        error = abs(y - expected) / scale
        surprise = error / (spread * math.sqrt(noise + unknown))
        variance = noise * max(surprise / _HUBER, 1.0)
        gain = 1 / (forgetting * (unknown + variance) * scale**2)
        self._free = self._free + direction * (gain * (y - free_value))
        # Forgetting widens the covariance in the direction in which learning narrows it.
        change = (1 / forgetting - 1) / (known * scale**2) - gain / forgetting
        covariance = covariance + common[:, np.newaxis] * common + (direction[:, np.newaxis] * direction) * change
        if unknown < noise:
            # Otherwise the error measures what is left to learn, not how observations err.
            own_spread += _SPREAD_RATE * (_DEVIATIONS * min(error, 1.0) - own_spread)
            self._spreads[kind] = max(_LEAST_SPREAD, own_spread)
        coefficients = _without_negatives(self._free, covariance) * self._scales
        self.fitted = Fitted(coefficients, max(self._spreads), self._scales, covariance)


def _without_negatives(free: Float64, covariance: Float64) -> Float64:
    """The estimate on condition that negative terms are zero."""
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
