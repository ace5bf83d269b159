"""When a call is tried again, and how long it waits before that. Pure arithmetic: knows no channel and sleeps nowhere.

Tried again is what the server has refused with a time to come again (RESOURCE_EXHAUSTED with RetryInfo), and what found
nobody (UNAVAILABLE), unless repeating it might change something. Everything else would end the same way again.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from onward.connection import ChannelOption
from onward.errors import CallError, ResourceExhausted, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how patiently.

    Before try k + 1 a call waits as long as the server has told it to, and a random part of
    `initial_backoff_seconds` * 2^(k - 1), at most of `max_backoff_seconds`, besides: so those who were refused together
    do not come again together. A pause that would outlast the deadline is not begun; the call fails at once.

    Attributes:
        max_attempts: tries in all; 1 is never again.
        initial_backoff_seconds: longest random pause after the first try.
        max_backoff_seconds: longest random pause at all.

    Raises:
        ValueError: naming the field and its limit.
    """

    max_attempts: int = 5
    initial_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts: must be at least 1, got {self.max_attempts}")
        if not 0 <= self.initial_backoff_seconds <= self.max_backoff_seconds < math.inf:
            raise ValueError(
                "initial_backoff_seconds: must be from 0 to max_backoff_seconds, which must be finite, got "
                f"{self.initial_backoff_seconds} and {self.max_backoff_seconds}"
            )

    @property
    def channel_options(self) -> tuple[ChannelOption, ...]:
        """For the channel that is tried again on.

        Between two tries to connect gRPC fails every call at once, for a second at first and for up to two minutes
        later: our next try must not fall into that.
        """
        return (
            ("grpc.initial_reconnect_backoff_ms", max(1, round(self.initial_backoff_seconds * 1000))),
            ("grpc.max_reconnect_backoff_ms", max(1, round(self.max_backoff_seconds * 1000))),
        )

    def pause_seconds(self, error: CallError, attempt: int, draw: Callable[[], float]) -> float:
        """How long to wait after try `attempt`, from 1; `draw` gives numbers from 0 to 1."""
        longest = min(self.max_backoff_seconds, math.ldexp(self.initial_backoff_seconds, min(attempt, 64) - 1))
        return (error.retry_after_seconds or 0.0) + longest * draw()


DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(max_attempts=1)


class Attempts:
    """The tries of one call.

    Args:
        policy: how many, and how far apart.
        timeout_seconds: for all of them together, from now; None for ever.
        is_repeatable: whether a call of which nobody knows how far it came may be made once more.
        clock: seconds, monotonic.
        draw: numbers from 0 to 1.

    Raises:
        ValueError: for a timeout that is no time.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_seconds: float | None,
        *,
        is_repeatable: bool = True,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        if timeout_seconds is not None and not 0 < timeout_seconds < math.inf:
            raise ValueError(f"timeout_seconds: must be finite and above 0, or None, got {timeout_seconds}")
        self._policy = policy
        self._deadline = None if timeout_seconds is None else clock() + timeout_seconds
        self._is_repeatable = is_repeatable
        self._clock = clock
        self._draw = draw
        self._num_failed = 0

    @property
    def left_seconds(self) -> float | None:
        """Until the deadline, not below 0; None where there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def pause_seconds(self, error: CallError) -> float:
        """How long to wait before the next try, now that one has failed.

        Raises:
            CallError: the given one, when there is no next.
        """
        self._num_failed += 1
        pause = self._policy.pause_seconds(error, self._num_failed, self._draw)
        left = self.left_seconds
        is_last = self._num_failed >= self._policy.max_attempts
        if is_last or not self._helps(error) or (left is not None and pause >= left):
            raise error
        return pause

    def _helps(self, error: CallError) -> bool:
        if isinstance(error, ResourceExhausted):
            return error.retry_after_seconds is not None
        return self._is_repeatable and isinstance(error, Unavailable)
