"""`python -m benchmarks.leaky_server serve …`: the server, with a leak of a known size put into it.

What `benchmarks.soak` proves itself on: a check that finds no leak in this finds none anywhere. The environment
variable `LEAK_MB_PER_HOUR` says how much is kept of every request, as a share of the time since the last.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

from service.__main__ import main
from service.generator import Generator

VARIABLE = "LEAK_MB_PER_HOUR"
_MEGABYTE = 1e6
_HOUR = 3600.0


def leak(megabytes_per_hour: float) -> None:
    """Makes `Generator.run` keep what it should not."""
    run, kept, last = Generator.run, list[bytearray](), [time.monotonic()]

    async def leaking(self: Generator, *arguments: Any) -> AsyncGenerator[Any, None]:
        now = time.monotonic()
        size = int(megabytes_per_hour * _MEGABYTE / _HOUR * (now - last[0]))
        last[0] = now
        # Written to, or the system would only promise the memory.
        kept.append(bytearray(os.urandom(size)))
        async for part in run(self, *arguments):
            yield part

    Generator.run = leaking  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    leak(float(os.environ[VARIABLE]))  # noqa: TID251 (not the server's own)
    sys.exit(main(sys.argv[1:]))
