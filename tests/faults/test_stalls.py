"""Clients that take no bytes and answer pings, over raw HTTP/2: they hold up nothing, and lose their place."""

from __future__ import annotations

import signal
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proto.onward.v1 import model_pb2
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from proto.onward.v1.model_pb2_grpc import ModelServiceStub
from tests.faults.http2 import PREFACE, frame, headers
from tests.faults.process import DECODER, MODELS, TRANSLATOR, ServerProcess, greedy, serving, streamed, until

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK = _END_STREAM = 1
_INITIAL_WINDOW_SIZE = 4
_FRAME_HEAD = 9
_SECONDS = 60.0
ONE_PLACE = ("--max-stall-seconds", "1", "--max-concurrent-rpcs", "1")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class DeafClient:
    """A client that takes few bytes or none, and answers settings and pings like a healthy one.

    Args:
        server: the server.
        calls: path and request of each call.
        window: bytes that each stream may receive.
    """

    def __init__(self, server: ServerProcess, calls: Sequence[tuple[bytes, Message]], window: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", server.port), timeout=_SECONDS)
        self._streams = set(range(1, 2 * len(calls), 2))
        self.begun: set[int] = set()
        self.ended: set[int] = set()
        sent = PREFACE + frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, window))
        for stream, (path, request) in zip(sorted(self._streams), calls, strict=True):
            message = request.SerializeToString()
            sent += headers(path, stream=stream)
            sent += frame(_DATA, _END_STREAM, stream, struct.pack(">BI", 0, len(message)) + message)
        self._connection.sendall(sent)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        until(lambda: self.begun == self._streams, "the server did not begin to answer")

    def listen(self) -> None:
        """Grants each stream a window after all."""
        grants = (frame(_WINDOW_UPDATE, 0, stream, struct.pack(">I", 1 << 16)) for stream in self._streams)
        self._connection.sendall(b"".join(grants))

    def close(self) -> None:
        """Leaves."""
        self._connection.shutdown(socket.SHUT_RDWR)
        self._reading.join()
        self._connection.close()

    def _read(self) -> None:
        with self._connection.makefile("rb") as file:
            try:
                while len(head := file.read(_FRAME_HEAD)) == _FRAME_HEAD:
                    kind, flags, stream = head[3], head[4], struct.unpack(">I", head[5:])[0]
                    payload = file.read(int.from_bytes(head[:3]))
                    if kind in (_SETTINGS, _PING) and not flags & _ACK:
                        self._connection.sendall(frame(kind, _ACK, 0, payload if kind == _PING else b""))
                    if kind == _HEADERS:
                        self.begun.add(stream)
                    if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                        self.ended.add(stream)
            except OSError:
                return


@contextmanager
def deaf(server: ServerProcess, *calls: tuple[bytes, Message], window: int = 0) -> Iterator[DeafClient]:
    client = DeafClient(server, calls, window)
    try:
        yield client
    finally:
        client.close()


def watch(name: str = "") -> tuple[bytes, Message]:
    return b"/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest(service=name)


def check(server: ServerProcess, name: str = "") -> int:
    with server.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=_SECONDS).status)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_watcher_that_takes_no_bytes_does_not_hold_up_stopping(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path, "--drain-grace-seconds", "2") as server, deaf(server, watch(), watch(DECODER)):
        assert server.stop(number) == 0


def test_a_watcher_that_takes_no_bytes_does_not_hold_up_a_change_of_models(tmp_path: Path) -> None:
    with serving(tmp_path) as server, deaf(server, *map(watch, ("", *MODELS))), server.channel() as channel:
        models = ModelServiceStub(channel)
        assert models.VerifyParity(model_pb2.VerifyParityRequest(model=DECODER), timeout=_SECONDS).parity.passed
        models.UnloadModel(model_pb2.UnloadModelRequest(model=DECODER), timeout=_SECONDS)
        assert check(server, DECODER) == NOT_SERVING
        models.LoadModel(model_pb2.LoadModelRequest(model=DECODER), timeout=_SECONDS)
        models.ReloadModel(model_pb2.ReloadModelRequest(model=TRANSLATOR), timeout=_SECONDS)
        assert [check(server, name) for name in ("", DECODER, TRANSLATOR)] == [SERVING] * 3
        assert server.stop() == 0


def watched(channel: grpc.Channel) -> grpc.StatusCode | int:
    """The first state of a new watcher, which leaves again; the status's code where it is refused."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=_SECONDS)
    try:
        return int(next(call).status)
    except grpc.RpcError as error:
        return error.code()
    finally:
        call.cancel()


def test_a_watcher_that_takes_no_bytes_loses_its_place_after_the_stall_limit(tmp_path: Path) -> None:
    with serving(tmp_path, *ONE_PLACE) as server, deaf(server, watch()) as watcher, server.channel() as channel:
        assert check(server) == SERVING, "watchers have taken the places of checks"
        until(lambda: watched(channel) == SERVING, "the watcher keeps its place")
        assert watcher.ended == set()
        watcher.listen()
        until(lambda: watcher.ended == {1}, "the watcher was not sent its status")
        assert server.stop() == 0


# Room for no message; and for the first one, but not for what follows.
@pytest.mark.parametrize("window", [0, 100])
def test_a_stream_whose_client_takes_no_bytes_loses_its_place_though_the_client_stays(
    tmp_path: Path, window: int
) -> None:
    stream = b"/onward.v1.GenerationService/GenerateStream", streamed(greedy(DECODER))
    with serving(tmp_path, *ONE_PLACE) as server, deaf(server, stream, window=window), server.channel() as channel:
        until(lambda: generated(channel) == 3, "the stream keeps its place")
        assert server.sample("grpc_server_handled_total", grpc_method="GenerateStream", grpc_code="ABORTED") == 1
        assert server.stop() == 0


def test_an_answer_whose_client_takes_no_bytes_loses_its_place_though_the_client_stays(tmp_path: Path) -> None:
    call = b"/onward.v1.GenerationService/Generate", greedy(DECODER)
    with serving(tmp_path, *ONE_PLACE) as server, deaf(server, call), server.channel() as channel:
        until(lambda: generated(channel) == 3, "the call keeps its place")
        assert server.stop() == 0


def test_a_health_check_whose_client_takes_no_bytes_loses_its_place_though_the_client_stays(tmp_path: Path) -> None:
    call = b"/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest()
    with serving(tmp_path, *ONE_PLACE) as server, deaf(server, call), server.channel() as channel:
        until(lambda: checked(channel) == SERVING, "the check keeps its place")
        assert server.stop() == 0


def checked(channel: grpc.Channel) -> int:
    """The server's state; -1 where the check is refused for want of a place."""
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_SECONDS)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return -1
    return int(answer.status)


def generated(channel: grpc.Channel) -> int:
    """How many tokens a short request is answered with; 0 where it is refused for want of a place."""
    try:
        answer = GenerationServiceStub(channel).Generate(greedy(DECODER, max_tokens=3), timeout=_SECONDS)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return 0
    return len(answer.outputs[0].token_ids)
