"""Which reads end when memory grows: those of connections that brought more than their messages may have, no others."""

from __future__ import annotations

import asyncio
import socket

import pytest

from service.transport import flooding
from service.transport.flooding import FloodGuard

MESSAGE = 4 << 20
GROWTH = 33 << 20


class System:
    """What the guard sees: memory, and what each connection has brought. Each look is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resident = 1 << 30
        self.received: dict[str, int] = {}
        self.num_looks = 0
        self._looked = asyncio.Event()
        monkeypatch.setattr(flooding, "_LOOK_SECONDS", 0.001)
        monkeypatch.setattr(flooding, "resident_bytes", self._look)
        monkeypatch.setattr(flooding, "_received_bytes", lambda: self.received)

    def _look(self) -> int:
        self.num_looks += 1
        self._looked.set()
        return self.resident

    async def looks(self) -> None:
        """Waits until the guard has looked again, and what it ended has heard of it."""
        for _ in range(2):
            self._looked.clear()
            async with asyncio.timeout(60):
                await self._looked.wait()


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


async def test_reads_of_the_connection_that_floods_end_and_of_no_other(system: System) -> None:
    guard = FloodGuard(MESSAGE)
    readings = {name: asyncio.timeout(None) for name in ("flood", "slow", "busy", "gone")}

    async def read(name: str) -> None:
        async with readings[name] as reading:
            guard.begin(name, reading)
            try:
                await asyncio.Event().wait()
            finally:
                guard.end(name, reading)

    system.received = dict.fromkeys(("flood", "slow", "busy"), 1000)
    reads = {name: asyncio.create_task(read(name)) for name in readings}
    await system.looks()
    system.resident += GROWTH
    await system.looks()
    assert not any(each.expired() for each in readings.values()), "what they brought before is not known"
    system.received = {"flood": 7 * MESSAGE, "slow": MESSAGE, "busy": 7 * MESSAGE}
    guard.took("busy", 6 * MESSAGE)
    await system.looks()
    assert not any(each.expired() for each in readings.values()), "memory has not grown"
    system.resident += GROWTH
    await system.looks()
    assert {name for name, each in readings.items() if each.expired()} == {"flood", "gone"}
    for each in reads.values():
        each.cancel()
    await asyncio.gather(*reads.values(), return_exceptions=True)


async def test_nothing_looks_while_nothing_is_read(system: System) -> None:
    guard = FloodGuard(MESSAGE)
    async with asyncio.timeout(None) as reading:
        guard.begin("a", reading)
        await system.looks()
        guard.end("a", reading)
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
            received = flooding._received_bytes()[peer.format(client.getsockname()[1])]
            assert 5000 <= received <= 5001, "its bytes, and the end"
            connection.send(b"it is still open")
