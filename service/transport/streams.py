"""Bidirectional streams: how many are open, and which silent one ends when another caller needs its place.

A stream's silence looks like an unfinished message, for which gRPC may have buffered a message's bytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from service.access import Allowance
from service.errors import ClientStalled, RateLimited
from service.transport.flooding import FloodGuard, Reading
from service.transport.receiving import Check, in_steps

_MAX_STREAM_BYTES = 512 << 20
_MIN_STREAMS = 4
# Until an open stream may have ended: nothing predicts it.
_RETRY_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class OpenStream:
    """A bidirectional call. It is silent while nothing of it is in flight, and may lose its place then."""

    caller: Hashable
    reading: Reading
    _streams: OpenStreams
    num_in_flight: int = 0
    is_ended: bool = False

    async def requests(
        self, messages: AsyncIterator[bytes], allowance: Allowance, check: Check, parse: Callable[[bytes], Any]
    ) -> AsyncIterator[Any]:
        """The call's requests. Tasks that are created meanwhile may use `each_request`."""
        _EXCHANGE.set((allowance, self))
        async for data in messages:
            self._streams.guard.took(self.reading, len(data))
            with self.working():
                await in_steps(check(data))
                request = [parse(data)]
                del data
                yield request.pop()
                # A task that was created for the request begins now, and marks the stream as working itself.
                await asyncio.sleep(0)

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context for work that the stream waits for: it is not silent meanwhile."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
            self._streams.active(self)


# Of the call that the running task serves.
_EXCHANGE: ContextVar[tuple[Allowance, OpenStream] | None] = ContextVar("onward_exchange", default=None)


@contextmanager
def each_request() -> Iterator[None]:
    """A context for one request of a call with many; it counts against its caller's key as a call would.

    Raises:
        Unauthenticated, PermissionDenied, RateLimited: on entry; see `service.access.Allowance`.
    """
    if (exchange := _EXCHANGE.get()) is None:
        yield
        return
    allowance, stream = exchange
    with stream.working(), allowance.request():
        yield


class OpenStreams:
    """The open streams of a server; one caller has at most half of the places."""

    def __init__(self, max_message_bytes: int, guard: FloodGuard) -> None:
        self.guard = guard
        self._max_streams = max(_MIN_STREAMS, _MAX_STREAM_BYTES // max_message_bytes)
        # Least recently active first.
        self._open: dict[OpenStream, None] = {}

    def __iter__(self) -> Iterator[OpenStream]:
        return iter(self._open)

    @asynccontextmanager
    async def open(self, peer: str, caller: Hashable) -> AsyncIterator[OpenStream]:
        """A context for a stream. If all places are taken, the longest silent stream of the caller with most ends.

        Raises:
            RateLimited: when no place can be had.
            ClientStalled: when the connection brings more than its messages may have, or lost the place.
        """
        held = Counter(each.caller for each in self._open)
        is_full = held.total() >= self._max_streams
        if held[caller] >= self._max_streams // 2 or (is_full and not self._end_silent(held, caller)):
            raise RateLimited(f"{held.total()} bidirectional streams are open", _RETRY_SECONDS)
        stream: OpenStream | None = None
        try:
            async with self.guard.reading(peer) as reading:
                stream = OpenStream(caller, reading, self)
                self._open[stream] = None
                try:
                    yield stream
                finally:
                    self._open.pop(stream, None)
        except ClientStalled as error:
            if stream is None or not stream.is_ended:
                raise
            what = "the stream is silent and another caller needs its place, which it had"
            raise ClientStalled(error.seconds, what) from error

    def active(self, stream: OpenStream) -> None:
        """Moves a stream to the end of those that may lose their place."""
        if stream in self._open:
            self._open[stream] = self._open.pop(stream)

    def _end_silent(self, held: Counter[Hashable], caller: Hashable) -> bool:
        """Ends a stream of the caller with most, if that makes the places more even; whether it did."""
        for greediest, num_held in held.most_common():
            if held[caller] and num_held <= held[caller] + 1:
                return False
            for stream in self._open:
                if stream.caller == greediest and not stream.num_in_flight and not stream.reading.expired():
                    del self._open[stream]
                    stream.is_ended = True
                    stream.reading.reschedule(0.0)
                    return True
        return False
