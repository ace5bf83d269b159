"""Ends reads of connections that bring more than their messages may have.

gRPC below 1.84 looks at a message's size only once it has all of it, and opens the window for as much as its sender
announces: up to 4 GiB, for one call. So while reads are under way the process's memory is looked at. Where it has
grown, a connection that has brought more than its messages may have loses its reads. Growth of another cause ends none,
and neither does what comes besides messages: frames' heads, and bodies of calls that are refused before they are read.
Linux only: where the system does not say what a connection has brought, none is ended.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from time import monotonic

from service.engine.memory import resident_bytes
from service.transport.connections import borrowed, descriptors, peer_of

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


class FloodGuard:
    """Watches over the connections that reads wait for.

    Clients can have the server buffer the messages that are read at once, twice `_GROWTH_BYTES`, `_SPARE_BYTES`, and
    what comes between four looks.

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
        self._resident = resident_bytes()

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

    def took(self, reading: asyncio.Timeout, num_bytes: int) -> None:
        """A message is complete that came by a read which has not ended."""
        connection = self._reads[reading]
        if connection.accounted is not None:
            connection.accounted += num_bytes + _OVERHEAD_BYTES

    def end(self, reading: asyncio.Timeout) -> None:
        """The read is over."""
        connection = self._reads.pop(reading)
        connection.reads.discard(reading)
        if not connection.reads:
            del self._connections[connection.peer]

    def _look(self) -> None:
        self._is_looking = bool(self._connections)
        if self._is_looking:
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        resident = resident_bytes()
        if not resident:
            return  # the system does not say, for want of a descriptor perhaps
        if resident - self._resident > _GROWTH_BYTES:
            if monotonic() >= self._rested_at:
                self._end_floods()
                self._resident = resident
        elif not self._connections or resident < self._resident:
            self._resident = resident

    def _end_floods(self) -> None:
        now = monotonic()
        received = _received_bytes(self._connections)
        scanned = monotonic()
        self._rested_at = scanned + _REST * (scanned - now)
        quiet_seconds = now - self._grown_at
        self._grown_at = now
        self._spare_bytes = min(_SPARE_BYTES, self._spare_bytes + quiet_seconds * _SPARE_BYTES_PER_SECOND)
        excesses: list[tuple[int, int, _Connection]] = []
        for peer, num_bytes in received.items():
            connection = self._connections[peer]
            # What was not accounted for in so long a time is no flood: frames of an open stream, refused calls.
            if connection.accounted is None or quiet_seconds > _QUIET_SECONDS:
                connection.accounted = num_bytes
            # What many small messages did not take of their allowance is not saved up for a large one.
            connection.accounted = min(connection.accounted, num_bytes)
            allowed = len(connection.reads) * self._max_message_bytes + _MARGIN_BYTES
            excess = num_bytes - connection.accounted - allowed
            if excess > 0:
                excesses.append((excess, num_bytes - allowed, connection))
        # A flood has more of it than what an honest client brings besides its messages.
        for excess, accounted, connection in sorted(excesses, key=itemgetter(0)):
            if excess <= self._spare_bytes:
                self._spare_bytes -= excess
                connection.accounted = accounted
                continue
            for reading in connection.reads:
                if not reading.expired():
                    reading.reschedule(0.0)


def _received_bytes(peers: Collection[str]) -> dict[str, int]:
    """What connections have brought since they are open, by their peers as gRPC names them; those that are found."""
    found: dict[str, int] = {}
    for descriptor in descriptors():
        # gRPC may close it meanwhile, and most are no connections, or none of these.
        with suppress(OSError, struct.error), borrowed(descriptor) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            (num_bytes,) = _TCP_INFO.unpack(info)
            if num_bytes and (peer := peer_of(connection)) in peers:
                found[peer] = num_bytes
    return found
