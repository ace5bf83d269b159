"""When a call is retried, and after what pause. Pure arithmetic: makes no calls, does not sleep.

Retried are RESOURCE_EXHAUSTED with RetryInfo, and UNAVAILABLE where repeating the call is safe. Every other status
would come back the same.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from onward.connection import ChannelOption, Metadata
from onward.errors import CallError, ResourceExhausted, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with jitter.

    Before attempt k + 1 a call waits for the server's retry delay, plus a random part of `initial_backoff_seconds` *
    2^(k - 1), at most of `max_backoff_seconds`: calls refused together do not return together. If the pause would
    outlast the deadline, the call fails at once.

    Attributes:
        max_attempts: attempts in all; 1 means no retry.
        initial_backoff_seconds: longest random pause after the first attempt.
        max_backoff_seconds: longest random pause of all.

    Raises:
        ValueError: names the field and its limit.
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
        """Options of the client's channel: it reconnects no later than the client retries.

        Between two attempts to connect, gRPC fails every call at once, by default for up to two minutes.
        """
        return (
            ("grpc.initial_reconnect_backoff_ms", max(1, round(self.initial_backoff_seconds * 1000))),
            ("grpc.max_reconnect_backoff_ms", max(1, round(self.max_backoff_seconds * 1000))),
        )

    def pause_seconds(self, error: CallError, attempt: int, draw: Callable[[], float]) -> float:
        """The pause after attempt number `attempt`, from 1; `draw` returns numbers from 0 to 1."""
        longest = min(self.max_backoff_seconds, math.ldexp(self.initial_backoff_seconds, min(attempt, 64) - 1))
        return (error.retry_after_seconds or 0.0) + longest * draw()


DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(max_attempts=1)


class Attempts:
    """The attempts of one call.

    Args:
        policy: their number and pauses.
        timeout_seconds: of all attempts together, from now; None for no deadline.
        is_repeatable: whether the call may be retried when it is unknown how far it came.
        metadata: of every attempt.
        clock: monotonic seconds.
        draw: returns numbers from 0 to 1.

    Raises:
        ValueError: the timeout is not finite or not positive.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_seconds: float | None,
        *,
        is_repeatable: bool = True,
        metadata: Metadata = (),
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        if timeout_seconds is not None and not 0 < timeout_seconds < math.inf:
            raise ValueError(f"timeout_seconds: must be finite and above 0, or None, got {timeout_seconds}")
        self.metadata = metadata
        self._policy = policy
        self._deadline = None if timeout_seconds is None else clock() + timeout_seconds
        self._is_repeatable = is_repeatable
        self._clock = clock
        self._draw = draw
        self._num_failed = 0

    @property
    def left_seconds(self) -> float | None:
        """Until the deadline, at least 0; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def pause_seconds(self, error: CallError) -> float:
        """How long to wait before the next attempt, after one that failed.

        Raises:
            CallError: `error`, if there is no next attempt.
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
