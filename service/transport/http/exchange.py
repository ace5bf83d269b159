"""One request and its answer on a connection: ASGI's messages with our limits of time.

read body ──> watch for a client that leaves ──> status line, events ──> the last bytes
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from service.errors import ClientStalled, InvalidRequest
from service.transport.http.failures import Refusal
from service.transport.places import current_place

JSON, EVENTS = "application/json", "text/event-stream"
# Those that OpenTelemetry knows, as a client may invent any.
_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
# The part of an answer that the connection takes at once: more waits until the client has taken it.
_PART_BYTES = 64 << 10

Message = MutableMapping[str, Any]


class Exchange:
    """Has what tracers and admission ask of a call, too (`CallContext`).

    Args:
        scope, receive, send: ASGI's.
        max_stall_seconds: how long the client may take no bytes.
    """

    def __init__(self, scope: Message, receive: Any, send: Any, max_stall_seconds: float) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._scheme: str = scope["scheme"]
        self._headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        host, port = scope["client"] or ("", 0)
        self._peer = f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
        self._abort: Callable[[], None] = scope["state"]["abort"]
        self._receive = receive
        self._send = send
        self._max_stall_seconds = max_stall_seconds
        self.has_started = self.is_last = self._has_room = False
        self.headers: list[tuple[str, str]] = []
        self.failed: Callable[[Mapping[str, Any]], Iterable[Any]] = lambda _error: ()
        """Events ahead of the error that ends a stream."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """The headers, names in lower case."""
        return self._headers

    def peer(self) -> str:
        """The client's address, as gRPC spells it."""
        return self._peer

    @property
    def attributes(self) -> Mapping[str, str]:
        """Of the call's span, by OpenTelemetry's conventions; the path is without its query, which may hold secrets."""
        method = self.method if self.method in _METHODS else "_OTHER"
        return {"http.request.method": method, "url.path": self.path, "url.scheme": self._scheme}

    def header(self, name: str) -> str | None:
        """A header; None where it is absent.

        Raises:
            InvalidRequest: when it occurs several times.
        """
        found = [value for each, value in self._headers if each == name]
        if len(found) > 1:
            raise InvalidRequest(name, len(found), "must be given once")
        return found[0] if found else None

    def announced_bytes(self, limit: int) -> None:
        """Refuses a body whose announced length is beyond the limit, before any of it is read."""
        length = self.header("content-length")
        if length is not None and length.isdecimal() and int(length[:20]) > limit:
            raise Refusal(413, "body", f"must have at most {limit} bytes, has {length[:20]}")

    async def body(self, limit: int, came: Callable[[int], None]) -> bytes:
        """The request's body; `came` hears of each part's bytes.

        Raises:
            Refusal: once it exceeds the limit.
            asyncio.CancelledError: when the client leaves before its end.
        """
        parts, num_bytes, has_more = [], 0, True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            parts.append(message["body"])
            num_bytes, has_more = num_bytes + len(message["body"]), message["more_body"]
            came(len(message["body"]))
            if num_bytes > limit:
                raise Refusal(413, "body", f"must have at most {limit} bytes, has {num_bytes} or more")
        return b"".join(parts)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Cancels the task in the block when the client leaves, as gRPC does."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (this is a coroutine)

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            task.cancel()

        watching = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            watching.cancel()

    async def event(self, data: bytes, name: str = "") -> None:
        """Sends a server-sent event of encoded JSON, behind the status line if it is the first."""
        if not self.has_started:
            await self._start(200, EVENTS, [("cache-control", "no-store"), ("x-accel-buffering", "no")])
        await self._write(_event(data, name), has_more=True)

    async def make_room(self, num_bytes: int) -> None:
        """Waits until the answers that clients have not taken leave room for the last bytes of this one.

        Raises:
            RateLimited: when they do not for too long.
        """
        if (place := current_place()) is not None:
            await place.answer(num_bytes, self._max_stall_seconds)
            self._has_room = True

    async def answer(self, status: int, data: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Sends the whole answer, JSON."""
        await self._start(status, JSON, [("content-length", str(len(data))), *headers])
        await self.end(data)

    async def end_with(self, error: Mapping[str, Any]) -> None:
        """Ends a stream that has begun with an error, as its last event."""
        ahead = (_event(encode(each), each["type"]) for each in self.failed(error))
        await self.end(b"".join((*ahead, _event(encode({"error": error})))))

    async def end(self, data: bytes = b"") -> None:
        """Sends the last bytes."""
        await self._write(data, has_more=False)

    def abort(self) -> None:
        """Ends the connection at once."""
        self._abort()

    async def _start(self, status: int, kind: str, headers: Iterable[tuple[str, str]]) -> None:
        self.has_started = True
        own = [("content-type", kind), *headers, *self.headers]
        if self.is_last:
            own.append(("connection", "close"))
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in own]
        await self._sent({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write(self, data: bytes, *, has_more: bool) -> None:
        if (place := current_place()) is not None and not self._has_room:
            await place.answer(len(data), self._max_stall_seconds)
        for at in range(0, max(1, len(data)), _PART_BYTES):
            is_rest = at + _PART_BYTES >= len(data)
            part = data[at : at + _PART_BYTES]
            await self._sent({"type": "http.response.body", "body": part, "more_body": has_more or not is_rest})
        if place is not None:
            place.answered()

    async def _sent(self, message: Message) -> None:
        """Hands a message over, and before that waits until the client has taken enough of the earlier ones.

        Raises:
            ClientStalled: when it does not for too long.
        """
        try:
            async with asyncio.timeout(self._max_stall_seconds) as stall:
                await self._send(message)
        except TimeoutError as error:
            if not stall.expired():
                raise
            raise ClientStalled(self._max_stall_seconds) from error


def encode(value: Any) -> bytes:
    """Compact JSON in UTF-8; a client's lone surrogate is escaped, as it was sent."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")


def _event(data: bytes, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, data)
