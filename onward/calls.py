"""What all calls of a client have in common, blocking or not: what they show, when they end, how often they try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import grpc
import grpc.aio
from google.protobuf.message import Message

from onward.answers import StreamFacts
from onward.connection import Connection, Metadata
from onward.errors import CallError
from onward.requests import CallOptions, carry_deadline, request_id
from onward.retries import Attempts, RetryPolicy
from onward.v1 import generation_pb2 as pb

DEFAULT_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """What holds for every call that does not say otherwise.

    Attributes:
        connection: what every call must show.
        timeout_seconds: from its beginning to its deadline; None for ever.
        retries: how often it is tried again.
    """

    connection: Connection
    timeout_seconds: float | None
    retries: RetryPolicy

    @classmethod
    def of(cls, connection: Connection | str, timeout_seconds: float | None, retries: RetryPolicy) -> Self:
        """The defaults of a client, to whom an address alone is a connection in the clear and without a key."""
        return cls(Connection(connection) if isinstance(connection, str) else connection, timeout_seconds, retries)

    def channel(self) -> grpc.Channel:
        """A channel for blocking calls. The caller closes it."""
        return self.connection.channel(*self.retries.channel_options)

    def aio_channel(self) -> grpc.aio.Channel:
        """The same for the running event loop."""
        return self.connection.aio_channel(*self.retries.channel_options)

    def begin(self, options: CallOptions, *, is_repeatable: bool = True) -> Tries:
        """The tries of a call that begins now.

        Raises:
            ValueError: for a timeout that is no time.
        """
        metadata = self.connection.metadata
        if "traceparent" in options:
            metadata += (("traceparent", options["traceparent"]),)
        if "tracestate" in options:
            metadata += (("tracestate", options["tracestate"]),)
        timeout = options.get("timeout_seconds", self.timeout_seconds)
        return Tries(Attempts(self.retries, timeout, is_repeatable=is_repeatable), metadata)


@dataclass(frozen=True, slots=True)
class Tries:
    """One call's tries, each of which shows `metadata`."""

    attempts: Attempts
    metadata: Metadata

    def next_timeout(self, request: Message) -> float | None:
        """Seconds that the next try has; written into the request too, where it has a place for them."""
        left = self.attempts.left_seconds
        carry_deadline(request, left)
        return left


class StreamTries(StreamFacts):
    """A stream's tries: it is tried again only as long as nothing of it was heard.

    Args:
        request: what is asked.
        tries: how often.
    """

    def __init__(self, request: pb.GenerateStreamRequest, tries: Tries) -> None:
        super().__init__(request_id(request))
        self._request = request
        self._tries = tries

    def _was_closed(self) -> bool:
        """Whether nobody wants to hear more: another thread or task may say so at any time."""
        return self._is_over

    def _pause_seconds(self, error: CallError) -> float:
        """How long to wait before the next try.

        Raises:
            CallError: the given one, when there is no next.
        """
        try:
            if self._has_begun:
                raise error
            return self._tries.attempts.pause_seconds(error)
        except CallError:
            self._is_over = True
            raise
