"""SIGTERM and Ctrl-C while a model trains: noted, so that the step is finished and saved; the second one ends at once.

Knows nothing of training.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
    """A signal arrived where nothing has to be finished first; like KeyboardInterrupt, it is no `Exception`."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        super().__init__(number.name)


class Interruption:
    """Takes the signals over while it is entered, in the main thread; puts the handlers back afterwards.

    `number` is the signal that has arrived, None while none has.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._ends_at_once = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Python lets the main thread alone handle signals; whoever trains in another one ends it in another way.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()

    def is_requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.number is not None

    def end_at_once(self) -> None:
        """From here on nothing needs to be finished: a signal raises where it arrives, or here if it has already.

        Raises:
            Interrupted: see above; later from anywhere.
        """
        self._ends_at_once = True
        if self.number is not None:
            raise Interrupted(self.number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.number = signal.Signals(number)
        # The next one meets the handlers of before, which end the process.
        self._put_back()
        if self._ends_at_once:
            raise Interrupted(self.number)

    def _put_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
