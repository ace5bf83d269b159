"""Bounds what clients can make the server buffer: few messages at a time are read, the others stay with their senders.

gRPC buffers a message in full once its read has begun, and little before: HTTP/2's flow control holds the rest back. So
each read waits for a place. A read that takes too long is ended, earlier where others wait for its place, or where the
connection brings more than its messages may have. Python's gRPC has no resource quota, which would bound bytes instead.
Knows nothing of what a message says.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from service.errors import ClientStalled, InvalidRequest, RateLimited, RequestError
from service.transport.flooding import FloodGuard
from service.transport.places import claim, stall_after, uncount
from service.transport.sending import abort, abort_stalled, send
from service.transport.status import to_status
from service.transport.wire_limits import malformed

Context = grpc.aio.ServicerContext[Any, Any]

MAX_BYTES = 64 << 20
"""Bound on all messages that are read at once."""
_MAX_STREAM_BYTES = 512 << 20
_MIN_PLACES = 4
# How long a caller waits for a place before a read is ended for it.
_PATIENCE_SECONDS = 0.5
# What a caller's only read has in any case: an honest one need not be longer, and a slow one must not be cut at once.
_MIN_READ_SECONDS = 1.0
# The part of its time that a read has while others of its own caller wait, who may be many clients behind a proxy.
_OWN_PART = 1 / 6
# What reads have brought is compared after so long, and not more often.
_MEASURE_SECONDS = 0.25
# For gRPC to report that a call whose message did not come was cancelled.
_CANCELLATION_SECONDS = 0.1
# Of one connection, to health and reflection: a balancer watches dozens of names.
_MAX_CALLS = 128
# Of a request to health or reflection, which answers with it. It has a name, or few.
_MAX_OPEN_BYTES = 4 << 10
# For the one request of such a call, which an honest client sends with the call.
_MAX_OPEN_SECONDS = 5.0
# Until an open stream may have ended: nothing predicts it.
_RETRY_SECONDS = 1.0


class Connection(NamedTuple):
    """A caller of methods that ask no key: each connection is one, and those of an address share."""

    address: str
    peer: str


@dataclass(eq=False, slots=True)
class _Read:
    """A message that is on its way."""

    caller: Hashable
    peer: str
    begun: float
    max_seconds: float
    # When it was first compared with others, and what its connection had brought by then.
    first: tuple[float, int] | None = None
    # Bytes a second since, of the connection's for each of its reads; None until that is known.
    rate: float | None = None


@dataclass(eq=False, slots=True)
class OpenStream:
    """A bidirectional call. It may lose its place to another caller while nothing of it is in flight."""

    caller: Hashable
    reading: asyncio.Timeout
    num_in_flight: int = 0
    is_ended: bool = False


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
        self.guard = guard
        self._num_places = max(_MIN_PLACES, max_bytes // max_message_bytes)
        self._num_streams = max(_MIN_PLACES, _MAX_STREAM_BYTES // max_message_bytes)
        self._num_held = 0
        self._held = Counter[Hashable]()
        # The same by address, for connections.
        self._shares = Counter[Hashable]()
        self._calls = Counter[Hashable]()
        # In the order in which they were last active.
        self._streams: dict[OpenStream, None] = {}
        # Both in the order in which they began.
        self._reads: dict[asyncio.Timeout, _Read] = {}
        self._waiting: dict[Hashable, dict[asyncio.Future[None], None]] = {}
        # A message that brings as much comes in time. Small ones, where there is no bound, come with their calls.
        self._timely_rate = max_message_bytes / max_stall_seconds if max_bytes else inf
        self._measured_at = -inf

    async def message(
        self,
        context: Context,
        caller: Hashable,
        check: Callable[[bytes], Iterator[None]],
        max_seconds: float | None = None,
    ) -> bytes:
        """The one message of a call.

        Args:
            context: gRPC's.
            caller: whose place the read takes.
            check: looks through the message, in steps that the event loop is held for, while it has its place.
            max_seconds: how long it may take to come, if less than others may.

        Raises:
            ClientStalled: when the message takes too long.
            InvalidRequest: when the call brings none; and what `check` raises.
        """
        max_seconds = self.max_stall_seconds if max_seconds is None else max_seconds
        message = await self._read(context, caller, check, max_seconds)
        if message is None:
            # gRPC reports as much of a cancelled call and of a message that is too large, and cancels this task then.
            await asyncio.sleep(_CANCELLATION_SECONDS)
            raise InvalidRequest("request", "no message", "must be one message")
        return message

    async def messages(
        self, context: Context, caller: Hashable, check: Callable[[bytes], Iterator[None]]
    ) -> AsyncIterator[bytes]:
        """All messages of a call, each of which must come as soon as that of a call that has one.

        Raises:
            ClientStalled: when one takes too long.
        """
        while (message := await self._read(context, caller, check, self.max_stall_seconds)) is not None:
            yield message

    @asynccontextmanager
    async def stream(self, context: Context, caller: Hashable) -> AsyncIterator[OpenStream]:
        """A context for a call that may be silent for long between its messages, which reads them itself.

        Its silence looks like an unfinished message, so it may hold a message's bytes all the while. Where all places
        are taken, the longest silent stream of the caller who holds most ends for the next caller.

        Raises:
            RateLimited: when as many such calls are open as may be.
            ClientStalled: when the connection brings more than its messages may have, or the place is another's.
        """
        held = Counter(each.caller for each in self._streams)
        is_full = held.total() >= self._num_streams
        if held[caller] >= self._num_streams // 2 or (is_full and not self._end_silent(held, caller)):
            raise RateLimited(f"{held.total()} bidirectional streams are open", _RETRY_SECONDS)
        stream: OpenStream | None = None
        try:
            async with self._reading(context, None) as reading:
                stream = OpenStream(caller, reading)
                self._streams[stream] = None
                try:
                    yield stream
                finally:
                    self._streams.pop(stream, None)
        except ClientStalled as error:
            if stream is None or not stream.is_ended:
                raise
            what = "the stream is silent and another caller needs its place, which it had"
            raise ClientStalled(error.seconds, what) from error

    def took(self, stream: OpenStream, num_bytes: int) -> None:
        """A message of a stream is complete."""
        self.guard.took(stream.reading, num_bytes)
        self._is_active(stream)

    @contextmanager
    def working(self, stream: OpenStream) -> Iterator[None]:
        """A context for what a stream waits for: it is not silent."""
        stream.num_in_flight += 1
        try:
            yield
        finally:
            stream.num_in_flight -= 1
            self._is_active(stream)

    def _is_active(self, stream: OpenStream) -> None:
        if stream in self._streams:
            self._streams[stream] = self._streams.pop(stream)  # to the end

    def _end_silent(self, held: Counter[Hashable], caller: Hashable) -> bool:
        """Ends a stream of the caller who holds most, if that makes the places more even; whether it did."""
        for greediest, num_held in held.most_common():
            if held[caller] and num_held <= held[caller] + 1:
                return False
            for stream in self._streams:
                if stream.caller == greediest and not stream.num_in_flight and not stream.reading.expired():
                    del self._streams[stream]
                    stream.is_ended = True
                    stream.reading.reschedule(0.0)
                    return True
        return False

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
            uncount(self._calls, caller)

    async def _read(
        self, context: Context, caller: Hashable, check: Callable[[bytes], Iterator[None]], max_seconds: float
    ) -> bytes | None:
        await self._take_place(caller)
        try:
            async with self._reading(context, max_seconds) as reading:
                begun = asyncio.get_running_loop().time()
                self._reads[reading] = _Read(caller, context.peer(), begun, max_seconds)
                try:
                    message: Any = await context.read()
                finally:
                    self._reads.pop(reading, None)
                if message is grpc.aio.EOF:
                    return None
                self.guard.took(reading, len(message), is_last=True)
            await in_steps(check(message))
            return message  # type: ignore[no-any-return]
        finally:
            self._release(caller)

    @asynccontextmanager
    async def _reading(self, context: Context, max_seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        started = asyncio.get_running_loop().time()
        reading = asyncio.timeout(max_seconds)
        try:
            async with reading:
                self.guard.begin(context.peer(), reading)
                try:
                    yield reading
                finally:
                    self.guard.end(reading)
        except TimeoutError as error:
            if not reading.expired():
                raise
            elapsed = asyncio.get_running_loop().time() - started
            raise ClientStalled(elapsed, "the request was on its way") from error

    async def _take_place(self, caller: Hashable) -> None:
        if self._has_place(caller):
            self._hold(caller)
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
                    self._end_a_read(caller)
        except (asyncio.CancelledError, RateLimited):
            if turn.done():
                self._release(caller)
            else:
                self._stop_waiting(caller, turn)
            raise

    def _has_place(self, caller: Hashable) -> bool:
        return self._num_held < self._num_places and self._shares[_share(caller)] < self._num_places // 2

    def _hold(self, caller: Hashable) -> None:
        self._num_held += 1
        self._held[caller] += 1
        self._shares[_share(caller)] += 1

    def _release(self, caller: Hashable) -> None:
        """Gives the place to the waiting caller that holds fewest."""
        self._num_held -= 1
        uncount(self._held, caller)
        uncount(self._shares, _share(caller))
        waiting = [each for each in self._waiting if self._has_place(each)]
        if waiting:
            following = min(waiting, key=lambda each: (self._shares[_share(each)], self._held[each]))
            turn = next(iter(self._waiting[following]))
            self._stop_waiting(following, turn)
            # Behind its equals: those who have many turns to wait for are not always first.
            self._wait_last([following])
            self._hold(following)
            turn.set_result(None)

    def _stop_waiting(self, caller: Hashable, turn: asyncio.Future[None]) -> None:
        del self._waiting[caller][turn]
        if not self._waiting[caller]:
            del self._waiting[caller]

    def _wait_last(self, callers: Iterable[Hashable]) -> None:
        for caller in callers:
            if caller in self._waiting:
                self._waiting[caller] = self._waiting.pop(caller)

    def _end_a_read(self, caller: Hashable) -> None:
        """Takes a place from the caller who holds most, if that makes the places more even; else from this caller."""
        now = asyncio.get_running_loop().time()
        self._measure(now)
        # Of those that bring as much the oldest, as they are in that order.
        for reading, read in sorted(self._that_may_end(caller, now), key=lambda each: each[1].rate or 0.0):
            if not reading.expired():
                del self._reads[reading]
                reading.reschedule(0.0)
                # Or it may have the very place again.
                share = _share(read.caller)
                self._wait_last([each for each in self._waiting if _share(each) == share != _share(caller)])
                self._wait_last([read.caller])
                return

    def _that_may_end(self, caller: Hashable, now: float) -> list[tuple[asyncio.Timeout, _Read]]:
        own, most = _share(caller), max(self._shares.values(), default=0)
        # Where no other has more: only between the connections of its address.
        is_own = self._shares[own] > 0 and most <= self._shares[own] + 1
        found = [
            (reading, read)
            for reading, read in self._reads.items()
            if (_share(read.caller) == own if is_own else self._shares[_share(read.caller)] == most)
        ]
        num_most = max((self._held[read.caller] for _, read in found), default=0)
        if is_own and self._held[caller] and num_most <= self._held[caller] + 1:
            found = [each for each in self._reads.items() if each[1].caller == caller]
            # The half that bring most, and of equal ones the older, are left to be done.
            found.sort(key=lambda each: each[1].rate or 0.0, reverse=True)
            num_kept = len(found) // 2
            return [
                each
                for place, each in enumerate(found)
                if self._is_too_slow(each[1], now) and (place >= num_kept or not each[1].rate)
            ]
        found = [(reading, read) for reading, read in found if self._held[read.caller] == num_most]
        if (num_most if is_own else most) > 1:
            return found
        num_kept = (self._shares[own] if is_own else self._num_held) // 2
        rates = sorted((read.rate or 0.0 for _, read in found), reverse=True)
        kept = rates[:num_kept] or [inf]
        return [(reading, read) for reading, read in found if self._is_beaten(read, kept[-1], now)]

    def _is_too_slow(self, read: _Read, now: float) -> bool:
        """Whether a read that has had its part of the time for it brings too little to come in time."""
        has_had_its_part = read.begun <= now - read.max_seconds * _OWN_PART
        return has_had_its_part and read.rate is not None and read.rate < self._timely_rate

    def _is_beaten(self, read: _Read, kept: float, now: float) -> bool:
        """Whether a caller's only read brings less than those that are kept, or nothing.

        It is left alone while it is young: where many wait, a slow upload would never be done. For the same reason the
        half of such reads that bring most is kept.
        """
        is_old = read.begun <= now - _MIN_READ_SECONDS
        return is_old and read.rate is not None and (not read.rate or read.rate < kept)

    def _measure(self, now: float) -> None:
        """Looks at what the connections of reads bring, which where the system does not say is taken for nothing."""
        if now < self._measured_at + _MEASURE_SECONDS:
            return
        self._measured_at = now
        num_reads = Counter(read.peer for read in self._reads.values())
        brought = {} if self._timely_rate == inf else self.guard.brought(num_reads)
        for read in self._reads.values():
            if read.peer not in brought:
                read.rate = 0.0
            elif read.first is None:
                read.first = now, brought[read.peer]
            else:
                begun, num_bytes = read.first
                rate = (brought[read.peer] - num_bytes) / (now - begun) / num_reads[read.peer]
                read.rate = max(0.0, rate)


def bounded(handler: Any, receiver: Receiver) -> Any:
    """A method's handler whose messages are small and read by the receiver, and which is open to callers of any kind.

    Raises:
        InvalidRequest: as a status, for a message of more than 4 KiB, which is not built.
    """
    answer = handler.stream_stream or handler.unary_stream or handler.unary_unary

    def parsed(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError as error:
            raise malformed(data) from error

    async def all_parsed(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in messages:
            yield parsed(data)

    async def call(_: AsyncIterator[Any], context: Context) -> None:
        peer = context.peer()
        caller = Connection(address_of(peer), peer)
        try:
            claim(caller.address, peer)
            with receiver.call(caller):
                if handler.request_streaming:
                    answers = answer(all_parsed(receiver.messages(context, caller, _check_open)), context)
                else:
                    seconds = min(_MAX_OPEN_SECONDS, receiver.max_stall_seconds)
                    answers = answer(parsed(await receiver.message(context, caller, _check_open, seconds)), context)
                if not inspect.isawaitable(answers):
                    async for each in answers:
                        await send(each, context, receiver.max_stall_seconds)
                elif (message := await answers) is not None:
                    await send(message, context, receiver.max_stall_seconds)
            stall_after(receiver.max_stall_seconds)
        except ClientStalled as error:
            await abort_stalled(context, to_status(error))
        except RequestError as error:
            receiver.guard.over(peer)
            await abort(context, to_status(error), receiver.max_stall_seconds)

    return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)


async def in_steps(check: Iterator[None]) -> None:
    """Runs a check, and the event loop's other work between its steps."""
    for _ in check:
        await asyncio.sleep(0)


def _check_open(data: bytes) -> Iterator[None]:
    if len(data) > _MAX_OPEN_BYTES:
        raise InvalidRequest("request", f"{len(data)} bytes", f"must have at most {_MAX_OPEN_BYTES} bytes")
    return iter(())


def address_of(peer: str) -> str:
    """Where a connection comes from: an IPv4 address, or the network of an IPv6 address, of which a host has 2^64.

    Args:
        peer: as gRPC names it: "ipv4:127.0.0.1:1234", "ipv6:%5B::1%5D:1234".
    """
    kind, _, rest = peer.partition(":")
    host = unquote(rest.rpartition(":")[0])
    if kind != "ipv6":
        return host
    return str(ipaddress.IPv6Network((host.strip("[]").partition("%")[0], 64), strict=False))


def _share(caller: Hashable) -> Hashable:
    """Which callers have half of the places together: the connections of an address."""
    return caller.address if isinstance(caller, Connection) else caller
