"""The process's connections as the system has them, by their peers as gRPC names them. Linux only; else there are none.

gRPC says of a connection who its peer is, and no more: not what it has brought, nor how it is closed.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path


def open_descriptors() -> list[int]:
    """All of the process, of whatever kind."""
    with suppress(OSError):
        return [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    return []


def found(peers: Collection[str], descriptors: Iterable[int]) -> Iterator[tuple[str, int, socket.socket]]:
    """Which descriptors are connections of these peers: the peer, the descriptor, and a socket of it until the next."""
    ports = {peer.rpartition(":")[2] for peer in peers}
    for descriptor in descriptors:
        # gRPC may close it meanwhile, and most are no connections, or none of these.
        with suppress(OSError, ValueError):
            # Its family is stated, or Python would ask the system what kind of socket it is.
            connection = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, descriptor)
            try:
                host, port = connection.getpeername()[:2]
                if str(port) in ports and (peer := _peer(host, port)) in peers:
                    yield peer, descriptor, connection
            finally:
                connection.detach()


def find(peers: Collection[str]) -> dict[str, int]:
    """The descriptors of those that are found."""
    return {peer: descriptor for peer, descriptor, _ in found(peers, open_descriptors())}


def shut(connections: Mapping[str, int]) -> None:
    """Closes connections that were found, with all calls of theirs."""
    for peer, descriptor in connections.items():
        # Its number may be another's by now: what is shut is a duplicate, which is looked at once more.
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
