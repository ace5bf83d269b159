"""Processor time of the client process: a busy client distorts its own measurement."""

from __future__ import annotations

import time

from loadtest.core.figures import ClientLoad


class Meter:
    """Counts processor time from construction on. The constructing thread must be the one that reads the streams."""

    def __init__(self) -> None:
        self._wall, self._process, self._thread = time.monotonic(), time.process_time(), time.thread_time()

    def read(self) -> ClientLoad:
        """Shares of one core since construction. Call it on the reading thread."""
        wall = max(time.monotonic() - self._wall, 1e-9)
        return ClientLoad(
            cpu_share=(time.process_time() - self._process) / wall,
            reader_share=(time.thread_time() - self._thread) / wall,
        )
