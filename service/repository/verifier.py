"""Golden cases on demand: one replay per model at a time, shared by all calls for it, given up when none is left.

Runs on the event loop. Knows neither gRPC nor what a replay computes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from model.spec.golden import tolerance_of
from service.engine.step_engine import StepEngine
from service.errors import NotServing
from service.repository.models import Models, ModelState, Parity, ServedModel
from service.runtime.async_engine import AsyncEngine

_LOGGER = logging.getLogger(__name__)

# A model that is in use can be verified between requests, but its new ones wait no longer than this for it.
_MAX_WAIT_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class _Replay:
    """A replay that runs or waits to, and how many wait for its outcome."""

    task: asyncio.Task[Parity]
    num_waiting: int = 0


class Verifier:
    """Replays golden cases on the provider in use and takes note of the outcome.

    Args:
        engine: where models run.
        models: what is served; a model that fails its cases does not answer any more.
        state_changed: called after each replay.
    """

    def __init__(self, engine: AsyncEngine, models: Models, state_changed: Callable[[], None]) -> None:
        self._engine = engine
        self._models = models
        self._state_changed = state_changed
        self._replays: dict[str, _Replay] = {}

    async def verify(self, name: str) -> Parity:
        """The outcome of the replay in progress, or of a new one.

        Raises:
            RequestError: when the replay itself failed, or the model was in use for too long to begin.
        """
        replay = self._replays.get(name)
        # One that is done tells of what was, though those who waited for it may not have been woken yet.
        if replay is None or replay.task.done():
            replay = self._replays[name] = _Replay(asyncio.create_task(self._replay(name)))
        replay.num_waiting += 1
        try:
            return await asyncio.shield(replay.task)
        finally:
            replay.num_waiting -= 1
            if replay.num_waiting == 0:
                replay.task.cancel()
            # Calls from now on want a new one, even if this one is still being cancelled.
            if (replay.num_waiting == 0 or replay.task.done()) and self._replays.get(name) is replay:
                del self._replays[name]

    async def _replay(self, name: str) -> Parity:
        """Replays until the outcome is that of the model that is served: it may be reloaded meanwhile."""
        while True:
            model = self._models.resolve(name)
            serves = self._serves(model)
            try:
                # No request waits behind the replay of a model that takes none.
                parity = await self._replay_once(model, _MAX_WAIT_SECONDS if serves else None)
            except NotServing:
                if self._models.is_served(model) and self._serves(model) == serves:
                    raise
                continue
            if self._models.is_served(model):
                break
        self._models.verified(model, parity)
        if not parity.passed:
            failed = ", ".join(case.name for case in parity.cases if not case.passed)
            _LOGGER.error("%s does not serve, golden cases failed: %s", name, failed or "there are none")
        self._state_changed()
        return parity

    def _serves(self, model: ServedModel) -> bool:
        return self._models.state(model.name) is ModelState.SERVING

    async def _replay_once(self, model: ServedModel, max_wait_seconds: float | None) -> Parity:
        def replay(engine: StepEngine) -> Parity:
            tolerance = tolerance_of(model.manifest.precision, model.manifest.kv_cache.precision)
            return Parity(tuple(engine.verify_golden(model.golden_cases, tolerance)))

        return await self._engine.call(model.name, replay, max_wait_seconds)
