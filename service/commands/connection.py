"""The client's `Connection` from the command line: reads its files, reports every problem."""

from __future__ import annotations

from pathlib import Path

from onward.connection import Connection, Tls
from service.config import ConnectionConfig
from service.errors import StartupError


def connection(config: ConnectionConfig, *, max_answer_bytes: int | None = None) -> Connection:
    """The connection of a command.

    Args:
        config: the command's.
        max_answer_bytes: largest message accepted, -1 for no limit; by default gRPC's 4 MiB.

    Raises:
        StartupError: names every file that cannot be read or used, and a key without a certificate.
    """
    problems: list[str] = []
    files = (config.ca_certificate, config.client_key, config.client_certificate)
    authority, key, certificate = (_read(path, problems) for path in files)
    shown = _read(config.api_key_file, problems)
    if authority is None and (key or certificate):
        problems.append("a client's certificate means nothing without the server's: name --ca-certificate too")
    if bool(key) != bool(certificate):
        problems.append("--client-certificate and --client-key belong together")
    if problems:
        raise StartupError(problems)
    tls = None
    if authority is not None:
        tls = Tls(
            ca_certificate=authority, client_certificate=certificate, client_key=key, server_name=config.server_name
        )
    # `Connection` refuses a key that is not ASCII.
    api_key = None if shown is None else shown.decode("ascii", errors="replace").strip()
    try:
        return Connection(config.target, tls, api_key, max_answer_bytes)
    except ValueError as error:
        raise StartupError([f"{config.api_key_file}: {error}" if shown is not None else str(error)]) from error


def _read(path: Path | None, problems: list[str]) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
        return None
