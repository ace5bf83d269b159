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
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
from prometheus_client import CollectorRegistry

from model.spec.golden import Feed, GoldenCase
from service.app import App
from service.config import ServeConfig
from service.engine.engine import LastRun
from service.engine.types import Device, StepStats, StoppingParams
from service.errors import RequestError
from service.forecasting.prediction import StepTimes
from service.generator import GenerateCall, Piece
from service.repository.models import ModelState, ServedModel
from service.runtime.async_engine import AsyncEngine
from tests.by_hand import (
    QUEUE,
    SLOTS,
    HandEngine,
    HandLibrary,
    HandPool,
    HandServer,
    HandThread,
    Jobs,
    Shelved,
    Spelling,
    needs,
)
from tests.fakes import BOS, GREEDY, NUM_SPECIAL, noise
from tests.servers import served_model

DRAIN_SECONDS = 5.0
MOST_MOVES = 5_000


async def _close(_: float) -> None:
    """A tracer's end."""


@dataclass(slots=True)
class Trace:
    """What was reported to a tracer of one request."""

    num_submitted: int = 0
    num_ended: int = 0

    def submitted(self, *_: object) -> None:
        self.num_submitted += 1

    def ended(self, *_: object) -> None:
        self.num_ended += 1


@dataclass(slots=True, eq=False)
class Asked:
    """A request or a change that is awaited; `parts` is what a request has got."""

    what: str
    model: str
    task: asyncio.Task[Any]
    max_tokens: int = 0
    parts: list[Any] = field(default_factory=list)


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
        # The engine of each step, by the moment at which it began: no two begin at once.
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
            cast(Any, SimpleNamespace(request=self._trace, close=_close)),
            self.pool,
            make_server=partial(HandServer, self.health),
        )
        for name in ("open", "replace"):
            setattr(self.app._engine, name, partial(self._note_engine, getattr(self.app._engine, name)))
        self._stopping = asyncio.Event()
        self.life = self.loop.create_task(self._live())
        while self.app._engine._thread is None:
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
        """Starts a request or a change."""
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

    def call(self, name: str, request_id: str, max_tokens: int, timeout: float | None = None) -> GenerateCall:
        """What a client asks a model for."""
        return GenerateCall(
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

    def ask(self, name: str, request_id: str, max_tokens: int = 3, timeout: float | None = None) -> Asked:
        """Starts a request to a model."""
        call = self.call(name, request_id, max_tokens, timeout)
        parts: list[Any] = []

        async def run() -> None:
            async with aclosing(self.app._generator.run(call, None)) as answer:
                # One by one: what a request has got so far is looked at.
                async for part in answer:
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
            _: Path,
            models: Sequence[ServedModel],
            config: ServeConfig,
            last_run: LastRun,
            kv: Mapping[str, int],
            **__: bool,
        ) -> dict[str, HandEngine]:
            return {model.name: world.make_engine(model, kv[model.name]) for model in models}

        return {
            "time.monotonic": lambda: world.now,
            "service.app.AsyncEngine": partial(AsyncEngine, clock=lambda: world.now),
            "service.runtime.async_engine.EngineThread": HandThread,
            "service.app.Library": partial(HandLibrary, world),
            "service.process.text_pool.ThreadPoolExecutor": lambda *_, **__: world.jobs,
            "service.explain.explainer.ThreadPoolExecutor": lambda *_, **__: world.jobs,
            "service.repository.library._in_daemon": world.jobs.submit,
            "service.repository.startup.build_engines": build,
            "service.repository.library.garbage": SimpleNamespace(collect=lambda: 0),
            "service.forecasting.prediction.StepTimes": HandTimes,
        }

    async def _live(self) -> None:
        async with self.app.listening():
            await self.app.start(self._stopping)
            await self.app.wait(self._stopping)

    def _trace(self, model: str) -> Trace:
        self.traces.append(Trace())
        return self.traces[-1]

    def _note_engine(self, install: Callable[..., Any], model: Any, engine: HandEngine, *others: Any) -> Any:
        self.current[engine.model.name] = engine
        return install(model, engine, *others)

    def _note_lesson(self, pupil: StepTimes, stats: StepStats) -> None:
        teacher = self.steppers[stats.start_time]
        for name, entry in self.app.models.entries.items():
            if entry.queue.predictor._times is pupil and self.current[name] is not teacher:
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
        assert Counter(part.model for part in self.pool._parts) == Counter(names)

    def _check_served(self, names: Collection[str]) -> None:
        models, engine = self.app.models, self.app._engine
        assert set(self.thread._entries) == set(engine.flight_log().models) == set(names)
        states = {name: models.state(name) for name in names}
        assert set(states.values()) <= {ModelState.SERVING, ModelState.FAILED}, states
        for name, state in states.items():
            if self.current[name].num_unproven >= 3:
                assert state is ModelState.FAILED, f"{name} fails and is asked on"
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
            own = [each for each in self.engines if each.model.name == asked.model]
            # One that begins to lie, or stops to, writes two letters.
            assert len(set(tokens)) == 1 or any(each.has_lied for each in own), "two engines wrote one answer"
