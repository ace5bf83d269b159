"""SIGTERM and Ctrl-C during training: the first signal lets the step finish and save, the second ends the process."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
    """A signal arrived while nothing has to be finished; like KeyboardInterrupt, not an `Exception`."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        super().__init__(number.name)


class Interruption:
    """Handles the signals inside its context, in the main thread, and restores the handlers afterwards.

    `number` is the signal that arrived, or None.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._ends_at_once = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Python allows signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def is_requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.number is not None

    def end_at_once(self) -> None:
        """From now on a signal raises where it arrives, or here if it has already arrived.

        Raises:
            Interrupted: here, or later anywhere.
        """
        self._ends_at_once = True
        if self.number is not None:
            raise Interrupted(self.number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.number = signal.Signals(number)
        # The second signal reaches the original handlers, which end the process.
        self._restore()
        if self._ends_at_once:
            raise Interrupted(self.number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
