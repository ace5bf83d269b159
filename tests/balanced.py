"""Servers of the test's own process behind a real Envoy, with the configuration that is shipped."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from benchmarks.infra.envoy import Envoy, balancing
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.engine.batch import ScheduledBatch
from tests.fakes import FakeRunner, Gate
from tests.servers import MODEL, SLOTS, Running, eventually, running, served_model


def target_of(server: Running) -> str:
    return f"{server.endpoint.host}:{server.endpoint.port}"


class Steps:
    """What happens before each step of each server: nothing, unless a test says otherwise for a while."""

    def __init__(self) -> None:
        self._before: Callable[[ScheduledBatch], None] | None = None

    def __call__(self, batch: ScheduledBatch) -> None:
        if (before := self._before) is not None:
            before(batch)

    @contextmanager
    def after(self, before: Callable[[ScheduledBatch], None]) -> Iterator[None]:
        self._before = before
        try:
            yield
        finally:
            self._before = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step is taken."""
        gate = Gate()
        with self.after(gate), gate.closed():
            yield

    def runner(self) -> FakeRunner:
        """Of one more server."""
        return FakeRunner(SLOTS, before_run=self)


@dataclass(frozen=True, slots=True)
class Balanced:
    """Servers, the Envoy before them, and a channel to it; what ended `before` does not count."""

    servers: Sequence[Running]
    envoy: Envoy
    channel: grpc.aio.Channel
    steps: Steps = field(default_factory=Steps)
    before: Sequence[Counter[str]] = ()

    @property
    def generation(self) -> Any:
        return GenerationServiceStub(self.channel)

    @property
    def ended(self) -> list[Counter[str]]:
        """How many requests of each server ended in which way."""
        before = self.before or [Counter()] * len(self.servers)
        return [Counter(server.ended()) - old for server, old in zip(self.servers, before, strict=True)]

    async def until_ended(self, count: int) -> Counter[str]:
        """How `count` requests ended, when they have; nobody holds a slot or waits for one then, which is checked."""
        await eventually(lambda: sum((each for each in self.ended), Counter()).total() >= count)
        for server in self.servers:
            for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"):
                assert server.metric(gauge, model_name=MODEL) == 0, gauge
        return sum((each for each in self.ended), Counter())

    def anew(self) -> Balanced:
        """The same, counted from now on."""
        return replace(self, before=[Counter(server.ended()) for server in self.servers])


@asynccontextmanager
async def behind(
    folder: Path, *servers: Running, others: Sequence[str] = (), are_serving: bool = True, steps: Steps | None = None
) -> AsyncIterator[Balanced]:
    """Servers of this very event loop, which must go on while Envoy starts: it asks after their health.

    A crowded machine may keep the loop from answering for longer than a server of its own process would take. No test
    here is about a silent server: Envoy waits. tests/faults/test_replicas.py kills servers, under shipped limits.
    """
    held = balancing([*map(target_of, servers), *others], folder, are_serving=are_serving, health_timeout_seconds=60.0)
    envoy = await asyncio.to_thread(held.__enter__)
    try:
        async with grpc.aio.insecure_channel(envoy.target) as channel:
            yield Balanced(servers, envoy, channel, steps or Steps())
    finally:
        await asyncio.to_thread(held.__exit__, None, None, None)


@asynccontextmanager
async def two(folder: Path, *, context: int | None = None, **changes: Any) -> AsyncIterator[Balanced]:
    """Two servers over fake models behind an Envoy of their own; `changes` are to their configuration."""
    steps = Steps()
    model = {} if context is None else {"context": context}
    async with (
        running([served_model(**model)], runner=steps.runner(), **changes) as one,
        running([served_model(**model)], runner=steps.runner(), **changes) as other,
        behind(folder, one, other, steps=steps) as balanced,
    ):
        yield balanced
