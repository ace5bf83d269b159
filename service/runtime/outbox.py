"""What the engine thread reports to the event loop, in order: the loop is woken once for all that waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

GATHER_SECONDS = 0.01
"""The age at which steps that may wait are delivered without others.

Event loop and graphs share the cores: waking the loop for each step of three milliseconds would cost a tenth of it.
"""


class Outbox:
    """Calls for the event loop.

    Waking the loop for each call would fill the pipe through which it is woken if it is held up for some hundred steps,
    and lose signals that come through the same pipe.

    `post` runs a callback on the event loop, from any thread.
    """

    def __init__(self, post: Callable[..., object]) -> None:
        self._post = post
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_awaited = False
        # When the first of the calls that wait was left.
        self._left_since: float | None = None

    def send(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Has `callback` run on the event loop, after all that was sent or left before. On the engine thread."""
        self._calls.append((callback, arguments))
        self._wake()

    def leave(self, now: float, callback: Callable[..., object], *arguments: Any) -> None:
        """As `send`, but with the next that is sent, or once the first that was left is `GATHER_SECONDS` old."""
        self._calls.append((callback, arguments))
        if self._left_since is None:
            self._left_since = now
        elif now - self._left_since >= GATHER_SECONDS:
            self._wake()

    def flush(self) -> None:
        """Sends what was left. On the engine thread."""
        if self._left_since is not None:
            self._wake()

    def _wake(self) -> None:
        self._left_since = None
        if not self._is_awaited:
            self._is_awaited = True
            self._post(self._deliver)

    def _deliver(self) -> None:
        # Reset first: whatever is sent from now on wakes the loop again and is left to its next turn, so that a fast
        # engine does not keep this turn from its other work.
        self._is_awaited = False
        num_left = len(self._calls)
        try:
            while num_left:
                num_left -= 1
                callback, arguments = self._calls.popleft()
                callback(*arguments)
        finally:
            if num_left:  # one raised: the others are delivered all the same
                self._post(self._deliver)
