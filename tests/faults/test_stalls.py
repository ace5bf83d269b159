"""Clients that take no bytes and answer pings, over raw HTTP/2: they hold up nothing, and lose their place."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proto.onward.v1 import model_pb2
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from proto.onward.v1.model_pb2_grpc import ModelServiceStub
from tests.faults.http2 import Connection, message_header
from tests.faults.process import DECODER, MODELS, TRANSLATOR, ServerProcess, greedy, serving, streamed, until

_SECONDS = 60.0
ONE_PLACE = ("--max-stall-seconds", "1", "--max-concurrent-rpcs", "1")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextmanager
def deaf(server: ServerProcess, *calls: tuple[bytes, Message], window: int = 0) -> Iterator[Connection]:
    """A client that takes few bytes or none, and answers settings and pings like a healthy one.

    Args:
        server: the server, which has begun to answer all calls.
        calls: path and request of each call.
        window: bytes that each stream may receive.
    """
    with closing(Connection(server.port, window)) as client:
        messages = [(path, request.SerializeToString()) for path, request in calls]
        streams = {
            client.call(path, head=message_header(len(data)) + data, is_complete=True) for path, data in messages
        }
        with client.pumped():
            until(lambda: client.begun == streams, "the server did not begin to answer")
            yield client


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
        assert not watcher.ended
        watcher.grant(1, 1 << 16)
        until(lambda: 1 in watcher.ended, "the watcher was not sent its status")
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
