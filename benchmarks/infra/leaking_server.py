"""`python -m benchmarks.infra.leaking_server serve …`: the server, which prints its number of tasks and may leak.

On SIGUSR1 it has the C library give back what is free, so that what is left is in use or in pieces, and prints the
number of asyncio's tasks, which nothing else shows from outside. The environment variable `LEAK_MB_PER_HOUR` puts a
leak of a known size into it: now and then a request leaves behind what is due by then. That is what `benchmarks.soak`
proves itself on: a check that finds no leak in this finds none anywhere.
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
"""What the line begins with that a signal brings; a number follows."""
_MEGABYTE = 1e6
_HOUR = 3600.0
_PIECE_BYTES = 1 << 14


def leak(megabytes_per_hour: float) -> None:
    """Makes `Generator.run` keep what it should not."""
    run, kept, last = Generator.run, list[bytes](), [time.monotonic()]

    async def leaking(self: Generator, *arguments: Any) -> AsyncGenerator[Any, None]:
        now = time.monotonic()
        size = int(megabytes_per_hour * _MEGABYTE / _HOUR * (now - last[0]))
        # In pieces so large that what each costs besides is nothing.
        if size >= _PIECE_BYTES:
            last[0] = now
            # Written to, or the system would only promise the memory.
            kept.append(os.urandom(size))
        async for part in run(self, *arguments):
            yield part

    Generator.run = leaking  # type: ignore[method-assign, assignment]


def tell_tasks(*_: object) -> None:
    """Gives back memory, and prints how many tasks the event loop has, whose thread is the one that signals come to."""
    # Elsewhere than in glibc there is no such function.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    sys.stdout.write(f"{TASKS}{len(asyncio.all_tasks())}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, tell_tasks)
    if leaked := float(os.environ.get(VARIABLE, "0")):  # noqa: TID251 (not the server's own)
        leak(leaked)
    sys.exit(main(sys.argv[1:]))
