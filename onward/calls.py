"""The attempts of one call, blocking or asyncio: deadline, metadata, when to retry."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from onward.answers import StreamFacts
from onward.connection import Metadata
from onward.errors import CallError
from onward.requests import carry_deadline, request_id
from onward.retries import Attempts
from onward.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Tries:
    """The attempts of one call, and the metadata that each sends."""

    attempts: Attempts
    metadata: Metadata

    def next_timeout(self, request: Message) -> float | None:
        """Seconds until the deadline for the next attempt, also written into a generation's request."""
        left = self.attempts.left_seconds
        carry_deadline(request, left)
        return left


class StreamTries(StreamFacts):
    """The attempts of a stream, which is retried only before its first event."""

    def __init__(self, request: pb.GenerateStreamRequest, tries: Tries) -> None:
        super().__init__(request_id(request))
        self._request = request
        self._tries = tries

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
            return self._tries.attempts.pause_seconds(error)
        except CallError:
            self._is_over = True
            raise
