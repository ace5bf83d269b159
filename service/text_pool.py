"""Threads for work on text, off the event loop and behind the engine: tokenizing, templates, large messages.

Tokenizing takes about two microseconds per byte (a megabyte: two seconds) and cannot be interrupted. So long texts have
one thread of their own, with a low priority and a short queue: they neither delay short texts nor take the engine's
cores. `model.tokenizer` releases the interpreter's lock while it tokenizes. Knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from service.errors import Overloaded

_Result = TypeVar("_Result")

LONG_BYTES = 32 << 10
"""Texts of more bytes are long."""
MAX_LONG = 16
"""Long texts that may run or wait at once; each holds no more than its message."""
# Of the long texts' thread: with this, Linux gives it a tenth of a core that another thread wants.
_NICENESS = 10
# Estimates of when a long text's place is free.
_SECONDS_PER_BYTE = 2e-6
_MIN_RETRY_SECONDS = 0.05


class TextPool:
    """Runs work on text. Used on one event loop; its threads start with their first work.

    Args:
        name: of its threads, and of itself in an `Overloaded`.
        num_threads: for short texts.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._short = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._long = ThreadPoolExecutor(1, thread_name_prefix=f"long-{name}", initializer=_lower_priority)
        self._long_sizes: list[int] = []

    async def run(self, num_bytes: int, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Runs `work` on a thread. Cancelling takes back work that has not begun.

        Args:
            num_bytes: how long the text is, at least.
            work: what to do.
            arguments: what to do it with.

        Raises:
            Overloaded: when the text is long and `MAX_LONG` others run or wait.
        """
        loop = asyncio.get_running_loop()
        if num_bytes <= LONG_BYTES:
            return await loop.run_in_executor(self._short, work, *arguments)
        if len(self._long_sizes) >= MAX_LONG:
            retry = max(_SECONDS_PER_BYTE * self._long_sizes[0], _MIN_RETRY_SECONDS)
            raise Overloaded(f"{self._name} with long texts", len(self._long_sizes), MAX_LONG, retry)
        self._long_sizes.append(num_bytes)
        # Work that is taken back waits in the executor's queue as before, but without its text.
        waiting: list[Callable[[], _Result]] = [partial(work, *arguments)]
        try:
            return await loop.run_in_executor(self._long, _take, waiting)
        finally:
            waiting.clear()
            self._long_sizes.remove(num_bytes)

    def close(self) -> None:
        """Ends the threads after what they do; work that waits is cancelled."""
        for executor in (self._short, self._long):
            executor.shutdown(wait=False, cancel_futures=True)


def _take(waiting: list[Callable[[], _Result]]) -> _Result:
    return waiting.pop()()


def _lower_priority() -> None:
    """On Linux, of the calling thread alone; elsewhere it would be the whole process's."""
    if sys.platform == "linux":
        os.nice(_NICENESS)
