"""Who may send a request when: places are shared between callers, and slow senders lose theirs to those who wait."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from service.errors import ClientStalled, InvalidRequest, RateLimited
from service.transport import receiving
from service.transport.flooding import FloodGuard
from service.transport.receiving import Receiver

MESSAGE = 100


class Call:
    """A call whose message comes when `message` is set."""

    def __init__(self) -> None:
        self.is_read = asyncio.Event()
        self.sent: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> Any:
        self.is_read.set()
        return await self.sent


def receiver(num_places: int, max_stall_seconds: float = 600.0) -> Receiver:
    return Receiver(MESSAGE, max_stall_seconds, FloodGuard(MESSAGE), MESSAGE * num_places)


def begin(bound: Receiver, *callers: str) -> list[tuple[Call, asyncio.Task[Any]]]:
    calls = [(Call(), caller) for caller in callers]
    return [(call, asyncio.create_task(bound.message(call, caller))) for call, caller in calls]  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def reads(calls: list[tuple[Call, asyncio.Task[Any]]]) -> list[bool]:
    return [call.is_read.is_set() for call, _ in calls]


async def end(calls: list[tuple[Call, asyncio.Task[Any]]]) -> list[Any]:
    for call, _ in calls:
        if not call.sent.done():
            call.sent.set_result(b"x")
    return await asyncio.gather(*(task for _, task in calls), return_exceptions=True)


async def test_a_caller_has_half_of_the_places_and_every_message_is_read_in_the_end() -> None:
    bound = receiver(8)
    calls = begin(bound, *"aaaaaa", *"bb")
    await settle()
    assert reads(calls) == [True] * 4 + [False] * 2 + [True] * 2
    assert await end(calls) == [b"x"] * 8


async def test_the_next_place_is_for_the_caller_who_holds_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "_PATIENCE_SECONDS", 600.0)
    bound = receiver(4)
    held = begin(bound, *"aabb")
    waiting = begin(bound, *"aaac")
    await settle()
    assert reads(held + waiting) == [True] * 4 + [False] * 4
    held[0][0].sent.set_result(b"x")
    await settle()
    assert reads(waiting) == [False, False, False, True]
    assert await end(held + waiting) == [b"x"] * 8


async def test_a_slow_sender_loses_its_place_to_a_caller_who_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "_PATIENCE_SECONDS", 0.01)
    bound = receiver(4)
    held = begin(bound, *"aabb")
    await settle()
    ((newcomer, task),) = begin(bound, "c")
    async with asyncio.timeout(60):
        await newcomer.is_read.wait()
    assert [isinstance(task.done() and task.exception(), ClientStalled) for _, task in held].count(True) == 1
    newcomer.sent.set_result(b"y")
    assert await task == b"y"
    await end(held)


async def test_nobody_loses_a_place_to_those_who_hold_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "_PATIENCE_SECONDS", 0.01)
    bound = receiver(4)
    held = begin(bound, *"aabb")
    looked, look = asyncio.Semaphore(0), bound._end_longest_read
    monkeypatch.setattr(bound, "_end_longest_read", lambda caller: (look(caller), looked.release()))
    waiting = begin(bound, *"ab")
    async with asyncio.timeout(60):
        for _ in range(4):
            await looked.acquire()
    assert reads(waiting) == [False, False]
    assert await end(held + waiting) == [b"x"] * 6


async def test_a_cancelled_call_leaves_its_place_and_its_turn_to_others() -> None:
    bound = receiver(4)
    held = begin(bound, *"aabb")
    waiting = begin(bound, *"ccd")
    await settle()
    waiting[0][1].cancel()
    held[0][1].cancel()
    await settle()
    assert sorted(reads(waiting[1:])) == [False, True]
    # Granted and cancelled in the same turn of the event loop: the place must not be lost.
    held[1][0].sent.set_result(b"x")
    for _, task in waiting:
        task.cancel()
    await end(held + waiting)
    again = begin(bound, *"eeff")
    await settle()
    assert reads(again) == [True] * 4
    assert await end(again) == [b"x"] * 4


async def test_a_message_that_takes_too_long_ends_its_call() -> None:
    bound = receiver(4, max_stall_seconds=0.01)
    ((_, task),) = begin(bound, "a")
    with pytest.raises(ClientStalled, match="on its way"):
        await task
    again = begin(bound, *"aa")
    await settle()
    assert reads(again) == [True, True]
    await end(again)


async def test_a_call_without_a_message_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "_CANCELLATION_SECONDS", 0.0)
    ((call, task),) = begin(receiver(4), "a")
    call.sent.set_result(grpc.aio.EOF)
    with pytest.raises(InvalidRequest):
        await task


async def test_streams_that_bring_many_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "_MAX_STREAM_BYTES", MESSAGE * 4)
    bound, call = receiver(4), cast("Any", Call())
    async with bound.stream(call, "a"), bound.stream(call, "a"):
        with pytest.raises(RateLimited):
            await bound.stream(call, "a").__aenter__()
        async with bound.stream(call, "b"):
            pass
    async with bound.stream(call, "a"), bound.stream(call, "a"):
        pass
