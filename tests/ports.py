"""Ports for what is told where to listen before it does, or comes back to where it was."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path


def free_port() -> int:
    """One that the system gives to nobody by itself, so that it is free still when somebody comes to use it."""
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    while True:
        port = random.SystemRandom().randrange(10_000, int(first)) if int(first) > 10_100 else 0
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return int(one.getsockname()[1])
