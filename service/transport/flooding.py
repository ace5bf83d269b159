"""Ends reads of connections that bring more than their messages may have.

gRPC below 1.84 looks at a message's size only once it has all of it, and opens the window for as much as its sender
announces: up to 4 GiB, for one call. So while reads are under way the process's memory is looked at. Where it has
grown, a connection that has brought more than its messages may have loses its reads. Growth of another cause ends none.
Linux only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from service.engine.memory import resident_bytes

_LOOK_SECONDS = 0.05
# What memory may grow by until the connections are looked at.
_GROWTH_BYTES = 32 << 20
# After so long without growth a connection's account begins anew.
_QUIET_SECONDS = 60.0
# What may come of calls that are not read yet.
_MARGIN_BYTES = 1 << 20
# Frames' heads and metadata of a call or a message, at most in practice.
_OVERHEAD_BYTES = 16 << 10
# `tcpi_bytes_received` of Linux' `struct tcp_info`.
_TCP_INFO = struct.Struct("128xQ")


@dataclass(slots=True)
class _Connection:
    reads: set[asyncio.Timeout] = field(default_factory=set)
    # What it had brought at the first look, and in complete messages since; None before that look.
    accounted: int | None = None


class FloodGuard:
    """Watches over the connections that reads wait for.

    Clients can have the server buffer the messages that are read at once, twice `_GROWTH_BYTES`, and what comes between
    three looks.

    Args:
        max_message_bytes: largest message.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._connections: dict[str, _Connection] = {}
        self._is_looking = False
        self._grown_at = 0.0
        self._resident = resident_bytes()

    def begin(self, peer: str, reading: asyncio.Timeout) -> None:
        """From now on a message may be on its way; `reading` is expired where the connection brings too much.

        Args:
            peer: the connection, as gRPC names it.
            reading: has been entered, and is not left before `end`.
        """
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection()
        connection.reads.add(reading)
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def took(self, peer: str, num_bytes: int) -> None:
        """A message of a connection with a read is complete."""
        connection = self._connections[peer]
        if connection.accounted is not None:
            connection.accounted += num_bytes + _OVERHEAD_BYTES

    def end(self, peer: str, reading: asyncio.Timeout) -> None:
        """The read is over."""
        reads = self._connections[peer].reads
        reads.discard(reading)
        if not reads:
            del self._connections[peer]

    def _look(self) -> None:
        self._is_looking = bool(self._connections)
        if self._is_looking:
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        resident = resident_bytes()
        if resident - self._resident > _GROWTH_BYTES:
            self._end_floods()
            self._resident = resident
        elif not self._connections or resident < self._resident:
            self._resident = resident

    def _end_floods(self) -> None:
        received, now = _received_bytes(), asyncio.get_running_loop().time()
        if now - self._grown_at > _QUIET_SECONDS:
            # What was not accounted for in so long a time is no flood: frames of an open stream, refused calls.
            for connection in self._connections.values():
                connection.accounted = None
        self._grown_at = now
        for peer, connection in self._connections.items():
            # 0 for one that is gone, or that the system does not say it of: it is ended at the second look.
            num_bytes = received.get(peer, 0)
            if connection.accounted is None:
                connection.accounted = num_bytes
                continue
            allowed = len(connection.reads) * self._max_message_bytes + _MARGIN_BYTES
            if not num_bytes or num_bytes - connection.accounted > allowed:
                for reading in connection.reads:
                    if not reading.expired():
                        reading.reschedule(0.0)


def _received_bytes() -> dict[str, int]:
    """What each TCP connection of the process has brought since it is open, by its peer as gRPC names it."""
    found: dict[str, int] = {}
    try:
        descriptors = [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    except OSError:
        return found
    for descriptor in descriptors:
        # gRPC may close it meanwhile, and most are no connections.
        with suppress(OSError, ValueError):
            connection = socket.socket(fileno=descriptor)
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                (num_bytes,) = _TCP_INFO.unpack(info)
                found[_peer(*connection.getpeername()[:2])] = num_bytes
            except struct.error:
                continue
            finally:
                connection.detach()
    return found


def _peer(host: str, port: int) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"ipv6:%5B{host.replace('%', '%25')}%5D:{port}"
        address = address.ipv4_mapped
    return f"ipv4:{address}:{port}"
