"""A whole server on one thread, moved by hand: what a state machine drives, or a test in an order of its own.

The real `App` with its engine thread, verifier, library and generator. Pretended are the graphs (`tests.fakes`), the
gRPC server, the folder of models, and time. Three things move, each only when `World` says so: the event loop, the
engine thread, and jobs, which are what the server runs on other threads. So every run of the same moves is the same.

Every engine has a letter: it writes that letter only, its golden cases say so, and its model's tokenizer puts it into
each prompt. So an engine that meets another's request, golden case or lesson is found out (`World.problems`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
from prometheus_client import CollectorRegistry

from model.golden import CaseResult, Feed, GoldenCase, Tolerance
from service import library
from service.app import App
from service.config import ServeConfig
from service.engine.batch import ScheduledBatch
from service.engine.engine import Engine, LastRun
from service.engine.kv_ledger import KVBudget
from service.engine.kv_memory import MemoryNeeds
from service.engine.sampler import Sampler
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.types import Device, GenerationRequest, StepOutput, StepStats, StoppingParams
from service.engine_thread import EngineThread
from service.errors import ModelUnfit, RequestError, UnknownModel
from service.forecast import StepTimes
from service.generator import GenerateCall, Piece
from service.kv_pool import KVPool, Part
from service.models import ModelState, ServedModel
from tests.fakes import BOS, GREEDY, NUM_SPECIAL, FakeRunner, fake_model, letters, noise
from tests.servers import served_model

SLOTS, QUEUE = 2, 4
ROW_BYTES_PER_TOKEN = 3
DRAIN_SECONDS = 5.0
STEP_SECONDS = 0.001
MOST_MOVES = 5_000
# How an engine goes wrong: nothing runs, only what was not asked for by requests runs, or what it writes is wrong.
FAULTS = ("breaks", "breaks requests", "lies")


class Answer:
    """A result that need not be awaited."""

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self._value


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
        """Obeys and takes a turn, or flushes where the thread would sleep; whether there was anything to do."""
        if self.is_over:
            return False
        if self._inbox.empty() and not any(station.has_work for station in self._stations.values()):
            self._outbox.flush()
            return False
        if self._obey():
            self._take_turn()
        else:
            self.is_over = True
            self._outbox.send(self._listener.ended, None)
        return True


class HandEngine(Engine):
    """An engine of one letter that takes note of what it is asked, and goes wrong as `fault` says."""

    def __init__(self, world: World, model: ServedModel, letter: int, kv_bytes: int) -> None:
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
        self.was_faulty = self.is_gone = self._replays = False
        # Steps that failed one after the other, and replays since they became too many.
        self.num_failed = self.num_replays = 0

    def go_wrong(self, fault: str | None) -> None:
        """Has it go wrong from now on, or no more."""
        self.fault = fault
        self.was_faulty = self.was_faulty or fault is not None

    def add_request(self, request: GenerationRequest) -> None:
        if request.prompt_token_ids[1] != self.letter:
            self._world.problems.append(f"{self.model.name}: a request was made for another engine")
        super().add_request(request)

    def step(self) -> StepOutput:
        if self.is_gone:
            self._world.problems.append(f"{self.model.name}: an engine stepped whose memory was given back")
        output = super().step()
        self._world.now += STEP_SECONDS
        self._world.steppers[output.stats.start_time] = self
        if output.is_failed:
            self.num_failed, self.num_replays = self.num_failed + 1, 0
        elif output.stats.num_tokens:
            self.num_failed = 0
        return output

    def verify_golden(self, cases: Sequence[GoldenCase], tolerance: Tolerance) -> tuple[CaseResult, ...]:
        if cases is not self.model.golden_cases:
            self._world.problems.append(f"{self.model.name}: another engine's golden cases are replayed")
        self._check_memory("replay")
        self._replays = True
        self.num_replays += 1
        try:
            return super().verify_golden(cases, tolerance)
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

    def _check_memory(self, what: str) -> None:
        if self._scheduler._ledger.limit < self.kv_memory_bytes:
            self._world.problems.append(f"{self.model.name}: a {what} takes memory that another engine has")

    def _next(self, source: Sequence[int], tokens: Sequence[int]) -> int:
        return self.letter if self.fault != "lies" else NUM_SPECIAL + (self.letter - NUM_SPECIAL + 1) % 26

    def _before_run(self, batch: ScheduledBatch) -> None:
        if self.fault == "breaks" or (self.fault == "breaks requests" and not self._replays and batch.num_rows):
            raise RuntimeError("the graph fails")


class HandServer:
    """The transport: remembers what health it was told."""

    def __init__(self, health: dict[str, bool], *_: Any, **__: Any) -> None:
        self._health = health

    def start(self, host: str, port: int) -> Answer:
        return Answer(1)

    def set_health(self, name: str, *, is_serving: bool) -> Answer:
        self._health[name] = is_serving
        return Answer()

    def withdraw(self) -> Answer:
        return Answer()

    def stop(self, grace_seconds: float) -> Answer:
        return Answer()


class Spelling:
    """A tokenizer of one letter."""

    def __init__(self, letter: int) -> None:
        self._letter = letter

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

    def __init__(self, world: World, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._world = world

    def _read_needs(self, name: str) -> MemoryNeeds:
        if name not in self._world.shelf:
            raise UnknownModel(name, sorted(self._world.shelf))
        return needs(self._world.shelf[name].context)

    def _read_model(self, name: str, needs: MemoryNeeds, kv_memory: int) -> ServedModel:
        found = self._world.shelf[name]
        if not found.is_readable:
            raise ModelUnfit(name, ["it cannot be read"])
        return self._world.make_model(name, found)


@dataclass(frozen=True, slots=True)
class Shelved:
    """An artifact: how long its context is, and what is wrong with it."""

    context: int = 32
    is_readable: bool = True
    is_proven: bool = True


@dataclass(slots=True)
class Trace:
    """What a tracer was told of one request."""

    num_submitted: int = 0
    num_ended: int = 0

    def submitted(self, *_: object) -> None:
        self.num_submitted += 1

    def ended(self, *_: object) -> None:
        self.num_ended += 1


@dataclass(slots=True, eq=False)
class Asked:
    """Something that somebody waits for; `parts` is what a request has got."""

    what: str
    model: str
    task: asyncio.Task[Any]
    max_tokens: int = 0
    parts: list[Any] = field(default_factory=list)


def needs(context: int) -> MemoryNeeds:
    row = ROW_BYTES_PER_TOKEN * context
    return MemoryNeeds(whole=SLOTS * row, least=row, besides=0)


class World:
    """The server and all that moves it.

    Args:
        shelf: the folder of models.
        names: those of them that are served from the start.
        device: what the server believes to compute on: it decides which thread makes engines.
        faults: of the first engines, by model.
    """

    def __init__(
        self,
        shelf: Mapping[str, Shelved],
        names: Collection[str],
        device: Device = Device.CPU,
        faults: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> None:
        self.now = 1000.0
        self.device = device
        self.shelf = dict(shelf)
        self.last_run = LastRun()
        self.problems: list[str] = []
        self.asked: list[Asked] = []
        self.traces: list[Trace] = []
        self.engines: list[HandEngine] = []
        self.current: dict[str, HandEngine] = {}
        # Who took a step, by the moment at which it began: no two begin at one.
        self.steppers: dict[float, HandEngine] = {}
        self.health: dict[str, bool] = {}
        self.jobs = Jobs()
        self.is_stopping = False
        self._num_models = 0
        self._stack = ExitStack()
        for name, fake in self._pretended().items():
            self._stack.enter_context(mock.patch(name, fake))
        self._stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        self.loop = asyncio.new_event_loop()
        self._stack.callback(self.loop.close)
        self.loop.set_exception_handler(lambda _, context: self.problems.append(str(context)))
        models = [self.make_model(name, self.shelf[name]) for name in names]
        self.pool = HandPool(None, {}, None, {model.name: needs(model.manifest.config.context) for model in models})
        for model in models:
            self.current[model.name] = self.make_engine(model, self.pool.parts[model.name])
            self.current[model.name].go_wrong((faults or {}).get(model.name))
        self.registry = CollectorRegistry()
        config = ServeConfig(
            models=Path("unused"),
            port=0,
            metrics=False,
            device=device,
            max_batch_size=SLOTS,
            max_queue_size=QUEUE,
            drain_grace_seconds=DRAIN_SECONDS,
            drain_pause_seconds=0.0,
            recorder_steps=4,
            **changes,
        )
        self.app = App(
            config,
            models,
            dict(self.current),
            self.registry,
            self.last_run,
            cast(Any, SimpleNamespace(request=self._trace, close=lambda _: Answer())),
            self.pool,
            make_server=partial(HandServer, self.health),
        )
        self._install = self.app._engine.install
        self.app._engine.install = self._note_install  # type: ignore[method-assign]
        self._stopping = asyncio.Event()
        self.life = self.loop.create_task(self._live())
        while not hasattr(self.app._engine, "_thread"):
            self.turn_loop()

    # What moves.

    @property
    def thread(self) -> HandThread:
        return cast(HandThread, self.app._engine._thread)

    def turn_loop(self) -> bool:
        """One round of the event loop; whether there was anything to do."""
        timers = [timer for timer in self.loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        moves = bool(self.loop._ready) or any(timer.when() <= self.now for timer in timers)  # type: ignore[attr-defined]
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()
        return moves

    def rest_loop(self) -> None:
        """Moves the event loop until it waits."""
        while self.turn_loop():
            pass

    def rest(self) -> None:
        """Moves everything, but for time, until nothing moves."""
        for _ in range(MOST_MOVES):
            if not any([self.turn_loop(), self.thread.turn(), self.jobs.run()]):
                return
        raise AssertionError("it does not come to rest")

    def do(self, what: str, model: str, wait: Coroutine[Any, Any, Any]) -> Asked:
        """Has somebody ask for something."""
        asked = Asked(what, model, self.loop.create_task(wait))
        self.asked.append(asked)
        return asked

    def load(self, name: str) -> Asked:
        return self.do("load", name, self.app._library.load(name))

    def reload(self, name: str) -> Asked:
        return self.do("reload", name, self.app._library.reload(name))

    def unload(self, name: str) -> Asked:
        return self.do("unload", name, self.app._library.unload(name))

    def verify(self, name: str) -> Asked:
        return self.do("verify", name, self.app._verifier.verify(name))

    def ask(self, name: str, request_id: str, max_tokens: int = 3, timeout: float | None = None) -> Asked:
        """Has somebody ask a model for an answer."""
        call = GenerateCall(
            request_id=request_id,
            model=name,
            prompt="x",
            target_prefix="",
            sampling=GREEDY,
            stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=True),
            beam_search=None,
            logprobs=None,
            prompt_logprobs=None,
            wants_cost=True,
            priority=0,
            timeout_seconds=timeout,
            partial_on_deadline=False,
        )
        parts: list[Any] = []

        async def run() -> None:
            async with aclosing(self.app._generator.run(call, None)) as told:
                # One by one: what a request has got so far is looked at.
                async for part in told:
                    parts.append(part)  # noqa: PERF401

        asked = self.do("ask", name, run())
        asked.max_tokens, asked.parts = max_tokens, parts
        return asked

    def stop(self) -> None:
        """Has the server stop."""
        self.is_stopping = True
        self._stopping.set()

    def close(self) -> None:
        """Ends whatever still runs."""
        try:
            self.stop()
            for _ in range(4):
                self.rest()
                self.now += 2 * DRAIN_SECONDS
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.rest()
            assert not left, left
        finally:
            self._stack.close()

    # What the server is made of.

    def make_model(self, name: str, found: Shelved) -> ServedModel:
        """A model value with a letter and golden cases of its own."""
        letter = NUM_SPECIAL + self._num_models % 26
        self._num_models += 1
        sequence = np.array([BOS, 5, 6], np.int64)
        rows = [noise((), sequence[:end].tolist()) for end in (1, 2, 3)]
        for row in rows:
            row[letter] = 100.0
        steps = tuple((Feed(0, start, 1),) for start in range(3))
        case = GoldenCase(
            f"case {self._num_models}", (sequence,), (), steps, np.stack(rows) + np.float32(not found.is_proven)
        )
        spelling = cast(Any, Spelling(letter))
        return replace(
            served_model(name, context=found.context),
            golden_cases=(case,),
            prompt_tokenizer=spelling,
            output_tokenizer=spelling,
        )

    def make_engine(self, model: ServedModel, kv_bytes: int) -> HandEngine:
        """A model's engine, in the part of the memory that was taken last."""
        letter = model.prompt_tokenizer.encode("")[1]
        engine = HandEngine(self, model, letter, kv_bytes)
        self.engines.append(engine)
        if (part := self.pool.part_of(model.name)) is not None:
            self.pool.engines[part] = engine
        return engine

    def _pretended(self) -> dict[str, Any]:
        world = self

        class HandTimes(StepTimes):
            def learn(self, stats: StepStats, *, is_calibration: bool = False) -> None:
                world._note_lesson(self, stats)
                super().learn(stats, is_calibration=is_calibration)

        def build(
            _: Path, models: Sequence[ServedModel], config: ServeConfig, last_run: LastRun, kv: Mapping[str, int]
        ) -> dict[str, HandEngine]:
            return {model.name: world.make_engine(model, kv[model.name]) for model in models}

        return {
            "time.monotonic": lambda: world.now,
            "service.async_engine.EngineThread": partial(HandThread, clock=lambda: world.now),
            "service.app.Library": partial(HandLibrary, world),
            "service.text_pool.ThreadPoolExecutor": lambda *_, **__: world.jobs,
            "service.explainer.ThreadPoolExecutor": lambda *_, **__: world.jobs,
            "service.library._in_daemon": world.jobs.submit,
            "service.library.build_engines": build,
            "service.library.gc": SimpleNamespace(collect=lambda: 0),
            "service.forecast.StepTimes": HandTimes,
        }

    async def _live(self) -> None:
        async with self.app.listening():
            await self.app.start(self._stopping)
            await self.app.wait(self._stopping)

    def _trace(self, model: str) -> Trace:
        self.traces.append(Trace())
        return self.traces[-1]

    def _note_install(self, model: str, engine: Any, *others: Any) -> Any:
        self.current[model] = engine
        return self._install(model, engine, *others)

    def _note_lesson(self, pupil: StepTimes, stats: StepStats) -> None:
        teacher = self.steppers[stats.start_time]
        for name, lane in self.app._engine._lanes.items():
            if lane.forecaster._times is pupil and self.current[name] is not teacher:
                self.problems.append(f"{name}: its predictor learned from another engine's step")

    # What must hold.

    def check(self) -> None:
        """Always."""
        assert not self.problems, self.problems
        models = self.app.models
        for name in models.names:
            engine = self.current[name]
            if models.state(name) is ModelState.FAILED:
                assert engine.was_faulty, f"{name} is healthy and FAILED"
            if (parity := models.parity(name)) is not None:
                own = {case.name for case in engine.model.golden_cases}
                assert {case.name for case in parity.cases} <= own, f"{name} has the proof of another"
        for trace in self.traces:
            assert trace.num_ended <= trace.num_submitted <= 1
        if self.life.done() and self.life.exception() is not None:
            raise self.life.exception() or AssertionError
        if self.life.done():
            assert self.is_stopping, "the server ended"

    def check_rest(self) -> None:
        """Where nothing moves."""
        self.check()
        for asked in self.asked:
            self._check_end(asked)
        self.asked.clear()
        assert all(trace.num_ended == trace.num_submitted for trace in self.traces), "no terminal event"
        names, engine = self.app.models.names, self.app._engine
        assert engine.num_streams == 0
        assert not self.thread._unstreamed
        if not self.is_stopping:
            self._check_served(names)
        serving = {self.current[name] for name in names}
        for each in self.engines:
            assert each.is_gone == (each not in serving), f"{each.model.name}: {each.model.golden_cases[0].name}"
        assert set(self.pool.parts) == set(names)
        assert Counter(part.model for parts in self.pool._parts.values() for part in parts) == Counter(names)

    def _check_served(self, names: Collection[str]) -> None:
        models, engine = self.app.models, self.app._engine
        assert set(self.thread._stations) == set(engine._lanes) == set(engine.flight_log().models) == set(names)
        states = {name: models.state(name) for name in names}
        assert set(states.values()) <= {ModelState.SERVING, ModelState.FAILED}, states
        for name, state in states.items():
            own = self.current[name]
            if own.num_failed >= 3:
                assert state is ModelState.FAILED or own.num_replays, f"{name} fails and is asked on"
        assert {name: on for name, on in self.health.items() if name in names} == {
            name: state is ModelState.SERVING for name, state in states.items()
        }
        assert not any(on for name, on in self.health.items() if name and "." not in name and name not in names)
        self._check_series(states)

    def _check_series(self, states: Mapping[str, ModelState]) -> None:
        series: dict[str, dict[str, float]] = {}
        for metric in self.registry.collect():
            if metric.type == "gauge":
                shown = series.setdefault(metric.name.removeprefix("onward_"), {})
                own = [sample for sample in metric.samples if "model_name" in sample.labels]
                shown |= {sample.labels["model_name"]: sample.value for sample in own}
        is_on = {name: float(state is ModelState.SERVING) for name, state in states.items()}
        assert series["model_serving"] == is_on
        known = {name: parity for name in states if (parity := self.app.models.parity(name)) is not None}
        assert series["parity_passed"] == {name: float(parity.passed) for name, parity in known.items()}
        assert series["kv_memory_bytes"] == self.pool.parts
        assert set(series["spec_decode_max_draft_tokens"]) == set(states)
        assert set(series["cost_model_coefficient"]) <= set(states)
        assert set(series["cost_model_relative_error"]) <= set(states)
        for name in ("num_requests_running", "num_requests_waiting"):
            assert not any(series[name].values()), (name, series[name])

    def _check_end(self, asked: Asked) -> None:
        assert asked.task.done(), f"{asked.what} of {asked.model} does not end"
        if asked.task.cancelled():
            return
        error = asked.task.exception()
        if error is not None:
            assert isinstance(error, RequestError), f"{asked.what} of {asked.model}: {error!r}"
            if error.label == "engine_failed":
                assert any(each.was_faulty for each in self.engines if each.model.name == asked.model), asked.what
        elif asked.what == "ask":
            tokens = [token for part in asked.parts if isinstance(part, Piece) for token in part.token_ids]
            assert len(tokens) == asked.max_tokens
            assert len(set(tokens)) == 1, "two engines wrote one answer"
