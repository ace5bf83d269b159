"""How models that share the cores lengthen each other's requests.

While several models have work, each gets time by its weight (`service.runtime.turns`). So a request that would take T
seconds with the cores to itself is over after

    T + Σ max(min(W, w·T), b·w·T)

summed over the other models: w is such a model's weight over ours, and w·T what it may take while the request runs. It
takes the work W that it has by now, as far as that goes, and as more will come, no less than for the share b of the
time for which it had work lately. Exact where nothing comes and no steps are long; the rest is a guess.

Knows weights and who has work; no requests and no clock: moments are `time.monotonic()` seconds. On the event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

# A request more or less is soon seen, and the moments between two of them are not taken for leisure.
_MEMORY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Rival:
    """Another model: its weight over ours, seconds of work that it has, share of the time for which it had some."""

    weight: float
    work_seconds: float
    busy_share: float

    def taken(self, seconds: float) -> float:
        """What it takes of the cores while we get so many seconds of them."""
        most = self.weight * seconds
        return max(min(self.work_seconds, most), self.busy_share * most)


def stretched(seconds: float, rivals: Collection[Rival]) -> float:
    """After how long we have had so many seconds of the cores."""
    return seconds + sum(rival.taken(seconds) for rival in rivals)


@dataclass(slots=True)
class _Use:
    """How many requests a model has, and for which share of the time it lately had any, as of a moment."""

    num_requests: int = 0
    busy_share: float = 0.0
    moment: float = field(default=-math.inf)

    def pass_time(self, now: float) -> None:
        """Time went by with as many requests as there are."""
        remembered = math.exp(min(0.0, self.moment - now) / _MEMORY_SECONDS)
        self.busy_share = remembered * self.busy_share + (1.0 - remembered) * (self.num_requests > 0)
        self.moment = now


class CoreSharing:
    """Who has work, and lately had.

    Args:
        weights: by model; those that are not named have a weight of 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._uses: dict[str, _Use] = {}

    def begun(self, model: str, now: float) -> None:
        """The engine was handed a request of a model."""
        use = self._uses.setdefault(model, _Use())
        use.pass_time(now)
        use.num_requests += 1

    def ended(self, model: str, now: float) -> None:
        """A request that was handed over is over; of a model that was forgotten it is ignored."""
        if (use := self._uses.get(model)) is not None:
            use.pass_time(now)
            use.num_requests = max(0, use.num_requests - 1)

    def forget(self, model: str) -> None:
        """A model is served no more."""
        self._uses.pop(model, None)

    def rivals_of(self, model: str, work: Mapping[str, Callable[[], float]], now: float) -> tuple[Rival, ...]:
        """The other models as a request that is handed over now meets them; those at rest for long are left out.

        Args:
            model: whose request it is.
            work: of each other model, asks for the seconds of work that it has.
            now: the moment.
        """
        rivals = []
        for other, work_seconds in work.items():
            if (use := self._uses.get(other)) is None:
                continue
            use.pass_time(now)
            seconds = work_seconds() if use.num_requests else 0.0
            if seconds > 0.0 or use.busy_share > 0.01:
                rivals.append(Rival(self._weight(other) / self._weight(model), seconds, use.busy_share))
        return tuple(rivals)

    def _weight(self, model: str) -> float:
        return self._weights.get(model, 1.0)
