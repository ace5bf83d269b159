"""How much a client can make the server buffer: requests that never end, of callers with a key and without one."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from onward.inference import open_inference_pb2 as oip
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.faults import bounds
from tests.faults.http2 import Connection, code, frame, message_header, varint
from tests.faults.process import DECODER, ServerProcess, greedy, serving, until
from tests.identities import key_table

MESSAGE = bounds.MESSAGE_BYTES
CALLS = 128
STALL_SECONDS = 600
MAX_CONNECTIONS = 64
DESCRIPTORS = 128
# Half of the places, which is one connection's; and a part of it, which many connections of an address have.
OWN_PLACES, OPEN_PLACES = bounds.SHARE, 2
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
    keys.write_text(key_table("alice") + key_table("bob"))
    flags = ("--api-keys", str(keys), "--max-stall-seconds", str(STALL_SECONDS))
    flags += ("--max-connections", str(MAX_CONNECTIONS))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def few_descriptors() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))

    with serving(tmp_path_factory.mktemp("models"), *flags, limit=few_descriptors) as server:
        yield server
        assert server.stop() == 0


def bearer(name: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {name}".encode()


@contextmanager
def unfinished(
    server: ServerProcess, path: bytes, *metadata: tuple[bytes, bytes], num_connections: int = 1
) -> Iterator[list[Connection]]:
    """`CALLS` calls that have begun, each with a message of which the last byte never comes."""
    connections = [Connection(server.port) for _ in range(num_connections)]
    try:
        for _ in range(CALLS // num_connections):
            for each in connections:
                each.call(path, *metadata, head=message_header(MESSAGE), num_zeros=MESSAGE - 1)
        yield connections
    finally:
        for each in connections:
            each.close()


def pump(connections: Sequence[Connection], condition: Callable[[], bool]) -> None:
    """Sends all that the server takes until a condition holds."""
    with ExitStack() as stack:
        for each in connections:
            stack.enter_context(each.pumped())
        until(condition, "the server takes too little")


def num_whole(connections: Sequence[Connection]) -> int:
    """Messages of which the server has taken all but the last byte."""
    head = len(message_header(MESSAGE))
    return sum(count == head + MESSAGE - 1 for each in connections for count in list(each.sent.values()))


def are_windows_used(connections: Sequence[Connection]) -> bool:
    return all(each.has_used_windows() for each in connections)


def is_held_up(server: ServerProcess, connection: Connection, stream: int) -> bool:
    """Whether nothing runs, and the server takes no more of a stream though its event loop has run since."""
    before = connection.sent[stream]
    is_idle = not server.held()
    assert connection.is_healthy()
    return is_idle and connection.has_used_windows() and connection.sent[stream] == before


def num_ended(connections: Sequence[Connection]) -> int:
    return sum(len(each.ended) for each in connections)


def growth(server: ServerProcess, before: int) -> int:
    """Bytes that the server has taken at most since then."""
    return (server.status("VmHWM") - before) << 10


@pytest.mark.parametrize(("path", "num_connections"), [*((path, 1) for path in OURS), (GENERATE, 8)])
@pytest.mark.sampled(2)
def test_unfinished_requests_without_a_key_take_little_memory(
    server: ServerProcess, path: bytes, num_connections: int
) -> None:
    before = server.forget_peak()
    with unfinished(server, path, num_connections=num_connections) as connections:
        pump(connections, lambda: num_ended(connections) == CALLS)
        assert all(code(block) == "UNAUTHENTICATED" for each in connections for block in each.ended.values())
        assert growth(server, before) <= bounds.calls(CALLS) + bounds.ALLOCATOR_BYTES


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.sampled(1)
def test_unfinished_requests_that_need_no_key_take_little_memory_and_health_is_answered(
    server: ServerProcess, path: bytes
) -> None:
    before = server.forget_peak()
    with unfinished(server, path, num_connections=8) as connections:
        # A connection has half of the places; those whose reads are ended, for the sake of others, have more by and by.
        pump(connections, lambda: num_whole(connections) >= OPEN_PLACES or num_ended(connections) == CALLS)
        with server.channel() as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        most = bounds.messages(2 * OPEN_PLACES) + bounds.calls(CALLS) + bounds.ALLOCATOR_BYTES
        assert growth(server, before) <= most


@pytest.mark.parametrize("path", OURS[:2])
@pytest.mark.sampled(1)
def test_unfinished_requests_of_a_key_take_no_more_than_its_share_and_another_key_is_served(
    server: ServerProcess, path: bytes
) -> None:
    before = server.forget_peak()
    with unfinished(server, path, bearer("alice"), num_connections=8) as connections:
        pump(connections, lambda: num_whole(connections) >= OWN_PLACES and are_windows_used(connections))
        # All calls have come, and the event loop has seen them before the other key's.
        assert all(each.is_healthy() for each in connections)
        with server.channel() as channel:
            key = tuple(each.decode() for each in bearer("bob"))
            answer = GenerationServiceStub(channel).Generate(greedy(DECODER, max_tokens=3), metadata=[key], timeout=60)
        assert len(answer.outputs[0].token_ids) == 3
        # A message more that is read would have a wider window by now.
        assert all(each.is_healthy() for each in connections)
        assert are_windows_used(connections)
        assert num_whole(connections) == OWN_PLACES
        most = bounds.messages(OWN_PLACES) + bounds.calls(CALLS) + bounds.ALLOCATOR_BYTES
        assert growth(server, before) <= most
    server.settle()


# A message's `id`, and a field that no message of the protocol has.
@pytest.mark.parametrize("field", [oip.ModelInferRequest.ID_FIELD_NUMBER, 1000])
@pytest.mark.sampled(1)
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
        until(lambda: is_held_up(server, connection, stream), "it is read on and on")
        assert connection.sent[stream] < CALLS * (len(head) + num_zeros)
        assert growth(server, before) <= bounds.stream() + bounds.calls(1) + bounds.ALLOCATOR_BYTES
    finally:
        connection.close()
    server.settle()


def test_a_call_that_ends_without_a_request_is_invalid(server: ServerProcess) -> None:
    with server.channel() as channel:
        call = channel.stream_unary(GENERATE.decode())
        with pytest.raises(grpc.RpcError) as caught:
            call(iter(()), metadata=[tuple(each.decode() for each in bearer("alice"))], timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("path", [*OURS[:2], OURS[3], *OPEN])
@pytest.mark.sampled(2)
def test_a_message_above_the_limit_is_refused_long_before_all_of_it_is_buffered(
    server: ServerProcess, path: bytes
) -> None:
    before = server.forget_peak()
    connection = Connection(server.port)
    try:
        stream = connection.call(path, bearer("alice"), head=message_header(1 << 30), num_zeros=(1 << 30) - 1)
        assert connection.flood(stream, bounds.SLICE_BYTES, bounds.LOOK_SECONDS)
        assert code(connection.ended[stream]) == "ABORTED"
        assert connection.sent[stream] > MESSAGE
        assert growth(server, before) <= bounds.messages(1) + bounds.flood() + bounds.calls(1) + bounds.ALLOCATOR_BYTES
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
        with ExitStack() as stack:
            connections = [stack.enter_context(closing(Connection(server.port))) for _ in range(2 * MAX_CONNECTIONS)]
            for each in connections:
                assert each.pump(lambda each=each: each.is_greeted or each.is_closed)
            # One is the channel's.
            assert sum(each.is_greeted for each in connections) < MAX_CONNECTIONS
            # Besides, the server may be looking at a file.
            until(lambda: server.num_descriptors() < before + MAX_CONNECTIONS, "more are open than there may be")
            health.Check(health_pb2.HealthCheckRequest(), timeout=60)
    until(lambda: server.num_descriptors() <= before, "connections are still open")


def test_a_message_above_the_limit_gains_little_from_calls_of_its_connection_that_are_cancelled(
    server: ServerProcess,
) -> None:
    before = server.forget_peak()
    connection = Connection(server.port)

    def cancel() -> None:
        for _ in range(bounds.SLICE_BYTES // bounds.MIB):
            begun = connection.call(GENERATE, bearer("alice"), head=message_header(MESSAGE), num_zeros=100)
            assert connection.pump(lambda begun=begun: connection.sent[begun] > 100)
            connection.send(frame(3, 0, begun, bytes(4)))

    try:
        stream = connection.call(STREAM, bearer("alice"), head=message_header(1 << 30), num_zeros=(1 << 30) - 1)
        assert connection.flood(stream, bounds.SLICE_BYTES, bounds.LOOK_SECONDS, cancel)
        assert code(connection.ended[stream]) == "ABORTED"
        most = bounds.messages(2) + bounds.flood(is_masked=True) + bounds.calls(9) + bounds.ALLOCATOR_BYTES
        assert growth(server, before) <= most
    finally:
        connection.close()
    server.settle()
