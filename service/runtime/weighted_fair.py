"""Weighted fair scheduling of models that share the cores: each gets time by its weight, however long its steps are.

Stride scheduling (Waldspurger and Weihl, 1995), charged afterwards: a turn costs its model its seconds over its weight,
and the model that has been charged least goes next. The length of a step need not be known beforehand.

* **Shares.** Of two models i and j that both have work, the seconds S that they get over any stretch of time satisfy
  |S_i/w_i - S_j/w_j| ≤ L_i/w_i + L_j/w_j, L being the longest turn of each.
* **No credit.** A model that was idle starts at the smallest charge among the others, so it saves nothing up. It waits
  for at most one turn of each other model, the one in progress included.
* **No escape.** A model stays charged for its last turn while others have work, so that requests of one long step each
  get no more than one long prompt does. The debt is at most its longest turn, and ends when all others are idle.
* **Work conserving.** A model that alone has work gets every turn.

Plain arithmetic on the engine thread; knows no clock, engines or requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

# The least charge of a turn: a clock may not see it pass, and one model must not go on forever.
_LEAST_SECONDS = 1e-6


class WeightedFairScheduler:
    """The accounts of models that have work or still owe for a turn; a model that is not named has a weight of 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        # Seconds over weight.
        self._charged: dict[str, float] = {}
        self._last_turn: dict[str, int] = {}
        self._busy: frozenset[str] = frozenset()
        self._num_turns = 0

    def next(self, busy: Collection[str]) -> str | None:
        """The model that goes next among those that have work now; None if there are none."""
        staying = self._busy.intersection(busy)
        if not staying:
            self._charged.clear()
        begin = min((self._charged[model] for model in staying), default=0.0)
        for model in busy:
            if model not in staying:
                self._charged[model] = max(self._charged.get(model, begin), begin)
        self._busy = frozenset(busy)
        # Among equals the one whose last turn is longest ago; a newcomer has had none.
        return min(busy, key=lambda model: (self._charged[model], self._last_turn.get(model, -1)), default=None)

    def charge(self, model: str, seconds: float) -> None:
        """The turn of the model that went has taken so long."""
        self._charged[model] += max(seconds, _LEAST_SECONDS) / self._weights.get(model, 1.0)
        self._last_turn[model] = self._num_turns
        self._num_turns += 1

    def forget(self, model: str) -> None:
        """Drops a model that was removed."""
        self._charged.pop(model, None)
        self._last_turn.pop(model, None)
        self._busy -= {model}
