"""Ends reads of connections that bring more than their messages may have.

gRPC below 1.84 checks a message's size only once it has all of it, and opens the window for as much as its sender
announces: up to 4 GiB, for one call. So this module watches the process's memory while reads wait. When memory has
grown, it ends the reads of connections that have brought more than their messages may have.

Growth of another cause ends no read. Neither does what comes besides messages: frame headers, bodies of calls that are
refused before they are read, and messages whose reads end before they are complete. gRPC frees those bytes, so memory
has not grown by them; growth by more than `_UNREAD_BYTES` looks like a flood all the same.
Linux only: a connection whose received bytes the system does not report is never ended.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from time import monotonic

from service.engine.kv.process_memory import resident_bytes
from service.errors import ClientStalled
from service.transport.connections import found, open_descriptors

Reading = asyncio.Timeout
"""The time limit of a read; `reschedule(0)` ends the read."""

_LOOK_SECONDS = 0.05
# Growth of memory after which the connections are judged.
_GROWTH_BYTES = 32 << 20
# After this long without growth the accounts begin anew.
_QUIET_SECONDS = 60.0
# For calls that are not read yet.
_MARGIN_BYTES = 1 << 20
# Excess of all connections together, so that a flood gains nothing from having many; it is restored with time.
_SPARE_BYTES = 32 << 20
_SPARE_BYTES_PER_SECOND = 1 << 20
# The same for messages that were not taken: their reads ended early, or none began. A flood beside calls that are
# cancelled looks alike, so this is a bound as well.
_UNREAD_BYTES = 64 << 20
# Body of a call without a read.
_UNREAD_CALL_BYTES = 64 << 10
# The search for connections rests for this many times as long as it took: there may be thousands.
_REST = 10
# Frame headers and metadata of a call or a message, at most in practice.
_OVERHEAD_BYTES = 16 << 10
# `tcpi_bytes_received` of Linux's `struct tcp_info`.
_TCP_INFO = struct.Struct("128xQ")


@dataclass(slots=True)
class _Connection:
    peer: str
    reads: set[Reading] = field(default_factory=set)
    # What it had brought when first judged, and in complete messages since; None before.
    accounted: int | None = None
    # Complete messages alone.
    taken: int = 0
    # Upper bound of what came since the last judgment in messages that were not taken.
    unread: int = 0


class FloodGuard:
    """Watches the connections that reads wait for.

    Clients can have the server buffer the messages that are read at once, twice `_GROWTH_BYTES`, `_SPARE_BYTES`, and
    what comes between four looks; and `_UNREAD_BYTES`, if they cancel calls besides.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._connections: dict[str, _Connection] = {}
        self._reads: dict[Reading, _Connection] = {}
        self._is_looking = False
        self._grown_at = self._rested_at = 0.0
        self._spare_bytes: float = _SPARE_BYTES
        self._unread_bytes: float = _UNREAD_BYTES
        # At the last judgment: memory, and the part of it that reads within their limits held.
        self._resident = resident_bytes()
        self._held_bytes = 0
        # Of the connections that were found: most descriptors are none.
        self._descriptors: dict[str, int] = {}

    @asynccontextmanager
    async def reading(self, peer: str, max_seconds: float | None = None) -> AsyncIterator[Reading]:
        """A context in which a message may be on its way.

        Args:
            peer: the connection, as gRPC names it.
            max_seconds: how long it may last.

        Raises:
            ClientStalled: when it lasts longer, or is ended early.
        """
        started = asyncio.get_running_loop().time()
        reading = asyncio.timeout(max_seconds)
        try:
            async with reading:
                self.begin(peer, reading)
                try:
                    yield reading
                finally:
                    self.end(reading)
        except TimeoutError as error:
            if not reading.expired():
                raise
            elapsed = asyncio.get_running_loop().time() - started
            raise ClientStalled(elapsed, "the request was on its way") from error

    def begin(self, peer: str, reading: Reading) -> None:
        """A message may be on its way. `reading` is entered, and not left before `end`."""
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection(peer)
        connection.reads.add(reading)
        self._reads[reading] = connection
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def took(self, reading: Reading, num_bytes: int, *, is_last: bool = False) -> None:
        """A message of a read that has not ended is complete; `is_last` if the read is for no other."""
        connection = self._reads[reading]
        if is_last:
            connection.unread -= self._max_message_bytes  # which its end adds
        connection.taken += num_bytes
        if connection.accounted is not None:
            connection.accounted += num_bytes + _OVERHEAD_BYTES

    def end(self, reading: Reading) -> None:
        """The read is over."""
        connection = self._reads.pop(reading)
        connection.unread += self._max_message_bytes
        connection.reads.discard(reading)
        if not connection.reads:
            del self._connections[connection.peer]

    def over(self, peer: str) -> None:
        """A call of the connection is over, which may have been refused before its message was read."""
        if (connection := self._connections.get(peer)) is not None:
            connection.unread += _UNREAD_CALL_BYTES + _OVERHEAD_BYTES

    def brought(self, peers: Collection[str]) -> dict[str, int]:
        """Bytes that connections brought besides whole messages, if reads wait for them and they are found.

        Only differences have a meaning.
        """
        received = self._received()
        return {
            peer: received[peer] - self._connections[peer].taken
            for peer in peers
            if peer in received and peer in self._connections
        }

    def _received(self) -> dict[str, int]:
        """Bytes received over each connection that is found, since it is open."""
        received = _received_bytes(self._connections, self._descriptors.values())
        started = monotonic()
        if (unknown := self._connections.keys() - received) and started >= self._rested_at:
            received |= _received_bytes(unknown, open_descriptors())
            scanned = monotonic()
            self._rested_at = scanned + _REST * (scanned - started)
        self._descriptors = {peer: descriptor for peer, (descriptor, _) in received.items()}
        return {peer: num_bytes for peer, (_, num_bytes) in received.items()}

    def _look(self) -> None:
        self._is_looking = bool(self._connections)
        if self._is_looking:
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        resident = resident_bytes()
        if not resident:
            return  # the system does not report it, for want of a descriptor perhaps
        if resident - self._resident > _GROWTH_BYTES:
            self._end_floods(resident)
        elif not self._connections or resident < self._resident:
            fallen = self._resident - resident
            self._held_bytes = max(0, self._held_bytes - fallen) if self._connections else 0
            self._resident = resident

    def _end_floods(self, resident: int) -> None:
        """Judges all connections, after memory has grown."""
        now = monotonic()
        # While the search rests, only found ones are judged: a flood cannot hide behind new connections.
        is_whole = now >= self._rested_at or self._connections.keys() <= self._descriptors.keys()
        received = self._received()
        quiet_seconds = now - self._grown_at
        self._grown_at = now
        restored = quiet_seconds * _SPARE_BYTES_PER_SECOND
        self._spare_bytes = min(_SPARE_BYTES, self._spare_bytes + restored)
        self._unread_bytes = min(_UNREAD_BYTES, self._unread_bytes + restored)
        excesses: list[tuple[int, int, int, _Connection]] = []
        held = 0
        for peer, num_bytes in received.items():
            connection = self._connections[peer]
            # Unaccounted bytes of so long a time are no flood: frames of an open stream, refused calls.
            if connection.accounted is None or quiet_seconds > _QUIET_SECONDS:
                connection.accounted = num_bytes
            # What small messages left of their overhead is not saved up for a large one.
            connection.accounted = min(connection.accounted, num_bytes)
            allowed = len(connection.reads) * self._max_message_bytes + _MARGIN_BYTES
            excess = num_bytes - connection.accounted - allowed
            held += allowed + min(excess, 0)
            if excess > 0:
                excesses.append((excess, min(excess, connection.unread), num_bytes - allowed, connection))
            # Nor what messages that did not come left.
            connection.unread *= not is_whole
        unknown = self._connections.keys() - received
        held += sum(len(self._connections[peer].reads) * self._max_message_bytes + _MARGIN_BYTES for peer in unknown)
        # What is not in memory is not held, whatever came.
        growth = max(0, resident - self._resident - (held - self._held_bytes))
        if is_whole:
            self._resident, self._held_bytes = resident, held
        # A flood's excess is larger than what an honest client brings besides its messages.
        for excess, ended, accounted, connection in sorted(excesses, key=itemgetter(0)):
            spare = min(excess - ended, growth)
            unread = min(ended, growth - spare)
            if spare <= self._spare_bytes and unread <= self._unread_bytes:
                self._spare_bytes -= spare
                self._unread_bytes -= unread
                growth -= spare + unread
                connection.accounted = accounted
                continue
            for reading in connection.reads:
                if not reading.expired():
                    reading.reschedule(0.0)


def _received_bytes(peers: Collection[str], descriptors: Iterable[int]) -> dict[str, tuple[int, int]]:
    """The descriptors that are connections of these peers, and the bytes received over each."""
    received: dict[str, tuple[int, int]] = {}
    for peer, descriptor, connection in found(peers, descriptors):
        with suppress(OSError, struct.error):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            (num_bytes,) = _TCP_INFO.unpack(info)
            if num_bytes:  # else the system does not report it
                received[peer] = descriptor, num_bytes
    return received
