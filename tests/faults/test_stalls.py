"""Clients that take no bytes and answer pings, over raw HTTP/2: they hold up nothing, and lose their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub
from tests.faults.http2 import Connection, code, message_header
from tests.faults.process import DECODER, MODELS, TRANSLATOR, ServerProcess, greedy, serving, streamed, until

_SECONDS = 60.0
ONE_PLACE = ("--max-stall-seconds", "1", "--max-concurrent-rpcs", "1")
_STREAM = b"/onward.v1.GenerationService/GenerateStream"
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


def test_a_watcher_that_takes_no_bytes_holds_up_neither_a_change_of_models_nor_stopping(tmp_path: Path) -> None:
    watched = [watch(name) for name in ("", *MODELS)]
    with (
        serving(tmp_path, "--drain-grace-seconds", "2") as server,
        deaf(server, *watched),
        server.channel() as channel,
    ):
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


CALLS: dict[str, tuple[tuple[bytes, Message], int, Callable[[grpc.Channel], Any], Any]] = {
    # What takes no bytes; of how many there is room; what needs its place; and what is had there.
    "watch": (watch(), 0, watched, SERVING),
    "check": ((b"/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest()), 0, checked, SERVING),
    "answer": ((b"/onward.v1.GenerationService/Generate", greedy(DECODER)), 0, generated, 3),
    # Room for no message; and for the first one, but not for what follows.
    "stream": ((_STREAM, streamed(greedy(DECODER))), 0, generated, 3),
    "begun stream": ((_STREAM, streamed(greedy(DECODER))), 100, generated, 3),
}


@pytest.fixture(scope="module")
def one_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("models"), *ONE_PLACE) as server:
        yield server
        assert server.stop() == 0


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_takes_no_bytes_loses_its_place_and_its_connection_to_the_next(
    one_place: ServerProcess, name: str
) -> None:
    call, window, needed, had = CALLS[name]
    with deaf(one_place, call, window=window) as client, one_place.channel() as channel:
        until(lambda: needed(channel) == had, "the call keeps its place")
        until(lambda: client.is_closed, "the call lives on")
        # The place of the call above comes back after its client has the answer.
        until(lambda: checked(channel) == SERVING, "no place is free")


def test_a_stream_that_is_taken_after_all_is_sent_its_status(one_place: ServerProcess) -> None:
    call = _STREAM, streamed(greedy(DECODER))
    handled = "grpc_server_handled_total"
    ended = {"grpc_method": "GenerateStream", "grpc_code": "ABORTED"}
    before = one_place.sample(handled, **ended)
    with deaf(one_place, call) as client:
        until(lambda: one_place.sample(handled, **ended) == before + 1, "the stream has not stalled")
        assert not client.ended
        client.grant(1, 1 << 16)
        until(lambda: 1 in client.ended, "the stream was not sent its status")
        assert code(client.ended[1]) == "ABORTED"


def test_calls_that_take_no_bytes_hold_no_more_places_than_there_are(tmp_path: Path) -> None:
    path, request = watch()
    data = request.SerializeToString()
    clients: list[Connection] = []

    def has_place(stack: ExitStack) -> bool:
        client = stack.enter_context(closing(Connection(server.port, 0)))
        client.call(path, head=message_header(len(data)) + data, is_complete=True)
        assert client.pump(lambda: 1 in client.begun)
        if 1 not in client.ended:
            clients.append(client)
        return 1 not in client.ended

    limits = "--max-stall-seconds", "1", "--max-concurrent-rpcs", "4"
    with serving(tmp_path, *limits) as server, ExitStack() as stack:
        for _ in range(8):
            until(lambda: has_place(stack), "no call that takes no bytes loses its place")
        for client in clients:
            client.ping()
            client.pump(lambda client=client: client.num_pongs > 0)
        assert sum(not client.is_closed for client in clients) <= 4
        assert server.stop() == 0
