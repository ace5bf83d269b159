"""API keys, certificate authorities and certificates, as files in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme

HOST = "localhost"


def key_table(name: str, key: str | None = None, permissions: str = '["generate"]', rest: str = "") -> str:
    """A table of an API key file; the key is by default the caller's name, `rest` are further lines."""
    digest = hashlib.sha256((key or name).encode()).hexdigest()
    return f'[keys.{name}]\nsha256 = "{digest}"\npermissions = {permissions}\n{rest}\n'


def keys_file(folder: Path, **rests: str) -> Path:
    """A file with a key for each name, which is the key as well."""
    path = folder / "keys.toml"
    path.write_text("".join(key_table(name, rest=rest) for name, rest in rests.items()))
    return path


def by(name: str) -> Mapping[str, Any]:
    """Arguments of a call with a key."""
    return {"metadata": (("authorization", f"Bearer {name}"),)}


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority, and files that it signed."""

    folder: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ca.cert_pem.write_to_path(self.pem)

    @property
    def pem(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """The files of a certificate and its key; under the same name, new ones replace them."""
        issued = self.ca.issue_cert(*hosts)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return certificate, key


@dataclass(frozen=True, slots=True)
class Identities:
    """The files `ca.pem`, `server.pem` (for `HOST`) and `client.pem` with their keys, `api-key`, and `keys.toml`."""

    folder: Path
    api_key: str = "an-api-key"

    @classmethod
    def issue(cls, folder: Path) -> Identities:
        made, authority = cls(folder), Authority(folder)
        for name, host in (("server", HOST), ("client", "client.example")):
            authority.issue(name, host)
        (folder / "api-key").write_text(f"{made.api_key}\n")
        (folder / "keys.toml").write_text(key_table("alice", made.api_key))
        return made

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def server(self, *, is_mutual: bool) -> dict[str, Path]:
        """Options of a server with these files."""
        files = {"tls_certificate": "server.pem", "tls_key": "server.key", "api_keys": "keys.toml"}
        if is_mutual:
            files["tls_client_ca"] = "ca.pem"
        return {option: self.folder / name for option, name in files.items()}
