"""Reads messages, a bounded number at a time: the others stay with their senders.

gRPC buffers a message in full once its read has begun, and little before: HTTP/2 flow control holds the rest back. So
each read waits for a place. A read ends early when it takes too long, when others wait for its place, or when the
connection brings more than its messages may have. Python's gRPC has no resource quota, which would bound bytes instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from math import inf
from typing import Any

import grpc

from service.errors import InvalidRequest
from service.transport.flooding import FloodGuard
from service.transport.read_places import ReadPlaces
from service.transport.sending import Context

MAX_BYTES = 64 << 20
"""Bound on all messages that are read at once."""
_MIN_PLACES = 4
# For gRPC to report that a call whose message did not come was cancelled.
_CANCELLATION_SECONDS = 0.1

Check = Callable[[bytes], Iterator[None]]
"""Raises for a message that must not be parsed; yields between steps, so that the event loop runs."""


class Receiver:
    """Reads the messages of calls.

    Args:
        max_message_bytes: largest message.
        max_stall_seconds: how long a message may take to come.
        guard: ends reads of larger messages, which gRPC may refuse only once it has all of them.
        max_bytes: bound on all messages that are read at once; the places are at least 4 messages.
    """

    def __init__(
        self, max_message_bytes: int, max_stall_seconds: float, guard: FloodGuard, max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_stall_seconds = max_stall_seconds
        self._guard = guard
        # Small messages, which have no bound of bytes, come with their calls.
        timely_rate = max_message_bytes / max_stall_seconds if max_bytes else inf
        self.places = ReadPlaces(max(_MIN_PLACES, max_bytes // max_message_bytes), timely_rate, guard)

    async def message(
        self, context: Context, caller: Hashable, check: Check, max_seconds: float | None = None
    ) -> bytes:
        """The one message of a call.

        Args:
            context: gRPC's.
            caller: whose place the read takes.
            check: runs while the message has its place.
            max_seconds: how long the message may take; `max_stall_seconds` by default.

        Raises:
            ClientStalled: when the message takes too long.
            InvalidRequest: when the call brings none; and what `check` raises.
        """
        message = await self._read(context, caller, check, max_seconds or self._max_stall_seconds)
        if message is None:
            # gRPC reports the same of a cancelled call and of a message that is too large; then it cancels this task.
            await asyncio.sleep(_CANCELLATION_SECONDS)
            raise InvalidRequest("request", "no message", "must be one message")
        return message

    async def messages(self, context: Context, caller: Hashable, check: Check) -> AsyncIterator[bytes]:
        """All messages of a call, each within `max_stall_seconds`.

        Raises:
            ClientStalled: when one takes too long; and what `check` raises.
        """
        while (message := await self._read(context, caller, check, self._max_stall_seconds)) is not None:
            yield message

    async def _read(self, context: Context, caller: Hashable, check: Check, max_seconds: float) -> bytes | None:
        await self.places.take(caller, self._max_stall_seconds)
        try:
            async with self._guard.reading(context.peer(), max_seconds) as reading:
                self.places.begin(reading, caller, context.peer(), max_seconds)
                try:
                    message: Any = await context.read()
                finally:
                    self.places.end(reading)
                if message is grpc.aio.EOF:
                    return None
                self._guard.took(reading, len(message), is_last=True)
            await in_steps(check(message))
            return message  # type: ignore[no-any-return]
        finally:
            self.places.release(caller)


async def in_steps(check: Iterator[None]) -> None:
    """Runs a check, and the event loop's other work between its steps."""
    for _ in check:
        await asyncio.sleep(0)
