"""TLS credentials that follow their files: each handshake uses the newest usable pair."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from service.errors import StartupError

_LOGGER = logging.getLogger(__name__)

# The event loop reads the files of HTTP's certificates at most so often; gRPC's own threads do at each handshake.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's certificate chain and key, and the CA of clients' certificates, if they need one."""

    certificate: Path
    key: Path
    client_ca: Path | None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files; an unusable new pair leaves the old one in place.

    Raises:
        StartupError: naming every unreadable file, or a key that does not match the certificate.
    """
    contents = _read(files)
    _check(files, contents)
    # Without `require`, clients without a certificate would be admitted.
    return grpc.dynamic_ssl_server_credentials(
        _configuration(contents),
        _fetcher(files, contents),  # type: ignore[arg-type]  # None means no change
        require_client_authentication=files.client_ca is not None,
    )


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """A context for `asyncio` that follows the files as `server_credentials` do.

    Raises:
        StartupError: as `server_credentials`.
    """
    contents = _read(files)
    _check(files, contents)
    newest = context = _context(contents)
    follow = _follower(files, contents)
    looked = time.monotonic()

    def choose(connection: ssl.SSLObject, name: str | None, base: ssl.SSLContext) -> None:  # noqa: ARG001 (ssl's)
        nonlocal newest, looked
        if time.monotonic() - looked >= _LOOK_SECONDS:
            looked = time.monotonic()
            if (changed := follow()) is not None:
                newest = _context(changed)
        connection.context = newest

    context.sni_callback = choose  # called for every handshake, with or without a server name
    return context


def _context(contents: tuple[bytes, ...]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _load(context, contents)
    _, _, *client_ca = contents
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _fetcher(files: TlsFiles, contents: tuple[bytes, ...]) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """What gRPC calls at every handshake, on its own threads: new certificates, None while they are unchanged."""
    follow = _follower(files, contents)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        changed = follow()
        return None if changed is None else _configuration(changed)

    return fetch


def _follower(files: TlsFiles, contents: tuple[bytes, ...]) -> Callable[[], tuple[bytes, ...] | None]:
    """Reads the files: their contents if they have changed and can be used, else None."""
    newest = contents

    def follow() -> tuple[bytes, ...] | None:
        nonlocal newest
        try:
            read = _read(files)
            if read == newest:
                return None
            _check(files, read)
        except StartupError as error:
            _LOGGER.error("the certificates stay as they were: %s", "; ".join(error.problems))
            return None
        newest = read
        _LOGGER.info("certificates read anew from %s", files.certificate)
        return read

    return follow


def _configuration(contents: tuple[bytes, ...]) -> grpc.ServerCertificateConfiguration:
    certificate, key, *client_ca = contents
    return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca[0] if client_ca else None)


def _read(files: TlsFiles) -> tuple[bytes, ...]:
    problems: list[str] = []
    contents = []
    paths = [files.certificate, files.key, *([files.client_ca] if files.client_ca else [])]
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if b"-----BEGIN " not in content:
            problems.append(f"{path}: is not in PEM form")
        contents.append(content)
    if problems:
        raise StartupError(problems)
    return tuple(contents)


def _check(files: TlsFiles, contents: tuple[bytes, ...]) -> None:
    """Refuses contents that gRPC would accept, and with which every handshake would fail.

    Checks the contents, as the files may have changed since they were read.
    """
    certificate, key, *client_ca = contents
    try:
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), (certificate, key))
    except (OSError, ValueError) as error:
        problem = f"{files.key}: cannot be used as the key of {files.certificate} ({_reason(error)})"
        raise StartupError([problem]) from error
    if not client_ca:
        return
    try:
        with _in_memory(client_ca[0]) as path:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise StartupError([f"{files.client_ca}: holds no certificates ({_reason(error)})"]) from error


def _load(context: ssl.SSLContext, contents: tuple[bytes, ...]) -> None:
    """Loads certificate and key, and the clients' CA if there is one."""
    certificate, key, *client_ca = contents
    with _in_memory(certificate) as certificate_path, _in_memory(key) as key_path:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate_path, key_path, password="")
    for each in client_ca:
        with _in_memory(each) as path:
            context.load_verify_locations(path)


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path to bytes in memory: OpenSSL loads a key from a path alone, and no disk must hold it."""
    with open(os.memfd_create("tls"), "wb") as file:  # noqa: PTH123 (there is a descriptor and no path)
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _reason(error: Exception) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else "") or str(error)
