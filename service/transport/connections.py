"""The process's connections as the system has them, by their peers as gRPC names them. Linux only; else there are none.

gRPC says of a connection who its peer is, and no more: not what it has brought, nor how it is closed.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def shut(peers: Collection[str]) -> None:
    """Closes connections, with all calls of theirs; those that are found."""
    for descriptor in descriptors():
        # gRPC may close it at any time: what is shut is a duplicate that was looked at.
        with suppress(OSError), borrowed(descriptor) as connection:
            if peer_of(connection) not in peers:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as own:
                if peer_of(own) in peers:
                    own.shutdown(socket.SHUT_RDWR)


def descriptors() -> list[int]:
    """All of the process, of whatever kind."""
    try:
        return [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    except OSError:
        return []


@contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A descriptor as a socket, though it may be none; it is not closed."""
    # Its family is stated, or Python would ask the system what kind of socket it is.
    connection = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def peer_of(connection: socket.socket) -> str:
    """The other end, as in "ipv4:127.0.0.1:1234" or "ipv6:%5B::1%5D:1234"; empty where it has no address.

    Raises:
        OSError: for what is not a connection.
    """
    name = connection.getpeername()
    if not isinstance(name, tuple):
        return ""  # a socket of the file system
    host, port = name[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"ipv6:%5B{host.replace('%', '%25')}%5D:{port}"
        address = address.ipv4_mapped
    return f"ipv4:{address}:{port}"
