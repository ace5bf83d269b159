"""The memory budget of all models' keys and values, and each model's part of it.

    budget  =  parts of the models that are served
            +  parts kept for models that the operator named, until they are served
            +  what is left, for models that come later

Parts are dealt once, at the start: by the operator's weights, or in proportion to what all rows of each model take at
full length, so that every model can run the same share of its rows. A later model gets the part that it had or was
named with, else what it needs, cut to what is left; with less than one row of full length it is refused. Models that
are unloaded give their part back. Without a budget every model gets what it needs. In any case all models together must
fit into this machine's memory.

Engines of one model that live beside each other during a reload share the larger of their parts; the engine thread sees
to that. Counts bytes; knows no engines, tensors or files. Event loop only, once that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from service.engine.kv.budget import MemoryNeeds
from service.errors import StartupError


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one engine of a model may take until it is given back: `kv_bytes` for K/V, `besides` for all else.

    `besides` has pre-faulted memory, and on a CPU weights and activations.
    """

    model: str
    kv_bytes: int
    besides: int


class KVPool:
    """The parts that are taken.

    Args:
        num_bytes: the budget of all K/V; None gives every model what it needs.
        weights: by name, what models get of the budget; where some are given, those not named have a weight of 1.
        memory: bytes that this process can have; None where that is not known.
        needs: of the models that are there from the start, by name.

    Raises:
        StartupError: listing every model whose part is too small, or that all of it is more than there is.
    """

    def __init__(
        self,
        num_bytes: int | None,
        weights: Mapping[str, float],
        memory: int | None,
        needs: Mapping[str, MemoryNeeds],
    ) -> None:
        self._num_bytes = num_bytes
        self._memory = memory
        self._kept_for: frozenset[str] = frozenset() if num_bytes is None else frozenset(weights)
        self._planned: dict[str, int] = {} if num_bytes is None else _deal(num_bytes, weights, needs)
        self._parts: list[Part] = []
        problems: list[str] = []
        for model, need in needs.items():
            try:
                self._deal_out(model, need, self._planned.get(model, need.whole))
            except StartupError as error:
                problems += error.problems
        if problems:
            raise StartupError(problems)
        self._check_memory()

    @property
    def num_bytes(self) -> int | None:
        """The budget."""
        return self._num_bytes

    @property
    def parts(self) -> Mapping[str, int]:
        """By model, the bytes that its K/V may take."""
        return {part.model: self._taken(part.model) for part in self._parts}

    @property
    def kept(self) -> Mapping[str, int]:
        """By model that was named and is not served, the bytes that are kept for it."""
        return {model: self._planned[model] for model in sorted(self._kept_for - self.parts.keys())}

    @property
    def promised(self) -> int:
        """Bytes that all engines may take, K/V and all else, whether they have touched them or not."""
        return sum(self.parts.values()) + sum(part.besides for part in self._parts)

    def part_of(self, model: str) -> Part | None:
        """The part that a model took last; None if it has none."""
        return next((part for part in reversed(self._parts) if part.model == model), None)

    def take(self, model: str, needs: MemoryNeeds) -> Part:
        """A part for an engine of a model, beside those that the model has.

        Raises:
            StartupError: saying what it needs at least and what there is; nothing was taken then.
        """
        wanted = self._planned.get(model, 0)
        # A model that was not named and has outgrown its part is treated as a new one.
        if wanted < needs.least and model not in self._kept_for:
            wanted = needs.whole
        part = self._deal_out(model, needs, wanted)
        try:
            self._check_memory()
        except StartupError:
            self.give_back(part)
            raise
        return part

    def give_back(self, part: Part) -> None:
        """Gives back the part of an engine that was released.

        Raises:
            ValueError: when the part was given back before.
        """
        self._parts.remove(part)

    def _deal_out(self, model: str, needs: MemoryNeeds, wanted: int) -> Part:
        """A part of `wanted` bytes, at most what is left; without a budget, all that the model needs."""
        kv_bytes = needs.whole if self._num_bytes is None else min(wanted, self._room(model))
        if kv_bytes < needs.least:
            raise StartupError([self._too_little(model, kv_bytes, needs.least)])
        part = Part(model, kv_bytes, needs.besides + needs.prefaulted(kv_bytes))
        self._parts.append(part)
        return part

    def _taken(self, model: str) -> int:
        return max((part.kv_bytes for part in self._parts if part.model == model), default=0)

    def _room(self, model: str) -> int:
        """The most that a model may have: the budget less the parts of others and those kept for others."""
        others = (self.parts.keys() | self._kept_for) - {model}
        spoken_for = sum(
            max(self._taken(other), self._planned[other] if other in self._kept_for else 0) for other in others
        )
        return (self._num_bytes or 0) - spoken_for

    def _too_little(self, model: str, kv_bytes: int, least: int) -> str:
        spoken_for = {**self.kept, **self.parts}
        spoken_for.pop(model, None)
        others = ", ".join(f"{other} {num_bytes}" for other, num_bytes in sorted(spoken_for.items()))
        beside = f" beside {others}" if others else ""
        return (
            f"kv_memory: {model} gets {kv_bytes} of {self._num_bytes} bytes{beside}, "
            f"must get at least {least}, for one sequence of full length"
        )

    def _check_memory(self) -> None:
        """Refuses what this machine cannot hold: the kernel would grant it and kill the process once it is touched."""
        needed = self.promised
        if self._memory is not None and needed > self._memory:
            besides = sum(part.besides for part in self._parts)
            each = ", ".join(f"{model} {num_bytes}" for model, num_bytes in sorted(self.parts.items()))
            raise StartupError(
                [
                    f"all models need {needed} bytes, there are {self._memory}: {besides} besides K/V, the rest for "
                    f"those ({each}); --kv-memory and --max-batch-size bound them"
                ]
            )


def _deal(num_bytes: int, weights: Mapping[str, float], needs: Mapping[str, MemoryNeeds]) -> dict[str, int]:
    """Parts by the weights, or by what the models need where none are given; their sum is the whole budget."""
    shares: dict[str, float] = {model: need.whole for model, need in needs.items()}
    if weights:
        shares = {**dict.fromkeys(needs, 1.0), **weights}
    # Exactly: the sum must not come out above the whole.
    total, before, parts = sum(map(Fraction, shares.values())), Fraction(), {}
    for model, share in shares.items():
        after = before + Fraction(share)
        parts[model] = int(num_bytes * after / total) - int(num_bytes * before / total)
        before = after
    return parts
