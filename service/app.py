"""The composition root: puts the server together, starts it, watches it, stops it, in the right order.

    start   load ─> listen (NOT_SERVING) ─> learn how long steps take ─> replay the golden cases ─> SERVING
    stop    NOT_SERVING ─> refuse new requests ─> let those in flight end ─> end the engine thread ─> close

If the engine thread dies or gRPC accepts no more calls, health flips, every stream ends and the process exits with 1.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, disable_created_metrics

from model import kernels
from service.access import Access, KeyAccess, OpenAccess
from service.config import Admission, Kernels, MetricsCompat, ServeConfig, keep_tokenizers_on_their_threads
from service.engine.engine import LastRun
from service.engine.proof import calibration
from service.engine.sessions.attention import load_attention_graph
from service.engine.sessions.session import share_threads
from service.engine.step_engine import StepEngine
from service.engine.types import Device
from service.errors import NotServing, OnwardError, RequestError, StartupError
from service.explain.explainer import Explainer
from service.generator import Generator
from service.process.text_pool import TextPool
from service.repository.devices import artifact_folder
from service.repository.kv_pool import KVPool
from service.repository.library import Library
from service.repository.loading import build_engines, load_models, settle_device, share_memory
from service.repository.models import Models, ModelState, Parity, ServedModel
from service.repository.verifier import Verifier
from service.runtime.async_engine import AsyncEngine
from service.runtime.model_queue import LaneLimits
from service.telemetry.debug import from_loop, with_debug
from service.telemetry.exporting import open_tracer
from service.telemetry.exposition import exposing, metrics_app
from service.telemetry.metrics import Metrics, Objectives
from service.telemetry.recorder import FlightLog, FlightRecorder
from service.telemetry.tracing import NoTracer, Tracer
from service.telemetry.vllm_names import VllmNames
from service.transport.generation import GenerationServicer
from service.transport.health import EVERYTHING, LIST
from service.transport.interceptors import CallInterceptor
from service.transport.model_service import ModelServicer
from service.transport.oip import InferenceServicer
from service.transport.permissions import MANAGING, PERMISSIONS
from service.transport.server import (
    GENERATION_SERVICE,
    INFERENCE_SERVICE,
    MODEL_SERVICE,
    SERVICES,
    GrpcServer,
    Server,
    TransportLimits,
)
from service.transport.tls import TlsFiles, server_credentials
from service.transport.wire_limits import request_limits

_LOGGER = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TOKENIZER_THREADS = 2
# After a run the engine thread waits for the interpreter's lock behind whatever the event loop does, for up to a whole
# switch interval: CPython's 5 ms are several steps of a small model, and a step's wait falls to the tenth with this.
_SWITCH_INTERVAL_SECONDS = 0.0005
# Of the process, besides its connections: files, threads, scrapers.
_NUM_OTHER_DESCRIPTORS = 512
# Between replays of a failed model's golden cases that fail themselves: twice as long each time.
_MIN_MEND_SECONDS = 1.0
_MAX_MEND_SECONDS = 60.0
# For a step in progress to end.
_ENGINE_SECONDS = 5.0
# For the last statuses to reach their clients; then for gRPC to end what is open; then for that to clean up; then for
# the last spans to be exported.
_CLOSING_SECONDS = 1.0


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
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    # When each series was born is of no use, and a series itself.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    if not _is_loopback(config.host) and (config.api_keys is None or config.tls_certificate is None):
        _LOGGER.warning(
            "%s is reached from outside: without TLS and API keys only a trusted network should", config.host
        )
    _allow_descriptors(config.max_connections + _NUM_OTHER_DESCRIPTORS)
    # It may refuse to start, and models take long to load.
    tracer = open_tracer(config.telemetry, config.otel_endpoint)
    config = settle_device(config)
    models = load_models(config.models, config.device)
    if config.device is not Device.CUDA:
        tell_kernels(config.kernels)
    # A GPU's graphs want no spinning threads.
    if config.spin and config.device is not Device.CUDA:
        share_threads(config.threads or 0)
    last_run = LastRun()
    pool = share_memory(models, config)
    engines = build_engines(config.models, models, config, last_run, pool.parts)
    for model in models:
        part = pool.parts[model.name]
        _LOGGER.info("%s is computed on %s", model.name, config.device)
        _LOGGER.info("%s has %d bytes (%.1f MiB) for keys and values", model.name, part, part / (1 << 20))
    for name, part in pool.kept.items():
        _LOGGER.warning(
            "%d bytes (%.1f MiB) for keys and values are kept for %s, which is not served", part, part / (1 << 20), name
        )
    app = App(config, models, engines, last_run=last_run, tracer=tracer, pool=pool)
    del engines  # a model that is unloaded must leave its memory
    return asyncio.run(run(app, announce))


async def run(app: App, announce: Callable[[Ready], None]) -> int:
    """Runs an app until a signal or a failure; the process's exit status. A second signal ends the drain's grace."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, signalled)
    try:
        async with app.listening(hurry) as endpoint:
            if await app.start(stop):
                states = {name: app.models.state(name) for name in app.models.names}
                parity = {name: found for name in states if (found := app.models.parity(name))}
                announce(Ready(endpoint, states, parity))
            if (error := await app.wait(stop)) is not None:
                _LOGGER.error("the server stops because it failed: %s", error)
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
        last_run: what the engines share.
        tracer: where traces go; by default nowhere.
        pool: the memory of keys and values, as the engines were built with; by default what `share_memory` says.
        make_server: makes what takes the calls, of what `GrpcServer` is made of.
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
        objectives = Objectives(
            time_to_first_token=config.slo_time_to_first_token,
            inter_token_latency=config.slo_inter_token_latency,
            e2e_latency=config.slo_e2e_latency,
        )
        self._metrics = Metrics(self._registry, objectives)
        if config.metrics_compat is MetricsCompat.VLLM:
            self._registry.register(VllmNames(self._metrics))
        self._tracer = tracer or NoTracer()
        self._models = Models(models)
        self._engine = AsyncEngine(
            engines,
            self._metrics,
            {model.name: model.cost_model(engines[model.name]) for model in models},
            LaneLimits(
                max_batch_size=config.max_batch_size,
                max_queue_size=config.max_queue_size,
                admits_by_deadline=config.admission is Admission.DEADLINE,
                time_shares=dict(config.time_shares),
            ),
            failing=self._failing,
            recorder=FlightRecorder(config.recorder_steps),
            tracer=self._tracer,
        )
        self._verifier = Verifier(self._engine, self._models, self._show_health)
        pool = pool or share_memory(models, config)
        self._library = Library(config, self._engine, self._models, last_run or LastRun(), pool, self._show_health)
        self._shown: set[str] = set()
        self._mending: set[asyncio.Task[None]] = set()
        keep_tokenizers_on_their_threads()
        self._prompts = TextPool("prompts", _TOKENIZER_THREADS)
        # A thread of its own: calls that only tokenize wait in line and hold up no prompt.
        self._texts = TextPool("texts", 1)
        self._generator = Generator(self._engine, self._models, self._prompts)
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
        self._calls = CallInterceptor(
            (*SERVICES, LIST),
            self._metrics.handled,
            _access(config),
            max_message_bytes=config.max_message_bytes,
            max_stall_seconds=config.max_stall_seconds,
            tracer=self._tracer,
            check=request_limits(SERVICES, config.request_limits, self._models).check,
        )
        self._credentials = None if (files := _tls_files(config)) is None else server_credentials(files)

    @property
    def models(self) -> Models:
        """The served models."""
        return self._models

    @asynccontextmanager
    async def listening(self, hurry: asyncio.Event | None = None) -> AsyncIterator[Endpoint]:
        """Listens for the length of the block; nothing is served before `verify_all`. Leaving drains and stops.

        Setting `hurry` ends the time that requests in flight are given.
        """
        take = from_loop(asyncio.get_running_loop(), self._engine.flight_log)
        with _metrics_server(self._config, self._registry, take) as metrics_port:
            self._server = self._make_server()
            port = await self._server.start(self._config.host, self._config.port)
            self._engine.start()
            try:
                yield Endpoint(self._config.host, port, metrics_port)
            finally:
                await self._stop(hurry or asyncio.Event())

    async def start(self, stop: asyncio.Event) -> bool:
        """`verify_all`, given up when `stop` is set or the engine thread dies; whether it was done."""
        verifying = asyncio.create_task(self.verify_all())
        waiting = asyncio.create_task(self.wait(stop))
        await asyncio.wait((verifying, waiting), return_when=asyncio.FIRST_COMPLETED)
        is_done = verifying.done() and not waiting.done()
        for task in (verifying, waiting):
            task.cancel()
        # What `verify_all` raised, and the ends of what was cancelled.
        for outcome in await asyncio.gather(verifying, waiting, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        return is_done

    async def verify_all(self) -> None:
        """Replays every model's golden cases and serves the models that pass; before that, learns their step times."""
        if self._config.calibrate:
            for name in self._models.names:
                await self._calibrate(name)
        for model in [self._models.resolve(name) for name in self._models.names]:
            if not (self._models.is_served(model) and self._models.state(model.name) is ModelState.STARTING):
                continue  # a client had it proven or replaced meanwhile; one that serves may be too busy for a replay
            try:
                await self._verifier.verify(model.name)
            except RequestError as error:
                _LOGGER.error("%s does not serve, its golden cases could not be replayed: %s", model.name, error)
                self._models.verified(model, Parity(()))
        self._show_health()

    async def _calibrate(self, name: str) -> None:
        try:
            num_steps = await self._engine.calibrate(name, calibration.MAX_SECONDS, calibration.MAX_SECONDS)
        except RequestError as error:
            _LOGGER.error("%s begins without knowing its step times: %s", name, error)
        else:
            _LOGGER.info("%s: step times learned from %d steps", name, num_steps)

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

    def _make_server(self) -> Server:
        """A gRPC server belongs to the event loop that runs when it is made, so it cannot be made any earlier."""
        generator, limits = self._generator, self._config.request_limits
        return self._server_of(
            GenerationServicer(generator, self._explainer, self._models, limits, self._texts),
            ModelServicer(self._models, self._verifier.verify, self._library, self._config),
            InferenceServicer(generator, self._models, self._library, limits, self._config.max_message_bytes),
            [self._calls],
            TransportLimits(
                max_message_bytes=self._config.max_message_bytes,
                max_metadata_bytes=self._config.max_metadata_bytes,
                max_concurrent_rpcs=self._config.max_concurrent_rpcs,
                max_stall_seconds=self._config.max_stall_seconds,
                max_connections=self._config.max_connections,
                keepalive_seconds=self._config.keepalive_seconds,
            ),
            credentials=self._credentials,
            has_reflection=self._config.reflection,
        )

    def _failing(self, name: str) -> None:
        """A model fails step after step: it is not asked any more until its golden cases pass again."""
        if not self._models.failing(name):
            return  # it is mended already, or leaves
        _LOGGER.error("%s does not serve, its steps fail one after the other", name)
        self._show_health()
        task = asyncio.get_running_loop().create_task(self._mend(self._models.resolve(name)))
        self._mending.add(task)
        task.add_done_callback(self._mending.discard)

    async def _mend(self, model: ServedModel) -> None:
        """Replays a failed model's golden cases until there is an outcome, good or bad, or the model is replaced.

        A replay that fails itself proves nothing: memory may have been short for a moment.
        """
        pause = _MIN_MEND_SECONDS
        while self._models.is_served(model) and self._models.state(model.name) is ModelState.FAILED:
            try:
                await self._verifier.verify(model.name)
            except RequestError as error:
                why = "%s does not serve, its golden cases could not be replayed and are again in %g s: %s"
                _LOGGER.error(why, model.name, pause, error)
            except Exception:
                why = "%s does not serve, replaying its golden cases failed unexpectedly, they are again in %g s"
                _LOGGER.exception(why, model.name, pause)
            else:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_MEND_SECONDS)

    def _show_health(self) -> None:
        for name in self._shown - set(self._models.names):
            self._server.set_health(name, is_serving=False)
        self._shown |= set(self._models.names)
        self._explainer.models_changed()
        self._show_states()
        serving = {name: self._models.state(name) is ModelState.SERVING for name in self._models.names}
        for name, is_serving in serving.items():
            self._server.set_health(name, is_serving=is_serving)
        for name in (EVERYTHING, GENERATION_SERVICE, INFERENCE_SERVICE):
            self._server.set_health(name, is_serving=all(serving.values()))
        self._server.set_health(MODEL_SERVICE, is_serving=True)

    def _show_states(self) -> None:
        for name in self._models.names:
            if (metrics := self._engine.metrics_of(name)) is None:
                continue
            metrics.serves(is_serving=self._models.state(name) is ModelState.SERVING)
            if (parity := self._models.parity(name)) is not None:
                metrics.parity_checked(parity.max_abs_error, passed=parity.passed)

    async def _stop(self, hurry: asyncio.Event) -> None:
        self._models.drain()
        self._show_states()
        self._engine.drain()
        self._server.withdraw()
        await self._drain(hurry)
        # Before the gRPC server: an open stream ends with the status of a server that stops, and is not just cut off.
        await _within(_ENGINE_SECONDS, self._engine.stop, "the engine did not stop")
        await _within(_CLOSING_SECONDS, self._calls.wait_idle, "calls did not end with the engine")
        await _within(2 * _CLOSING_SECONDS, partial(self._server.stop, _CLOSING_SECONDS), "gRPC did not stop")
        # Cancelled handlers clean up after `stop` has returned.
        await _within(_CLOSING_SECONDS, self._calls.wait_idle, "cancelled calls did not end")
        for task in self._mending:
            task.cancel()
        self._library.close()
        await self._tracer.close(_CLOSING_SECONDS)
        for pool in (self._prompts, self._texts):
            pool.close()
        self._explainer.close()

    async def _drain(self, hurry: asyncio.Event) -> None:
        """Gives calls in flight the grace to end, and balancers the pause to notice; less if `hurry` is set."""
        idle = asyncio.create_task(self._calls.wait_idle())
        hurried = asyncio.create_task(hurry.wait())
        pause = asyncio.create_task(asyncio.sleep(self._config.drain_pause_seconds))
        grace = self._config.drain_grace_seconds
        await asyncio.wait((idle, hurried), timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        # Clients that have not seen yet that the health is bad are answered until then, and not just cut off.
        await asyncio.wait((pause, hurried), return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, hurried, pause):
            task.cancel()
        if num_open := self._calls.num_open:
            _LOGGER.warning("%d calls outlived the grace and are ended", num_open)


def _allow_descriptors(num_needed: int) -> None:
    """Raises the limit of open descriptors: without one the server neither accepts a connection nor reads a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= num_needed or soft == resource.RLIM_INFINITY:
        return
    num_allowed = num_needed if hard == resource.RLIM_INFINITY else min(num_needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_allowed, hard))
    if num_allowed < num_needed:
        _LOGGER.warning(
            "%d descriptors may be open (ulimit -n), and --max-connections can take %d", num_allowed, num_needed
        )


def tell_kernels(wanted: Kernels) -> None:
    """Tells the log what computes our own operators on the processor.

    Raises:
        StartupError: when the kernels' library is there and cannot be loaded.
    """
    if wanted is Kernels.STANDARD:
        _LOGGER.info("our own operators are computed by standard ones, as --kernels says")
    elif (obstacle := kernels.why_not()) is not None:
        _LOGGER.warning(
            "our own operators are computed by standard ones, slower, as there are no kernels: %s", obstacle
        )
    elif operators := _operators():
        _LOGGER.info("kernels compute these of our own operators: %s", ", ".join(operators))
    else:
        _LOGGER.warning("our own operators are computed by standard ones, slower: this processor can run no kernel")


def _operators() -> tuple[str, ...]:
    try:
        return kernels.operators()
    except OSError as error:
        raise StartupError([f"the kernels cannot be loaded, --kernels standard does without them: {error}"]) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _access(config: ServeConfig) -> Access:
    if config.api_keys is not None:
        return KeyAccess(config.api_keys, PERMISSIONS)
    is_open = config.tls_client_ca is not None or _is_loopback(config.host)
    return OpenAccess(closed=() if is_open else MANAGING)


def _tls_files(config: ServeConfig) -> TlsFiles | None:
    if config.tls_certificate is None or config.tls_key is None:
        return None
    return TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)


async def _within(seconds: float, wait: Callable[[], Awaitable[None]], complaint: str) -> None:
    try:
        await asyncio.wait_for(wait(), seconds)
    except TimeoutError:
        _LOGGER.error("%s within %g s", complaint, seconds)


@contextmanager
def _metrics_server(
    config: ServeConfig, registry: CollectorRegistry, take: Callable[[], FlightLog]
) -> Iterator[int | None]:
    """Serves metrics and the recorder's log for the length of the block, unless they are off; yields the port."""
    if not config.metrics:
        yield None
        return
    app = with_debug(metrics_app(registry), take, is_on=config.recorder_steps > 0)
    with exposing(app, config.host, config.metrics_port) as port:
        yield port
