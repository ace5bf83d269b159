"""What the measuring process itself spends: a client that is busy measures itself."""

from __future__ import annotations

import time

from loadtest.core.figures import ClientLoad


class Meter:
    """Processor time from its making on; the reading thread is the one that made it."""

    def __init__(self) -> None:
        self._wall, self._process, self._thread = time.monotonic(), time.process_time(), time.thread_time()

    def read(self) -> ClientLoad:
        """Shares of one core since then. To be called on the reading thread."""
        wall = max(time.monotonic() - self._wall, 1e-9)
        return ClientLoad(
            cpu_share=(time.process_time() - self._process) / wall,
            reader_share=(time.thread_time() - self._thread) / wall,
        )
