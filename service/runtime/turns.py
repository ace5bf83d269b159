"""Whose turn it is among models that share the cores: each gets time by its weight, however long its steps are.

Stride scheduling (Waldspurger and Weihl, 1995), paid for afterwards: a turn costs its taker its seconds over its
weight, and the model that has paid least goes next. How long a step takes need not be known beforehand.

* **Shares.** Of two models that both have work all the while, i and j, the seconds S that they get over any stretch of
  time differ by no more than |S_i/w_i - S_j/w_j| ≤ L_i/w_i + L_j/w_j, L being the longest turn of each.
* **No saving up.** A model that had nothing to do begins where the least paid of the others is: what it left to them is
  theirs. It waits for one turn of each of the others at most, the one in progress included.
* **No way out.** What a model has paid too much in its last turn stays paid while others are at work, so that requests
  of one long step each, however spaced, get no more than a long prompt does. It is no more than its longest turn, and
  forgotten once everybody else has had nothing to do.
* **Work conserving.** A model that alone has work has every turn.

Plain arithmetic on the engine thread; knows no clock, no engines and no requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

# What a turn costs at least: a clock may not see a turn go by, and it must not be followed by another for ever.
_LEAST_SECONDS = 1e-6


class Turns:
    """The accounts of all models that have work, and of those that still owe a turn.

    Args:
        weights: by model, above 0; models that are not named have a weight of 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        # Seconds over weight: of those at work, and of those that had work a moment ago.
        self._paid: dict[str, float] = {}
        self._last_turn: dict[str, int] = {}
        self._busy: frozenset[str] = frozenset()
        self._num_turns = 0

    def next(self, busy: Collection[str]) -> str | None:
        """Whose turn it is; None where no model has work.

        Args:
            busy: the models that have work now.
        """
        staying = self._busy.intersection(busy)
        if not staying:
            self._paid.clear()
        begin = min((self._paid[model] for model in staying), default=0.0)
        for model in busy:
            if model not in staying:
                self._paid[model] = max(self._paid.get(model, begin), begin)
        self._busy = frozenset(busy)
        # Among equals, whose last turn was longest ago: a newcomer's, if it comes to that.
        return min(busy, key=lambda model: (self._paid[model], self._last_turn.get(model, -1)), default=None)

    def took(self, model: str, seconds: float) -> None:
        """The model whose turn it was has taken so long."""
        self._paid[model] += max(seconds, _LEAST_SECONDS) / self._weights.get(model, 1.0)
        self._last_turn[model] = self._num_turns
        self._num_turns += 1

    def forget(self, model: str) -> None:
        """A model is gone."""
        self._paid.pop(model, None)
        self._last_turn.pop(model, None)
        self._busy -= {model}
