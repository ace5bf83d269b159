"""One HTTP/1.1 connection: what a client can have the server hold, or wait for, outside of a call.

uvicorn's protocol bounds neither a request's head nor the time that it takes. Here both are bounded, and so is what
comes behind a refused request. A request behind one that is still being answered (pipelining) is not served: the
connection closes behind the answer, as HTTP allows (RFC 9112, 9.3.2), and reading goes on, so that a client that leaves
is noticed at once.
"""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

# For a client to send a request's head, or to begin with one after it has connected.
_HEAD_SECONDS = 10.0
# As HTTP/2 counts a header besides its name and value, and gRPC's metadata are counted.
_HEADER_BYTES = 32
# Parts of a body in what is read at once, a quarter of a megabyte: each takes some microseconds of the event loop.
_MAX_PARTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What connections may take: their number, bytes of a request's head, bytes and seconds of what is not read."""

    max_connections: int
    max_head_bytes: int
    max_unread_bytes: int
    max_stall_seconds: float


class Connection(HttpToolsProtocol):
    """A connection. `abort` of a request's `state` ends it at once."""

    def __init__(self, config: Config, state: ServerState, limits: ConnectionLimits) -> None:
        super().__init__(config, state, {})
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._reads_head, self._reads_body, self._ignores = True, False, False
        # Of the head so far what its parser has reported; what came since it last reported a head or a part of a body.
        self._num_head_bytes = self._num_raw_bytes = self._num_unread_bytes = 0
        self._num_parts = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A connection begins, with the time for its first head."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 (TCP and TLS have no other)
        super().connection_made(transport)
        self.app_state["abort"] = transport.abort
        connection = transport.get_extra_info("socket")
        # Ends a connection whose client takes no bytes, or has vanished; also once its last answer is written.
        milliseconds = round(self._limits.max_stall_seconds * 1000)
        with suppress(OSError, AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._end_after(_HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Reports it to the call, whose `receive` then returns."""
        self._rest()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on, unless the answer to come is the last."""
        if self._ignores:
            self._leave_unread(len(data))
            return
        self._num_parts = 0
        if self._reads_head and self._timer is None and not self._is_answering:
            # Behind a body some clients send a line break: it begins no request, and must not end the answer.
            self._end_after(_HEAD_SECONDS)
        self._num_raw_bytes += len(data)
        self._parse(data)
        if self._num_raw_bytes > self._limits.max_head_bytes:
            # The parser reports a header once it is complete, also one behind a body, and keeps what it has of it.
            self._refuse_head()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            # Of a request for another protocol the parser skips the body, which would be taken for the next request. It
            # is read again without the wish, as HTTP allows (RFC 9110, 7.8). Java's client wishes so by default.
            if not (self._ignores or self.transport.is_closing()):
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                lines = [b"%s: %s" % each for each in self.headers if each[0] != b"upgrade"]
                head = b"\r\n".join([b"%s %s HTTP/%s" % (method, self.url, version), *lines, b"\r\n"])
                self._parse(head + data[upgrade.args[0] :])
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_message_begin(self) -> None:
        """A request begins; behind one that is not answered it is ignored, with all that follows."""
        if self._is_answering:
            self._ignores, self.cycle.keep_alive = True, False
            return
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the path."""
        if not self._ignores:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; those beyond the limit are not kept, nor those behind a body, which no proxy has checked."""
        self._num_head_bytes += len(name) + len(value) + _HEADER_BYTES
        if self._num_head_bytes > self._limits.max_head_bytes:
            self._refuse_head()
        elif self._reads_head and not self._ignores:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: the call begins."""
        if self._ignores or self.transport.is_closing():
            return
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("a tunnel is not offered")  # the parser's error, and so a status of 400
            return
        self._rest()
        # That of a body which ended in the same bytes.
        self._unset_keepalive_if_required()
        self._reads_head, self._reads_body = False, True
        self._num_raw_bytes = self._num_unread_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body. Behind the answer it is discarded, up to a limit."""
        if self._ignores or self.transport.is_closing():
            return
        self._num_parts += 1
        self._num_raw_bytes = 0
        if self._num_parts > _MAX_PARTS:
            self._refuse(HTTPStatus.BAD_REQUEST, "the body's chunks are too small")
            return
        super().on_body(body)
        if self.cycle.response_complete:
            self._leave_unread(len(body))

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._ignores or self.transport.is_closing() or self.parser.should_upgrade():
            return
        self._rest()
        self._reads_head, self._reads_body, self._num_raw_bytes = True, False, 0
        if self.cycle.response_complete:
            # The body came behind its answer: only now the next request has its time to begin.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is written; what is left of its request must come soon."""
        super().on_response_complete()
        if self._reads_body and not self.transport.is_closing():
            self._end_after(self._limits.max_stall_seconds)

    def _refuse_head(self) -> None:
        if not self._ignores and not self.transport.is_closing():
            limit = f"the request's head must have at most {self._limits.max_head_bytes} bytes"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, limit)

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP. Behind a request that is being answered it is ignored, in its body the last."""
        if self.cycle is None or self.cycle.response_complete:
            if not self.transport.is_closing():
                self._refuse(HTTPStatus.BAD_REQUEST, msg)
        elif self._reads_body:
            self.transport.abort()
        else:
            self._ignores, self.cycle.keep_alive = True, False

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        if self.cycle is not None and self.cycle.response_started and (self._reads_body or self._is_answering):
            self.transport.abort()
            return
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "malformed_request"}
        body = json.dumps({"error": error}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _leave_unread(self, num_bytes: int) -> None:
        self._num_unread_bytes += num_bytes
        if self._num_unread_bytes > self._limits.max_unread_bytes:
            self.transport.abort()

    def _end_after(self, seconds: float) -> None:
        """Ends the connection unless what it waits for comes in time."""
        self._rest()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
