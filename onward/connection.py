"""Where a server is, and how each knows the other: an address, TLS, an API key. Opens channels and makes no calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
import grpc.aio

ChannelOption: TypeAlias = tuple[str, str | int]
Metadata: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How the server is known, and the client to it.

    Attributes:
        ca_certificate: PEM of who signs the server's certificate; by default, whom gRPC trusts by itself.
        client_certificate: PEM of the client's own certificate, where the server asks for one.
        client_key: PEM of that certificate's key.
        server_name: the name in the server's certificate; by default the target's.

    Raises:
        ValueError: for a certificate without its key, or a key without its certificate.
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
    """How a server is reached. Without `tls` nothing is encrypted, the API key neither.

    Attributes:
        target: address as gRPC writes it, as in "127.0.0.1:8001".
        tls: how to encrypt.
        api_key: shown with every call.
        max_answer_bytes: the largest message that is taken, -1 for any; gRPC's own 4 MiB unless given.

    Raises:
        ValueError: for an empty target, or a key that no header can carry.
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
            # Its text is a secret.
            raise ValueError("api_key: must be printable ASCII, not empty, and without space around it")

    @property
    def metadata(self) -> Metadata:
        """What every call must show. Not gRPC's call credentials, which a channel in the clear refuses."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def channel(self, *options: ChannelOption) -> grpc.Channel:
        """A channel for blocking calls, which connects with its first. The caller closes it."""
        options = (*self._options(), *options)
        if self.tls is None:
            return grpc.insecure_channel(self.target, options)
        return grpc.secure_channel(self.target, self._credentials(self.tls), options)

    def aio_channel(self, *options: ChannelOption) -> grpc.aio.Channel:
        """The same for the running event loop."""
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
