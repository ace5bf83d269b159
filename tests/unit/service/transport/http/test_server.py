"""The HTTP server's socket."""

from __future__ import annotations

import socket

import pytest

from service.transport.http.server import _listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_an_accepted_connection_sends_waits_for_no_acknowledgement(host: str) -> None:
    with _listen(host, 0) as listening, socket.create_connection(listening.getsockname()[:2], timeout=5):
        listening.settimeout(5)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
