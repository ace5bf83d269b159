"""The state of a stream, blocking or asyncio: its request, and when it is retried."""

from __future__ import annotations

from onward.answers import StreamFacts
from onward.errors import CallError
from onward.requests import request_id
from onward.retries import Attempts
from onward.v1 import generation_pb2 as pb


class StreamState(StreamFacts):
    """A stream's request and its attempts. It is retried only before its first event."""

    def __init__(self, request: pb.GenerateStreamRequest, attempts: Attempts) -> None:
        super().__init__(request_id(request))
        self._request = request
        self._attempts = attempts

    def _was_closed(self) -> bool:
        """Whether the stream was closed. A call, as another thread or task may close it at any time."""
        return self._is_over

    def _pause_seconds(self, error: CallError) -> float:
        """How long to wait before the next attempt.

        Raises:
            CallError: `error`, if there is no next attempt.
        """
        try:
            if self._has_begun:
                raise error
            return self._attempts.pause_seconds(error)
        except CallError:
            self._is_over = True
            raise
