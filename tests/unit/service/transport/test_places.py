"""Which connections of stalled calls are closed, for whom, and what that gives back."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping

import pytest

from service.errors import RateLimited
from service.transport import connections, places
from service.transport.places import Place, Places


class System:
    """Connections that are found by their peers, those that were closed, and calls that have stalled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[asyncio.Task[None]] = []
        self.closed: list[str] = []
        self.is_blind = False
        monkeypatch.setattr(places, "find", lambda peers: {} if self.is_blind else dict.fromkeys(peers, 0))
        monkeypatch.setattr(places, "shut", self._shut)
        monkeypatch.setattr(places, "_REST_SECONDS", 0.0)

    async def stalled(self, all_places: Places, caller: str, peer: str, num_calls: int) -> list[asyncio.Task[None]]:
        """Calls whose answers are not taken."""

        async def call() -> None:
            claimed(all_places, caller, peer).stall()
            await asyncio.Event().wait()

        calls = [asyncio.create_task(call()) for _ in range(num_calls)]
        self.calls += calls
        await asyncio.sleep(0)
        assert not any(each.done() for each in calls)
        return calls

    def _shut(self, found: Mapping[str, int]) -> None:
        self.closed += sorted(found)


@pytest.fixture
async def system(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    system = System(monkeypatch)
    yield system
    for call in system.calls:
        call.cancel()


def claimed(all_places: Places, caller: str, peer: str) -> Place:
    """A place of this task and this caller."""
    place = all_places.take("")
    assert place is not None
    place.claim(caller, peer)
    return place


async def taken(all_places: Places) -> Place | None:
    """A place of this task, once what it may have caused is over."""
    place = all_places.take("")
    if all_places._eviction is not None:
        await all_places._eviction
    await asyncio.sleep(0)
    return place


async def test_where_no_place_is_left_those_who_stall_most_are_evicted(system: System) -> None:
    all_places = Places(20, 100)
    calls = {
        peer: await system.stalled(all_places, peer, peer, num_calls)
        for peer, num_calls in {"a": 10, "b": 5, "c": 2, "d": 1, "e": 1}.items()
    }
    assert await taken(all_places) is not None
    assert system.closed == []
    assert await taken(all_places) is None
    assert system.closed == ["a"], "half as many are not most"
    assert [each.done() for peer in "ab" for each in calls[peer]] == [True] * 10 + [False] * 5
    assert [await taken(all_places) is None for _ in range(11)] == [False] * 10 + [True]
    assert system.closed == ["a", "b"]


@pytest.mark.parametrize("has_neighbor", [False, True])
async def test_a_callers_own_share_closes_no_connection_that_others_use(system: System, has_neighbor: bool) -> None:
    all_places = Places(8, 100)
    await system.stalled(all_places, "a", "proxy", 4)
    if has_neighbor:
        await system.stalled(all_places, "b", "proxy", 1)
    place = await taken(all_places)
    assert place is not None
    with pytest.raises(RateLimited, match="4 calls of this caller"):
        place.claim("a", "another")
    if all_places._eviction is not None:
        await all_places._eviction
    assert system.closed == ([] if has_neighbor else ["proxy"])


async def test_a_call_whose_connection_is_not_found_keeps_its_place(system: System) -> None:
    system.is_blind = True
    all_places = Places(1, 100)
    (call,) = await system.stalled(all_places, "a", "a", 1)
    assert await taken(all_places) is None
    assert not call.done()
    assert await taken(all_places) is None


async def test_a_connection_on_which_most_calls_are_well_is_left_alone(system: System) -> None:
    all_places = Places(9, 100)
    await system.stalled(all_places, "a", "a", 1)
    places_of_a = [await taken(all_places) for _ in range(3)]
    for place in places_of_a:
        assert place is not None
        place.claim("a", "a")
    await system.stalled(all_places, "b", "b", 1)
    for _ in range(4):
        assert await taken(all_places) is not None
    assert await taken(all_places) is None
    assert system.closed == ["b"], "one of one, not one of four"


async def test_an_answer_that_waits_has_those_evicted_that_stall_meanwhile(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "MAX_ANSWER_BYTES", 0)
    monkeypatch.setattr(places, "_LOOK_SECONDS", 0.001)
    all_places, is_stuck, num_bytes = Places(4, 10_000), asyncio.Event(), 10_000

    async def answer(caller: str) -> None:
        place = claimed(all_places, caller, caller)
        await place.answer(num_bytes, 60.0)
        await is_stuck.wait()
        place.stall()
        await asyncio.Event().wait()

    first = [asyncio.create_task(answer(caller)) for caller in ("a", "a")]
    await asyncio.sleep(0)
    assert all_places.answers.num_taken == 4 * num_bytes

    async def wait() -> None:
        for caller, size in (("b", 2 * num_bytes), ("c", num_bytes)):
            await claimed(all_places, caller, caller).answer(size, 60.0)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert system.closed == []
    is_stuck.set()
    async with asyncio.timeout(60):
        await asyncio.wait(first)
        await waiting
    assert system.closed == ["a"]


def test_a_connection_is_closed_and_no_other_that_has_its_descriptor_by_then() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        ends = [listener.accept()[0] for _ in clients]
        first, second = (f"ipv4:127.0.0.1:{each.getsockname()[1]}" for each in clients)
        found = connections.find([first, "ipv4:127.0.0.1:1"])
        assert found == {first: ends[0].fileno()}
        connections.shut({second: ends[0].fileno()})
        clients[0].sendall(b"a")
        assert ends[0].recv(1) == b"a", "another's descriptor"
        connections.shut(found)
        assert clients[0].recv(1) == b"", "it is closed"
        os.fstat(ends[0].fileno())
        for each in (*clients, *ends):
            each.close()
