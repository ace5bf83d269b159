"""Proves models: replays of golden cases at the start, on demand, and after steps have failed.

One replay of a model at a time, shared by all calls for it, cancelled when none is left. Event loop only. Knows neither
gRPC nor what a replay computes.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from service.engine.proof import calibration
from service.errors import NotServing, RequestError
from service.repository.entry import ModelEntry, Models, Replay
from service.repository.models import ModelState, Parity, ServedModel
from service.repository.startup import failed_cases, prove
from service.runtime.async_engine import AsyncEngine

_LOGGER = logging.getLogger(__name__)

# A model in use is verified between requests, but new requests wait no longer than this for it.
_MAX_WAIT_SECONDS = 10.0
# Between replays that failed themselves, of a model whose steps failed: twice as long each time.
_MIN_PAUSE_SECONDS = 1.0
_MAX_PAUSE_SECONDS = 60.0


class Verifier:
    """Replays golden cases on the provider in use, and sets the states of models by the outcome."""

    def __init__(self, engine: AsyncEngine, models: Models) -> None:
        self._engine = engine
        self._models = models
        self._mending: set[asyncio.Task[None]] = set()

    async def verify(self, name: str) -> Parity:
        """The outcome of the replay in progress, or of a new one.

        Raises:
            RequestError: when the replay itself failed, or the model was in use for too long to begin.
        """
        entry = self._models.find(name)
        replay = entry.replay
        # One that is done may be outdated, though the calls that waited for it may not have been woken yet.
        if replay is None or replay.task.done():
            replay = entry.replay = Replay(asyncio.create_task(self._replay(name)))
        replay.num_waiting += 1
        try:
            return await asyncio.shield(replay.task)
        finally:
            replay.num_waiting -= 1
            if replay.num_waiting == 0:
                replay.task.cancel()
            # Later calls want a new one, even if this one is still being cancelled.
            if (replay.num_waiting == 0 or replay.task.done()) and entry.replay is replay:
                entry.replay = None

    async def verify_all(self, *, calibrate: bool) -> None:
        """Proves every model at the start; with `calibrate`, learns their step times before that."""
        if calibrate:
            for entry in [self._models.find(name) for name in self._models.names]:
                await self._calibrate(entry)
        for model in [self._models.resolve(name) for name in self._models.names]:
            if not (self._models.is_served(model) and self._models.state(model.name) is ModelState.STARTING):
                continue  # a client had it proven or replaced meanwhile; one that serves may be too busy for a replay
            try:
                await self.verify(model.name)
            except RequestError as error:
                _LOGGER.error("%s does not serve, its golden cases could not be replayed: %s", model.name, error)
                self._models.verified(model, Parity(()))

    def failing(self, name: str) -> None:
        """Takes a model whose steps fail one after the other out of service until its golden cases pass again."""
        if not self._models.failing(name):
            return  # it has failed already, or drains
        _LOGGER.error("%s does not serve, its steps fail one after the other", name)
        task = asyncio.get_running_loop().create_task(self._mend(self._models.resolve(name)))
        self._mending.add(task)
        task.add_done_callback(self._mending.discard)

    def close(self) -> None:
        """Ends the replays of failed models."""
        for task in self._mending:
            task.cancel()

    async def _calibrate(self, entry: ModelEntry) -> None:
        name = entry.model.name
        try:
            num_steps = await self._engine.calibrate(entry.queue, calibration.MAX_SECONDS, calibration.MAX_SECONDS)
        except RequestError as error:
            _LOGGER.error("%s begins without knowing its step times: %s", name, error)
        else:
            _LOGGER.info("%s: step times learned from %d steps", name, num_steps)

    async def _replay(self, name: str) -> Parity:
        """Replays until the outcome is that of the model that is served: it may be reloaded meanwhile."""
        while True:
            entry = self._models.find(name)
            model, is_serving = entry.model, entry.is_serving
            try:
                # A model that takes no requests keeps none waiting.
                max_wait_seconds = _MAX_WAIT_SECONDS if is_serving else None
                parity = await self._engine.call(entry.queue.engine, partial(prove, model), max_wait_seconds)
            except NotServing:
                if self._models.is_served(model) and entry.is_serving == is_serving:
                    raise
                continue
            if self._models.is_served(model):
                break
        self._models.verified(model, parity)
        if not parity.passed:
            _LOGGER.error("%s does not serve, golden cases failed: %s", name, failed_cases(parity))
        return parity

    async def _mend(self, model: ServedModel) -> None:
        """Replays a failed model's golden cases until there is an outcome, good or bad, or the model is replaced.

        A replay that fails itself proves nothing: memory may have been short for a moment.
        """
        pause = _MIN_PAUSE_SECONDS
        while self._models.is_served(model) and self._models.state(model.name) is ModelState.FAILED:
            try:
                await self.verify(model.name)
            except RequestError as error:
                why = "%s does not serve, its golden cases could not be replayed and are again in %g s: %s"
                _LOGGER.error(why, model.name, pause, error)
            except Exception:
                why = "%s does not serve, replaying its golden cases failed unexpectedly, they are again in %g s"
                _LOGGER.exception(why, model.name, pause)
            else:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
