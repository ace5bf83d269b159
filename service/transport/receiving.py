"""Bounds what clients can make the server buffer: few messages at a time are read, the others stay with their senders.

gRPC buffers a message in full once its read has begun, and little before: HTTP/2's flow control holds the rest back. So
each read waits for a place. A read that takes too long is ended, earlier where another caller waits for its place, or
where the connection brings more than its messages may have. Python's gRPC has no resource quota, which would bound
bytes instead. Knows nothing of what a message says.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import grpc

from service.errors import ClientStalled, InvalidRequest, RateLimited, RequestError
from service.transport.flooding import FloodGuard
from service.transport.sending import abort_stalled, send
from service.transport.status import to_status

Context = grpc.aio.ServicerContext[Any, Any]

MAX_BYTES = 64 << 20
"""Bound on all messages that are read at once."""
_MAX_STREAM_BYTES = 512 << 20
_MIN_PLACES = 4
# How long a caller waits for a place before the longest read of one who holds more is ended.
_PATIENCE_SECONDS = 0.5
# For gRPC to report that a call whose message did not come was cancelled.
_CANCELLATION_SECONDS = 0.1
# Of one connection, to health and reflection: a balancer watches dozens of names.
_MAX_CALLS = 128
# Until an open stream may have ended: nothing predicts it.
_RETRY_SECONDS = 1.0


class Receiver:
    """Reads the messages of calls, a bounded number at a time. One caller has at most half of the places.

    Args:
        max_message_bytes: largest message.
        max_stall_seconds: how long a message may take to come.
        guard: ends reads of larger messages, which gRPC may refuse only once it has all of them.
        max_bytes: bound on all messages that are read at once; the places are at least 4 messages.
    """

    def __init__(
        self, max_message_bytes: int, max_stall_seconds: float, guard: FloodGuard, max_bytes: int = MAX_BYTES
    ) -> None:
        self.max_stall_seconds = max_stall_seconds
        self._guard = guard
        self._num_places = max(_MIN_PLACES, max_bytes // max_message_bytes)
        self._num_streams = max(_MIN_PLACES, _MAX_STREAM_BYTES // max_message_bytes)
        self._held = Counter[Hashable]()
        self._streams = Counter[Hashable]()
        self._calls = Counter[Hashable]()
        # Both in the order in which they began.
        self._reads: dict[asyncio.Timeout, Hashable] = {}
        self._waiting: dict[Hashable, dict[asyncio.Future[None], None]] = {}

    async def message(self, context: Context, caller: Hashable) -> Any:
        """The one message of a call.

        Args:
            context: gRPC's.
            caller: whose place the read takes.

        Raises:
            ClientStalled: when the message takes too long.
            InvalidRequest: when the call brings none.
        """
        message = await self._read(context, caller)
        if message is grpc.aio.EOF:
            # gRPC reports as much of a cancelled call and of a message that is too large, and cancels this task then.
            await asyncio.sleep(_CANCELLATION_SECONDS)
            raise InvalidRequest("request", "no message", "must be one message")
        return message

    async def messages(self, context: Context, caller: Hashable) -> AsyncIterator[Any]:
        """All messages of a call, each of which must come as soon as that of a call that has one.

        Raises:
            ClientStalled: when one takes too long.
        """
        while (message := await self._read(context, caller)) is not grpc.aio.EOF:
            yield message

    @asynccontextmanager
    async def stream(self, context: Context, caller: Hashable) -> AsyncIterator[Callable[[int], None]]:
        """A context for a call that may be silent for long between its messages, which reads them itself.

        Its silence looks like an unfinished message, so it may hold a message's bytes all the while. What it
        gives is called with each message's size.

        Raises:
            RateLimited: when as many such calls are open as may be.
            ClientStalled: when the connection brings more than its messages may have.
        """
        if not _has_place(self._streams, caller, self._num_streams):
            raise RateLimited(f"{self._streams.total()} bidirectional streams are open", _RETRY_SECONDS)
        self._streams[caller] += 1
        try:
            async with self._reading(context, None):
                yield partial(self._guard.took, context.peer())
        finally:
            self._streams -= Counter((caller,))

    @contextmanager
    def call(self, caller: Hashable) -> Iterator[None]:
        """A context for a call that nothing else counts by its caller.

        Raises:
            RateLimited: when the caller has as many such calls as it may have.
        """
        if self._calls[caller] >= _MAX_CALLS:
            raise RateLimited(f"{_MAX_CALLS} calls of this connection are open", _RETRY_SECONDS)
        self._calls[caller] += 1
        try:
            yield
        finally:
            self._calls -= Counter((caller,))

    async def _read(self, context: Context, caller: Hashable) -> Any:
        await self._take_place(caller)
        try:
            async with self._reading(context, self.max_stall_seconds) as reading:
                self._reads[reading] = caller
                try:
                    message = await context.read()
                finally:
                    self._reads.pop(reading, None)
                if isinstance(message, bytes):
                    self._guard.took(context.peer(), len(message))
                return message
        finally:
            self._release(caller)

    @asynccontextmanager
    async def _reading(self, context: Context, max_seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        peer = context.peer()
        started = asyncio.get_running_loop().time()
        reading = asyncio.timeout(max_seconds)
        try:
            async with reading:
                self._guard.begin(peer, reading)
                try:
                    yield reading
                finally:
                    self._guard.end(peer, reading)
        except TimeoutError as error:
            if not reading.expired():
                raise
            elapsed = asyncio.get_running_loop().time() - started
            raise ClientStalled(elapsed, "the request was on its way") from error

    async def _take_place(self, caller: Hashable) -> None:
        if _has_place(self._held, caller, self._num_places):
            self._held[caller] += 1
            return
        loop = asyncio.get_running_loop()
        turn, latest = loop.create_future(), loop.time() + self.max_stall_seconds
        self._waiting.setdefault(caller, {})[turn] = None
        try:
            while not turn.done():
                await asyncio.wait((turn,), timeout=_PATIENCE_SECONDS)
                if not turn.done():
                    if loop.time() >= latest:
                        raise RateLimited("too many other requests are on their way", _RETRY_SECONDS)
                    self._end_longest_read(caller)
        except (asyncio.CancelledError, RateLimited):
            if turn.done():
                self._release(caller)
            else:
                self._stop_waiting(caller, turn)
            raise

    def _release(self, caller: Hashable) -> None:
        """Gives the place to the waiting caller that holds fewest."""
        self._held -= Counter((caller,))
        waiting = [each for each in self._waiting if _has_place(self._held, each, self._num_places)]
        if waiting:
            following = min(waiting, key=self._held.__getitem__)
            turn = next(iter(self._waiting[following]))
            self._stop_waiting(following, turn)
            if following in self._waiting:
                # Behind its equals: those who have many turns to wait for are not always first.
                self._waiting[following] = self._waiting.pop(following)
            self._held[following] += 1
            turn.set_result(None)

    def _stop_waiting(self, caller: Hashable, turn: asyncio.Future[None]) -> None:
        del self._waiting[caller][turn]
        if not self._waiting[caller]:
            del self._waiting[caller]

    def _end_longest_read(self, caller: Hashable) -> None:
        """Takes a place from the caller who holds most, if that makes the places more even."""
        ((greediest, num_held),) = self._held.most_common(1)
        if self._held[caller] and num_held <= self._held[caller] + 1:
            return
        for reading, holder in self._reads.items():
            if holder == greediest and not reading.expired():
                del self._reads[reading]
                reading.reschedule(0.0)
                return


def bounded(handler: Any, receiver: Receiver) -> Any:
    """A method's handler whose messages are read by the receiver. Each connection is a caller of its own."""
    answer = handler.stream_stream or handler.unary_stream or handler.unary_unary

    async def call(_: AsyncIterator[Any], context: Context) -> None:
        caller = context.peer()
        try:
            with receiver.call(caller):
                if handler.request_streaming:
                    answers = answer(receiver.messages(context, caller), context)
                else:
                    answers = answer(await receiver.message(context, caller), context)
                if not inspect.isawaitable(answers):
                    async for each in answers:
                        await send(each, context, receiver.max_stall_seconds)
                elif (message := await answers) is not None:
                    await send(message, context, receiver.max_stall_seconds)
        except ClientStalled as error:
            await abort_stalled(context, to_status(error))
        except RequestError as error:
            status = to_status(error)
            await context.abort(status.code, status.message, status.trailing_metadata)

    return grpc.stream_stream_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)


def _has_place(held: Counter[Hashable], caller: Hashable, num_places: int) -> bool:
    return held.total() < num_places and held[caller] < num_places // 2
