"""A server's address, TLS and API key. Opens channels, makes no calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
import grpc.aio

ChannelOption: TypeAlias = tuple[str, str | int]
Metadata: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS: how the client verifies the server, and its own certificate.

    Attributes:
        ca_certificate: PEM of the CA of the server's certificate; by default gRPC's own roots.
        client_certificate: PEM of the client's certificate, for mutual TLS.
        client_key: PEM of its private key.
        server_name: the name in the server's certificate; by default the target's.

    Raises:
        ValueError: a certificate without its key, or a key without its certificate.
    """

    ca_certificate: bytes | None = None
    client_certificate: bytes | None = None
    client_key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.client_certificate is None) != (self.client_key is None):
            raise ValueError("client_certificate and client_key belong together")


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach a server. Without `tls`, everything is sent unencrypted, the API key included.

    Attributes:
        target: gRPC's form of an address, such as "127.0.0.1:8001".
        tls: None for no encryption.
        api_key: sent with every call.
        max_answer_bytes: largest message accepted, -1 for no limit; by default gRPC's 4 MiB.

    Raises:
        ValueError: the target is empty, or the key cannot be sent in a header.
    """

    target: str
    tls: Tls | None = None
    api_key: str | None = field(default=None, repr=False)
    max_answer_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.target:
            raise ValueError("target: must be an address, as in 127.0.0.1:8001")
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
            # The message must not contain the key.
            raise ValueError("api_key: must be printable ASCII, not empty, and without space around it")

    @property
    def metadata(self) -> Metadata:
        """Metadata of every call. Not gRPC's call credentials, which an unencrypted channel refuses."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def channel(self, *options: ChannelOption) -> grpc.Channel:
        """A blocking channel, which connects at its first call. The caller closes it."""
        options = (*self._options(), *options)
        if self.tls is None:
            return grpc.insecure_channel(self.target, options)
        return grpc.secure_channel(self.target, self._credentials(self.tls), options)

    def aio_channel(self, *options: ChannelOption) -> grpc.aio.Channel:
        """An asyncio channel of the running event loop."""
        options = (*self._options(), *options)
        if self.tls is None:
            return grpc.aio.insecure_channel(self.target, options)
        return grpc.aio.secure_channel(self.target, self._credentials(self.tls), options)

    def _options(self) -> tuple[ChannelOption, ...]:
        options: list[ChannelOption] = []
        if self.max_answer_bytes is not None:
            options.append(("grpc.max_receive_message_length", self.max_answer_bytes))
        if self.tls is not None and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return tuple(options)

    @staticmethod
    def _credentials(tls: Tls) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(tls.ca_certificate, tls.client_key, tls.client_certificate)
