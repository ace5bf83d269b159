"""Two engines of a reloaded model on one budget: never beyond it together, and nobody waits for ever.

Real engines on the real thread; the runners are pretended and count what they hold. What is posted runs on the engine
thread itself, so that a request comes or a model is reloaded between two given steps.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.engine import Engine, LastRun
from service.engine.interfaces import EngineHandle
from service.engine.kv.reservations import KVBudget
from service.engine.scheduler import EngineLimits
from service.engine.types import GenerationRequest, StepOutput, StoppingParams
from service.errors import EngineFailed, RequestError
from service.runtime.engine_thread import EngineThread
from tests.fakes import CONTEXT, FakeRunner, drain, expected_tokens, fake_engine, request, tokens_of

LIMITS = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=16)
MOST_STEPS = 3_000


def budget(rows: float) -> KVBudget:
    """Of so many sequences of full length, in pages of four tokens of three bytes."""
    return KVBudget(num_bytes=int(rows * 3 * CONTEXT), token_bytes=3, page_tokens=4)


def engine(kv_budget: KVBudget, runner: FakeRunner) -> Engine:
    return fake_engine(runner, limits=LIMITS, kv_budget=kv_budget, last_run=LastRun())


def writing(name: str, length: int, new: int, priority: int = 0) -> GenerationRequest:
    prompt = [3 + (7 * i + length) % 29 for i in range(length)]
    return request(name, prompt, stopping=StoppingParams(max_tokens=new, ignore_eos=True), priority=priority)


# What an engine gives up, by itself.


def test_an_engine_keeps_within_a_limit_and_takes_more_when_it_may() -> None:
    small, runner = budget(2), FakeRunner(LIMITS.max_batch_size)
    one = engine(small, runner)
    for name in "abc":
        one.add_request(writing(name, 8, 24))
    # A request takes 32 tokens of three bytes at its longest, half a row.
    one.limit_kv(2 * 96)
    outputs = [one.step() for _ in range(6)]
    assert (one.num_running, one.num_waiting) == (2, 1)
    assert runner.num_held_bytes(small) <= 2 * 96
    one.limit_kv(one.kv_memory_bytes)
    outputs += [one.step()]
    assert one.num_running == 3
    outputs += drain(one)
    for name in "abc":
        assert tokens_of(outputs, name) == expected_tokens(writing(name, 8, 24).prompt_token_ids, 24)


def test_an_engine_without_any_memory_waits_until_it_has_some() -> None:
    one = engine(budget(2), FakeRunner(LIMITS.max_batch_size))
    one.limit_kv(0)
    one.add_request(writing("a", 8, 4))
    for _ in range(5):
        assert one.step().events == ()
    assert (one.num_running, one.num_waiting) == (0, 1)
    one.limit_kv(96)
    assert len(tokens_of(drain(one), "a")) == 4


def test_what_requests_hold_cannot_be_taken_from_them() -> None:
    one = engine(budget(2), FakeRunner(LIMITS.max_batch_size))
    one.add_request(writing("a", 8, 24))
    one.step()
    with pytest.raises(ValueError, match="requests hold 96 bytes, the limit cannot be 95"):
        one.limit_kv(95)


def test_an_engine_needs_what_its_requests_do_and_keeps_no_prompts_for_later_within_that() -> None:
    whole, runner = budget(4), FakeRunner(LIMITS.max_batch_size)
    one = engine(whole, runner)
    one.add_request(writing("before", 40, 4))
    drain(one)
    assert runner.kept
    for name, new in (("a", 24), ("b", 8)):
        one.add_request(writing(name, 8, new))
    one.step()
    assert one.kv_needed_bytes == 96 + 48
    one.limit_kv(96 + 48)
    one.step()
    assert runner.num_held_bytes(whole) <= 96 + 48
    drain(one)
    assert one.kv_needed_bytes == 0


def test_an_engine_needs_room_for_the_largest_that_waits() -> None:
    one = engine(budget(2), FakeRunner(LIMITS.max_batch_size))
    for name, new in (("a", 4), ("b", 56), ("c", 8)):
        one.add_request(writing(name, 8, new))
    assert one.kv_needed_bytes == 3 * CONTEXT
    one.limit_kv(3 * CONTEXT)
    outputs = drain(one)
    assert [len(tokens_of(outputs, name)) for name in "abc"] == [4, 56, 8]


# A reload, whole.


@dataclass
class Reload:
    """A model that is asked, and reloaded, after so many steps each."""

    rows: float
    asked: list[tuple[int, GenerationRequest]]
    reloads: list[int]
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_steps: int = 0
    gone: set[int] = field(default_factory=set)
    error: BaseException | None = None

    def run(self) -> None:
        self.budget = budget(self.rows)
        self.runners = [FakeRunner(LIMITS.max_batch_size)]
        self.num_left = len(self.asked)
        self.over = threading.Event()
        self.handle = EngineHandle("m")
        self.thread = EngineThread({self.handle: engine(self.budget, self.runners[0])}, self, lambda call: call(), {})
        self.feed()
        self.thread.start()
        assert self.over.wait(60.0)
        if self.error is not None:
            raise self.error

    def feed(self) -> None:
        """What comes now, in order; all that is left once nobody is there."""
        while self.asked and (self.asked[0][0] <= self.num_steps or self.num_left == len(self.asked)):
            self.thread.submit(self.handle, self.asked.pop(0)[1])
        while self.reloads and self.reloads[0] <= self.num_steps:
            self.reloads.pop(0)
            former = len(self.runners) - 1
            self.runners.append(FakeRunner(LIMITS.max_batch_size))
            self.handle = EngineHandle("m")
            self.thread.install(self.handle, engine(self.budget, self.runners[-1]), partial(self.gone.add, former))

    def step_done(self, engine: EngineHandle, output: StepOutput, now: float) -> None:
        self.num_steps += 1
        try:
            there = [runner for number, runner in enumerate(self.runners) if number not in self.gone]
            held = [runner.num_held_bytes(self.budget) for runner in there]
            assert sum(held) <= self.budget.num_bytes, held
            assert self.num_steps < MOST_STEPS, "somebody waits for ever"
        except AssertionError as error:
            self.error = error
        for event in output.events:
            if event.token_id is not None:
                self.tokens[event.request_id].append(event.token_id)
            self.num_left -= event.is_terminal
        self.feed()
        if not self.num_left or self.error is not None:
            self.thread.stop()

    def rejected(self, engine: EngineHandle, request_id: str, error: RequestError, now: float) -> None:
        self.error = error

    def ended(self, error: EngineFailed | None) -> None:
        self.error = self.error or error
        self.over.set()


def test_what_an_engine_gives_up_is_not_used_before_a_step_has_freed_it() -> None:
    """The first of two requests that fill the memory ends a step before the second, and a prompt waits for its half."""
    asked = [(0, writing("a", 24, 8)), (0, writing("b", 25, 7)), (6, writing("c", 16, 16))]
    world = Reload(1.0, list(asked), [5])
    world.run()
    assert [len(world.tokens[name]) for name in "abc"] == [8, 7, 16]


REQUESTS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=14
)


@settings(max_examples=120)
@given(
    rows=st.sampled_from([1.0, 1.3, 2.0, 3.5, 6.0]),
    drawn=REQUESTS,
    reloads=st.lists(st.integers(1, 60), min_size=1, max_size=3),
)
def test_engines_of_a_reloaded_model_never_hold_more_than_its_part_and_end_all_they_have(
    rows: float, drawn: list[tuple[int, int, int, int]], reloads: list[int]
) -> None:
    drawn = [(at, length, min(new, CONTEXT - length), priority) for at, length, new, priority in sorted(drawn)]
    asked = [
        (at, writing(f"r{number}", length, new, priority)) for number, (at, length, new, priority) in enumerate(drawn)
    ]
    world = Reload(rows, list(asked), sorted(reloads))
    world.run()
    for _, each in asked:
        count = each.stopping.max_tokens
        assert world.tokens[each.request_id] == expected_tokens(each.prompt_token_ids, count), each.request_id
