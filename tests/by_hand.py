"""The parts of a server that `tests.model_world` moves by hand or pretends: jobs, engine thread, engines, folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from model.spec.golden import CaseResult, GoldenCase, Tolerance
from service.engine.batch import ScheduledBatch
from service.engine.engine import Engine, LastRun
from service.engine.kv.budget import MemoryNeeds
from service.engine.kv.reservations import KVBudget
from service.engine.sampling.sampler import Sampler
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.types import GenerationRequest, StepOutput, StepStats
from service.errors import ModelUnfit, UnknownModel
from service.repository import library
from service.repository.kv_pool import KVPool, Part
from service.repository.models import ServedModel
from service.runtime.engine_thread import EngineThread
from tests.fakes import BOS, NUM_SPECIAL, FakeRunner, fake_model, letters

SLOTS, QUEUE = 2, 6
ROW_BYTES_PER_TOKEN = 3
STEP_SECONDS = 0.001
# How an engine goes wrong: nothing runs, only replays run, or what it writes is wrong.
FAULTS = ("breaks", "breaks requests", "lies")


@dataclass(frozen=True, slots=True)
class Shelved:
    """An artifact: how long its context is, and what is wrong with it."""

    context: int = 32
    is_readable: bool = True
    is_proven: bool = True


class Stage(Protocol):
    """What the parts need of the world: its clock, its folder, and where they report to."""

    now: float
    shelf: dict[str, Shelved]
    last_run: LastRun
    problems: list[str]
    steppers: dict[float, HandEngine]

    def make_model(self, name: str, found: Shelved) -> ServedModel:
        """A model value of its own."""
        ...


def needs(context: int) -> MemoryNeeds:
    row = ROW_BYTES_PER_TOKEN * context
    return MemoryNeeds(whole=SLOTS * row, least=row, besides=0)


class Jobs(Executor):
    """What waits for another thread. One of them runs when `run` is called."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, partial(function, *arguments, **options)))
        return future

    def run(self, number: int = 0) -> bool:
        """Runs a job that waits; whether one did."""
        if not self.waiting:
            return False
        future, function = self.waiting.pop(number % len(self.waiting))
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
        return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Each of the server's executors is this one: nothing is cancelled for the sake of one."""


class HandThread(EngineThread):
    """The engine thread without a thread: each `turn` is one round of what the thread does."""

    is_over = False

    def start(self) -> None:
        pass

    def turn(self) -> bool:
        """Drains the inbox and takes a turn, or flushes where the thread would sleep; whether there was work."""
        if self.is_over:
            return False
        if self._inbox.empty() and self._is_idle:
            self._outbox.flush()
            return False
        if self._drain_inbox():
            self._take_turn()
        else:
            self.is_over = True
            self._outbox.send(self._listener.ended, None)
        return True


class HandEngine(Engine):
    """An engine of one letter that takes note of what it is asked, and goes wrong as `fault` says."""

    def __init__(self, world: Stage, model: ServedModel, letter: int, kv_bytes: int) -> None:
        limits = EngineLimits(max_batch_size=SLOTS, prefill_chunk=8, max_prefill_tokens=16)
        budget = KVBudget(num_bytes=kv_bytes, token_bytes=ROW_BYTES_PER_TOKEN, page_tokens=4)
        shape = fake_model(context=model.manifest.config.context)
        runner = FakeRunner(SLOTS, next_token=self._next, before_run=self._before_run)
        super().__init__(
            Scheduler(limits, shape, letters, budget), runner, Sampler(), world.last_run, lambda: world.now
        )
        self._world = world
        self.model = model
        self.letter = letter
        self.fault: str | None = None
        self.was_faulty = self.has_lied = self.is_gone = self._replays = False
        # Steps that failed in a row, those of them since the last replay, and replays since the last of them.
        self.num_failed = self.num_unproven = self.num_replays = 0

    def go_wrong(self, fault: str | None) -> None:
        """Has it go wrong from now on, or no more."""
        self.fault = fault
        self.was_faulty = self.was_faulty or fault is not None
        self.has_lied = self.has_lied or fault == "lies"

    def num_cached_tokens(self, request: GenerationRequest) -> int:
        self._check_request(request)
        return super().num_cached_tokens(request)

    def add_request(self, request: GenerationRequest) -> None:
        self._check_request(request)
        super().add_request(request)

    def step(self) -> StepOutput:
        if self.is_gone:
            self._world.problems.append(f"{self.model.name}: an engine stepped whose memory was given back")
        output = super().step()
        self._world.now += STEP_SECONDS
        self._world.steppers[output.stats.start_time] = self
        if output.is_failed:
            self.num_failed, self.num_unproven, self.num_replays = self.num_failed + 1, self.num_unproven + 1, 0
        elif output.stats.num_tokens:
            self.num_failed = self.num_unproven = 0
        return output

    def verify_golden(self, cases: Sequence[GoldenCase], tolerance: Tolerance) -> tuple[CaseResult, ...]:
        if cases is not self.model.golden_cases:
            self._world.problems.append(f"{self.model.name}: another engine's golden cases are replayed")
        self._check_memory("replay")
        self._replays = True
        self.num_replays += 1
        self.num_unproven = 0
        try:
            return super().verify_golden(cases, tolerance)
        finally:
            self._replays = False

    def check_batch_invariance(self, cases: Sequence[GoldenCase]) -> bool | None:
        self._replays = True
        try:
            return super().check_batch_invariance(cases)
        finally:
            self._replays = False

    def calibrate(self, max_seconds: float, goes_on: Callable[[], bool] = lambda: True) -> tuple[StepStats, ...]:
        if self.has_work:
            self._world.problems.append(f"{self.model.name}: calibrated while it had work")
        self._check_memory("calibration")
        if self.fault == "breaks":
            raise RuntimeError("calibration fails")
        self._world.now += STEP_SECONDS
        self._world.steppers[self._world.now] = self
        stats = super().step().stats
        self._world.now += STEP_SECONDS
        return (replace(stats, num_tokens=1, num_rows=1),) * 2

    def _check_request(self, request: GenerationRequest) -> None:
        if request.prompt_token_ids[1] != self.letter:
            self._world.problems.append(f"{self.model.name}: a request was made for another engine")

    def _check_memory(self, what: str) -> None:
        if self._scheduler._ledger.limit < self.kv_memory_bytes:
            self._world.problems.append(f"{self.model.name}: a {what} takes memory that another engine has")

    def _next(self, source: Sequence[int], tokens: Sequence[int]) -> int:
        return self.letter if self.fault != "lies" else NUM_SPECIAL + (self.letter - NUM_SPECIAL + 1) % 26

    def _before_run(self, batch: ScheduledBatch) -> None:
        if self.fault == "breaks" or (self.fault == "breaks requests" and not self._replays and batch.num_rows):
            raise RuntimeError("the graph fails")


class HandServer:
    """The transport: keeps the health that was set last."""

    def __init__(self, health: dict[str, bool], *_: Any, **__: Any) -> None:
        self._health = health

    async def start(self, host: str, port: int) -> int:
        return 1

    def set_health(self, name: str, *, is_serving: bool) -> None:
        self._health[name] = is_serving

    def withdraw(self) -> None:
        pass

    async def wait_ended(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def stop(self, grace_seconds: float) -> None:
        pass


class Spelling:
    """A tokenizer of one letter."""

    def __init__(self, letter: int) -> None:
        self._letter = letter

    def max_bytes(self, num_tokens: int) -> int:
        return num_tokens

    def encode(self, text: str) -> list[int]:
        return [BOS, self._letter, *(5 for _ in text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return letters(token_ids)


class HandPool(KVPool):
    """Takes note of which engines are gone."""

    def __init__(self, *arguments: Any) -> None:
        self.engines: dict[Part, HandEngine] = {}
        super().__init__(*arguments)

    def give_back(self, part: Part) -> None:
        super().give_back(part)
        if part in self.engines:
            self.engines[part].is_gone = True


class HandLibrary(library.Library):
    """Its folder holds what the world says."""

    def __init__(self, world: Stage, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._world = world

    def _read_needs(self, name: str) -> MemoryNeeds:
        if name not in self._world.shelf:
            raise UnknownModel(name, sorted(self._world.shelf))
        return needs(self._world.shelf[name].context)

    def _read_model(self, name: str, needs: MemoryNeeds, part: Part, more_bytes: int, promised: int) -> ServedModel:
        found = self._world.shelf[name]
        if not found.is_readable:
            raise ModelUnfit(name, ["it cannot be read"])
        return self._world.make_model(name, found)
