"""The composition root: puts the server together, starts it, watches it, stops it, in the right order.

    start   load ─> listen (NOT_SERVING) ─> replay the golden cases on the engine thread ─> SERVING
    stop    NOT_SERVING ─> refuse new requests ─> let those in flight end ─> close ─> end the engine thread

If the engine thread dies, every stream is told, health flips and the process exits with 1: it never limps.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, start_http_server

from model.golden import fp32_tolerance
from service.async_engine import AsyncEngine
from service.config import ServeConfig
from service.engine_thread import StepEngine
from service.errors import EngineFailed, StartupError
from service.generator import Generator
from service.loading import build_engines, load_models
from service.metrics import Metrics
from service.models import Models, ModelState, Parity, ServedModel
from service.transport.generation import GenerationServicer
from service.transport.interceptors import CallInterceptor
from service.transport.model_service import ModelServicer
from service.transport.server import EVERYTHING, GENERATION_SERVICE, MODEL_SERVICE, SERVICES, GrpcServer

_LOGGER = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TOKENIZER_THREADS = 2
# For the last statuses to reach their clients, and for cancelled handlers to clean up.
_CLOSING_SECONDS = 1.0
# For a step in progress to end.
_ENGINE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server listens. `metrics_port` is None where metrics are off."""

    host: str
    port: int
    metrics_port: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    """What a person wants to know once the golden cases are replayed."""

    endpoint: Endpoint
    states: Mapping[str, ModelState]
    parity: Mapping[str, Parity]


def serve(config: ServeConfig, announce: Callable[[Ready], None]) -> int:
    """Serves every model under `config.models` until a signal or a failure; the process's exit status.

    Raises:
        StartupError: listing every problem that keeps the server from starting.
    """
    models = load_models(config.models)
    engines = build_engines(config.models, models, config)
    return asyncio.run(run(App(config, models, engines), announce))


async def run(app: App, announce: Callable[[Ready], None]) -> int:
    """Runs an app until a signal or a failure; the process's exit status."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        async with app.listening() as endpoint:
            states = await app.verify_all()
            parity = {name: found for name in states if (found := app.models.parity(name))}
            announce(Ready(endpoint, states, parity))
            error = await app.wait(stop)
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
    return 0 if error is None else 1


class App:
    """One server over loaded models.

    Args:
        config: what the operator wants.
        models: what is served.
        engines: an engine for each model, by name; the engine thread owns them once the app runs.
        registry: where metrics go.
    """

    def __init__(
        self,
        config: ServeConfig,
        models: Collection[ServedModel],
        engines: Mapping[str, StepEngine],
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._config = config
        self._registry = registry or CollectorRegistry()
        self._metrics = Metrics(self._registry)
        self._models = Models(models)
        self._engine = AsyncEngine(
            engines, self._metrics, max_batch_size=config.max_batch_size, max_queue_size=config.max_queue_size
        )
        self._executor = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._calls = CallInterceptor(SERVICES, self._metrics.handled)

    @property
    def models(self) -> Models:
        """The served models."""
        return self._models

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Endpoint]:
        """Listens for the length of the block; nothing is served before `verify_all`. Leaving drains and stops."""
        with _metrics_server(self._config, self._registry) as metrics_port:
            self._server = self._make_server()
            port = await self._server.start(self._config.host, self._config.port)
            self._engine.start()
            try:
                yield Endpoint(self._config.host, port, metrics_port)
            finally:
                await self._stop()

    async def verify_all(self) -> Mapping[str, ModelState]:
        """Replays every model's golden cases and serves the models that pass; the states that follow, by name."""
        for name in self._models.names:
            try:
                await self.verify(name)
            except EngineFailed as error:
                _LOGGER.error("%s does not serve, its golden cases could not be replayed: %s", name, error)
                self._models.verified(name, Parity(()))
        await self._tell_health()
        return {name: self._models.state(name) for name in self._models.names}

    async def wait(self, stop: asyncio.Event) -> EngineFailed | None:
        """Waits until `stop` is set (None) or the engine thread died (its error)."""
        ended = asyncio.create_task(self._engine.wait_ended())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if ended.done():
            return ended.result()
        ended.cancel()
        return None

    async def verify(self, name: str) -> Parity:
        """Replays a model's golden cases on the provider in use; a model that fails them does not answer.

        Raises:
            RequestError: when the replay itself failed.
        """
        cases = self._models.resolve(name).golden_cases
        tolerance = fp32_tolerance(cases)
        parity = Parity(tuple(await self._engine.call(name, lambda engine: engine.verify_golden(cases, tolerance))))
        self._models.verified(name, parity)
        self._metrics.for_model(name).parity_checked(parity.max_abs_error)
        if not parity.passed:
            failed = ", ".join(case.name for case in parity.cases if not case.passed)
            _LOGGER.error("%s does not serve, golden cases failed: %s", name, failed or "there are none")
        await self._tell_health()
        return parity

    def _make_server(self) -> GrpcServer:
        """A gRPC server belongs to the event loop that runs when it is made, so it cannot be made any earlier."""
        generator = Generator(self._engine, self._models, self._executor)
        return GrpcServer(
            GenerationServicer(generator, self._models, self._config.limits, self._executor),
            ModelServicer(self._models, self.verify, self._config),
            [self._calls],
            self._config.max_message_bytes,
        )

    async def _tell_health(self) -> None:
        serving = {name: self._models.state(name) is ModelState.SERVING for name in self._models.names}
        for name, is_serving in serving.items():
            await self._server.set_health(name, is_serving=is_serving)
        for name in (EVERYTHING, GENERATION_SERVICE):
            await self._server.set_health(name, is_serving=all(serving.values()))
        await self._server.set_health(MODEL_SERVICE, is_serving=True)

    async def _stop(self) -> None:
        self._models.drain()
        self._engine.drain()
        await self._server.withdraw()
        try:
            await asyncio.wait_for(self._calls.wait_idle(), self._config.drain_grace_seconds)
        except TimeoutError:
            _LOGGER.warning("%d requests outlived the grace and are cancelled", self._engine.num_streams)
        await self._server.stop(_CLOSING_SECONDS)
        # Cancelled handlers clean up after `stop` has returned; the engine thread may be in the middle of a long step.
        for part, seconds in ((self._calls.wait_idle(), _CLOSING_SECONDS), (self._engine.stop(), _ENGINE_SECONDS)):
            try:
                await asyncio.wait_for(part, seconds)
            except TimeoutError:
                _LOGGER.error("not everything ended in time")
        self._executor.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _metrics_server(config: ServeConfig, registry: CollectorRegistry) -> Iterator[int | None]:
    """Serves metrics over HTTP for the length of the block, on a thread of its own; yields the port."""
    if not config.metrics:
        yield None
        return
    try:
        server, thread = start_http_server(config.metrics_port, config.host, registry)
    except OSError as error:
        address = f"{config.host}:{config.metrics_port}"
        raise StartupError([f"cannot serve metrics on {address}: {error.strerror}"]) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
