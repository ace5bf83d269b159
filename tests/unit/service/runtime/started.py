"""Engines on a real engine thread without a server: what the tests of `service.runtime` share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from service.engine.interfaces import StepEngine
from service.engine.types import (
    GenerationRequest,
    TokenEvent,
)
from service.runtime.async_engine import AsyncEngine
from service.runtime.model_queue import ModelQueue, QueueLimits
from service.telemetry.metrics import Metrics
from tests.fakes import FakeRunner, fake_costs, fake_engine

MODEL = "fake"
SLOTS, QUEUE = 4, 2
ENDLESS = 60_000


def make_engine(
    engines: Mapping[str, StepEngine],
    limits: QueueLimits,
    registry: CollectorRegistry | None = None,
    kind: type[AsyncEngine] = AsyncEngine,
    **options: Any,
) -> AsyncEngine:
    """Engines with their entries, not started."""
    entries: dict[str, Any] = {}
    made = kind(entries, Metrics(registry or CollectorRegistry()), limits, **options)
    for name, engine in engines.items():
        entries[name] = SimpleNamespace(queue=made.open(name, engine, fake_costs(engine.chunk_rules)))
    return made


def queue(engine: AsyncEngine, model: str = MODEL) -> ModelQueue:
    return engine._queue(model)


@asynccontextmanager
async def started(
    runner: FakeRunner | None = None,
    registry: CollectorRegistry | None = None,
    *,
    admits_by_deadline: bool = False,
    clock: Callable[[], float] = time.monotonic,
    **engines: StepEngine,
) -> AsyncIterator[AsyncEngine]:
    engines = engines or {MODEL: fake_engine(runner, context=ENDLESS + 1)}
    limits = QueueLimits(max_batch_size=SLOTS, max_queue_size=QUEUE, admits_by_deadline=admits_by_deadline)
    engine = make_engine(engines, limits, registry, clock=clock)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def run(engine: AsyncEngine, asked: GenerationRequest) -> list[tuple[TokenEvent, ...]]:
    with engine.admit(asked.model, asked.request_id) as place:
        place.submit(asked)
        return [events async for events in place.events()]


def tokens(batches: list[tuple[TokenEvent, ...]]) -> list[int]:
    return [event.token_id for events in batches for event in events if event.token_id is not None]
