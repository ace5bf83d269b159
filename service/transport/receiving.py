"""Bounds what clients can make the server buffer: few messages at a time are read, the others stay with their senders.

gRPC buffers a message in full once its read has begun, and little before: HTTP/2's flow control holds the rest back. So
each read waits for a place. A read that takes too long is ended, earlier where another caller waits for its place.
Python's gRPC has no resource quota, which would bound bytes instead. Knows nothing of what a message says.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from service.errors import ClientStalled, InvalidRequest, RateLimited, RequestError
from service.transport.status import to_status

Context = grpc.aio.ServicerContext[Any, Any]

MAX_BYTES = 128 << 20
"""Bound on all messages that are read at once."""
_MAX_STREAM_BYTES = 512 << 20
_MIN_PLACES = 4
# How long a caller waits for a place before the longest read of one who holds more is ended.
_PATIENCE_SECONDS = 0.5
# For gRPC to report that a call whose message did not come was cancelled.
_CANCELLATION_SECONDS = 1.0
# Until an open stream may have ended: nothing predicts it.
_RETRY_SECONDS = 1.0


class Receiver:
    """Reads the messages of calls, a bounded number at a time. One caller has at most half of the places.

    Args:
        max_message_bytes: largest message, which gRPC refuses as soon as it has its length.
        max_stall_seconds: how long a message may take to come.
        max_bytes: bound on all messages that are read at once; the places are at least 4 messages.
    """

    def __init__(self, max_message_bytes: int, max_stall_seconds: float, max_bytes: int = MAX_BYTES) -> None:
        self._max_stall_seconds = max_stall_seconds
        self._num_places = max(_MIN_PLACES, max_bytes // max_message_bytes)
        self._num_streams = max(_MIN_PLACES, _MAX_STREAM_BYTES // max_message_bytes)
        self._held = Counter[Hashable]()
        self._streams = Counter[Hashable]()
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

    @contextmanager
    def stream(self, caller: Hashable) -> Iterator[None]:
        """A context for a call that may be silent for long between its messages.

        Nothing tells its silence from an unfinished message, so it may hold a message's bytes all the while.

        Raises:
            RateLimited: when as many such calls are open as may be.
        """
        if not _has_place(self._streams, caller, self._num_streams):
            raise RateLimited(f"{self._streams.total()} bidirectional streams are open", _RETRY_SECONDS)
        self._streams[caller] += 1
        try:
            yield
        finally:
            self._streams -= Counter((caller,))

    async def _read(self, context: Context, caller: Hashable) -> Any:
        await self._take_place(caller)
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._max_stall_seconds) as reading:
                self._reads[reading] = caller
                return await context.read()
        except TimeoutError as error:
            elapsed = asyncio.get_running_loop().time() - started
            raise ClientStalled(elapsed, "the request was on its way") from error
        finally:
            self._reads.pop(reading, None)
            self._release(caller)

    async def _take_place(self, caller: Hashable) -> None:
        if _has_place(self._held, caller, self._num_places):
            self._held[caller] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, {})[turn] = None
        try:
            while not turn.done():
                await asyncio.wait((turn,), timeout=_PATIENCE_SECONDS)
                if not turn.done():
                    self._end_longest_read(caller)
        except asyncio.CancelledError:
            if turn.done():
                self._release(caller)
            else:
                self._stop_waiting(caller, turn)
            raise

    def _release(self, caller: Hashable) -> None:
        """Gives the place to whoever waits and holds fewest."""
        self._held -= Counter((caller,))
        waiting = [each for each in self._waiting if _has_place(self._held, each, self._num_places)]
        if waiting:
            following = min(waiting, key=self._held.__getitem__)
            turn = next(iter(self._waiting[following]))
            self._stop_waiting(following, turn)
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
            if handler.request_streaming:
                answers = answer(receiver.messages(context, caller), context)
            else:
                answers = answer(await receiver.message(context, caller), context)
            if not inspect.isawaitable(answers):
                async for each in answers:
                    await context.write(each)
            elif (message := await answers) is not None:
                await context.write(message)
        except RequestError as error:
            status = to_status(error)
            await context.abort(status.code, status.message, status.trailing_metadata)

    return grpc.stream_stream_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)


def _has_place(held: Counter[Hashable], caller: Hashable, num_places: int) -> bool:
    return held.total() < num_places and held[caller] < num_places // 2
