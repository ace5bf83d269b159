"""By how much models that share the cores lengthen each other's requests.

While several models have work, each gets time by its weight (`service.runtime.weighted_fair`). A request that would
take T seconds with the cores to itself ends after

    T + Σ max(min(W, w·T), b·w·T)

summed over the other models: w is such a model's weight over ours, so it takes w·T while the request runs. It takes the
work W that it has now, as far as that goes, and at least its share b of the recent time in which it had work, as more
requests will come. Exact if nothing comes and no step is long.

Knows weights and which models have work; no requests and no clock: moments are `time.monotonic()` seconds. Event loop
only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

# Long enough that the pauses between requests do not count as idle, short enough to see one request more or less.
_MEMORY_SECONDS = 2.0
_LEAST_BUSY_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Rival:
    """Another model: its weight over ours, seconds of work that it has, share of recent time in which it had some."""

    weight: float
    work_seconds: float
    busy_share: float

    def taken(self, seconds: float) -> float:
        """Seconds of the cores that it takes while we get so many."""
        most = self.weight * seconds
        return max(min(self.work_seconds, most), self.busy_share * most)


def stretched(seconds: float, rivals: Collection[Rival]) -> float:
    """Seconds until we have had so many seconds of the cores."""
    return seconds + sum(rival.taken(seconds) for rival in rivals)


class CoreUse:
    """How many requests a model has, and the share of the recent time in which it had any."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self._num_requests = 0
        self._busy_share = 0.0
        self._moment = -math.inf

    def begun(self, now: float) -> None:
        """The engine was handed a request."""
        self._pass_time(now)
        self._num_requests += 1

    def ended(self, now: float) -> None:
        """A request that was handed over is over."""
        self._pass_time(now)
        self._num_requests -= 1

    def as_rival(self, weight: float, work_seconds: Callable[[], float], now: float) -> Rival | None:
        """This model as a rival of another one of weight `weight`; None if it was idle for long."""
        self._pass_time(now)
        seconds = work_seconds() if self._num_requests else 0.0
        if seconds <= 0.0 and self._busy_share <= _LEAST_BUSY_SHARE:
            return None
        return Rival(self.weight / weight, seconds, self._busy_share)

    def _pass_time(self, now: float) -> None:
        remembered = math.exp(min(0.0, self._moment - now) / _MEMORY_SECONDS)
        self._busy_share = remembered * self._busy_share + (1.0 - remembered) * (self._num_requests > 0)
        self._moment = now
