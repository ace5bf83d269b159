"""The HTTP server: one listening socket on the event loop that gRPC has. Needs the extra `http`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from service.config import ServeConfig
from service.errors import StartupError
from service.transport.http.calls import Calls
from service.transport.http.connection import Connection, ConnectionLimits
from service.transport.tls import TlsFiles, server_context

# Longer than clients' pools keep idle connections: the server would otherwise close one that is just being used.
_KEEP_ALIVE_SECONDS = 75
_HANDSHAKE_SECONDS = 10.0
_BACKLOG = 1024
_ACCEPT_AGAIN_SECONDS = 0.1


class HttpServer:
    """Listens, and stops. uvicorn's own server is not used: it handles signals, and exits the process on errors.

    Args:
        calls: answers requests.
        config: the operator's limits and TLS.

    Raises:
        StartupError: when the certificates cannot be used.
    """

    def __init__(self, calls: Calls, config: ServeConfig) -> None:
        self._calls = calls
        self._limits = ConnectionLimits(
            max_connections=config.max_connections,
            max_head_bytes=config.max_metadata_bytes,
            max_unread_bytes=config.max_message_bytes,
            max_stall_seconds=config.max_stall_seconds,
        )
        has_tls = config.tls_certificate is not None and config.tls_key is not None
        files = TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca) if has_tls else None  # type: ignore[arg-type]
        self._ssl = None if files is None else server_context(files)
        self._state = ServerState()
        # Connections before their protocol has them: asyncio's own server counts none whose TLS handshake goes on.
        self._opening: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port, which the system chooses for 0.

        Raises:
            StartupError: when the address cannot be used.
        """
        # Calls report all errors themselves; what is left are warnings about clients, one for each malformed request.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = Config(
            self._application,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            interface="asgi3",
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        config.load()
        try:
            listening = _listen(host, port)
        except OSError as error:
            raise StartupError([f"cannot listen on {host}:{port} for HTTP: {error}"]) from error
        self._listening = listening
        self._accepting = asyncio.ensure_future(self._accept(lambda: Connection(config, self._state, self._limits)))
        bound: int = listening.getsockname()[1]
        return bound

    async def _accept(self, make: Callable[[], Connection]) -> None:
        """Accepts connections, and closes at once what is beyond their number, handshakes included."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError:
                # The client has left, or no descriptor is free.
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                continue
            if len(self._opening) + len(self._state.connections) >= self._limits.max_connections:
                accepted.close()
                await asyncio.sleep(0)  # `sock_accept` does not yield while more wait
                continue
            opening = asyncio.ensure_future(self._open(make, accepted))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, make: Callable[[], Connection], accepted: socket.socket) -> None:
        seconds = None if self._ssl is None else _HANDSHAKE_SECONDS
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                make, accepted, ssl=self._ssl, ssl_handshake_timeout=seconds
            )
        except OSError:
            accepted.close()  # no TLS, or none in time

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        await self._calls.answer(scope, receive, send)

    def withdraw(self) -> None:
        """Health becomes unavailable, for good, and every answer closes its connection."""
        self._calls.withdraw()

    async def stop(self, grace_seconds: float) -> None:
        """Accepts no more connections, and ends open ones after the grace."""
        self._accepting.cancel()
        self._listening.close()
        for opening in list(self._opening):
            opening.cancel()
        for connection in list(self._state.connections):
            connection.shutdown()
        tasks = set(self._state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=grace_seconds)
        for task in tasks:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while self._state.connections:  # noqa: ASYNC110 (their last bytes are on their way, no event says when)
                    await asyncio.sleep(0.01)
        for connection in list(self._state.connections):
            connection.transport.abort()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; an IPv6 address also takes IPv4's connections, as gRPC's does."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    is_ipv6 = family == socket.AF_INET6
    listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=is_ipv6)
    listening.settimeout(0)
    # Accepted sockets inherit it. asyncio leaves it out, as these do not name their protocol; without it an answer's
    # second packet waits for the client's delayed acknowledgement, up to 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
