"""By how much a client's deadline may lie before the one that the server knows of.

A client's clock starts before the request arrives and stops when the answer has arrived, and gRPC rounds a timeout up
by as much as 1 % on the wire. What the way takes is not the server's to measure: a fixed allowance stands for it.
"""

from __future__ import annotations

TRANSIT_SECONDS = 0.01
_ROUNDING = 0.01


def deadline_margin(timeout: float) -> float:
    """Seconds by which a client that waits for `timeout` seconds may give up before that is over here."""
    return TRANSIT_SECONDS + _ROUNDING * timeout
