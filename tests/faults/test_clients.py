"""Clients that die, freeze or vanish in the middle: what they held comes back, and no other client notices."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.faults.http2 import Connection, code, message_header
from tests.faults.process import (
    DECODER,
    LONG,
    LONG_TOKENS,
    MODELS,
    Neighbour,
    Relay,
    ServerProcess,
    greedy,
    put_long_artifact,
    serving,
    streamed,
    until,
)

# Opens a long stream on a signal, reports its first token, and reads on.
CLIENT = """
import sys
import grpc
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
target, model, tokens, alternatives = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)]
sys.stdout.write("r")
sys.stdout.flush()
sys.stdin.read(1)
with grpc.insecure_channel(target, options) as channel:
    request = pb.GenerateStreamRequest(model=model, text="3 May", sampling=pb.SamplingParams(temperature=0.0, n=1))
    request.stopping.max_tokens, request.stopping.ignore_eos = tokens, True
    if alternatives:
        request.response.logprobs = alternatives
    for event in GenerationServiceStub(channel).GenerateStream(request):
        if event.WhichOneof("event") == "delta":
            sys.stdout.write("x")
            sys.stdout.flush()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    put_long_artifact(folder)
    flags = ("--max-stall-seconds", "1", "--keepalive-seconds", "2", "--max-logprobs", "280", "--max-queue-size", "4")
    with serving(folder, *flags) as server:
        yield server
        assert server.stop() == 0


def client(server: ServerProcess, model: str, tokens: int, alternatives: int = 0) -> subprocess.Popen[bytes]:
    """A client of its own process."""
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, server.target, model, str(tokens), str(alternatives)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def until_first_token(*processes: subprocess.Popen[bytes]) -> None:
    """Has all of them ask, when each is ready: none is to be over before another has begun."""
    for said in (b"r", b"x"):
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.read(1) == said
        for process in processes if said == b"r" else ():
            assert process.stdin is not None
            process.stdin.write(b"!")
            process.stdin.flush()


def close(process: subprocess.Popen[bytes]) -> None:
    """Our ends of its pipes."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def aborted(server: ServerProcess) -> float:
    """Streams that ended because they were not read."""
    return server.sample("grpc_server_handled_total", grpc_method="GenerateStream", grpc_code="ABORTED")


def test_client_sigkill_in_the_middle_of_a_stream_frees_what_it_held(server: ServerProcess, kills: int) -> None:
    neighbour = Neighbour(server)
    descriptors = server.num_descriptors()
    left = kills
    while left > 0:
        clients = [client(server, LONG, LONG_TOKENS) for _ in range(min(4, left))]
        left -= len(clients)
        with neighbour.beside():
            until_first_token(*clients)
            assert server.sample("num_requests_running", model_name=LONG) == len(clients)
            for each in clients:
                each.send_signal(signal.SIGKILL)
            for each in clients:
                assert each.wait() == -signal.SIGKILL
                close(each)
            until(lambda: server.sample("num_requests_running", model_name=LONG) == 0, "slots are still taken")
    server.settle()
    neighbour.check()
    until(lambda: server.num_descriptors() <= descriptors + 1, "connections are still open")


def test_client_sigstop_is_a_slow_reader_that_loses_its_place_after_the_stall_limit(server: ServerProcess) -> None:
    neighbour = Neighbour(server)
    before = aborted(server)
    # Every token with all its alternatives: more than HTTP/2's windows hold, and for longer than it may stand still.
    frozen = client(server, LONG, LONG_TOKENS, alternatives=280)
    until_first_token(frozen)
    try:
        frozen.send_signal(signal.SIGSTOP)
        with neighbour.beside():
            # While it stands still, and still has its connection.
            until(lambda: aborted(server) == before + 1, "it still has its place")
        server.settle()
    finally:
        frozen.send_signal(signal.SIGKILL)
        frozen.wait()
        close(frozen)


def test_queue_full_is_resource_exhausted_within_a_moment_and_has_no_effect_on_others(server: ServerProcess) -> None:
    neighbour = Neighbour(server)
    with server.channel() as channel:
        stub = GenerationServiceStub(channel)
        # Long ones, or a quick server would have answered the first before the last is sent.
        calls = [stub.Generate.future(greedy(LONG, max_tokens=200), timeout=600) for _ in range(200)]
        codes = [call.code().name for call in calls]
        assert set(codes) == {"OK", "RESOURCE_EXHAUSTED"}
        # As many as there are slots and waiting places had theirs from the start.
        assert codes.count("OK") >= 12
        for call in calls:
            if call.code().name == "OK":
                assert len(call.result().outputs[0].token_ids) == 200
                continue
            status, retry = rpc_status.from_call(call), error_details_pb2.RetryInfo()
            assert status is not None
            assert status.details[0].Unpack(retry)
            assert retry.retry_delay.ToMilliseconds() > 0
    server.settle()
    neighbour.check()


def test_idle_tcp_connections_do_not_keep_others_out(server: ServerProcess) -> None:
    neighbour = Neighbour(server)
    descriptors = server.num_descriptors()
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    try:
        neighbour.check()
    finally:
        for connection in idle:
            connection.close()
    until(lambda: server.num_descriptors() <= descriptors, "connections are still open")


def test_half_open_tcp_is_closed_though_nobody_says_a_word(server: ServerProcess) -> None:
    neighbour, relay = Neighbour(server), Relay(server)
    descriptors = server.num_descriptors()
    with grpc.insecure_channel(relay.target) as channel:
        try:
            GenerationServiceStub(channel).Generate(greedy(DECODER, max_tokens=2), timeout=60)
            assert server.num_descriptors() > descriptors
            relay.cut()
            # Pings without an answer, though no call is open.
            with neighbour.beside():
                until(lambda: server.num_descriptors() <= descriptors, "its connection is still open")
        finally:
            relay.close()


def test_half_open_tcp_in_the_middle_of_a_stream_loses_its_place(server: ServerProcess) -> None:
    neighbour, relay = Neighbour(server), Relay(server)
    before = aborted(server)
    request = streamed(greedy(LONG, max_tokens=LONG_TOKENS, response=pb.ResponseOptions(logprobs=280)))
    windows = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)]
    with grpc.insecure_channel(relay.target, windows) as channel:
        call = GenerationServiceStub(channel).GenerateStream(request)
        try:
            while not next(call).HasField("delta"):
                pass
            relay.cut()
            with neighbour.beside():
                until(lambda: aborted(server) == before + 1, "it still has its place")
            server.settle()
        finally:
            relay.close()
            call.cancel()


def test_cancelling_at_each_stage_leaves_no_leak(server: ServerProcess) -> None:
    neighbour = Neighbour(server)
    with server.channel() as channel, neighbour.beside():
        stub = GenerationServiceStub(channel)
        for number in range(60):
            calls = [stub.GenerateStream(streamed(greedy(MODELS[number % 2], max_tokens=80))) for _ in range(6)]
            # At once, while queued; while the prompt is computed; while tokens come.
            time.sleep((number % 6) * 0.002)
            for call in calls:
                call.cancel()
    server.settle()
    neighbour.check()
    assert server.process.poll() is None


def test_a_request_that_does_not_come_is_ended_after_the_stall_limit(server: ServerProcess) -> None:
    neighbour = Neighbour(server)
    connection = Connection(server.port)
    with neighbour.beside():
        stream = connection.call(b"/onward.v1.GenerationService/Generate", head=message_header(100), num_zeros=99)
        assert connection.pump(lambda: stream in connection.ended)
    connection.close()
    assert code(connection.ended[stream]) == "ABORTED"
    assert server.sample("grpc_server_handled_total", grpc_method="Generate", grpc_code="ABORTED") == 1
    server.settle()
