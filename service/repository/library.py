"""Which models are served, changed while others answer: load, unload, reload.

    load      read and check the artifact ─> build its engine ─> replay its golden cases ─> serve it
    reload    the same beside the old engine, which ends what it has begun and then goes
    unload    refuse new requests ─> let those in flight end, for a grace ─> let the engine go

A model answers only once it is proven, and a reload that fails leaves the old one where it was. It is loaded only if
there is memory for its keys and values (`service.repository.kv_pool`). A change that has begun is brought to its end,
whether or not who asked for it still waits. What takes time happens on a thread beside the event loop and the engine
thread, for one model at a time: ONNX Runtime makes a session without holding the interpreter's lock, so that streams go
on and only share the processor with it. What touches a GPU is done by the engine thread, and streams wait: memory that
another thread takes or gives back spoils what is being recorded there, and what is recorded is the thread's own.

A large artifact is tried out in a process of its own first, behind all others in line for the processor: one that is
unfit, or that ONNX Runtime does not survive, is found there, and one that is fit is in the page cache by then.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from model.spec.golden import tolerance_of
from service.config import ServeConfig
from service.engine.engine import Engine, LastRun
from service.engine.kv.budget import MemoryNeeds
from service.engine.proof import calibration
from service.engine.types import Device, StepStats
from service.errors import ModelUnfit, RequestError, StartupError, UnknownModel
from service.process import garbage
from service.repository.devices import artifact_folder
from service.repository.kv_pool import KVPool, Part
from service.repository.loading import build_engines, check_room, load_model, manifest_of, model_names, needs_of
from service.repository.models import Models, ModelState, Parity, ServedModel
from service.runtime.async_engine import AsyncEngine

_LOGGER = logging.getLogger(__name__)

_Result = TypeVar("_Result")

TRIAL_BYTES = 64 << 20
"""From how large an artifact on it is tried out first."""

_HEARTBEAT_SECONDS = 0.01
_LONG_STALL_SECONDS = 1.0
_MAX_TRIAL_SECONDS = 600.0
# The longest that a model may take to be read, a load check included. A disk that does not answer must not keep the
# turn of those that come after it.
_MAX_READ_SECONDS = 3 * _MAX_TRIAL_SECONDS


class Library:
    """Changes what is served.

    Args:
        config: the operator's; `models` is the folder that models come from.
        engine: where they run.
        models: what is known of them.
        last_run: shared by the engines of the thread.
        pool: the memory of keys and values, with the parts of the models that are served.
        state_changed: called after each change.
    """

    def __init__(
        self,
        config: ServeConfig,
        engine: AsyncEngine,
        models: Models,
        last_run: LastRun,
        pool: KVPool,
        state_changed: Callable[[], None],
    ) -> None:
        self._config = config
        self._engine = engine
        self._models = models
        self._last_run = last_run
        self._pool = pool
        self._state_changed = state_changed
        self._turn = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._trial: subprocess.Popen[str] | None = None
        self._is_closed = False

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
            model = self._models.resolve(name).name
            self._models.withdraw(model)
            self._state_changed()
            gone = await self._engine.remove(model, self._config.drain_grace_seconds)
            self._give_back_when(gone, self._pool.part_of(model))
            self._models.remove(model)
            self._state_changed()
            # A client that sees it unloaded may want its memory next.
            await asyncio.wait([gone])
            # Sessions and buffers are large: whatever cycle holds them should not do so until some day.
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
        """What a served model's keys and values may take, and what those of running and preempted requests do; bytes.

        What is kept for later requests gives way, so that it does not count.
        """
        part = self._pool.part_of(model)
        kv_bytes = 0 if part is None else part.kv_bytes
        return kv_bytes, round(self._engine.kv_usage_ratio(model) * kv_bytes)

    def close(self) -> None:
        """Gives up what is being changed, without waiting for a thread that is at work on it."""
        self._is_closed = True
        for task in self._changes:
            task.cancel()
        if self._trial is not None:
            self._trial.kill()

    async def _in_turn(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Makes a change when those before it are over. Cancelling it takes it back until it begins, and no later."""
        await self._turn.acquire()
        task = asyncio.create_task(change())
        self._changes.add(task)
        task.add_done_callback(self._changed)
        await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[None]) -> None:
        self._turn.release()
        self._changes.discard(task)
        # Asked for even if no caller waits for it any more, or the loop would complain.
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOGGER.info("nothing is changed: %s", error)

    async def _bring(self, name: str) -> None:
        began = time.monotonic()
        needs = await _in_time(name, lambda: self._read_needs(name))
        with _unfit_without_paths(self._config.models, name):
            former = self._pool.part_of(name) if name in self._models.names else None
            part = self._pool.take(name, needs)
        # Its K/V and those of the engine that it replaces share one part.
        more_kv_bytes = max(0, part.kv_bytes - (0 if former is None else former.kv_bytes))
        try:
            async with _stall() as stall:
                model = await _in_time(name, lambda: self._read_model(name, needs, part.kv_bytes, more_kv_bytes))
                making = time.monotonic()
                engine, parity, steps = await self._where_engines_are_made(lambda: self._prepare(model, part.kv_bytes))
                made = time.monotonic()
        except BaseException:
            self._pool.give_back(part)
            raise
        gone = self._engine.install(name, engine, model.cost_model(engine), steps)
        self._give_back_when(gone, former)
        if former is not None and self._config.device is not Device.CUDA:
            # The old engine may have been set aside, with whatever cycle holds it.
            gone.add_done_callback(lambda _: garbage.collect())
        self._models.serve(model, parity)
        self._state_changed()
        stood_still = made - making if self._config.device is Device.CUDA else stall()
        _LOGGER.log(
            logging.WARNING if stood_still > _LONG_STALL_SECONDS else logging.INFO,
            "%s is served after %.1f s, in which streams stood still for %.3f s at most",
            name,
            time.monotonic() - began,
            stood_still,
        )

    def _give_back_when(self, gone: asyncio.Future[None], part: Part | None) -> None:
        """Has a part given back once the engine that holds it is gone."""
        if part is not None:
            gone.add_done_callback(lambda _: self._pool.give_back(part))

    def _read_needs(self, name: str) -> MemoryNeeds:
        """What a model of the folder will take, by its manifest and the sizes of its files. On a thread of its own."""
        with _unfit_without_paths(self._config.models, name):
            served = model_names(self._config.models)
            # Compared with what is there, not joined: a name is never a path.
            if name not in served:
                raise UnknownModel(name, served)
            return needs_of(manifest_of(self._config.models / name, self._config.device), self._config)

    def _read_model(self, name: str, needs: MemoryNeeds, kv_memory: int, more_kv_bytes: int) -> ServedModel:
        """All of a model but its engine, where there is memory for that. On a thread of its own."""
        with _unfit_without_paths(self._config.models, name):
            manifest = manifest_of(self._config.models / name, self._config.device)
            check_room(manifest, self._config, more_kv_bytes)
            folder = artifact_folder(self._config.models / name, self._config.device)
            is_large = sum(path.stat().st_size for path in folder.iterdir()) >= TRIAL_BYTES
            # A device has no room for a model twice, nor for the K/V of another try.
            if is_large and self._config.device is not Device.CUDA:
                self._try_out(name, kv_memory)
                # That may have taken minutes, in which requests took memory.
                check_room(manifest, self._config, more_kv_bytes)
            model = self._load(name)
        if needs_of(model.manifest, self._config) != needs:
            raise ModelUnfit(name, ["its manifest has changed while it was loaded"])
        return model

    def _prepare(self, model: ServedModel, kv_memory: int) -> tuple[Engine, Parity, Sequence[StepStats]]:
        """A proven engine, its proof, and the steps that it was calibrated by."""
        with _unfit_without_paths(self._config.models, model.name):
            kv = {model.name: kv_memory}
            built = build_engines(self._config.models, [model], self._config, self._last_run, kv, is_serving=True)
            engine = built[model.name]
            parity = prove(model, engine)
            if not parity.passed:
                failed = ", ".join(case.name for case in parity.cases if not case.passed)
                raise ModelUnfit(model.name, [f"golden cases failed: {failed or 'there are none'}"])
            return engine, parity, self._calibrate(model.name, engine)

    async def _where_engines_are_made(self, function: Callable[[], _Result]) -> _Result:
        """Runs what makes an engine, or lets go of one: beside the streams, or for a GPU on the engine thread."""
        if self._config.device is Device.CUDA:
            return await self._engine.do(function)
        return await asyncio.wrap_future(_in_daemon(function))

    def _load(self, name: str) -> ServedModel:
        return load_model(self._config.models / name, self._config.device)

    def _calibrate(self, name: str, engine: Engine) -> Sequence[StepStats]:
        """Steps to learn from, while no stream is open: beside streams they would take longer, and so would those."""
        if not self._config.calibrate:
            return ()
        steps = engine.calibrate(calibration.MAX_SECONDS, lambda: not self._engine.num_streams)
        _LOGGER.info("%s: step times learned from %d steps, others from its requests", name, len(steps))
        return steps

    def _try_out(self, name: str, kv_memory: int) -> None:
        """Loads and proves a model, with so many bytes of K/V, in a process that has nothing to lose.

        Raises:
            StartupError: with what it found.
        """
        command = [
            sys.executable,
            "-m",
            "service.repository.load_check",
            json.dumps(trial_settings(self._config, name, kv_memory)),
        ]
        with subprocess.Popen(  # noqa: S603 (ourselves)
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            self._trial = process
            if self._is_closed:
                process.kill()
            try:
                out, err = process.communicate(timeout=_MAX_TRIAL_SECONDS)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise StartupError([f"it could not be tried out in {_MAX_TRIAL_SECONDS:g} s"]) from error
            finally:
                if self._trial is process:
                    self._trial = None
        answer = _last_json(out)
        if answer is None:
            _LOGGER.error("trying out %s ended with %d: %s", name, process.returncode, err.strip()[-2000:])
            raise StartupError([f"the process that tried it out ended with {_ending(process.returncode)}"])
        if problems := answer["problems"]:
            raise StartupError(problems)
        _LOGGER.info("%s was tried out: its sessions took %.1f s to make", name, answer["session_seconds"])


def prove(model: ServedModel, engine: Engine) -> Parity:
    """How a model's golden cases go on its idle engine."""
    tolerance = tolerance_of(model.manifest.precision, model.manifest.kv_cache.precision)
    return Parity(tuple(engine.verify_golden(model.golden_cases, tolerance)))


def trial_settings(config: ServeConfig, name: str, kv_memory: int | None = None) -> dict[str, Any]:
    """What `service.repository.load_check` needs to load a model as this server would, with so many bytes of K/V."""
    return {
        "folder": str(config.models),
        "name": name,
        "max_batch_size": config.max_batch_size,
        "prefill_chunk": config.prefill_chunk,
        "device": str(config.device),
        "kv_memory": kv_memory,
        "threads": config.threads,
        "kernels": str(config.kernels),
        "look_up": config.look_up,
    }


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
    """Reads on a thread of its own, which is left to itself once it has taken too long.

    Raises:
        ModelUnfit: when it has.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(_in_daemon(read)), _MAX_READ_SECONDS)
    except TimeoutError as error:
        raise ModelUnfit(name, [f"it could not be read in {_MAX_READ_SECONDS:g} s"]) from error


def _ending(returncode: int) -> str:
    """A process's exit status, or the name of the signal that ended it."""
    if returncode < 0 and -returncode in {*signal.Signals}:
        return signal.Signals(-returncode).name
    return str(returncode)


def _last_json(text: str) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = json.loads(text.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return answer


@contextmanager
def _unfit_without_paths(folder: Path, name: str) -> Iterator[None]:
    """Whatever is wrong with an artifact becomes ModelUnfit, for a client that need not know where things lie."""
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
    """How long the event loop stood still at most, during the block."""
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
        # What ended with the block would have its turn only now.
        look()
        beating.cancel()
