"""The log of ended calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_LOGGER = logging.getLogger(__name__)

# Statuses, gRPC's and HTTP's, of calls that cost their caller nothing, and how many of them are logged per second.
_REFUSALS = {"UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "401", "403", "429"}
_MAX_LOGGED_REFUSALS = 100


class CallLog:
    """Logs one line per call; of refused ones at most `_MAX_LOGGED_REFUSALS` per second, and a count of the rest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second, self._num_refused = 0, 0

    def ended(self, method: str, code: str, seconds: float) -> None:
        """Logs one call, if not too many were refused in this second."""
        if code in _REFUSALS:
            if (second := int(self._clock())) != self._second:
                if (num_left_out := self._num_refused - _MAX_LOGGED_REFUSALS) > 0:
                    _LOGGER.warning("%d more calls were refused within a second", num_left_out)
                self._second, self._num_refused = second, 0
            self._num_refused += 1
            if self._num_refused > _MAX_LOGGED_REFUSALS:
                return
        _LOGGER.info("%s %s %.3f s", method, code, seconds)
