"""Several models on one engine thread, whose clock goes by what is computed: who gets the time, and who waits for whom.

Real engines and the real thread; only the runner is pretended, and time is what it says. Everything that is asked is
asked before the thread starts or from the thread itself, so that every run is the same.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import pytest

from service.engine.batch import ScheduledBatch
from service.engine.engine import Engine, LastRun
from service.engine.interfaces import EngineHandle
from service.engine.scheduler import EngineLimits
from service.engine.types import FinishReason, GenerationRequest, StepOutput, StoppingParams
from service.errors import EngineFailed, NotServing, RequestError
from service.runtime.engine_thread import _MAX_COMMANDS, _MAX_QUESTIONS, EngineThread
from tests.fakes import FakeRunner, expected_tokens, fake_engine, request

CHUNK_SECONDS, STEP_SECONDS = 0.4, 0.01
LIMITS = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=8)
CONTEXT = 512


@dataclass
class World:
    """Engines over pretended runners, the thread that steps them, and what it tells; `now` is everybody\'s clock."""

    weights: dict[str, float] = field(default_factory=dict)
    until: float = 40.0
    now: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    begun: list[tuple[float, str]] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    running: Callable[[str], None] = lambda model: None
    heard: Callable[[str, StepOutput], None] = lambda model, output: None
    error: BaseException | None = None

    def engine(self, model: str) -> Engine:
        def run(batch: ScheduledBatch) -> None:
            took = CHUNK_SECONDS * batch.num_prefill_runs + STEP_SECONDS * (batch.num_decode_rows > 0)
            self.begun.append((self.now, model))
            self.running(model)
            self.seconds[model] += took
            self.now += took

        runner = FakeRunner(LIMITS.max_batch_size, before_run=run)
        return fake_engine(runner, limits=LIMITS, context=CONTEXT, last_run=self.last_run, clock=lambda: self.now)

    def __post_init__(self) -> None:
        self.last_run = LastRun()
        self.over = threading.Event()

    def run(self, models: list[str], asked: Callable[[World], None]) -> None:
        """From when so much was asked to `until`."""
        self.handles = {model: EngineHandle(model) for model in models}
        engines = {handle: self.engine(model) for model, handle in self.handles.items()}
        # What is posted runs at once, on the engine thread: nothing depends on another thread\'s pace.
        self.thread = EngineThread(engines, self, lambda call: call(), self.weights, lambda: self.now)
        asked(self)
        self.thread.start()
        assert self.over.wait(60.0)
        if self.error is not None:
            raise self.error

    def submit(self, model: str, asked: GenerationRequest) -> None:
        self.thread.submit(self.handles[model], asked)

    def step_done(self, engine: EngineHandle, output: StepOutput, now: float) -> None:
        for event in output.events:
            if event.token_id is not None:
                self.tokens[event.request_id].append(event.token_id)
        try:
            self.heard(engine.model, output)
        except BaseException as error:
            self.error = error
        if self.now >= self.until or self.error is not None:
            self.thread.stop()

    def rejected(self, engine: EngineHandle, request_id: str, error: RequestError, now: float) -> None:
        self.error = error

    def ended(self, error: EngineFailed | None) -> None:
        self.error = self.error or error
        self.over.set()


def writing(name: str, count: int) -> GenerationRequest:
    """A token for each step."""
    return request(name, (5,), stopping=StoppingParams(max_tokens=count, ignore_eos=True))


def reading(name: str, chunks: int) -> GenerationRequest:
    """A prompt of so many chunks that hardly another begins like, and a token."""
    number = zlib.crc32(name.encode())
    return request(name, [3 + (number + i * (number >> 8)) % 29 for i in range(8 * chunks)], max_tokens=1)


def renew(world: World, model: str, output: StepOutput) -> None:
    """Whoever is over is followed by another, so that the model always has work."""
    for event in output.events:
        if event.is_terminal and model in ("reader", "writer"):
            name = f"{event.request_id}+"
            world.submit(model, reading(name, 4) if model == "reader" else writing(name, 400))


def begin(world: World) -> None:
    for number in range(3):
        world.submit("reader", reading(f"r{number}", 4))
        world.submit("writer", writing(f"w{number}", 400))


@pytest.mark.parametrize("weight", [3.0])
def test_long_chunks_of_one_model_leave_the_steps_of_another_their_share(weight: float) -> None:
    """Step by step, the writer would get 1 second of 41: here half of them or three quarters, within a turn of each."""
    world = World({"writer": weight})
    world.heard = partial(renew, world)
    world.run(["reader", "writer"], begin)
    got, bound = world.seconds, CHUNK_SECONDS + STEP_SECONDS / weight
    assert got["writer"] + got["reader"] == pytest.approx(world.now), "no time is lost"
    assert abs(got["writer"] / weight - got["reader"]) <= bound + 1e-6
    # And they come as evenly as can be: between two of the writer's steps lies one chunk at most.
    starts = [moment for moment, model in world.begun if model == "writer"]
    assert max(after - before for before, after in itertools.pairwise(starts)) <= CHUNK_SECONDS + STEP_SECONDS + 1e-6


def test_whoever_comes_to_busy_others_is_begun_after_a_turn_of_each_at_most() -> None:
    """And when it comes a turn has just begun, which is one of these."""
    world = World()
    asked: list[float] = []
    waits: list[float] = []

    def come(model: str) -> None:
        if model == "late":
            waits.append(world.now - asked[-1])
        elif len(asked) == len(waits) and world.now > 1.37 * (1 + len(asked)):
            asked.append(world.now)
            world.submit("late", writing(f"late{len(asked)}", 1))

    world.running, world.heard = come, partial(renew, world)
    world.run(["reader", "writer", "late"], begin)
    assert len(waits) > 20
    assert max(waits) <= CHUNK_SECONDS + STEP_SECONDS + 1e-6


def test_a_model_alone_is_held_up_by_nobody_whatever_its_weight() -> None:
    world = World({"a": 0.1}, until=99.5 * STEP_SECONDS)
    world.run(["a", "b", "c"], lambda world: world.submit("a", writing("w", 100)))
    assert world.tokens["w"] == expected_tokens((5,), 100)
    assert world.now == pytest.approx(100 * STEP_SECONDS)


@dataclass
class Witness:
    """What a model's steps found: how many questions had been answered, and how many requests were known, by step."""

    world: World
    answered: list[int] = field(default_factory=list)
    num_answered: list[int] = field(default_factory=list)
    num_known: list[int] = field(default_factory=list)
    ends: dict[str, FinishReason | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world.running = lambda _: self.num_answered.append(len(self.answered))
        self.world.heard = self.hear

    def hear(self, _: str, output: StepOutput) -> None:
        self.ends |= {event.request_id: event.finish_reason for event in output.events if event.is_terminal}
        self.num_known.append(output.stats.num_running + output.stats.num_waiting + len(self.ends))

    def question(self, model: str, number: int) -> Future[None]:
        return self.world.thread.ask(self.world.handles[model], lambda _: self.answered.append(number))


def test_a_flood_of_questions_holds_up_no_step_and_no_request() -> None:
    world = World(until=30.5 * STEP_SECONDS)
    witness = Witness(world)

    def asked(world: World) -> None:
        world.submit("a", writing("first", 100))
        for number in range(100):
            # Callers that have gone take no other's place.
            assert witness.question("a", -1).cancel()
            witness.question("a", number)
        world.submit("a", writing("second", 100))
        world.thread.abort(world.handles["a"], "first")
        world.submit("a", writing("third", 100))

    world.run(["a"], asked)
    assert witness.answered == list(range(100))
    assert witness.num_answered[:13] == [*range(_MAX_QUESTIONS, 100, _MAX_QUESTIONS), 100]
    # What came behind them was done before the first step.
    assert witness.num_known[0] == 3
    assert witness.ends == {"first": FinishReason.CANCELLED}
    assert len(world.tokens["second"]) == len(world.tokens["third"]) == len(world.begun)


def test_a_flood_of_requests_is_taken_in_between_steps_in_order_and_none_is_lost() -> None:
    world = World(until=30.5 * STEP_SECONDS)
    witness = Witness(world)
    names = [f"r{number}" for number in range(100)]

    def asked(world: World) -> None:
        for name in names:
            world.submit("a", writing(name, 400))
        for name in names[:-1]:
            world.thread.abort(world.handles["a"], name)

    world.run(["a"], asked)
    assert witness.num_known[:4] == [*range(_MAX_COMMANDS, 100, _MAX_COMMANDS), 100]
    assert witness.ends == dict.fromkeys(names[:-1], FinishReason.CANCELLED)
    assert world.tokens[names[-1]]


def test_questions_that_came_before_another_engine_are_answered_by_the_one_that_they_were_for() -> None:
    world = World(until=3.5 * STEP_SECONDS)
    asked_of: list[object] = []
    num_asked: list[int] = []
    questions: list[Future[None]] = []

    def asked(world: World) -> None:
        old, world.handles["a"] = world.handles["a"], EngineHandle("a")
        questions.extend(world.thread.ask(old, asked_of.append) for _ in range(3 * _MAX_QUESTIONS))
        world.thread.install(world.handles["a"], world.engine("a"), lambda: num_asked.append(len(asked_of)))
        questions.append(world.thread.ask(old, asked_of.append))
        world.submit("a", writing("w", 100))

    world.run(["a"], asked)
    # None when that is gone, and its memory given back.
    assert num_asked == [len(asked_of)] == [3 * _MAX_QUESTIONS]
    assert len(set(map(id, asked_of))) == 1
    assert isinstance(questions[-1].exception(0), NotServing)
