"""One model on the engine thread: the engine that serves it, and engines that drain after a reload."""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from service.engine.interfaces import EngineHandle, StepEngine
from service.engine.types import GenerationRequest, StepOutput


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A function to run on an engine: between two steps, or with `needs_idle` once the engine is idle."""

    engine: EngineHandle
    function: Callable[[StepEngine], Any]
    future: concurrent.futures.Future[Any]
    needs_idle: bool


class DrainingEngine:
    """An engine that was replaced or removed: it ends what it has begun; `released` then runs on the event loop.

    `kept_bytes` is the most that its K/V take until its next step: only a step frees what it releases.
    """

    def __init__(
        self, handle: EngineHandle, engine: StepEngine, released: Callable[[], object], kept_bytes: int
    ) -> None:
        self.handle = handle
        self.engine = engine
        self.released = released
        self.kept_bytes = self._limit = kept_bytes

    def step(self) -> StepOutput:
        """A step; what it frees is free then."""
        output = self.engine.step()
        if not output.is_failed:
            self.kept_bytes = self._limit
        return output

    def settle(self, num_free: int) -> int:
        """Releases what its requests do not need, or takes what they lack of `num_free` bytes; how many it took."""
        self._limit = min(self.engine.kv_needed_bytes, self.kept_bytes + num_free)
        self.engine.limit_kv(self._limit)
        taken = max(0, self._limit - self.kept_bytes)
        self.kept_bytes += taken
        return taken


class EngineEntry:
    """A model's engines, the calls that wait for an idle one, and the requests behind those.

    A call waits until the serving engine is idle and no other engine holds memory of the model: a replay of golden
    cases writes all of its K/V. Requests that come after the call are parked. A parked request that is aborted or late
    goes to the engine all the same, whose next step ends it before it takes a slot; the others count as waiting. Calls
    and parked requests belong to the serving engine, and no other gets them.

    All engines of a model share the K/V memory of the newest. Draining engines keep what their requests need, free
    memory goes to the oldest that lacks some, and the serving engine has the rest.
    """

    def __init__(self, handle: EngineHandle | None = None, engine: StepEngine | None = None) -> None:
        self.handle = handle
        self.engine = engine
        self.draining: list[DrainingEngine] = []
        self._part = self._limit = 0 if engine is None else engine.kv_memory_bytes
        self.calls: deque[EngineCall] = deque()
        self.parked: dict[str, GenerationRequest] = {}

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything."""
        serves = self.engine is not None and self.engine.has_work
        return serves or bool(self.draining) or bool(self.calls) or bool(self.parked)

    def engine_of(self, handle: EngineHandle) -> StepEngine | None:
        """The engine of this identity; None once it is released."""
        if handle is self.handle:
            return self.engine
        return next((each.engine for each in self.draining if each.handle is handle), None)

    def replace(self, handle: EngineHandle | None, engine: StepEngine | None, released: Callable[[], object]) -> None:
        """Has another engine serve from now on, or none; `released` runs once the former engine is released."""
        if self.handle is not None and self.engine is not None:
            self.draining.append(DrainingEngine(self.handle, self.engine, released, self._limit))
        self.handle, self.engine = handle, engine
        self._limit = 0
        if engine is not None:
            self._part = engine.kv_memory_bytes
        self.share_memory()

    def release(self) -> list[Callable[[], object]]:
        """Releases the draining engines that are done; returns their callbacks."""
        done = [each.released for each in self.draining if not each.engine.has_work]
        self.draining = [each for each in self.draining if each.engine.has_work]
        self.share_memory()
        return done

    def share_memory(self) -> None:
        """Deals out the K/V memory that engines have released by now."""
        num_free = max(0, self._part - self._limit - sum(each.kept_bytes for each in self.draining))
        for each in self.draining:
            num_free -= each.settle(num_free)
        if self.engine is not None:
            self._limit += num_free
            self.engine.limit_kv(self._limit)

    def step(self, engine: StepEngine) -> StepOutput:
        """A step of the serving engine."""
        output = engine.step()
        if not self.parked:
            return output
        return replace(output, stats=replace(output.stats, num_waiting=output.stats.num_waiting + len(self.parked)))

    def unpark(self, now: float) -> list[GenerationRequest]:
        """Takes out the parked requests that wait no longer: all if no call is left, else those whose time is up."""
        while self.calls and self.calls[0].future.cancelled():
            self.calls.popleft()
        ready = [
            request
            for request in self.parked.values()
            if not self.calls or any(moment is not None and now >= moment for moment in _ends(request))
        ]
        for request in ready:
            del self.parked[request.request_id]
        return ready


def _ends(request: GenerationRequest) -> tuple[float | None, ...]:
    """The moments at which an engine would end it in the queue."""
    return request.deadline, request.end_by, request.start_by
