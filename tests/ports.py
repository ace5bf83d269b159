"""Ports for servers that are configured before they listen, or that return to their address."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path


def free_port() -> int:
    """A port outside the ephemeral range, so that it is still free when it is used."""
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    while True:
        port = random.SystemRandom().randrange(10_000, int(first)) if int(first) > 10_100 else 0
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return int(one.getsockname()[1])
