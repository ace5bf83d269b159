"""The way from a folder of artifacts to proven engines: settle, load, share, build, prove.

    settle    interpreter, device, threads, kernels: what holds for the process
    load      read and check the artifacts
    share     deal out the K/V memory
    build     make sessions, reserve K/V, prove speculation
    prove     replay golden cases, check batch invariance

`start_up` takes a process through all but the last, for `serve` and for a replica on Ray: their app proves models once
it listens (`service.repository.verifier`). `prepare` builds and proves one model beside others, for LoadModel and
ReloadModel (`service.repository.library`) and for the load check in a child process (`service.repository.load_check`).
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from model import kernels
from model.spec import golden
from model.spec.artifact import Device as BuiltFor
from model.spec.golden import tolerance_of
from service.config import Kernels, ServeConfig
from service.engine.engine import Engine, LastRun
from service.engine.interfaces import StepEngine
from service.engine.sessions.session import GraphError, share_threads
from service.engine.types import Device
from service.errors import StartupError, report_failure
from service.repository.kv_pool import KVPool
from service.repository.loading import build_engines, load_models, settle_device, share_memory
from service.repository.models import Parity, ServedModel

_LOGGER = logging.getLogger(__name__)

# After a run the engine thread waits for the interpreter's lock behind the event loop, for up to a switch interval:
# CPython's 5 ms are several steps of a small model. With this the wait falls to a tenth.
_SWITCH_INTERVAL_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Started:
    """Models that can be served once they are proven. Drop it when the app has its engines, or it keeps their memory.

    Attributes:
        config: the operator's, with the device that computes.
        models: in the order of their names.
        engines: by model name.
        pool: K/V memory, with a part for each model.
        last_run: shared by the engines.
    """

    config: ServeConfig
    models: Collection[ServedModel]
    engines: Mapping[str, Engine]
    pool: KVPool
    last_run: LastRun


@dataclass(frozen=True, slots=True)
class Prepared:
    """One model's engine, its proof, and how long its sessions took to make."""

    engine: Engine
    parity: Parity
    session_seconds: float


def start_up(config: ServeConfig) -> Started:
    """Settles the process, loads every model below `config.models`, shares K/V memory and builds the engines.

    Raises:
        StartupError: listing every problem that keeps the server from starting.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    config = settle_device(config)
    models = load_models(config.models, config.device)
    _settle_threads(config)
    last_run, pool = LastRun(), share_memory(models, config)
    engines = build_engines(config.models, models, config, last_run, pool.parts)
    for model in models:
        part = pool.parts[model.name]
        _LOGGER.info("%s is computed on %s", model.name, config.device)
        _LOGGER.info("%s has %d bytes (%.1f MiB) for keys and values", model.name, part, part / (1 << 20))
    for name, part in pool.kept.items():
        _LOGGER.warning(
            "%d bytes (%.1f MiB) for keys and values are kept for %s, which is not served", part, part / (1 << 20), name
        )
    return Started(config, models, engines, pool, last_run)


def prepare(config: ServeConfig, model: ServedModel, kv_bytes: int, last_run: LastRun) -> Prepared:
    """Builds and proves the engine of one model, in a process that may serve others.

    Raises:
        StartupError: when it cannot be built, or golden cases failed.
    """
    began = time.monotonic()
    kv = {model.name: kv_bytes}
    engine = build_engines(config.models, [model], config, last_run, kv, is_serving=True)[model.name]
    session_seconds = time.monotonic() - began
    try:
        parity = prove(model, engine)
    except GraphError as error:
        failure = report_failure(f"{model.name}: a graph failed in the replay of golden cases", error)
        raise StartupError([f"its golden cases could not be replayed, {failure.error_id}"]) from error
    if not parity.passed:
        raise StartupError([f"golden cases failed: {failed_cases(parity)}"])
    return Prepared(engine, parity, session_seconds)


def prove(model: ServedModel, engine: StepEngine) -> Parity:
    """Replays a model's golden cases on its idle engine; on the CPU, checks batch invariance, too."""
    tolerance = tolerance_of(model.manifest.precision, model.manifest.kv_cache.precision)
    cases = tuple(engine.verify_golden(model.golden_cases, tolerance))
    # On CUDA batch invariance is not promised (docs/operate/gpu.md).
    is_promised = model.manifest.device is BuiltFor.CPU
    return Parity(cases, engine.check_batch_invariance(model.golden_cases) if is_promised else None)


def failed_cases(parity: Parity) -> str:
    """The names of the golden cases that failed, and the reason, for an error or a log line."""
    failed = [case for case in parity.cases if not case.passed]
    names = ", ".join(case.name for case in failed) or "there are none"
    drift = golden.describe_drift(case for case in failed if (case.drift or 0.0) > (case.max_drift or math.inf))
    return f"{names}; {drift}" if drift else names


def report_kernels(wanted: Kernels) -> None:
    """Logs what computes our own operators on the CPU.

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
        tiles = "; AMX multiplies many rows in int8 and int4, and attends in long chunks" if kernels.has_tiles() else ""
        _LOGGER.info("kernels compute these of our own operators: %s%s", ", ".join(operators), tiles)
    else:
        _LOGGER.warning("our own operators are computed by standard ones, slower: this processor can run no kernel")


def _settle_threads(config: ServeConfig) -> None:
    if config.device is Device.CUDA:
        return
    report_kernels(config.kernels)
    if config.spin:
        share_threads(config.threads or 0)


def _operators() -> tuple[str, ...]:
    try:
        return kernels.operators()
    except OSError as error:
        raise StartupError([f"the kernels cannot be loaded, --kernels standard does without them: {error}"]) from error
