"""Metrics over HTTP: Prometheus' text format at `/metrics`, rendered by a thread of its own beside the busy ones.

What a scrape waits for is the interpreter's lock, which the engine thread and the event loop want as well. They take
turns every switch interval, so that a rendering takes as many times longer as there are others, and whoever lets go of
the lock, as for every system call, waits for a turn again. Hence the plain text format whatever a scraper would rather
have (OpenMetrics takes the client library almost twice as long, for exemplars that we do not have), one write for an
answer, and connections that stay open. Knows nothing of which metrics there are.
"""

from __future__ import annotations

import gzip
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest

from service.errors import StartupError

_LOGGER = logging.getLogger(__name__)

PATH = "/metrics"

# Longer than anybody's scrape interval: a connection that is quiet for so long has lost its scraper.
_IDLE_SECONDS = 300.0
_STOP_POLL_SECONDS = 0.1
# A fifth of the highest level's time or less, for a few bytes more.
_GZIP_LEVEL = 1
_MAX_ONE_WRITE_BYTES = 1 << 18


@contextmanager
def exposing(registry: CollectorRegistry, host: str, port: int) -> Iterator[int]:
    """Answers scrapes for the length of the block; yields the port, which the system chose if it was 0.

    Raises:
        StartupError: when the address cannot be used.
    """
    try:
        server = _Server(registry, host, port)
    except OSError as error:
        raise StartupError([f"cannot serve metrics on {host}:{port}: {error.strerror}"]) from error
    thread = threading.Thread(target=server.serve_forever, args=(_STOP_POLL_SECONDS,), name="metrics", daemon=True)
    thread.start()
    try:
        yield server.port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(socketserver.ThreadingTCPServer):
    """A thread for each connection, of which a scraper has one."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self.registry = registry
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        super().__init__((str(address[0]), port), _Handler)

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        # A scraper that hung up is nobody's concern.
        if not isinstance(sys.exception(), ConnectionError):
            _LOGGER.exception("a scrape by %s failed", client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "onward"
    sys_version = ""
    timeout = _IDLE_SECONDS
    wbufsize = _MAX_ONE_WRITE_BYTES
    # An answer that takes two writes must not wait for the first one's acknowledgement.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if urlsplit(self.path).path != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"metrics are at {PATH}")
            return
        body = generate_latest(self.server.registry)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
        if _accepts_gzip(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body, _GZIP_LEVEL)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Says nothing: a line for each scrape would drown the others."""


def _accepts_gzip(header: str) -> bool:
    """Whether an `Accept-Encoding` names gzip and does not rule it out."""
    for part in header.split(","):
        coding, _, weight = part.partition(";")
        if coding.strip().lower() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
