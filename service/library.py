"""Which models are served, changed while others answer: load, unload, reload.

    load      read and check the artefact ─> build its engine ─> replay its golden cases ─> serve it
    reload    the same beside the old engine, which ends what it has begun and then goes
    unload    refuse new requests ─> let those in flight end, for a grace ─> let the engine go

A model answers only once it is proven, and a reload that fails leaves the old one where it was. It is loaded only if
there is memory for its keys and values (`service.kv_pool`). All of this happens on one thread beside the event loop and
the engine thread, one model at a time; but ONNX Runtime holds the interpreter's lock while it makes a session, so that
every stream halts for as long. A large artefact is therefore tried out in a process of its own first: what is unfit is
found there, and what is fit is in the page cache by then.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from model.artifact import ArtifactError, read_manifest
from model.golden import tolerance_of
from service.async_engine import AsyncEngine
from service.config import ServeConfig
from service.costing import CostModel
from service.engine import calibration
from service.engine.engine import Engine, LastRun
from service.engine.kv_memory import MemoryNeeds
from service.engine.types import StepStats
from service.errors import ModelUnfit, RequestError, StartupError, UnknownModel
from service.kv_pool import KVPool, Part
from service.loading import build_engines, load_model, model_names, needs_of
from service.metrics import Metrics
from service.models import Models, Parity, ServedModel

_LOGGER = logging.getLogger(__name__)

TRIAL_BYTES = 64 << 20
"""From how large an artefact on it is tried out first."""

_HEARTBEAT_SECONDS = 0.01
_LONG_STALL_SECONDS = 1.0
_MAX_TRIAL_SECONDS = 600.0


class Library:
    """Changes what is served.

    Args:
        config: the operator's; `models` is the folder that models come from.
        engine: where they run.
        models: what is known of them.
        metrics: where their largest error is shown.
        last_run: shared by the engines of the thread.
        pool: the memory of keys and values, with the parts of the models that are served.
        state_changed: called after each change.
    """

    def __init__(
        self,
        config: ServeConfig,
        engine: AsyncEngine,
        models: Models,
        metrics: Metrics,
        last_run: LastRun,
        pool: KVPool,
        state_changed: Callable[[], Awaitable[None]],
    ) -> None:
        self._config = config
        self._engine = engine
        self._models = models
        self._metrics = metrics
        self._last_run = last_run
        self._pool = pool
        self._state_changed = state_changed
        self._turn = asyncio.Lock()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="library")

    async def load(self, name: str) -> None:
        """Serves a model of the folder. One that is served already stays as it is.

        Raises:
            UnknownModel: when the folder has none of this name.
            ModelUnfit: listing all that is wrong with it.
        """
        async with self._turn:
            if name not in self._models.names:
                await self._bring(name)

    async def reload(self, name: str) -> None:
        """Serves what a model's folder now holds, in place of what it held; no request is lost.

        Raises:
            UnknownModel: when it is not served, or not in the folder any more.
            ModelUnfit: listing all that is wrong with it; the model is served as before.
        """
        async with self._turn:
            self._models.resolve(name)
            await self._bring(name)

    async def unload(self, name: str) -> None:
        """Serves a model no more. Its requests in flight have the drain's grace to end.

        Raises:
            UnknownModel: when it is not served.
        """
        async with self._turn:
            model = self._models.resolve(name).name
            self._models.withdraw(model)
            await self._state_changed()
            gone = await self._engine.remove(model, self._config.drain_grace_seconds)
            self._give_back_when(gone, self._pool.part_of(model))
            self._models.remove(model)
            await self._state_changed()
            # Whoever hears that it is unloaded may want its memory next.
            await asyncio.wait([gone])
            gc.collect()  # sessions and buffers are large: whatever cycle holds them should not do so until some day
            _LOGGER.info("%s is served no more", model)

    async def names(self) -> tuple[str, ...]:
        """The models of the folder, served or not; none while it cannot be read."""
        try:
            return await asyncio.get_running_loop().run_in_executor(None, model_names, self._config.models)
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
        """Begins nothing new."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _bring(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        needs = await loop.run_in_executor(self._executor, self._read_needs, name)
        with _told_without_paths(self._config.models, name):
            former = self._pool.part_of(name) if name in self._models.names else None
            part = self._pool.take(name, needs)
        try:
            async with _stall() as stall:
                model, engine, parity, steps = await loop.run_in_executor(
                    self._executor, self._prepare, name, part.kv_bytes
                )
            if not parity.passed:
                failed = ", ".join(case.name for case in parity.cases if not case.passed)
                raise ModelUnfit(name, [f"golden cases failed: {failed or 'there are none'}"])
            if needs_of(model.manifest, self._config) != needs:
                raise ModelUnfit(name, ["its manifest has changed while it was loaded"])
        except BaseException:
            self._pool.give_back(part)
            raise
        gone = self._engine.install(name, engine, CostModel.of(model, engine), steps)
        self._give_back_when(gone, former)
        self._models.serve(model, parity)
        metrics = self._metrics.for_model(name)
        metrics.parity_checked(parity.max_abs_error, passed=parity.passed)
        metrics.kv_memory(part.kv_bytes)
        await self._state_changed()
        _LOGGER.log(
            logging.WARNING if stall() > _LONG_STALL_SECONDS else logging.INFO,
            "%s is served after %.1f s, in which streams stood still for %.3f s at most",
            name,
            time.monotonic() - began,
            stall(),
        )

    def _give_back_when(self, gone: asyncio.Future[None], part: Part | None) -> None:
        """Has a part given back once the engine that holds it is gone."""
        if part is not None:
            gone.add_done_callback(lambda _: self._pool.give_back(part))

    def _read_needs(self, name: str) -> MemoryNeeds:
        """What a model of the folder will take, by its manifest alone. On the library's thread."""
        with _told_without_paths(self._config.models, name):
            served = model_names(self._config.models)
            # Compared with what is there, not joined: a name is never a path.
            if name not in served:
                raise UnknownModel(name, served)
            folder = self._config.models / name
            try:
                manifest = read_manifest(folder)
            except ArtifactError:
                # Which names whatever else is wrong with it, too.
                manifest = load_model(folder, self._config.prefill_provider).manifest
            return needs_of(manifest, self._config)

    def _prepare(self, name: str, kv_memory: int) -> tuple[ServedModel, Engine, Parity, Sequence[StepStats]]:
        """Everything that takes time, and the steps that the engine was calibrated by. On the library's thread."""
        with _told_without_paths(self._config.models, name):
            folder = self._config.models / name
            if sum(path.stat().st_size for path in folder.iterdir()) >= TRIAL_BYTES:
                _try_out(self._config, name, kv_memory)
            model = load_model(folder, self._config.prefill_provider)
            kv = {name: kv_memory}
            engine = build_engines(self._config.models, [model], self._config, self._last_run, kv)[name]
            parity = prove(model, engine)
            return model, engine, parity, self._calibrate(name, engine) if parity.passed else ()

    def _calibrate(self, name: str, engine: Engine) -> Sequence[StepStats]:
        """Steps to learn from, while nobody is served: beside streams they would take longer, and so would those."""
        if not self._config.calibrate:
            return ()
        steps = engine.calibrate(calibration.MAX_SECONDS, lambda: not self._engine.num_streams)
        _LOGGER.info("%s: step times learned from %d steps, others from its requests", name, len(steps))
        return steps


def prove(model: ServedModel, engine: Engine) -> Parity:
    """How a model's golden cases go on its idle engine."""
    tolerance = tolerance_of(model.manifest.precision, model.manifest.kv_cache.precision)
    return Parity(tuple(engine.verify_golden(model.golden_cases, tolerance)))


def _try_out(config: ServeConfig, name: str, kv_memory: int) -> None:
    """Loads and proves a model, with so many bytes of K/V, in a process that has nothing to lose.

    Raises:
        StartupError: with what it found.
    """
    settings = {
        "folder": str(config.models),
        "name": name,
        "max_batch_size": config.max_batch_size,
        "prefill_chunk": config.prefill_chunk,
        "prefill_provider": str(config.prefill_provider),
        "kv_memory": kv_memory,
        "threads": config.threads,
    }
    command = [sys.executable, "-m", "service.trial", json.dumps(settings)]
    try:
        done = subprocess.run(  # noqa: S603 (ourselves)
            command, capture_output=True, text=True, check=False, timeout=_MAX_TRIAL_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise StartupError([f"it could not be tried out in {_MAX_TRIAL_SECONDS:g} s"]) from error
    answer = _last_json(done.stdout)
    if answer is None:
        _LOGGER.error("trying out %s ended with %d: %s", name, done.returncode, done.stderr.strip()[-2000:])
        raise StartupError([f"the process that tried it out ended with {done.returncode}"])
    if problems := answer["problems"]:
        raise StartupError(problems)
    _LOGGER.info("%s was tried out: its sessions took %.1f s to make", name, answer["session_seconds"])


def _last_json(text: str) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = json.loads(text.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return answer


@contextmanager
def _told_without_paths(folder: Path, name: str) -> Iterator[None]:
    """Whatever is wrong with an artefact becomes ModelUnfit, for a client that need not know where things lie."""
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
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            longest = max(longest, time.monotonic() - before - _HEARTBEAT_SECONDS)

    beating = asyncio.create_task(beat())
    try:
        yield lambda: longest
    finally:
        beating.cancel()
