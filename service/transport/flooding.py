"""Ends reads of connections that bring more than their messages may have.

gRPC below 1.84 looks at a message's size only once it has all of it, and opens the window for as much as its sender
announces: up to 4 GiB, for one call. So while reads are under way the process's memory is looked at. Where it has
grown, a connection that has brought more than its messages may have loses its reads. Growth of another cause ends none,
and neither does what comes besides messages: frames' heads, bodies of calls that are refused before they are read, and
messages whose reads end before they are complete. Those bytes are free again, so that memory has not grown by them;
where it has grown all the same, by more than `_UNREAD_BYTES`, a flood looks no different.
Linux only: where the system does not say what a connection has brought, none is ended.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from time import monotonic

from service.engine.kv.process_memory import resident_bytes
from service.transport.connections import found, open_descriptors

_LOOK_SECONDS = 0.05
# What memory may grow by until the connections are looked at.
_GROWTH_BYTES = 32 << 20
# After so long without growth a connection's account begins anew.
_QUIET_SECONDS = 60.0
# What may come of calls that are not read yet.
_MARGIN_BYTES = 1 << 20
# What connections may bring beyond that: all of them together, so that a flood gains nothing from having many, and as
# much again with time.
_SPARE_BYTES = 32 << 20
_SPARE_BYTES_PER_SECOND = 1 << 20
# The same for messages that were not taken: their reads ended before, or none began. A flood beside calls that are
# cancelled looks alike, so that this is a bound as well.
_UNREAD_BYTES = 64 << 20
# What may come of a call without a read.
_UNREAD_CALL_BYTES = 64 << 10
# For so many times as long as the connections were looked for they are not looked for again: they may be thousands.
_REST = 10
# Frames' heads and metadata of a call or a message, at most in practice.
_OVERHEAD_BYTES = 16 << 10
# `tcpi_bytes_received` of Linux' `struct tcp_info`.
_TCP_INFO = struct.Struct("128xQ")


@dataclass(slots=True)
class _Connection:
    peer: str
    reads: set[asyncio.Timeout] = field(default_factory=set)
    # What it had brought at the first look, and in complete messages since; None before that look.
    accounted: int | None = None
    # In complete messages, without what came besides.
    taken: int = 0
    # What may have come since connections were last judged of messages that were not taken.
    unread: int = 0


class FloodGuard:
    """Watches over the connections that reads wait for.

    Clients can have the server buffer the messages that are read at once, twice `_GROWTH_BYTES`, `_SPARE_BYTES`, and
    what comes between four looks; and `_UNREAD_BYTES`, if they cancel calls besides.

    Args:
        max_message_bytes: largest message.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._connections: dict[str, _Connection] = {}
        self._reads: dict[asyncio.Timeout, _Connection] = {}
        self._is_looking = False
        self._grown_at = self._rested_at = 0.0
        self._spare_bytes: float = _SPARE_BYTES
        self._unread_bytes: float = _UNREAD_BYTES
        # When connections were last judged: memory, and what of it reads held that brought no more than they may.
        self._resident = resident_bytes()
        self._held_bytes = 0
        # Where connections were found: of many descriptors few are theirs.
        self._descriptors: dict[str, int] = {}

    def begin(self, peer: str, reading: asyncio.Timeout) -> None:
        """From now on a message may be on its way; `reading` is expired where the connection brings too much.

        Args:
            peer: the connection, as gRPC names it.
            reading: has been entered, and is not left before `end`.
        """
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection(peer)
        connection.reads.add(reading)
        self._reads[reading] = connection
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def took(self, reading: asyncio.Timeout, num_bytes: int, *, is_last: bool = False) -> None:
        """A message is complete that came by a read which has not ended; the read is for no other if it is the last."""
        connection = self._reads[reading]
        if is_last:
            connection.unread -= self._max_message_bytes  # which its end adds
        connection.taken += num_bytes
        if connection.accounted is not None:
            connection.accounted += num_bytes + _OVERHEAD_BYTES

    def end(self, reading: asyncio.Timeout) -> None:
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
        """Bytes that connections have brought besides whole messages, of those that reads wait for and that are found.

        Only differences have a meaning.
        """
        received = self._received()
        return {
            peer: received[peer] - self._connections[peer].taken
            for peer in peers
            if peer in received and peer in self._connections
        }

    def _received(self) -> dict[str, int]:
        """Bytes that the connections have brought since they are open; without those that are not found."""
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
            return  # the system does not say, for want of a descriptor perhaps
        if resident - self._resident > _GROWTH_BYTES:
            self._end_floods(resident)
        elif not self._connections or resident < self._resident:
            fallen = self._resident - resident
            self._held_bytes = max(0, self._held_bytes - fallen) if self._connections else 0
            self._resident = resident

    def _end_floods(self, resident: int) -> None:
        now = monotonic()
        # Those that are found while the others are not looked for: a flood does not hide behind new connections.
        is_whole = now >= self._rested_at or self._connections.keys() <= self._descriptors.keys()
        received = self._received()
        quiet_seconds = now - self._grown_at
        self._grown_at = now
        spared = quiet_seconds * _SPARE_BYTES_PER_SECOND
        self._spare_bytes = min(_SPARE_BYTES, self._spare_bytes + spared)
        self._unread_bytes = min(_UNREAD_BYTES, self._unread_bytes + spared)
        excesses: list[tuple[int, int, int, _Connection]] = []
        held = 0
        for peer, num_bytes in received.items():
            connection = self._connections[peer]
            # What was not accounted for in so long a time is no flood: frames of an open stream, refused calls.
            if connection.accounted is None or quiet_seconds > _QUIET_SECONDS:
                connection.accounted = num_bytes
            # What many small messages did not take of their allowance is not saved up for a large one.
            connection.accounted = min(connection.accounted, num_bytes)
            allowed = len(connection.reads) * self._max_message_bytes + _MARGIN_BYTES
            excess = num_bytes - connection.accounted - allowed
            held += allowed + min(excess, 0)
            if excess > 0:
                excesses.append((excess, min(excess, connection.unread), num_bytes - allowed, connection))
            # Nor what was not brought by messages that did not come.
            connection.unread *= not is_whole
        unknown = self._connections.keys() - received
        held += sum(len(self._connections[peer].reads) * self._max_message_bytes + _MARGIN_BYTES for peer in unknown)
        # What is not in memory is not held, whatever came.
        growth = max(0, resident - self._resident - (held - self._held_bytes))
        if is_whole:
            self._resident, self._held_bytes = resident, held
        # A flood has more of it than what an honest client brings besides its messages.
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
    """Which of the descriptors are connections of these peers, by their names in gRPC, and what these have brought."""
    received: dict[str, tuple[int, int]] = {}
    for peer, descriptor, connection in found(peers, descriptors):
        with suppress(OSError, struct.error):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            (num_bytes,) = _TCP_INFO.unpack(info)
            if num_bytes:  # or the system does not say
                received[peer] = descriptor, num_bytes
    return received
