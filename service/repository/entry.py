"""The served models: a `ModelEntry` holds all that is known of one, and `Models` is the table of them.

Loading a model is one `insert`, unloading it one `remove`. Event loop only. What the engine thread owns is there
(`service.runtime.engine_entry`); an entry has the identity of the engine that serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from model.spec.generation import WIRE_DEFAULTS, GenerationDefaults
from service.errors import NotServing, UnknownModel
from service.repository.kv_pool import Part
from service.repository.models import ModelState, Parity, ServedModel
from service.runtime.model_queue import ModelQueue

_WHY_NOT = {
    ModelState.STARTING: "{} is starting",
    ModelState.FAILED: "{} does not answer as its golden cases say, or fails",
    ModelState.DRAINING: "{} is draining",
}


@dataclass(slots=True, eq=False)
class Replay:
    """A replay of golden cases that runs or waits to, and how many calls wait for its outcome."""

    task: asyncio.Task[Parity]
    num_waiting: int = 0


@dataclass(slots=True, eq=False)
class ModelEntry:
    """One served model.

    Attributes:
        model: its artifact's facts; another value after a reload.
        queue: its places, predictor, metrics, recorder and the identity of its engine.
        part: the K/V memory of its engine; None only in tests that have no pool.
        state: whether it answers.
        parity: how its golden cases went when they were last replayed; None before that.
        replay: of its golden cases, in progress.
    """

    model: ServedModel
    queue: ModelQueue
    part: Part | None
    state: ModelState = ModelState.STARTING
    parity: Parity | None = None
    replay: Replay | None = None

    @property
    def is_serving(self) -> bool:
        """Whether the model answers."""
        return self.state is ModelState.SERVING

    def show(self) -> None:
        """Writes state and parity to the model's metrics."""
        self.queue.metrics.serves(is_serving=self.is_serving)
        if self.parity is not None:
            self.queue.metrics.parity_checked(self.parity.max_abs_error, passed=self.parity.passed)
            self.queue.metrics.batch_invariance_checked(is_invariant=self.parity.batch_invariant)


class Models:
    """The table of served models, and the only place where their states change; each change is reported.

    Args:
        own_defaults: whether a model's own defaults apply to requests, or the wire contract's.
    """

    def __init__(self, *, own_defaults: bool = True) -> None:
        self._own_defaults = own_defaults
        self._entries: dict[str, ModelEntry] = {}
        self._changed: Callable[[str], None] = lambda _: None
        self._is_draining = False

    def watch(self, changed: Callable[[str], None]) -> None:
        """Has `changed` called with a model's name after it changed or was removed."""
        self._changed = changed

    @property
    def entries(self) -> Mapping[str, ModelEntry]:
        """All entries by name, always as they are now."""
        return self._entries

    @property
    def names(self) -> tuple[str, ...]:
        """All served models' names, sorted."""
        return tuple(sorted(self._entries))

    def find(self, name: str) -> ModelEntry:
        """The entry that a request means; the name may be empty where one model is served.

        Raises:
            UnknownModel: when there is none of this name, or several and no name.
        """
        if not name and len(self._entries) == 1:
            return next(iter(self._entries.values()))
        if name not in self._entries:
            raise UnknownModel(name, self.names)
        return self._entries[name]

    def resolve(self, name: str) -> ServedModel:
        """The model that a request means.

        Raises:
            UnknownModel: as `find`.
        """
        return self.find(name).model

    def defaults(self, name: str) -> GenerationDefaults:
        """What applies where a request leaves a field out; the contract's defaults for an unknown model."""
        try:
            return self.resolve(name).manifest.generation_defaults if self._own_defaults else WIRE_DEFAULTS
        except UnknownModel:
            return WIRE_DEFAULTS

    def require_serving(self, name: str) -> None:
        """Checks that a model answers.

        Raises:
            NotServing: saying why not.
        """
        if (why := _WHY_NOT.get(self._entries[name].state)) is not None:
            raise NotServing(why.format(name))

    def state(self, name: str) -> ModelState:
        """Whether a model answers."""
        return self._entries[name].state

    def parity(self, name: str) -> Parity | None:
        """How a model's golden cases went when they were last replayed; None before that."""
        return self._entries[name].parity

    def is_served(self, model: ServedModel) -> bool:
        """Whether this very model is served, and not one that was loaded in its place."""
        entry = self._entries.get(model.name)
        return entry is not None and entry.model is model

    def insert(self, entry: ModelEntry) -> None:
        """Serves a model; while the server is stopping it takes no requests."""
        if self._is_draining:
            entry.state = ModelState.DRAINING
        self._entries[entry.model.name] = entry
        self._show(entry)

    def remove(self, name: str) -> None:
        """Serves a model no more."""
        del self._entries[name]
        self._changed(name)

    def reloaded(self, model: ServedModel, parity: Parity) -> None:
        """A served model was replaced by this one, which has passed its golden cases."""
        entry = self._entries[model.name]
        entry.model, entry.parity = model, parity
        entry.state = ModelState.DRAINING if self._is_draining else ModelState.SERVING
        self._show(entry)

    def verified(self, model: ServedModel, parity: Parity) -> None:
        """Notes a replay: a model that failed answers no more; one that passed does, unless it drains.

        Ignored if the model is not served any more.
        """
        if not self.is_served(model):
            return
        entry = self._entries[model.name]
        entry.parity = parity
        if entry.state is not ModelState.DRAINING:
            entry.state = ModelState.SERVING if parity.passed else ModelState.FAILED
        self._show(entry)

    def failing(self, name: str) -> bool:
        """Takes a model whose steps fail out of service until it is proven or loaded anew; whether it answered."""
        entry = self._entries.get(name)
        if entry is None or not entry.is_serving:
            return False
        entry.state = ModelState.FAILED
        self._show(entry)
        return True

    def withdraw(self, name: str) -> None:
        """Takes no more requests to a model that is about to be removed."""
        self._entries[name].state = ModelState.DRAINING
        self._show(self._entries[name])

    def drain(self) -> None:
        """Takes no more requests: the server is stopping."""
        self._is_draining = True
        for name in self._entries:
            self.withdraw(name)

    def _show(self, entry: ModelEntry) -> None:
        entry.show()
        self._changed(entry.model.name)
