"""Who is who: API keys of a file, and over TLS an authority and certificates that it signed, as files in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

HOST = "localhost"


def key_table(name: str, key: str | None = None, permissions: str = '["generate"]', rest: str = "") -> str:
    """A table of an API key file.

    Args:
        name: the caller's.
        key: what it shows; its name where None is given.
        permissions: as in TOML.
        rest: lines that follow: limits, a weight.
    """
    digest = hashlib.sha256((key or name).encode()).hexdigest()
    return f'[keys.{name}]\nsha256 = "{digest}"\npermissions = {permissions}\n{rest}\n'


def keys_file(folder: Path, **rests: str) -> Path:
    """A key for each name, which is the key as well."""
    path = folder / "keys.toml"
    path.write_text("".join(key_table(name, rest=rest) for name, rest in rests.items()))
    return path


def by(name: str) -> Mapping[str, Any]:
    """A call's arguments that show a key."""
    return {"metadata": (("authorization", f"Bearer {name}"),)}


@dataclass(frozen=True, slots=True)
class Identities:
    """The files `ca.pem`, `server.pem` (for `HOST`) and `client.pem` with their keys, `api-key`, and `keys.toml`."""

    folder: Path
    api_key: str = "an-api-key"

    @classmethod
    def issue(cls, folder: Path) -> Identities:
        made = cls(folder)
        ca = trustme.CA()
        ca.cert_pem.write_to_path(folder / "ca.pem")
        for name, host in (("server", HOST), ("client", "client.example")):
            issued = ca.issue_cert(host)
            issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
            issued.private_key_pem.write_to_path(folder / f"{name}.key")
        (folder / "api-key").write_text(f"{made.api_key}\n")
        (folder / "keys.toml").write_text(key_table("alice", made.api_key))
        return made

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def server(self, *, is_mutual: bool) -> dict[str, Path]:
        """What the server is told of them."""
        told = {"tls_certificate": "server.pem", "tls_key": "server.key", "api_keys": "keys.toml"}
        if is_mutual:
            told["tls_client_ca"] = "ca.pem"
        return {option: self.folder / name for option, name in told.items()}
