"""How much a client can make the server buffer: requests that never end, of callers with a key and without one."""

from __future__ import annotations

import hashlib
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proto.inference import open_inference_pb2 as oip
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.faults.http2 import Connection, message_header, status, varint
from tests.faults.process import DECODER, ServerProcess, greedy, serving, until

MESSAGE = 4 << 20
CALLS = 128
KEYS = {name: secrets.token_hex(32) for name in ("alice", "bob")}
STALL_SECONDS = 600
DESCRIPTORS = 128
_KIB = 1 << 10
_UNAUTHENTICATED, _ABORTED = status(16), status(10)
GENERATE = b"/onward.v1.GenerationService/Generate"
OURS = (
    GENERATE,
    b"/onward.v1.GenerationService/GenerateStream",
    b"/onward.v1.ModelService/ReloadModel",
    b"/inference.GRPCInferenceService/ModelStreamInfer",
)
STREAM = OURS[3]
OPEN = (
    b"/grpc.health.v1.Health/Check",
    b"/grpc.health.v1.Health/Watch",
    b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(
        "\n".join(
            f'[keys.{name}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\npermissions = ["generate"]'
            for name, key in KEYS.items()
        )
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def few_descriptors() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))

    flags = ("--api-keys", str(keys), "--max-stall-seconds", str(STALL_SECONDS), "--max-connections", "64")
    with serving(tmp_path_factory.mktemp("models"), *flags, limit=few_descriptors) as server:
        yield server
        assert server.stop() == 0


def bearer(name: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {KEYS[name]}".encode()


@contextmanager
def unfinished(
    server: ServerProcess, path: bytes, *metadata: tuple[bytes, bytes], num_connections: int = 1
) -> Iterator[list[Connection]]:
    """`CALLS` calls that send all but the last byte of a message, as far as the server takes it."""
    connections = [Connection(server.port) for _ in range(num_connections)]
    try:
        for _ in range(CALLS // num_connections):
            for each in connections:
                each.call(path, *metadata, head=message_header(MESSAGE), num_zeros=MESSAGE - 1)
        # Again, for what ended reads have made room for.
        for each in connections * 2:
            each.push()
        yield connections
    finally:
        for each in connections:
            each.close()


def growth(server: ServerProcess, before: int) -> float:
    """MiB that the server has taken at most since then."""
    return (server.status("VmHWM") - before) / _KIB


@pytest.mark.parametrize(("path", "num_connections"), [*((path, 1) for path in OURS), (GENERATE, 8)])
def test_unfinished_requests_without_a_key_take_little_memory(
    server: ServerProcess, path: bytes, num_connections: int
) -> None:
    before = server.forget_peak()
    with unfinished(server, path, num_connections=num_connections) as connections:
        assert growth(server, before) <= 50
        for each in connections:
            assert each.pump(lambda each=each: len(each.ended) == CALLS // num_connections)
            assert all(_UNAUTHENTICATED in block for block in each.ended.values())


@pytest.mark.parametrize("path", OPEN)
def test_unfinished_requests_that_need_no_key_take_little_memory_and_health_is_told(
    server: ServerProcess, path: bytes
) -> None:
    before = server.forget_peak()
    with unfinished(server, path, num_connections=8):
        with server.channel() as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert growth(server, before) <= 50


@pytest.mark.parametrize("path", OURS[:2])
def test_unfinished_requests_of_a_key_take_no_more_than_its_share_and_another_key_is_served(
    server: ServerProcess, path: bytes
) -> None:
    before = server.forget_peak()
    with unfinished(server, path, bearer("alice"), num_connections=8):
        with server.channel() as channel:
            key = tuple(each.decode() for each in bearer("bob"))
            answer = GenerationServiceStub(channel).Generate(greedy(DECODER, max_tokens=3), metadata=[key], timeout=60)
        assert len(answer.outputs[0].token_ids) == 3
        # 8 messages, and what every stream may send before its message is read.
        assert growth(server, before) <= 8 * 4 + 8 + 32
    server.settle()


# A message's `id`, and a field that no message of the protocol has.
@pytest.mark.parametrize("field", [oip.ModelInferRequest.ID_FIELD_NUMBER, 1000])
def test_requests_of_a_stream_whose_answers_are_not_read_take_little_memory(server: ServerProcess, field: int) -> None:
    request = oip.ModelInferRequest(model_name=DECODER)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"3 May")
    request.parameters["max_tokens"].int64_param = 24
    num_zeros = 3 << 20
    rest = request.SerializeToString() + varint(field << 3 | 2) + varint(num_zeros)
    before = server.forget_peak()
    connection = Connection(server.port, window=0)
    try:
        head = message_header(len(rest) + num_zeros) + rest
        stream = connection.call(STREAM, bearer("alice"), head=head, num_zeros=num_zeros, num_times=CALLS)
        assert connection.pump(lambda: connection.sent[stream] > MESSAGE)
        connection.push()
        assert growth(server, before) <= 64
    finally:
        connection.close()
    server.settle()


def test_a_call_that_ends_without_a_request_is_invalid(server: ServerProcess) -> None:
    with server.channel() as channel:
        call = channel.stream_unary(GENERATE.decode())
        with pytest.raises(grpc.RpcError) as caught:
            call(iter(()), metadata=[tuple(each.decode() for each in bearer("alice"))], timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# The growth that has the connections looked at, twice, and what this client sends between looks.
@pytest.mark.parametrize("path", [*OURS[:2], OURS[3], *OPEN])
def test_a_message_above_the_limit_is_refused_long_before_all_of_it_is_buffered(
    server: ServerProcess, path: bytes
) -> None:
    before = server.forget_peak()
    connection = Connection(server.port)
    try:
        stream = connection.call(path, bearer("alice"), head=message_header(1 << 30), num_zeros=(1 << 30) - 1)
        assert connection.pump(lambda: stream in connection.ended), connection.sent
        assert _ABORTED in connection.ended[stream]
        assert growth(server, before) <= 256
        with server.channel() as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=60).status == 1
    finally:
        connection.close()


def test_start_allows_as_many_descriptors_as_connections_may_need(server: ServerProcess) -> None:
    soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    assert soft == min(64 + 512, hard) > DESCRIPTORS


def test_connections_above_the_limit_are_closed_and_the_others_served(server: ServerProcess) -> None:
    with server.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        before = server.num_descriptors()
        connections = [Connection(server.port) for _ in range(128)]
        until(lambda: sum(each.pump(lambda each=each: each.is_closed, 0.05) for each in connections) >= 64, "open")
        assert server.num_descriptors() <= before + 64
        health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        for each in connections:
            each.close()
    until(lambda: server.num_descriptors() <= before, "connections are still open")
