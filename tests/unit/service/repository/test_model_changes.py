"""Models that change while something else is under way: what each step, call, request and outcome belongs to.

Each order of events is played by hand on a whole server (`tests.model_world`); `test_model_life` draws others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from service.engine.types import Device, GenerationRequest
from service.errors import NotServing
from service.repository.models import ModelState
from tests.by_hand import Shelved
from tests.fakes import BOS, request
from tests.model_world import MOST_MOVES, Asked, World

LONG = 25


@contextmanager
def serving(shelf: str, names: str, *arguments: Any, is_started: bool = True, **options: Any) -> Iterator[World]:
    """A server that rests at the end and, if it is started, at the beginning."""
    world = World({name: Shelved() for name in shelf}, names, *arguments, **options)
    try:
        if is_started:
            world.rest()
            world.check_rest()
        yield world
        world.rest()
        world.check_rest()
    finally:
        world.close()


@pytest.fixture(params=[Device.CPU, Device.CUDA])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A server that serves "a"; "b" is there to be loaded."""
    with serving("ab", "a", request.param, calibrate=False) as world:
        yield world


@pytest.fixture
def starting() -> Iterator[World]:
    """A server that has begun to calibrate "a"."""
    with serving("ab", "a", is_started=False, calibrate=True) as world:
        yield world


def turn(world: World, until: Callable[[], object], *, thread: bool = True) -> None:
    """Moves everything, or all but the engine thread, until something holds."""
    for _ in range(MOST_MOVES):
        if until():
            return
        world.turn_loop()
        if thread:
            world.thread.turn()
        world.jobs.run()
    raise AssertionError("it never holds")


def run(world: World, name: str = "a", request_id: str = "running", max_tokens: int = LONG) -> Asked:
    """A request that has got its first token and not its last."""
    asked = world.ask(name, request_id, max_tokens)
    turn(world, lambda: len(asked.parts) > 1)
    assert not asked.task.done()
    return asked


def reload(world: World, name: str = "a") -> Asked:
    """Has another engine installed: the event loop knows it, the engine thread does not."""
    before, change = world.current[name], world.reload(name)
    while True:
        world.turn_loop()
        if world.current[name] is not before:
            return change
        # On a device the engine thread makes the engine.
        if not world.jobs.run() and not world.thread._inbox.empty():
            world.thread.turn()


@contextmanager
def stuck_reload(**options: Any) -> Iterator[World]:
    """A server that has read a model anew and is about to make its engine."""
    with serving("a", "a", **options) as world:
        world.reload("a")
        for _ in ("its needs", "its model"):
            while not world.jobs.run():
                world.turn_loop()
        world.rest_loop()
        assert len(world.jobs.waiting) == 1
        yield world


def waiting_calls(world: World, name: str = "a") -> int:
    return len(world.thread._entries[name].calls)


def tokens(asked: Asked) -> list[int]:
    return [token for part in asked.parts for token in getattr(part, "token_ids", ())]


# Replays.


def test_a_replay_that_waits_while_its_model_is_reloaded_replays_the_new_models_cases(world: World) -> None:
    run(world)
    verified = world.verify("a")
    turn(world, lambda: waiting_calls(world))
    reload(world)
    world.rest()
    assert world.app.models.state("a") is ModelState.SERVING
    assert verified.task.result().cases[0].name == world.current["a"].model.golden_cases[0].name


def test_an_outcome_that_is_reported_after_a_reload_is_not_the_new_models() -> None:
    with stuck_reload(calibrate=False) as world:
        world.current["a"].go_wrong("lies")
        verified = world.verify("a")
        world.rest_loop()
        # The replay is over and the new engine is made before either is reported to the event loop.
        world.thread.turn()
        world.jobs.run()
        world.rest()
        assert world.app.models.state("a") is ModelState.SERVING
        assert verified.task.result().passed


def test_a_model_reloaded_while_it_is_mended_serves(world: World) -> None:
    world.current["a"].go_wrong("breaks requests")
    broken = world.current["a"]
    for number in range(8):
        world.ask("a", str(number))
    turn(world, lambda: world.app.models.state("a") is ModelState.FAILED)
    reload(world)
    world.rest()
    assert broken.is_gone
    assert world.app.models.state("a") is ModelState.SERVING


def fail(world: World) -> None:
    """Has "a" fail step after step, and the replays after that as well."""
    world.current["a"].go_wrong("breaks")
    for number in range(8):
        world.ask("a", str(number))
    turn(world, lambda: world.app.models.state("a") is ModelState.FAILED)
    world.rest()


def test_a_failed_model_whose_replay_fails_for_a_while_serves_again_by_itself(world: World) -> None:
    fail(world)
    engine, found = world.current["a"], list[int]()
    before = engine.num_replays
    for seconds in (1, 1, 1, 1, 3):
        world.now += seconds
        world.rest()
        found.append(engine.num_replays - before)
    assert found == [1, 1, 2, 2, 3], "after pauses of 1, 2 and 4 seconds"
    assert world.app.models.state("a") is ModelState.FAILED
    engine.go_wrong(None)
    world.now += 8
    world.rest()
    assert world.app.models.state("a") is ModelState.SERVING
    assert world.app._verifier._mending == set()


def test_pauses_between_replays_grow_to_a_minute_and_unexpected_errors_are_logged_as_such(world: World) -> None:
    replay = mock.AsyncMock(side_effect=ValueError("unexpected"))
    with (
        mock.patch("service.repository.verifier._LOGGER") as log,
        mock.patch.object(world.app._verifier, "verify", replay),
    ):
        fail(world)
        for _ in range(7):
            world.now += 60
            world.rest()
    assert replay.await_count == 8
    assert [call.args[1:] for call in log.exception.call_args_list] == [
        ("a", seconds) for seconds in (1, 2, 4, 8, 16, 32, 60, 60)
    ]
    reload(world)
    world.rest()


def test_a_failed_model_that_is_reloaded_is_not_replayed_any_more(world: World) -> None:
    fail(world)
    reload(world)
    world.rest()
    num_replays = world.current["a"].num_replays
    world.now += 100
    world.rest()
    assert world.current["a"].num_replays == num_replays
    assert world.app._verifier._mending == set()


def test_a_replay_waits_until_the_engine_before_has_given_its_memory_back(world: World) -> None:
    running = run(world)
    reload(world)
    verified = world.verify("a")
    world.rest()
    world.check()
    assert verified.task.result().passed
    assert len(tokens(running)) == LONG


def test_requests_that_wait_behind_a_replay_are_answered_by_the_engine_they_were_made_for(world: World) -> None:
    run(world)
    world.verify("a")
    turn(world, lambda: waiting_calls(world))
    old = world.current["a"]
    behind = world.ask("a", "behind")
    turn(world, lambda: world.thread._entries["a"].parked)
    reload(world)
    world.rest()
    world.check()
    assert set(tokens(behind)) == {old.letter}


@pytest.mark.parametrize("rounds", range(8))
def test_a_replay_whose_model_is_unloaded_before_its_outcome_is_known_leaves_no_series(
    world: World, rounds: int
) -> None:
    replays = world.current["a"].num_replays
    verified = world.verify("a")
    world.turn_loop()
    world.unload("a")
    for _ in range(rounds):
        world.turn_loop()
    turn(world, lambda: world.current["a"].num_replays > replays or verified.task.done())
    world.rest()
    assert world.app.models.names == ()


# Start-up.


@pytest.mark.parametrize("rounds", range(6))
def test_a_model_unloaded_while_it_is_calibrated_leaves_the_server_as_it_was(starting: World, rounds: int) -> None:
    unloaded = starting.unload("a")
    for _ in range(rounds):
        starting.turn_loop()
    starting.thread.turn()
    starting.rest()
    assert unloaded.task.exception() is None
    assert not starting.life.done()
    loaded = starting.load("b")
    starting.rest()
    assert loaded.task.exception() is None
    assert starting.app.models.state("b") is ModelState.SERVING


def test_a_model_reloaded_while_it_is_calibrated_learns_from_its_own_engine_alone(starting: World) -> None:
    starting.reload("a")
    turn(starting, lambda: len(starting.engines) == 2)
    starting.rest()
    assert starting.app.models.state("a") is ModelState.SERVING


def test_a_start_that_could_not_replay_a_model_says_nothing_of_another_of_its_name() -> None:
    with stuck_reload(calibrate=False, faults={"a": "breaks"}, is_started=False) as world:
        world.thread.turn()
        world.jobs.run()
        world.rest()
        assert world.app.models.state("a") is ModelState.SERVING


def test_a_start_replays_no_model_that_was_proven_before_its_turn() -> None:
    with serving("ab", "ab", is_started=False, calibrate=False) as world:
        world.verify("b")
        world.rest_loop()
        for _ in "ab":
            world.thread.turn()
        world.rest_loop()
        # Longer than a replay waits for a model that serves, while the engine thread does other things.
        world.now += 11.0
        world.rest_loop()
        world.rest()
        assert world.app.models.state("b") is ModelState.SERVING


# Steps.


def test_steps_of_a_replaced_engine_teach_the_new_ones_predictor_nothing(world: World) -> None:
    run(world)
    reload(world)
    learned = world.app.models.find("a").queue.predictor
    world.rest()
    world.check()
    assert world.app.models.find("a").queue.predictor is learned


def test_failures_of_a_replaced_engine_are_not_the_new_ones(world: World) -> None:
    for number in range(6):
        world.ask("a", str(number))
    turn(world, lambda: world.app._engine.num_streams == 6)
    turn(world, lambda: world.current["a"].num_waiting)
    old = world.current["a"]
    reload(world)
    old.go_wrong("breaks requests")
    world.rest()
    assert old.num_failed >= 3
    assert world.current["a"].num_replays == 1, "it was proven once, not again"


def test_successes_of_a_replaced_engine_do_not_make_up_for_the_new_ones_failures(world: World) -> None:
    run(world, request_id="old", max_tokens=25)
    reload(world)
    new = world.current["a"]
    new.go_wrong("breaks requests")
    for number in range(3):
        world.ask("a", str(number))
        turn(world, lambda count=number: new.num_failed > count)
    world.rest()
    assert new.num_failed == 3
    assert new.num_replays == 1, "it is proven again"


def test_gauges_count_the_requests_of_a_replaced_engine_until_they_are_over_and_of_the_new_one_besides(
    world: World,
) -> None:
    def shown(name: str) -> float | None:
        return world.registry.get_sample_value(f"onward_{name}", {"model_name": "a"})

    old = run(world)
    alone = shown("kv_cache_usage_ratio")
    reload(world)
    new = world.ask("a", "new", LONG)
    turn(world, lambda: len(new.parts) > 1)
    assert not old.task.done()
    world.rest_loop()
    both = shown("kv_cache_usage_ratio")
    assert shown("num_requests_running") == 2
    assert alone is not None
    assert both is not None
    assert both > alone > 0
    assert world.app._library.kv_memory("a")[1] == round(both * world.pool.parts["a"])
    world.rest()
    assert (shown("num_requests_running"), shown("kv_cache_usage_ratio")) == (0, 0)


def test_a_model_that_fails_again_once_it_is_proven_is_proven_again(world: World) -> None:
    engine = world.current["a"]
    engine.go_wrong("breaks requests")
    for again in (1, 2):
        for number in range(3):
            world.ask("a", f"{again} {number}")
            world.rest()
        assert engine.num_replays == 1, again


# Names that come back.


def test_a_late_refusal_of_a_removed_engine_is_not_a_new_requests_of_the_same_name(world: World) -> None:
    world.load("b")
    world.rest()
    running = run(world)
    world.verify("a")
    turn(world, lambda: waiting_calls(world))
    engine = world.app._engine
    with engine.admit("a", "mine") as place:
        # Too long for the engine, which has not looked at it yet.
        place.submit(_request("a", "mine", world.current["a"].letter, 40))
        world.unload("a")
        for _ in range(4):
            world.turn_loop()
        world.now += 6.0
        turn(world, lambda: not engine.num_streams, thread=False)
    again = world.ask("b", "mine")
    turn(world, lambda: engine.num_streams, thread=False)
    world.rest()
    assert isinstance(running.task.exception(), NotServing)
    assert len(tokens(again)) == again.max_tokens


def test_a_place_that_was_taken_away_cannot_be_used_under_a_name_that_is_used_again(world: World) -> None:
    engine = world.app._engine
    place = engine.admit("a", "mine")
    world.unload("a")
    for _ in range(4):
        world.turn_loop()
    world.now += 6.0
    world.rest()
    world.load("a")
    world.rest()
    with engine.admit("a", "mine") as again:
        with place, pytest.raises(NotServing):
            place.submit(_request("a", "mine", world.current["a"].letter))
        again.submit(_request("a", "mine", world.current["a"].letter))
        world.rest()
    assert world.traces[-1].num_ended == 1
    assert world.registry.get_sample_value("onward_requests_total", {"model_name": "a", "finish_reason": "length"})


def _request(name: str, request_id: str, letter: int, num_tokens: int = 3, max_tokens: int = 4) -> GenerationRequest:
    prompt = (BOS, letter, *(5,) * (num_tokens - 2))
    return replace(request(request_id, prompt, max_tokens=max_tokens), model=name, arrival_time=time.monotonic())


# What waits without limit, and what must not.


def test_a_failed_model_is_proven_again_however_long_its_last_requests_take(world: World) -> None:
    engine = world.current["a"]
    engine.go_wrong("breaks requests")
    for number in range(2):
        world.ask("a", str(number))
        world.rest()
    running = [world.ask("a", f"long {number}", LONG) for number in range(6)]
    turn(world, lambda: engine.num_failed == 3)
    # It is well again, and the rest of its requests go on.
    engine.go_wrong(None)
    turn(world, lambda: world.app.models.state("a") is ModelState.FAILED and waiting_calls(world))
    world.now += 11.0
    for _ in range(4):
        world.turn_loop()
    world.rest()
    assert [len(tokens(asked)) for asked in running].count(LONG) >= 4
    assert world.app.models.state("a") is ModelState.SERVING


def test_a_model_that_fails_during_a_verification_is_proven_however_long_that_takes(world: World) -> None:
    engine = world.current["a"]
    running = [world.ask("a", f"long {number}", LONG) for number in range(8)]
    turn(world, lambda: engine.num_waiting == 6)
    world.verify("a")
    turn(world, lambda: waiting_calls(world))
    engine.go_wrong("breaks requests")
    turn(world, lambda: engine.num_failed == 3)
    engine.go_wrong(None)
    # Both wait for one replay, which was begun while the model served.
    world.rest_loop()
    assert world.app.models.state("a") is ModelState.FAILED
    world.now += 11.0
    world.rest_loop()
    world.rest()
    assert [len(tokens(asked)) for asked in running].count(LONG) == 2
    assert world.app.models.state("a") is ModelState.SERVING


def test_an_estimate_is_of_one_model_though_another_takes_its_place_meanwhile(world: World) -> None:
    world.shelf["a"] = Shelved(context=16)
    call = world.call("a", "estimated", 30)
    estimated = world.do("estimate", "a", world.app._generator.estimate(call))
    world.turn_loop()
    (job,) = world.jobs.waiting
    world.jobs.waiting.clear()
    reload(world)
    world.jobs.waiting.append(job)
    world.rest()
    world.check()
    assert estimated.task.exception() is None


# Changes.


def test_the_only_model_is_reloaded_without_its_name(world: World) -> None:
    before = world.current["a"]
    world.reload("")
    world.rest()
    assert world.current["a"] is not before


def test_a_model_that_is_served_is_loaded_anew_only_if_it_fails(world: World) -> None:
    before = world.current["a"]
    world.load("a")
    world.rest()
    assert world.current["a"] is before
    world.app.models.failing("a")
    world.load("a")
    world.rest()
    assert world.current["a"] is not before
    assert world.app.models.state("a") is ModelState.SERVING


def test_a_model_that_is_ready_when_the_server_stops_takes_no_requests(world: World) -> None:
    world.is_stopping = True
    world.app.models.drain()
    for change in (world.load("b"), world.reload("a")):
        world.rest()
        assert change.task.exception() is None
    assert [world.app.models.state(name) for name in "ab"] == [ModelState.DRAINING] * 2


def test_a_model_is_removed_though_the_engine_thread_has_ended() -> None:
    world = World({"a": Shelved()}, "a", calibrate=False)
    try:
        world.rest()
        world.do("stop", "a", world.app._engine.stop())
        world.rest()
        removed = world.do("remove", "a", world.app._engine.remove(world.app.models.find("a").queue, 1.0))
        world.rest()
        assert removed.task.result().done()
    finally:
        world.is_stopping = True
        world.close()
