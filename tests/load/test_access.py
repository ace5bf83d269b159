"""TLS files and API keys: read, validated, and required by a guarded server."""

from __future__ import annotations

import argparse
from pathlib import Path

import grpc
import pytest

from loadtest import bench
from loadtest.bench import BenchSettings
from loadtest.core.access import Access, add_access, read_access
from loadtest.core.clients import WireProtocol
from loadtest.core.figures import summarize
from tests.identities import HOST, Authority
from tests.integration.test_server_security import KEY, alices_keys
from tests.load.test_bench import options
from tests.servers import MODEL, running


def read(*words: str) -> Access:
    parser = argparse.ArgumentParser()
    add_access(parser)
    return read_access(parser.parse_args(words))


def test_without_files_nothing_is_encrypted_and_nothing_shown() -> None:
    assert read() == Access()
    assert read().metadata == ()


def test_a_key_is_sent_and_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n", encoding="ascii")
    access = read("--api-key-file", str(path))
    assert access.metadata == (("authorization", f"Bearer {KEY}"),)
    assert KEY not in repr(access)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--api-key-file", "/nowhere"), "--api-key-file: /nowhere: No such file"),
        (("--ca-certificate", "/nowhere"), "--ca-certificate: /nowhere: No such file"),
        (("--server-name", "x"), "--ca-certificate: without it there is no TLS"),
        (("--ca-certificate", __file__, "--client-key", __file__), "--client-certificate and --client-key belong"),
    ],
)
def test_what_does_not_fit_is_named(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(*words)


@pytest.mark.parametrize("protocol", list(WireProtocol))
async def test_a_guarded_server_needs_certificate_and_key(protocol: WireProtocol, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server", HOST)
    own_certificate, own_key = authority.issue("client", "client.example")
    shown = tmp_path / "key"
    shown.write_text(KEY, encoding="ascii")
    tls = ("--ca-certificate", str(authority.pem), "--server-name", HOST)
    own = ("--client-certificate", str(own_certificate), "--client-key", str(own_key))
    guards = {"tls_certificate": certificate, "tls_key": key, "tls_client_ca": authority.pem}
    async with running(api_keys=alices_keys(tmp_path), **guards) as server:

        async def measured(*words: str) -> dict[str, object]:
            load = options("--model", MODEL, "--num-prompts", "4", "--max-tokens", "3", "--prompt-tokens", "2", *words)
            target = f"127.0.0.1:{server.endpoint.port}"
            settings = BenchSettings(target=target, protocol=protocol, load=load, max_concurrency=2, connections=2)
            return summarize((await bench.measure(settings)).run)

        assert (await measured(*tls, *own, "--api-key-file", str(shown)))["finished"] == 4
        for words, code in (((*tls, *own), "UNAUTHENTICATED"), (tls, "UNAVAILABLE"), ((), "UNAVAILABLE")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await measured(*words)
            assert refused.value.code().name == code
