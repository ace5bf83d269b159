"""The deadline margin: by how much a client's deadline may be earlier than the one that the server knows.

A client's clock starts before the request arrives and stops when the answer has arrived, and gRPC rounds a timeout up
by as much as 1 % on the wire. The server cannot measure the transit: a fixed allowance stands for it.
"""

from __future__ import annotations

TRANSIT_SECONDS = 0.01
_ROUNDING = 0.01


def deadline_margin(timeout: float) -> float:
    """Seconds by which a client with this timeout may time out before the server does."""
    return TRANSIT_SECONDS + _ROUNDING * timeout
