"""Bytes that are no HTTP/2, frames that are no request, messages that are larger than they look."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import pytest

from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.faults.http2 import BEGIN, PREFACE, SETTINGS, frame, headers
from tests.faults.process import DECODER, Neighbour, ServerProcess, greedy, serving, until

FRAME_TYPES = 12
_READ_SECONDS = 5.0


def random_frames(source: random.Random) -> bytes:
    def one() -> bytes:
        payload = source.randbytes(source.choice((0, 1, 8, 100, 3000)))
        return frame(source.randrange(FRAME_TYPES), source.randrange(256), source.choice((0, 1, 3, 2**31 - 1)), payload)

    return b"".join(one() for _ in range(source.randint(1, 12)))


GENERATE = b"/onward.v1.GenerationService/Generate"
EMPTY = frame(0, 1, 1, b"\x00\x00\x00\x00\x00")
SENT: dict[str, bytes] = {
    "nothing": b"",
    "http 1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "half a preface": PREFACE[:10],
    "zeros": bytes(100_000),
    "truncated frame": BEGIN + frame(1, 4, 1, b"\x00", length=4000),
    "frame of 16 MiB": BEGIN + frame(0, 0, 1, b"", length=(1 << 24) - 1),
    "data without headers": BEGIN + frame(0, 1, 1, b"x" * 100),
    "broken header compression": BEGIN + frame(1, 5, 1, b"\xff" * 50),
    "message shorter than announced": BEGIN + headers(GENERATE) + frame(0, 1, 1, b"\x00\x00\x00\x01\x00abc"),
    "message of 4 GiB": BEGIN + headers(GENERATE) + frame(0, 1, 1, b"\x00\xff\xff\xff\xffabc"),
    "compressed by an unknown method": BEGIN
    + headers(GENERATE, (b"grpc-encoding", b"zip"))
    + frame(0, 1, 1, b"\x01\x00\x00\x00\x01a"),
    "unknown method": BEGIN + headers(b"/a/b") + EMPTY,
    "path of no method": BEGIN + headers(b"//..//") + EMPTY,
    "path that is no UTF-8": BEGIN + headers(b"/onward.v1.GenerationService/\xff\xfe") + EMPTY,
    "path that is no UTF-8 and no method": BEGIN + headers(b"\xff") + EMPTY,
    "another content type": BEGIN + headers(GENERATE, (b"content-type", b"text/html")),
    "timeout that is none": BEGIN + headers(GENERATE, (b"grpc-timeout", b"99999999999x")) + EMPTY,
    "window of zero": PREFACE + frame(4, 0, 0, struct.pack(">HI", 4, 0)) + headers(GENERATE) + EMPTY,
    "endless pings": BEGIN + frame(6, 0, 0, bytes(8)) * 5000,
    "endless settings": PREFACE + SETTINGS * 5000,
    "rapid resets": BEGIN + b"".join(headers(GENERATE) + frame(3, 0, 1, bytes(4)) for _ in range(300)),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("models"), "--max-message-bytes", str(1 << 20)) as server:
        yield server
        assert server.stop() == 0


def send(server: ServerProcess, data: bytes) -> None:
    """Sends bytes and leaves, whether or not there was an answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=_READ_SECONDS) as connection:
        try:
            connection.sendall(data)
            connection.settimeout(0.2)
            while connection.recv(65536):
                pass
        except (TimeoutError, ConnectionError):
            pass


def test_garbage_bytes_on_a_connection_hurt_nobody_else(server: ServerProcess) -> None:
    neighbour = Neighbour(server)
    with ThreadPoolExecutor(4) as senders:
        for kind, ended in [(kind, senders.submit(send, server, data)) for kind, data in SENT.items()]:
            ended.result()
            assert server.process.poll() is None, kind
    neighbour.check()
    server.settle()


def test_random_frames_hurt_nobody_else(server: ServerProcess, fuzz: int) -> None:
    source = random.Random(1)
    neighbour = Neighbour(server)
    descriptors = server.num_descriptors()
    for number in range(max(20, fuzz // 100)):
        data = PREFACE + source.choice((b"", SETTINGS)) + random_frames(source)
        address = "127.0.0.1", server.port
        # It may have had enough before all is sent.
        with socket.create_connection(address, timeout=_READ_SECONDS) as connection, suppress(ConnectionError):
            connection.sendall(data)
        if number % 50 == 0:
            neighbour.check()
    neighbour.check()
    server.settle()
    until(lambda: server.num_descriptors() <= descriptors + 1, "connections are still open")


def test_compressed_bomb_is_refused_without_being_unpacked_and_the_next_request_ok(server: ServerProcess) -> None:
    neighbour = Neighbour(server)
    bomb = pb.GenerateRequest(model=DECODER, text="\x00" * (64 << 20))
    before = server.forget_peak()
    with server.channel(("grpc.max_send_message_length", -1)) as channel:
        stub = GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(bomb, timeout=30, compression=grpc.Compression.Gzip)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "gzip" in (caught.value.details() or "")
        assert len(stub.Generate(greedy(DECODER, max_tokens=3), timeout=30).outputs[0].token_ids) == 3
    neighbour.check()
    # Not what is left of it: what is unpacked and thrown away is as often gone again as not.
    assert server.status("VmHWM") - before < 32 << 10, "it was unpacked"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x0a\xff\xff\xff\xff\x0f", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x0a\x02\xff\xfe", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x0b" * 20_000, grpc.StatusCode.INVALID_ARGUMENT),
        (b"\xfa\xff\xff\xff\x0f\x03abc", grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["length beyond the end", "bad UTF-8", "deep nesting", "unknown field alone"],
)
def test_messages_that_are_none_are_refused_and_the_next_request_ok(
    server: ServerProcess, data: bytes, code: grpc.StatusCode
) -> None:
    with server.channel() as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/onward.v1.GenerationService/Generate")(data, timeout=30)
        assert caught.value.code() is code
        GenerationServiceStub(channel).Generate(greedy(DECODER, max_tokens=2), timeout=30)
