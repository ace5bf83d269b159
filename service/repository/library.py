"""Changes which models are served while others answer: load, unload, reload.

    load      read and check the artifact ─> build its engine ─> replay its golden cases ─> serve it
    reload    the same beside the former engine, which then drains
    unload    refuse new requests ─> let those in flight end, for a grace ─> release the engine

A model answers only once it is proven, and a reload that fails leaves the former model as it was. A model is loaded
only if there is memory for its K/V (`service.repository.kv_pool`). A change that has begun is finished, even if its
caller is gone. Reading, building and proving run on a thread beside event loop and engine thread, for one model at a
time: ONNX Runtime makes a session without holding the interpreter's lock, so streams go on and only share the CPU. On a
GPU the engine thread does it, while streams wait: memory that another thread takes or frees corrupts a graph capture in
progress, and captures belong to a thread.

A large artifact passes a load check in a child process first (`service.repository.load_check`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from service.config import ServeConfig
from service.engine.engine import Engine, LastRun
from service.engine.kv.budget import MemoryNeeds
from service.engine.proof import calibration
from service.engine.types import Device, StepStats
from service.errors import ModelUnfit, RequestError, StartupError, UnknownModel
from service.process import garbage
from service.repository.devices import artifact_folder
from service.repository.entry import ModelEntry, Models
from service.repository.kv_pool import KVPool, Part
from service.repository.load_check import MAX_SECONDS, MIN_BYTES, LoadCheck
from service.repository.loading import check_room, load_model, manifest_of, model_names, needs_of
from service.repository.models import ModelState, Parity, ServedModel
from service.repository.startup import prepare
from service.runtime.async_engine import AsyncEngine

_LOGGER = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_HEARTBEAT_SECONDS = 0.01
_LONG_STALL_SECONDS = 1.0
# The longest that reading a model may take, a load check included: a disk that does not answer must not block the
# changes that wait.
_MAX_READ_SECONDS = 3 * MAX_SECONDS


class Library:
    """Loads models from `config.models` into the table, replaces and removes them; `pool` deals out the K/V memory."""

    def __init__(
        self, config: ServeConfig, engine: AsyncEngine, models: Models, last_run: LastRun, pool: KVPool
    ) -> None:
        self._config = config
        self._engine = engine
        self._models = models
        self._last_run = last_run
        self._pool = pool
        self._turn = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._load_check = LoadCheck()

    async def load(self, name: str) -> None:
        """Serves a model of the folder. One that is served already stays as it is, unless it fails.

        Raises:
            UnknownModel: when the folder has none of this name.
            ModelUnfit: listing all that is wrong with it.
        """

        async def change() -> None:
            if name not in self._models.names or self._models.state(name) is ModelState.FAILED:
                await self._bring(name)

        await self._in_turn(change)

    async def reload(self, name: str) -> None:
        """Serves what a model's folder now holds, in place of what it held; no request is lost.

        Raises:
            UnknownModel: when it is not served, or not in the folder any more.
            ModelUnfit: listing all that is wrong with it; the model is served as before.
        """

        async def change() -> None:
            await self._bring(self._models.resolve(name).name)

        await self._in_turn(change)

    async def unload(self, name: str) -> None:
        """Serves a model no more. Its requests in flight have the drain's grace to end.

        Raises:
            UnknownModel: when it is not served.
        """

        async def change() -> None:
            entry = self._models.find(name)
            model = entry.model.name
            self._models.withdraw(model)
            released = await self._engine.remove(entry.queue, self._config.drain_grace_seconds)
            self._give_back_when(released, entry.part)
            self._models.remove(model)
            del entry
            # A client that sees it unloaded may want its memory next.
            await asyncio.wait([released])
            # Sessions and buffers are large: reference cycles must not keep them until a later collection.
            if self._config.device is Device.CUDA:
                await self._engine.do(garbage.collect)
            else:
                garbage.collect()
            _LOGGER.info("%s is served no more", model)

        await self._in_turn(change)

    async def names(self) -> tuple[str, ...]:
        """The models of the folder, served or not; none while it cannot be read."""
        try:
            return await asyncio.wrap_future(_in_daemon(lambda: model_names(self._config.models)))
        except StartupError:
            return ()

    def kv_memory(self, model: str) -> tuple[int, int]:
        """Bytes that a served model's K/V may take, and bytes that running and preempted requests hold.

        Cached K/V are evicted when requests need the memory, so they do not count.
        """
        entry = self._models.find(model)
        kv_bytes = 0 if entry.part is None else entry.part.kv_bytes
        return kv_bytes, round(entry.queue.kv_usage_ratio * kv_bytes)

    def close(self) -> None:
        """Cancels the change in progress, without waiting for a thread that works on it."""
        for task in self._changes:
            task.cancel()
        self._load_check.close()

    async def _in_turn(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Makes a change after those before it. Cancelling takes it back only until it begins."""
        await self._turn.acquire()
        task = asyncio.create_task(change())
        self._changes.add(task)
        task.add_done_callback(self._changed)
        await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[None]) -> None:
        self._turn.release()
        self._changes.discard(task)
        # Retrieved even if no caller waits, or the loop would log it.
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOGGER.info("nothing is changed: %s", error)

    async def _bring(self, name: str) -> None:
        began = time.monotonic()
        needs = await _in_time(name, lambda: self._read_needs(name))
        former = self._models.entries.get(name)
        promised = self._pool.promised
        with _unfit_without_paths(self._config.models, name):
            part = self._pool.take(name, needs)
        # Its K/V and those of the engine that it replaces share one part.
        more_bytes = self._pool.promised - promised
        try:
            async with _stall() as stall:
                model = await _in_time(name, lambda: self._read_model(name, needs, part, more_bytes, promised))
                making = time.monotonic()
                engine, parity, steps = await self._where_engines_are_made(lambda: self._prepare(model, part.kv_bytes))
                made = time.monotonic()
        except BaseException:
            self._pool.give_back(part)
            raise
        self._serve(former, model, engine, parity, steps, part)
        stood_still = made - making if self._config.device is Device.CUDA else stall()
        _LOGGER.log(
            logging.WARNING if stood_still > _LONG_STALL_SECONDS else logging.INFO,
            "%s is served after %.1f s, in which streams stood still for %.3f s at most",
            name,
            time.monotonic() - began,
            stood_still,
        )

    def _serve(
        self,
        former: ModelEntry | None,
        model: ServedModel,
        engine: Engine,
        parity: Parity,
        steps: Sequence[StepStats],
        part: Part,
    ) -> None:
        """Inserts a model, or has it take the place of another of its name."""
        costs = model.cost_model(engine)
        if former is None:
            queue = self._engine.open(model.name, engine, costs, steps)
            self._models.insert(ModelEntry(model, queue, part, ModelState.SERVING, parity))
            return
        released = self._engine.replace(former.queue, engine, costs, steps)
        self._give_back_when(released, former.part)
        if self._config.device is not Device.CUDA:
            # Garbage collection may have set the former engine aside, with cycles that hold it.
            released.add_done_callback(lambda _: garbage.collect())
        former.part = part
        self._models.reloaded(model, parity)

    def _give_back_when(self, released: asyncio.Future[None], part: Part | None) -> None:
        """Gives a part back once the engine that holds it is released."""
        if part is not None:
            released.add_done_callback(lambda _: self._pool.give_back(part))

    def _read_needs(self, name: str) -> MemoryNeeds:
        """What a model of the folder will take, by its manifest and the sizes of its files. On a thread of its own."""
        with _unfit_without_paths(self._config.models, name):
            served = model_names(self._config.models)
            # Compared with what is there, not joined: a name is never a path.
            if name not in served:
                raise UnknownModel(name, served)
            return needs_of(manifest_of(self._config.models / name, self._config.device), self._config)

    def _read_model(self, name: str, needs: MemoryNeeds, part: Part, more_bytes: int, promised: int) -> ServedModel:
        """All of a model but its engine, where there is memory for that. On a thread of its own.

        `more_bytes` are those that the model takes beyond the bytes that others were `promised`.
        """
        with _unfit_without_paths(self._config.models, name):
            manifest = manifest_of(self._config.models / name, self._config.device)
            check_room(manifest, self._config, more_bytes, promised)
            folder = artifact_folder(self._config.models / name, self._config.device)
            is_large = sum(path.stat().st_size for path in folder.iterdir()) >= MIN_BYTES
            # A device has no room for a model twice, nor for the K/V of another try.
            if is_large and self._config.device is not Device.CUDA:
                self._load_check.run(self._config, name, part.kv_bytes)
                # That may have taken minutes, in which requests took memory.
                check_room(manifest, self._config, more_bytes, promised)
            model = load_model(self._config.models / name, self._config.device)
        if needs_of(model.manifest, self._config) != needs:
            raise ModelUnfit(name, ["its manifest has changed while it was loaded"])
        return model

    def _prepare(self, model: ServedModel, kv_bytes: int) -> tuple[Engine, Parity, Sequence[StepStats]]:
        """A proven engine, its proof, and the steps that it was calibrated by."""
        with _unfit_without_paths(self._config.models, model.name):
            prepared = prepare(self._config, model, kv_bytes, self._last_run)
            return prepared.engine, prepared.parity, self._calibrate(model.name, prepared.engine)

    async def _where_engines_are_made(self, function: Callable[[], _Result]) -> _Result:
        """Runs `function` beside the streams, or for a GPU on the engine thread."""
        if self._config.device is Device.CUDA:
            return await self._engine.do(function)
        return await asyncio.wrap_future(_in_daemon(function))

    def _calibrate(self, name: str, engine: Engine) -> Sequence[StepStats]:
        """Calibration steps, as long as no stream is open: beside streams they would take longer, and delay them."""
        if not self._config.calibrate:
            return ()
        steps = engine.calibrate(calibration.MAX_SECONDS, lambda: not self._engine.num_streams)
        _LOGGER.info("%s: step times learned from %d steps, others from its requests", name, len(steps))
        return steps


def _in_daemon(function: Callable[[], _Result]) -> Future[_Result]:
    """Runs it on a thread that a stopping process does not wait for: making a session cannot be interrupted."""
    future: Future[_Result] = Future()
    # From now on it cannot be cancelled, and its result has a place.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # whatever it is, the caller that waits gets it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="library", daemon=True).start()
    return future


async def _in_time(name: str, read: Callable[[], _Result]) -> _Result:
    """Reads on a thread of its own, which is abandoned once it has taken too long.

    Raises:
        ModelUnfit: when it has.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(_in_daemon(read)), _MAX_READ_SECONDS)
    except TimeoutError as error:
        raise ModelUnfit(name, [f"it could not be read in {_MAX_READ_SECONDS:g} s"]) from error


@contextmanager
def _unfit_without_paths(folder: Path, name: str) -> Iterator[None]:
    """Turns errors of an artifact into ModelUnfit without the server's paths, for a client."""
    try:
        yield
    except StartupError as error:
        problems = [
            problem.replace(str(folder / name), name).replace(str(folder), "models") for problem in error.problems
        ]
        raise ModelUnfit(name, problems) from error
    except RequestError:
        raise
    except OSError as error:
        raise ModelUnfit(name, [error.strerror or "it cannot be read"]) from error


@asynccontextmanager
async def _stall() -> AsyncIterator[Callable[[], float]]:
    """Measures the longest time that the event loop stood still during the block."""
    longest, last = 0.0, time.monotonic()

    def look() -> None:
        nonlocal longest, last
        now = time.monotonic()
        longest, last = max(longest, now - last - _HEARTBEAT_SECONDS), now

    async def beat() -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            look()

    beating = asyncio.create_task(beat())
    try:
        yield lambda: longest
    finally:
        # A stall at the end of the block: `beat` has not run since.
        look()
        beating.cancel()
