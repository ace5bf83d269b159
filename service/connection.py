"""A client's channel to a server: in the clear or over TLS, with an API key where one is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from service.config import ConnectionConfig
from service.errors import StartupError


@contextmanager
def connect(config: ConnectionConfig, *, max_answer_bytes: int | None = None) -> Iterator[grpc.Channel]:
    """A channel for the length of the block. It connects with its first call.

    Args:
        config: where to, and how.
        max_answer_bytes: the largest message that is taken, -1 for any; gRPC's own 4 MiB unless given.

    Raises:
        StartupError: naming every file that cannot be read, or a key that belongs to no certificate.
    """
    problems: list[str] = []
    files = (config.ca_certificate, config.client_key, config.client_certificate)
    authority, key, certificate = (_read(path, problems) for path in files)
    api_key = (_read(config.api_key_file, problems) or b"").decode("ascii", errors="replace").strip()
    if authority is None and (key or certificate):
        problems.append("a client's certificate means nothing without the server's: name --ca-certificate too")
    if bool(key) != bool(certificate):
        problems.append("--client-certificate and --client-key belong together")
    if problems:
        raise StartupError(problems)
    options = [] if max_answer_bytes is None else [("grpc.max_receive_message_length", max_answer_bytes)]
    with _channel(config, authority, key, certificate, options) as channel:
        yield grpc.intercept_channel(channel, _ApiKey(api_key)) if api_key else channel


def _channel(
    config: ConnectionConfig,
    authority: bytes | None,
    key: bytes | None,
    certificate: bytes | None,
    options: Sequence[tuple[str, Any]],
) -> grpc.Channel:
    if authority is None:
        return grpc.insecure_channel(config.target, options)
    if config.server_name:
        options = [*options, ("grpc.ssl_target_name_override", config.server_name)]
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.secure_channel(config.target, credentials, options)


def _read(path: Path | None, problems: list[str]) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
        return None


class _CallDetails(NamedTuple):
    """`grpc.ClientCallDetails`, which has no constructor of its own."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class _ApiKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Shows the key with every call. Not as gRPC's call credentials, which a channel in the clear refuses."""

    def __init__(self, key: str) -> None:
        self._metadata = ("authorization", f"Bearer {key}")

    def intercept_unary_unary(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def _with_key(self, details: Any) -> _CallDetails:
        return _CallDetails(
            details.method,
            details.timeout,
            [*(details.metadata or ()), self._metadata],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
