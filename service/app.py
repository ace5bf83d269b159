"""The composition root: puts the server together, starts it, watches it, and stops it in the right order.

    start   load ─> listen (NOT_SERVING) ─> learn step times ─> replay the golden cases ─> SERVING
    stop    NOT_SERVING ─> refuse new requests ─> let those in flight end ─> end the engine thread ─> close

If the engine thread dies or gRPC accepts no more calls, health flips, every stream ends and the process exits with 1.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, disable_created_metrics

from service.config import Admission, Defaults, Kernels, ServeConfig, keep_tokenizers_on_their_threads
from service.engine.engine import LastRun
from service.engine.interfaces import StepEngine
from service.engine.sessions.attention import load_attention_graph
from service.errors import NotServing, OnwardError
from service.explain.explainer import Explainer
from service.generator import Generator
from service.process.descriptors import allow_descriptors
from service.process.text_pool import TextPool
from service.repository.devices import artifact_folder
from service.repository.entry import ModelEntry, Models
from service.repository.grammars import Grammars
from service.repository.kv_pool import KVPool
from service.repository.library import Library
from service.repository.loading import share_memory
from service.repository.models import ModelState, Parity, ServedModel
from service.repository.startup import start_up
from service.repository.verifier import Verifier
from service.runtime.async_engine import AsyncEngine
from service.runtime.model_queue import QueueLimits
from service.telemetry.debug import from_loop
from service.telemetry.exporting import open_tracer
from service.telemetry.setup import make_metrics, metrics_server
from service.telemetry.tracing import NoTracer, Tracer
from service.transport.admission import OpenCalls
from service.transport.generation import GenerationServicer
from service.transport.health import EVERYTHING, LIST
from service.transport.http.setup import make_http, require_http
from service.transport.interceptors import CallInterceptor
from service.transport.model_service import ModelServicer
from service.transport.oip import InferenceServicer
from service.transport.server import (
    GENERATION_SERVICE,
    INFERENCE_SERVICE,
    MODEL_SERVICE,
    SERVICES,
    GrpcServer,
    Server,
)
from service.transport.setup import is_loopback, make_access, make_credentials, transport_limits
from service.transport.wire_limits import request_limits

_LOGGER = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TOKENIZER_THREADS = 2
# Of the process, besides its connections: files, threads, scrapers.
_NUM_OTHER_DESCRIPTORS = 512
# For a step in progress to end.
_ENGINE_SECONDS = 5.0
# For the last statuses to reach their clients; then for gRPC to end what is open; then for that to clean up; then for
# the last spans to be exported.
_CLOSING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server listens. `metrics_port` and `http_port` are None where they are off."""

    host: str
    port: int
    metrics_port: int | None
    http_port: int | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The server once the golden cases are replayed, for the start-up message."""

    endpoint: Endpoint
    states: Mapping[str, ModelState]
    parity: Mapping[str, Parity]


def serve(config: ServeConfig, announce: Callable[[Ready], None]) -> int:
    """Serves every model under `config.models` until a signal or a failure; returns the process's exit status.

    Raises:
        StartupError: listing every problem that keeps the server from starting.
    """
    if not is_loopback(config.host) and (config.api_keys is None or config.tls_certificate is None):
        _LOGGER.warning(
            "%s is reached from outside: without TLS and API keys only a trusted network should", config.host
        )
    num_connections = config.max_connections * (1 if config.http_port is None else 2)
    allow_descriptors(num_connections + _NUM_OTHER_DESCRIPTORS)
    return asyncio.run(run(App.load(config), announce))


async def run(app: App, announce: Callable[[Ready], None]) -> int:
    """Runs an app until a signal or a failure; returns the exit status. A second signal ends the drain's grace."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, signalled)
    try:
        async with app.listening(hurry) as endpoint:
            if await app.start(stop):
                entries = app.models.entries
                states = {name: entry.state for name, entry in entries.items()}
                parity = {name: entry.parity for name, entry in entries.items() if entry.parity is not None}
                announce(Ready(endpoint, states, parity))
            if (error := await app.wait(stop)) is not None:
                _LOGGER.error("the server stops because it failed: %s", error)
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
    return 0 if error is None else 1


class App:
    """One server over loaded models and their engines, which the engine thread owns once the app runs.

    `pool` is the K/V memory that the engines were built with; `make_server` takes the arguments of `GrpcServer`.
    """

    def __init__(
        self,
        config: ServeConfig,
        models: Collection[ServedModel],
        engines: Mapping[str, StepEngine],
        registry: CollectorRegistry | None = None,
        last_run: LastRun | None = None,
        tracer: Tracer | None = None,
        pool: KVPool | None = None,
        make_server: Callable[..., Server] = GrpcServer,
    ) -> None:
        self._config = config
        self._server_of = make_server
        self._registry = registry or CollectorRegistry()
        self._metrics = make_metrics(config, self._registry)
        self._tracer = tracer or NoTracer()
        self._models = Models(own_defaults=config.generation_defaults is Defaults.MODEL)
        self._engine = AsyncEngine(
            self._models.entries,
            self._metrics,
            QueueLimits(
                max_batch_size=config.max_batch_size,
                max_queue_size=config.max_queue_size,
                admits_by_deadline=config.admission is Admission.DEADLINE,
                time_shares=dict(config.time_shares),
            ),
            failing=lambda name: self._verifier.failing(name),  # noqa: PLW0108 (it is made below)
            num_recorded=config.recorder_steps,
            tracer=self._tracer,
        )
        self._verifier = Verifier(self._engine, self._models)
        pool = pool or share_memory(models, config)
        for model in models:
            engine = engines[model.name]
            queue = self._engine.open(model.name, engine, model.cost_model(engine))
            self._models.insert(ModelEntry(model, queue, pool.part_of(model.name)))
        self._library = Library(config, self._engine, self._models, last_run or LastRun(), pool)
        keep_tokenizers_on_their_threads()
        self._prompts = TextPool("prompts", _TOKENIZER_THREADS)
        # A thread of its own: calls that only tokenize wait in line and delay no prompt.
        self._texts = TextPool("texts", 1)
        self._grammars = Grammars()
        self._generator = Generator(self._engine, self._models, self._prompts, self._grammars)
        self._explainer = Explainer(
            self._generator,
            self._models,
            lambda model: load_attention_graph(
                artifact_folder(config.models / model.name, config.device),
                model.manifest,
                own_kernels=config.kernels is Kernels.AUTO,
            ),
            self._prompts,
            config.limits.max_explain_tokens,
            config.max_message_bytes,
        )
        self._open_calls, access = OpenCalls(), make_access(config)
        self._calls = CallInterceptor(
            (*SERVICES, LIST),
            self._metrics.handled,
            access,
            max_message_bytes=config.max_message_bytes,
            max_stall_seconds=config.max_stall_seconds,
            tracer=self._tracer,
            check=request_limits(SERVICES, config.request_limits, self._models).check,
            open_calls=self._open_calls,
        )
        self._http = None
        if config.http_port is not None:
            self._http = make_http(
                config,
                self._generator,
                self._models,
                self._texts,
                handled=self._metrics.http_handled,
                access=access,
                tracer=self._tracer,
                open_calls=self._open_calls,
            )
        self._credentials = make_credentials(config)

    @classmethod
    def load(
        cls,
        config: ServeConfig,
        registry: CollectorRegistry | None = None,
        make_server: Callable[..., Server] = GrpcServer,
    ) -> App:
        """The app over every model below `config.models`, for `serve` and for a replica on Ray.

        Raises:
            StartupError: listing every problem that keeps the server from starting.
        """
        # Creation times would be a series for each series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        # Before the models, which take long to load: it may refuse to start.
        tracer = open_tracer(config.telemetry, config.otel_endpoint)
        if config.http_port is not None:
            require_http()
        started = start_up(config)
        return cls(
            started.config,
            started.models,
            started.engines,
            registry,
            started.last_run,
            tracer,
            started.pool,
            make_server,
        )

    @property
    def models(self) -> Models:
        """The served models."""
        return self._models

    @asynccontextmanager
    async def listening(self, hurry: asyncio.Event | None = None) -> AsyncIterator[Endpoint]:
        """Listens for the length of the block; nothing is served before `verify_all`. Leaving drains and stops.

        Setting `hurry` ends the grace of requests in flight.
        """
        take = from_loop(asyncio.get_running_loop(), self._engine.flight_log)
        with metrics_server(self._config, self._registry, take) as metrics_port:
            self._server = self._make_server()
            port = await self._server.start(self._config.host, self._config.port)
            for name in self._models.names:
                self._server.set_health(name, is_serving=False)
            http_port = await self._open_http()
            self._models.watch(self._show_health)
            self._engine.start()
            try:
                yield Endpoint(self._config.host, port, metrics_port, http_port)
            finally:
                await self._stop(hurry or asyncio.Event())

    async def start(self, stop: asyncio.Event) -> bool:
        """`verify_all`, cancelled when `stop` is set or the engine thread dies; whether it was done."""
        verifying = asyncio.create_task(self.verify_all())
        waiting = asyncio.create_task(self.wait(stop))
        await asyncio.wait((verifying, waiting), return_when=asyncio.FIRST_COMPLETED)
        is_done = verifying.done() and not waiting.done()
        for task in (verifying, waiting):
            task.cancel()
        # Raises what `verify_all` raised; cancellations are no `Exception`.
        for outcome in await asyncio.gather(verifying, waiting, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        return is_done

    async def verify_all(self) -> None:
        """Replays every model's golden cases and serves the models that pass; before that, learns their step times."""
        await self._verifier.verify_all(calibrate=self._config.calibrate)

    async def wait(self, stop: asyncio.Event) -> OnwardError | None:
        """Waits until `stop` is set (None), or the engine thread or what accepts calls has ended (the error)."""
        ended = asyncio.create_task(self._engine.wait_ended())
        closed = asyncio.create_task(self._server.wait_ended())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((ended, closed, stopped), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            return NotServing("no call is accepted any more") if closed.done() else None
        finally:
            for task in (ended, closed, stopped):
                task.cancel()

    async def _open_http(self) -> int | None:
        if self._http is None or self._config.http_port is None:
            return None
        try:
            return await self._http.start(self._config.host, self._config.http_port)
        except OnwardError:
            await self._server.stop(0)
            raise

    def _make_server(self) -> Server:
        """A gRPC server belongs to the event loop that runs when it is made, so it cannot be made any earlier."""
        config, generator, limits = self._config, self._generator, self._config.request_limits
        return self._server_of(
            GenerationServicer(generator, self._explainer, self._models, limits, self._texts),
            ModelServicer(self._models, self._verifier.verify, self._library, config),
            InferenceServicer(generator, self._models, self._library, limits, config.max_message_bytes),
            [self._calls],
            transport_limits(config),
            credentials=self._credentials,
            has_reflection=config.reflection,
        )

    def _show_health(self, changed: str) -> None:
        """Sets the health of a model that has changed or was removed, and of the services."""
        entries = self._models.entries
        self._server.set_health(changed, is_serving=changed in entries and entries[changed].is_serving)
        for name in (EVERYTHING, GENERATION_SERVICE, INFERENCE_SERVICE):
            self._server.set_health(name, is_serving=all(entry.is_serving for entry in entries.values()))
        self._server.set_health(MODEL_SERVICE, is_serving=True)
        self._explainer.models_changed()

    async def _stop(self, hurry: asyncio.Event) -> None:
        self._models.drain()
        self._engine.drain()
        self._server.withdraw()
        if self._http is not None:
            self._http.withdraw()
        await self._drain(hurry)
        # Before the gRPC server: an open stream ends with the status of a server that stops, and is not just cut off.
        await _within(_ENGINE_SECONDS, self._engine.stop, "the engine did not stop")
        await _within(_CLOSING_SECONDS, self._open_calls.wait_idle, "calls did not end with the engine")
        await _within(2 * _CLOSING_SECONDS, partial(self._server.stop, _CLOSING_SECONDS), "gRPC did not stop")
        if self._http is not None:
            await _within(2 * _CLOSING_SECONDS, partial(self._http.stop, _CLOSING_SECONDS), "HTTP did not stop")
        # Cancelled handlers clean up after `stop` has returned.
        await _within(_CLOSING_SECONDS, self._open_calls.wait_idle, "cancelled calls did not end")
        self._verifier.close()
        self._library.close()
        await self._tracer.close(_CLOSING_SECONDS)
        for pool in (self._prompts, self._texts):
            pool.close()
        self._grammars.close()
        self._explainer.close()

    async def _drain(self, hurry: asyncio.Event) -> None:
        """Gives calls in flight the grace to end, and balancers the pause to notice; less if `hurry` is set."""
        idle = asyncio.create_task(self._open_calls.wait_idle())
        hurried = asyncio.create_task(hurry.wait())
        pause = asyncio.create_task(asyncio.sleep(self._config.drain_pause_seconds))
        grace = self._config.drain_grace_seconds
        await asyncio.wait((idle, hurried), timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        # Clients that have not noticed the health yet are answered until then, and not just cut off.
        await asyncio.wait((pause, hurried), return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, hurried, pause):
            task.cancel()
        if num_open := self._open_calls.num_open:
            _LOGGER.warning("%d calls outlived the grace and are ended", num_open)


async def _within(seconds: float, wait: Callable[[], Awaitable[None]], complaint: str) -> None:
    try:
        await asyncio.wait_for(wait(), seconds)
    except TimeoutError:
        _LOGGER.error("%s within %g s", complaint, seconds)
