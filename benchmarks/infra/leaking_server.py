"""`python -m benchmarks.infra.leaking_server serve …`: the server, which prints its number of tasks and may leak.

On SIGUSR1 it trims the heap and prints the number of asyncio tasks, which nothing else shows from outside. The
environment variable `LEAK_MB_PER_HOUR` seeds a leak of a known size: a check that does not find it finds none.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

from service.__main__ import main
from service.generator import Generator

VARIABLE = "LEAK_MB_PER_HOUR"
TASKS = "tasks "
"""Begins the line that answers a signal; a number follows."""
_MEGABYTE = 1e6
_HOUR = 3600.0
_PIECE_BYTES = 1 << 14


def leak(megabytes_per_hour: float) -> None:
    """Makes `Generator.run` keep memory."""
    run, kept, last = Generator.run, list[bytes](), [time.monotonic()]

    async def leaking(self: Generator, *arguments: Any) -> AsyncGenerator[Any, None]:
        now = time.monotonic()
        size = int(megabytes_per_hour * _MEGABYTE / _HOUR * (now - last[0]))
        if size >= _PIECE_BYTES:
            last[0] = now
            # Written to: untouched memory is not resident.
            kept.append(os.urandom(size))
        async for part in run(self, *arguments):
            yield part

    Generator.run = leaking  # type: ignore[method-assign, assignment]


def print_tasks(*_: object) -> None:
    """Trims the heap, and prints the number of tasks. Signals arrive on the event loop's thread."""
    # glibc only.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    sys.stdout.write(f"{TASKS}{len(asyncio.all_tasks())}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, print_tasks)
    if leaked := float(os.environ.get(VARIABLE, "0")):  # noqa: TID251 (not the server's own)
        leak(leaked)
    sys.exit(main(sys.argv[1:]))
