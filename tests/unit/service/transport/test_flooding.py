"""Which reads end when memory grows: those of connections that brought more than their messages may have, no others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from typing import Any

import pytest

from service.transport import flooding
from service.transport.flooding import FloodGuard

MESSAGE = 4 << 20
# More than reads bring here between two looks.
GROWTH = 150 << 20


class System:
    """What the guard sees: memory, the time, and what each connection has brought. Looks at all three are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resident = 1 << 30
        self.now = 1000.0
        self.scan_seconds = 0.0
        self.received: dict[str, int] = {}
        self.num_looks = self.num_scans = 0
        self._looked = asyncio.Event()
        monkeypatch.setattr(flooding, "_LOOK_SECONDS", 0.001)
        monkeypatch.setattr(flooding, "resident_bytes", self._look)
        monkeypatch.setattr(flooding, "monotonic", lambda: self.now)
        monkeypatch.setattr(flooding, "open_descriptors", self._scan)
        monkeypatch.setattr(flooding, "_received_bytes", self._received)

    def _look(self) -> int:
        self.num_looks += 1
        self._looked.set()
        return self.resident

    def _scan(self) -> list[str]:
        # Each connection's name is its descriptor.
        self.num_scans += 1
        self.now += self.scan_seconds
        return list(self.received)

    def _received(self, peers: Collection[str], descriptors: Iterable[Any]) -> dict[str, tuple[str, int]]:
        return {peer: (peer, self.received[peer]) for peer in descriptors if peer in peers and peer in self.received}

    async def looks(self) -> None:
        """Waits until the guard has looked again, and what it ended has heard of it."""
        for _ in range(2):
            self._looked.clear()
            async with asyncio.timeout(60):
                await self._looked.wait()

    async def grows(self, num_bytes: int = GROWTH) -> None:
        """Memory grows, and the guard has looked."""
        self.resident += num_bytes
        await self.looks()


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


class Reads:
    """Reads that wait for a message each, of connections that have brought a little."""

    def __init__(self, system: System, *names: str) -> None:
        self.guard = FloodGuard(MESSAGE)
        self.readings = {name: asyncio.timeout(None) for name in names}
        self._tasks = [asyncio.create_task(self._read(name)) for name in names]
        system.received = dict.fromkeys(names, 1000)

    @property
    def ended(self) -> set[str]:
        """Those that the guard has ended."""
        return {name for name, reading in self.readings.items() if reading.expired()}

    async def close(self) -> None:
        """Ends the others."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, name: str) -> None:
        async with self.readings[name] as reading:
            self.guard.begin(name, reading)
            try:
                await asyncio.Event().wait()
            finally:
                self.guard.end(reading)


Opened = Callable[..., Awaitable[Reads]]


@pytest.fixture
async def opened(system: System) -> AsyncIterator[Opened]:
    """Begins reads, and has memory grow and the guard look at their connections, but for those that are gone."""
    all_reads: list[Reads] = []

    async def begin(*names: str, gone: Collection[str] = (), grown: int = GROWTH) -> Reads:
        all_reads.append(Reads(system, *names))
        for name in gone:
            del system.received[name]
        await system.looks()
        await system.grows(grown)
        return all_reads[-1]

    yield begin
    for reads in all_reads:
        await reads.close()


async def test_reads_of_the_connection_that_floods_end_and_of_no_other(system: System, opened: Opened) -> None:
    reads = await opened("flood", "slow", "busy", "gone", gone=["gone"])
    assert not reads.ended, "what they brought before is not known"
    system.received = {"flood": 12 * MESSAGE, "slow": MESSAGE, "busy": 12 * MESSAGE}
    reads.guard.took(reads.readings["busy"], 11 * MESSAGE)
    await system.looks()
    assert not reads.ended, "memory has not grown"
    await system.grows()
    assert reads.ended == {"flood"}


async def test_a_flood_gains_nothing_from_many_connections(system: System, opened: Opened) -> None:
    names = {f"flood {number}" for number in range(8)}
    reads = await opened(*names)
    for _ in range(2):
        for name in names:
            system.received[name] += 3 * MESSAGE
        await system.grows()
    assert reads.ended == names


async def test_what_comes_besides_messages_ends_no_stream_however_long_it_is_open(
    system: System, opened: Opened
) -> None:
    reads = await opened("stream", "other")
    for _ in range(100):
        # 200 calls that are refused before their bodies are read.
        system.received["stream"] += 200 << 16
        await system.grows()
        await system.grows()
        assert not reads.ended
        system.now += 30.0
    system.received["stream"] += 12 * MESSAGE
    await system.grows()
    assert reads.ended == {"stream"}


async def test_small_messages_save_up_nothing_for_a_large_one(system: System, opened: Opened) -> None:
    reads = await opened("stream")
    for _ in range(10_000):
        system.received["stream"] += 200
        reads.guard.took(reads.readings["stream"], 100)
    await system.grows()
    system.received["stream"] += 12 * MESSAGE
    await system.grows()
    assert reads.ended == {"stream"}


async def test_nothing_ends_where_the_system_does_not_say_what_came(system: System, opened: Opened) -> None:
    reads = await opened("stream", "other")
    system.received = {}
    await system.grows()
    await system.grows()
    assert not reads.ended
    # It does not say how much memory there is, either; that is no growth when it does again.
    system.received, num_scans = {"stream": 100 * MESSAGE}, system.num_scans
    resident, system.resident = system.resident, 0
    await system.looks()
    system.resident = resident
    await system.looks()
    assert (system.num_scans, reads.ended) == (num_scans, set())


async def test_connections_are_looked_for_a_small_part_of_the_time(system: System, opened: Opened) -> None:
    system.scan_seconds = 1.0
    await opened("stream", "gone", gone=["gone"])
    for _ in range(4):
        await system.grows()
    assert system.num_scans == 1
    system.now += 10.0
    await system.looks()
    assert system.num_scans == 2, "the growth is not forgotten"


async def test_connections_that_were_found_are_not_looked_for_again(system: System, opened: Opened) -> None:
    reads = await opened("stream", "other")
    for _ in range(4):
        system.now += 10.0
        await system.grows()
    system.now += 10.0
    assert system.num_scans == 1
    system.received["stream"] += 30 * MESSAGE
    await system.grows()
    assert (system.num_scans, reads.ended) == (1, {"stream"})


def cancelled(reads: Reads, name: str, num_reads: int) -> None:
    """Begins reads of a connection and ends each before its message is complete."""
    for reading in [asyncio.timeout(None) for _ in range(num_reads)]:
        reads.guard.begin(name, reading)
        reads.guard.end(reading)


async def test_messages_that_are_not_taken_end_no_stream_of_their_connection(system: System, opened: Opened) -> None:
    reads = await opened("proxy", "other", grown=33 << 20)
    # Memory grows by some of it, or by something else.
    cancelled(reads, "proxy", 200)
    system.received["proxy"] += 200 * MESSAGE
    await system.grows(60 << 20)
    assert not reads.ended
    system.now += 58.0
    # Bodies of calls that are refused.
    for _ in range(2000):
        reads.guard.over("proxy")
    system.received["proxy"] += 2000 << 16
    await system.grows(60 << 20)
    assert not reads.ended
    system.received["proxy"] += 30 * MESSAGE
    await system.grows()
    assert reads.ended == {"proxy"}


async def test_a_flood_gains_little_from_cancelled_messages(system: System, opened: Opened) -> None:
    reads = await opened("flood", "other", grown=33 << 20)
    for _ in range(3):
        cancelled(reads, "flood", 1000)
        system.received["flood"] += 12 * MESSAGE
        await system.grows(12 * MESSAGE)
    assert reads.ended == {"flood"}


async def test_nothing_looks_while_nothing_is_read(system: System) -> None:
    guard = FloodGuard(MESSAGE)
    async with asyncio.timeout(None) as reading:
        guard.begin("a", reading)
        await system.looks()
        guard.end(reading)
    # The last look, which was due.
    system._looked.clear()
    async with asyncio.timeout(60):
        await system._looked.wait()
    assert not guard._is_looking


@pytest.mark.parametrize(
    ("family", "host", "target", "peer"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1:{}"),
        (socket.AF_INET6, "::1", "::1", "ipv6:%5B::1%5D:{}"),
        (socket.AF_INET6, "::", "127.0.0.1", "ipv4:127.0.0.1:{}"),
    ],
)
def test_what_a_connection_has_brought_is_found_under_the_name_that_grpc_gives_it(
    family: socket.AddressFamily, host: str, target: str, peer: str
) -> None:
    try:
        listener = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener, socket.create_connection((target, listener.getsockname()[1])) as client:
        connection, _ = listener.accept()
        with connection:
            client.sendall(bytes(5000))
            client.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
            name = peer.format(client.getsockname()[1])
            everywhere = flooding.open_descriptors()
            descriptor, num_bytes = flooding._received_bytes([name], everywhere)[name]
            assert 5000 <= num_bytes <= 5001, "its bytes, and the end"
            assert descriptor == connection.fileno()
            assert flooding._received_bytes(["ipv4:127.0.0.1:1"], everywhere) == {}
            connection.send(b"it is still open")
