"""Metrics over HTTP: Prometheus' text format at `/metrics`, rendered on a thread of its own.

A scrape competes with the engine thread and the event loop for the interpreter's lock. They take turns every switch
interval, and each system call releases the lock and waits for a turn again. Hence the plain text format whatever the
scraper prefers (OpenMetrics takes the client library almost twice as long, for exemplars that we do not have), fast
compression, and one write per answer.
"""

from __future__ import annotations

import gzip
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from socketserver import TCPServer, ThreadingMixIn
from typing import IO, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest

from service.errors import StartupError

Key = TypeVar("Key")

_LOGGER = logging.getLogger(__name__)

PATH = "/metrics"

_STOP_POLL_SECONDS = 0.1
# At most a fifth of the highest level's time, for a few bytes more.
_GZIP_LEVEL = 1
_MAX_ONE_WRITE_BYTES = 1 << 18
# From connect to the end of the answer: a client that sends or reads byte by byte must not hold a thread.
_MAX_SECONDS = 10.0
# Each has a thread; a scraper needs one for milliseconds. Above, a new connection evicts another or is refused.
_MAX_CONNECTIONS = 16
# An answer gets this long before a new connection from the same address may evict it.
_ANSWER_SECONDS = 1.0
# For an evicted connection's thread to end.
_CLOSING_SECONDS = 1.0
_MAX_REQUEST_BYTES = 1 << 14
_PLAIN = ("Content-Type", "text/plain; charset=utf-8")


def metrics_app(registry: CollectorRegistry) -> WSGIApplication:
    """A WSGI application that answers scrapes at `PATH`."""
    # At most one rendering competes with the engine for the interpreter's lock.
    rendering = threading.Lock()

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != PATH:
            start_response("404 Not Found", [_PLAIN])
            return [f"metrics are at {PATH}\n".encode()]
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET"), _PLAIN])
            return [b"only GET\n"]
        try:
            with rendering:
                body = generate_latest(registry)
        except Exception:  # a collector's; the next scrape may succeed
            _LOGGER.exception("a scrape failed")
            start_response("500 Internal Server Error", [_PLAIN])
            return [b"the log has more of it\n"]
        headers = [("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)]
        if _accepts_gzip(environ.get("HTTP_ACCEPT_ENCODING", "")):
            body = gzip.compress(body, _GZIP_LEVEL)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", headers)
        return [body]

    return app


@contextmanager
def exposing(app: WSGIApplication, host: str, port: int) -> Iterator[int]:
    """Serves HTTP inside the block; yields the port, chosen by the system if it was 0.

    Raises:
        StartupError: the address cannot be used.
    """
    try:
        server = _Server(host, port)
    except OSError as error:
        raise StartupError([f"cannot serve metrics on {host}:{port}: {error.strerror}"]) from error
    server.set_app(app)
    thread = threading.Thread(target=server.serve_forever, args=(_STOP_POLL_SECONDS,), name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(WSGIRequestHandler):
    wbufsize = _MAX_ONE_WRITE_BYTES
    # The second write of an answer must not wait for the first one's acknowledgment.
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Bounds the request's size; the base class would accept megabytes."""
        super().setup()
        self.rfile: Any = _Bounded(self.rfile)

    def get_environ(self) -> WSGIEnvironment:
        """The application's environment. The request is complete when this is called."""
        self.server.asked(self.request)  # type: ignore[attr-defined]
        return super().get_environ()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Logs nothing: a line per scrape would flood the log."""


class _Bounded:
    """A request's lines, at most `_MAX_REQUEST_BYTES` in all."""

    def __init__(self, file: IO[bytes]) -> None:
        self._left = _MAX_REQUEST_BYTES
        self._file = file
        self.close = file.close

    def readline(self, size: int) -> bytes:
        line = self._file.readline(min(size, self._left))
        self._left -= len(line)
        if not self._left:
            raise ConnectionAbortedError("the request is too large")
        return line


@dataclass(slots=True)
class Connection:
    """An open connection: its client's address, when it was opened, when its request was complete, and its end."""

    host: str
    begun: float = field(default_factory=time.monotonic)
    asked: float | None = None
    ended: threading.Event = field(default_factory=threading.Event)


def least_deserving(connections: Mapping[Key, Connection], host: str, now: float) -> Key | None:
    """The connection to evict for a new one from `host`; None if none may be.

    Candidates are the connections of the address that has most. Those without a complete request go first (a scraper
    sends its request at once), the oldest of them first. A connection whose request is younger than `_ANSWER_SECONDS`
    goes last, and only for an address that has fewer connections.
    """
    # Copied: other threads remove connections that end.
    taken = list(connections.items())
    held = Counter(each.host for _, each in taken)
    most = max(held.values(), default=0)
    ranked = []
    for key, each in taken:
        is_due = each.asked is not None and now - each.asked < _ANSWER_SECONDS
        if held[each.host] == most and not (is_due and held[host] == most):
            ranked.append(((is_due, each.asked is not None, each.begun), key))
    return min(ranked, key=lambda each: each[0])[1] if ranked else None


class _Server(ThreadingMixIn, WSGIServer):
    """A thread per connection, of which there are few: a slow client delays no other."""

    daemon_threads = True
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, host: str, port: int) -> None:
        self._open: dict[Any, Connection] = {}
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], str(found[0][4][0])
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        """Binds, without the base class's lookup of the host's name, which waits if no name server answers."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether to accept a connection. If all are taken, another one may be evicted for it."""
        if len(self._open) >= _MAX_CONNECTIONS:
            self._make_room(client_address[0])
        has_place = len(self._open) < _MAX_CONNECTIONS
        if has_place:
            self._open[request] = Connection(client_address[0])
        return has_place

    def _make_room(self, host: str) -> None:
        """Evicts a connection, if any may be, for a new one from `host`."""
        request = least_deserving(self._open, host, time.monotonic())
        # It may have ended meanwhile.
        if request is not None and (connection := self._open.get(request)) is not None:
            _cut(request)
            connection.ended.wait(_CLOSING_SECONDS)

    def asked(self, request: Any) -> None:
        """Notes that a connection's request is complete."""
        self._open[request].asked = time.monotonic()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answers a request; ends quietly if the client disconnects or was cut."""
        with suppress(ConnectionError):
            super().finish_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        connection = self._open.pop(request, None)
        super().shutdown_request(request)
        if connection is not None:
            connection.ended.set()

    def service_actions(self) -> None:
        """Cuts connections older than `_MAX_SECONDS`. Called at every poll."""
        for request, each in list(self._open.items()):
            if time.monotonic() - each.begun > _MAX_SECONDS:
                _cut(request)


def _cut(connection: socket.socket) -> None:
    """Shuts a connection down; its thread gets an error."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _accepts_gzip(header: str) -> bool:
    """Whether an `Accept-Encoding` allows gzip."""
    for part in header.split(","):
        coding, _, weight = part.partition(";")
        if coding.strip().lower() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
