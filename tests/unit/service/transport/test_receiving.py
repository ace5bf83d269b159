"""Reads share places fairly between callers, and slow ones lose theirs to waiting callers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import pytest

from service.errors import ClientStalled
from service.transport import read_places
from service.transport.flooding import FloodGuard
from service.transport.open_methods import OpenMethods
from service.transport.read_places import Connection
from service.transport.receiving import Receiver

MESSAGE = 100


class Call:
    """A call whose message comes when `message` is set."""

    def __init__(self, peer: str = "ipv4:127.0.0.1:1") -> None:
        self.is_read = asyncio.Event()
        self.sent: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.peer = lambda: peer

    async def read(self) -> Any:
        self.is_read.set()
        return await self.sent


def receiver(num_places: int, max_stall_seconds: float = 600.0) -> Receiver:
    return Receiver(MESSAGE, max_stall_seconds, FloodGuard(MESSAGE), MESSAGE * num_places)


def begin(bound: Receiver, *callers: Hashable) -> list[tuple[Call, asyncio.Task[Any]]]:
    def message(call: Any, caller: Hashable) -> Any:
        return bound.message(call, caller, lambda _: iter(()))

    calls = [(Call(str(caller)), caller) for caller in callers]
    return [(call, asyncio.create_task(message(call, caller))) for call, caller in calls]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def begun(bound: Receiver, *callers: Hashable) -> list[tuple[Call, asyncio.Task[Any]]]:
    """Calls that have come as far as they do for now."""
    calls = begin(bound, *callers)
    await settle()
    return calls


def reads(calls: list[tuple[Call, asyncio.Task[Any]]]) -> list[bool]:
    return [call.is_read.is_set() for call, _ in calls]


async def end(calls: list[tuple[Call, asyncio.Task[Any]]]) -> list[Any]:
    for call, _ in calls:
        if not call.sent.done():
            call.sent.set_result(b"x")
    return await asyncio.gather(*(task for _, task in calls), return_exceptions=True)


async def test_a_caller_has_half_of_the_places_and_every_message_is_read_in_the_end() -> None:
    bound = receiver(8)
    calls = await begun(bound, *"aaaaaa", *"bb")
    assert reads(calls) == [True] * 4 + [False] * 2 + [True] * 2
    assert await end(calls) == [b"x"] * 8


async def test_the_next_place_is_for_the_caller_who_holds_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_places, "_PATIENCE_SECONDS", 600.0)
    bound = receiver(4)
    held = begin(bound, *"aabb")
    waiting = await begun(bound, *"aaac")
    assert reads(held + waiting) == [True] * 4 + [False] * 4
    held[0][0].sent.set_result(b"x")
    await settle()
    assert reads(waiting) == [False, False, False, True]
    assert await end(held + waiting) == [b"x"] * 8


async def test_a_slow_sender_loses_its_place_to_a_caller_who_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_places, "_PATIENCE_SECONDS", 0.01)
    bound = receiver(4)
    held = await begun(bound, *"aabb")
    ((newcomer, task),) = begin(bound, "c")
    async with asyncio.timeout(60):
        await newcomer.is_read.wait()
    assert [isinstance(task.done() and task.exception(), ClientStalled) for _, task in held].count(True) == 1
    newcomer.sent.set_result(b"y")
    assert await task == b"y"
    await end(held)


@pytest.mark.parametrize(("holders", "waiters"), [("aabb", "ab"), ("aabc", "b")], ids=["as many", "one more"])
async def test_no_read_ends_for_a_caller_that_holds_as_many_or_one_less(
    holders: str, waiters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_places, "_PATIENCE_SECONDS", 0.01)
    bound = receiver(4)
    held = begin(bound, *holders)
    looked, look = asyncio.Semaphore(0), bound.places._end_a_read
    monkeypatch.setattr(bound.places, "_end_a_read", lambda caller: (look(caller), looked.release()))
    waiting = begin(bound, *waiters)
    async with asyncio.timeout(60):
        for _ in range(4):
            await looked.acquire()
    assert not any(reads(waiting))
    assert await end(held + waiting) == [b"x"] * (len(holders) + len(waiters))


async def test_the_only_read_of_a_caller_is_not_ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_places, "_MIN_READ_SECONDS", 600.0)
    monkeypatch.setattr(read_places, "_PATIENCE_SECONDS", 600.0)
    bound = receiver(4)
    held = begin(bound, *"abcd")
    waiting = await begun(bound, *"ef")
    # As often as two who wait would.
    for _ in range(4):
        bound.places._end_a_read("e")
        bound.places._end_a_read("f")
    await settle()
    assert not any(task.done() for _, task in held)
    # Once they are older, each who waits has one.
    monkeypatch.setattr(read_places, "_MIN_READ_SECONDS", 0.0)
    bound.places._end_a_read("e")
    bound.places._end_a_read("f")
    await settle()
    assert [task.done() for _, task in held] == [True, True, False, False]
    assert reads(waiting) == [True, True]
    await end(held + waiting)


def at(address: str, *peers: str) -> list[Hashable]:
    return [Connection(address, peer) for peer in peers]


@pytest.mark.parametrize(
    ("callers", "waiters"),
    [
        ("abcd", "ae"),
        (at("here", "1", "2"), at("here", "1", "3")),
        ([*at("here", "1"), *"bcd"], [*at("here", "2"), "e"]),
    ],
    ids=["of keys", "of an address", "of addresses"],
)
async def test_a_caller_whose_read_was_ended_has_no_place_before_the_one_it_was_ended_for(
    callers: Sequence[Hashable], waiters: Sequence[Hashable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_places, "_PATIENCE_SECONDS", 600.0)
    monkeypatch.setattr(read_places, "_MIN_READ_SECONDS", 0.0)
    bound = receiver(4)
    held = await begun(bound, *callers)
    waiting = await begun(bound, *waiters)
    bound.places._end_a_read(waiters[-1])
    await settle()
    assert held[0][1].done()
    assert reads(waiting) == [False, True]
    await end(held + waiting)


async def test_connections_of_one_address_have_half_of_the_places_together() -> None:
    bound = receiver(4)
    crowd = await begun(bound, *(Connection("here", str(each)) for each in range(10)))
    assert sum(reads(crowd)) == 2
    other = await begun(bound, Connection("there", "1"))
    assert reads(other) == [True]
    assert await end(crowd + other) == [b"x"] * 11


async def test_a_message_is_looked_through_while_others_run() -> None:
    bound, call = receiver(4), Call()
    steps: list[str] = []

    def check(data: bytes) -> Iterator[None]:
        for _ in data:
            steps.append("step")
            yield

    async def other() -> None:
        while True:
            steps.append("other")
            await asyncio.sleep(0)

    call.sent.set_result(b"abc")
    running = asyncio.create_task(other())
    assert await bound.message(cast("Any", call), "a", check) == b"abc"
    running.cancel()
    assert steps.count("step") == 3
    assert ("step", "step") not in pairwise(steps)


async def test_a_cancelled_call_leaves_its_place_and_its_turn_to_others() -> None:
    bound = receiver(4)
    held = begin(bound, *"aabb")
    waiting = await begun(bound, *"ccd")
    waiting[0][1].cancel()
    held[0][1].cancel()
    await settle()
    assert sorted(reads(waiting[1:])) == [False, True]
    # Granted and cancelled in the same turn of the event loop: the place must not be lost.
    held[1][0].sent.set_result(b"x")
    for _, task in waiting:
        task.cancel()
    await end(held + waiting)
    again = await begun(bound, *"eeff")
    assert reads(again) == [True] * 4
    assert await end(again) == [b"x"] * 4


class System:
    """The time, and what each caller's connection has brought besides whole messages."""

    def __init__(self, bound: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.brought: dict[str, int] = {}
        monkeypatch.setattr(read_places, "_PATIENCE_SECONDS", 600.0)
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)
        monkeypatch.setattr(bound._guard, "brought", lambda _: dict(self.brought))


async def test_the_calls_of_one_caller_do_not_wait_for_its_own_silent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = receiver(8)
    system = System(bound, monkeypatch)
    silent = await begun(bound, *"aaaa")
    waiting = await begun(bound, *"aa")
    # A sixth of 600 seconds.
    for now, num_ended in ((1099.0, 0), (1101.0, 1), (1102.0, 2)):
        system.now = now
        bound.places._end_a_read("a")
        await settle()
        assert [task.done() for _, task in silent] == [True] * num_ended + [False] * (4 - num_ended)
        assert reads(waiting) == [True] * num_ended + [False] * (2 - num_ended)
    assert isinstance(silent[0][1].exception(), ClientStalled)
    await end(silent + waiting)


async def test_an_upload_that_comes_in_time_is_not_ended_for_its_own_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = receiver(8, max_stall_seconds=60.0)
    system = System(bound, monkeypatch)
    held = await begun(bound, *"aaaa")
    waiting = await begun(bound, "a")
    for now, num_bytes in ((1020.0, 0), (1030.0, 2 * MESSAGE)):
        system.now, system.brought = now, {"a": num_bytes}
        bound.places._end_a_read("a")
        await settle()
        assert not any(task.done() for _, task in held)
    # On average too little; but half of them may go on.
    system.now = 1055.0
    bound.places._end_a_read("a")
    await settle()
    assert [task.done() for _, task in held] == [False, False, True, False]
    await end(held + waiting)


async def test_a_health_check_does_not_wait_long_for_silent_ones_of_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = Receiver(MESSAGE, 30.0, FloodGuard(MESSAGE), 0)
    system = System(bound, monkeypatch)
    caller = Connection("here", "1")
    calls = [Call() for _ in range(3)]
    tasks = [asyncio.create_task(bound.message(cast("Any", call), caller, lambda _: iter(()), 5.0)) for call in calls]
    await settle()
    # What the connection brings is for other calls.
    system.now, system.brought = 1001.0, {"ipv4:127.0.0.1:1": 0}
    bound.places._end_a_read(caller)
    system.now, system.brought = 1002.0, {"ipv4:127.0.0.1:1": 1 << 30}
    bound.places._end_a_read(caller)
    await settle()
    assert [call.is_read.is_set() for call in calls] == [True] * 3
    await end(list(zip(calls, tasks, strict=True)))


async def test_where_each_has_one_read_those_that_bring_least_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = receiver(4)
    system = System(bound, monkeypatch)
    # The oldest is an honest upload.
    held = await begun(bound, *"abcd")
    waiting = await begun(bound, *"efgh")
    system.now, system.brought = 1010.0, {"a": 50, "b": 0, "c": 0, "d": 0}
    for _ in waiting:
        bound.places._end_a_read("e")
    await settle()
    assert not any(task.done() for _, task in held), "what they bring is not known"
    system.now, system.brought = 1020.0, {"a": 5000, "b": 0, "c": 10, "d": 5}
    for name in "efgh":
        bound.places._end_a_read(name)
    await settle()
    assert [task.done() for _, task in held] == [False, True, False, True]
    await end(held + waiting)


async def test_a_place_that_is_given_back_is_counted_without_a_look_at_all_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> Any:
        raise AssertionError("every caller's count is looked at")

    bound = receiver(4)
    held, waiting = begin(bound, *"aabb"), await begun(bound, *"cdef")
    monkeypatch.setattr(Counter, "__isub__", fail)
    monkeypatch.setattr(Counter, "total", fail)
    methods, caller = OpenMethods(MESSAGE, 1.0, FloodGuard(MESSAGE)), Connection("here", "1")
    with methods._counted("check", caller):
        pass
    assert await end(held) + await end(waiting) == [b"x"] * 8
    places = bound.places
    assert (places.num_held, places._held, places._shares, methods._num_calls) == (0, {}, {}, {})
