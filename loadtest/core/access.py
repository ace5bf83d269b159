"""TLS and API key of the clients. Options have the names of `python -m service ask`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc


class Parser(Protocol):
    """argparse's parser, Locust's, or a group of either."""

    def add_argument(self, *names: str, **settings: Any) -> Any:
        """As `argparse.ArgumentParser.add_argument`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """TLS files' contents and the API key; no TLS without `authority`, no key without `api_key`."""

    authority: bytes | None = None
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    server_name: str = ""
    api_key: str = field(default="", repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call. Not gRPC's call credentials: a plaintext channel refuses those."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def open(self, target: str) -> grpc.Channel:
        """Opens a channel with its own connection to "host:port"."""
        if self.authority is None:
            return grpc.insecure_channel(target, self._options)
        return grpc.secure_channel(target, self._credentials, self._options)

    def open_async(self, target: str) -> grpc.aio.Channel:
        """`open` for asyncio."""
        if self.authority is None:
            return grpc.aio.insecure_channel(target, self._options)
        return grpc.aio.secure_channel(target, self._credentials, self._options)

    @property
    def _credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    @property
    def _options(self) -> list[tuple[str, Any]]:
        # By default gRPC shares one connection between channels to the same target: users would wait for each other.
        options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1)]
        return [*options, ("grpc.ssl_target_name_override", self.server_name)] if self.server_name else options


def add_access(parser: Parser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("--api-key-file", default="", help="file that holds only the API key")
    add("--ca-certificate", default="", help="PEM file of the CA of the server's certificate; turns TLS on")
    add("--client-certificate", default="", help="PEM file of the client's own certificate")
    add("--client-key", default="", help="PEM file of that certificate's key")
    add("--server-name", default="", help="name in the server's certificate; empty: the target's")


def read_access(values: Any) -> Access:
    """Reads the parsed options and the files that they name.

    Raises:
        ValueError: naming every option that does not fit.
    """
    problems: list[str] = []

    def read(name: str) -> bytes | None:
        if not (path := str(getattr(values, name) or "")):
            return None
        try:
            return Path(path).read_bytes()
        except OSError as error:
            problems.append(f"--{name.replace('_', '-')}: {path}: {error.strerror}")
            return None

    access = Access(
        authority=read("ca_certificate"),
        certificate=read("client_certificate"),
        key=read("client_key"),
        server_name=str(values.server_name or ""),
        api_key=(read("api_key_file") or b"").decode("ascii", errors="replace").strip(),
    )
    if not values.ca_certificate and (values.client_certificate or values.client_key or values.server_name):
        problems.append(
            "--ca-certificate: without it there is no TLS, so no certificate of a client and no server's name"
        )
    if bool(values.client_certificate) != bool(values.client_key):
        problems.append("--client-certificate and --client-key belong together")
    if problems:
        raise ValueError("; ".join(problems))
    return access
