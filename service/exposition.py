"""Metrics over HTTP: Prometheus' text format at `/metrics`, rendered by a thread of its own beside the busy ones.

What a scrape waits for is the interpreter's lock, which the engine thread and the event loop want as well. They take
turns every switch interval, so that a rendering takes as many times longer as there are others, and whoever lets go of
the lock, as for every system call, waits for a turn again. Hence the plain text format whatever a scraper would rather
have (OpenMetrics takes the client library almost twice as long, for exemplars that we do not have), fast compression,
and one write for an answer. Knows nothing of which metrics there are.
"""

from __future__ import annotations

import gzip
import logging
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest

from service.errors import StartupError

_LOGGER = logging.getLogger(__name__)

PATH = "/metrics"

_STOP_POLL_SECONDS = 0.1
# A fifth of the highest level's time or less, for a few bytes more.
_GZIP_LEVEL = 1
_MAX_ONE_WRITE_BYTES = 1 << 18
# For a scraper to ask and to take its answer; one that does neither must not keep a thread.
_PATIENCE_SECONDS = 10.0
_PLAIN = ("Content-Type", "text/plain; charset=utf-8")


def metrics_app(registry: CollectorRegistry) -> WSGIApplication:
    """An application that answers scrapes at `PATH`, and nothing else."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != PATH:
            start_response("404 Not Found", [_PLAIN])
            return [f"metrics are at {PATH}\n".encode()]
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET"), _PLAIN])
            return [b"only GET\n"]
        try:
            body = generate_latest(registry)
        except Exception:  # a collector's own; the next scrape may do better
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
    """Answers HTTP requests for the length of the block; yields the port, which the system chose if it was 0.

    Raises:
        StartupError: when the address cannot be used.
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
    timeout = _PATIENCE_SECONDS
    wbufsize = _MAX_ONE_WRITE_BYTES
    # An answer that takes two writes must not wait until the first is acknowledged.
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Answers one request, unless the client leaves or keeps silent."""
        try:
            super().handle()
        except (TimeoutError, ConnectionError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Says nothing: a line for each scrape would drown the others."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request: one that is slow to read its answer holds up no other."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], str(found[0][4][0])
        super().__init__((address, port), _Handler)


def _accepts_gzip(header: str) -> bool:
    """Whether an `Accept-Encoding` names gzip and does not rule it out."""
    for part in header.split(","):
        coding, _, weight = part.partition(";")
        if coding.strip().lower() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
