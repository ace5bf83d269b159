"""Finds and closes the process's connections by their peers, as gRPC names them. Linux only; elsewhere none is found.

gRPC reports of a connection only its peer: not the bytes received, and no way to close it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path


def open_descriptors() -> list[int]:
    """All open descriptors of the process."""
    with suppress(OSError):
        return [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    return []


def found(peers: Collection[str], descriptors: Iterable[int]) -> Iterator[tuple[str, int, socket.socket]]:
    """Those descriptors that are connections of these peers, each with a socket that is valid until the next."""
    ports = {peer.rpartition(":")[2] for peer in peers}
    for descriptor in descriptors:
        # Most are no connections, or other ones, and gRPC may close one meanwhile.
        with suppress(OSError, ValueError):
            # With the family given, Python makes no system calls to detect it.
            connection = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, descriptor)
            try:
                host, port = connection.getpeername()[:2]
                if str(port) in ports and (peer := _peer(host, port)) in peers:
                    yield peer, descriptor, connection
            finally:
                connection.detach()


def find(peers: Collection[str]) -> dict[str, int]:
    """The descriptors of connections that are found."""
    return {peer: descriptor for peer, descriptor, _ in found(peers, open_descriptors())}


def shut(connections: Mapping[str, int]) -> None:
    """Closes connections that `find` returned, with all their calls."""
    for peer, descriptor in connections.items():
        # The descriptor may be another connection's by now: checks a duplicate, and shuts that.
        with suppress(OSError):
            own = os.dup(descriptor)
            try:
                for _, _, connection in found([peer], [own]):
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                os.close(own)


def _peer(host: str, port: int) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"ipv6:%5B{host.replace('%', '%25')}%5D:{port}"
        address = address.ipv4_mapped
    return f"ipv4:{address}:{port}"
