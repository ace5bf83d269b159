"""Clients that die, freeze or vanish in the middle: what they held comes back, and nobody else notices."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.faults.process import DECODER, MODELS, Neighbour, ServerProcess, greedy, serving, streamed, until

# Opens a stream that would last, says so once it has a token, and reads on; with "stop" it reads nothing more.
CLIENT = """
import sys
import grpc
from proto.onward.v1 import generation_pb2 as pb
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
target, model, tokens, alternatives = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)]
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
    flags = ("--max-stall-seconds", "1", "--max-logprobs", "280", "--max-queue-size", "4")
    with serving(tmp_path_factory.mktemp("models"), *flags) as server:
        yield server
        assert server.stop() == 0


def client(server: ServerProcess, model: str, tokens: int = 90, alternatives: int = 0) -> subprocess.Popen[bytes]:
    """A client of its own process that has had its first token."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, server.target, model, str(tokens), str(alternatives)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    return process


def test_client_sigkill_in_the_middle_of_a_stream_frees_what_it_held(server: ServerProcess, kills: int) -> None:
    neighbour = Neighbour(server)
    descriptors = server.num_descriptors()
    left = kills
    while left > 0:
        clients = [client(server, MODELS[number % 2]) for number in range(min(4, left))]
        left -= len(clients)
        for each in clients:
            each.send_signal(signal.SIGKILL)
        neighbour.check()
        for each in clients:
            assert each.wait() in (-signal.SIGKILL, 0)
            assert each.stdout is not None
            each.stdout.close()
    server.settle()
    neighbour.check()
    until(lambda: server.num_descriptors() <= descriptors + 1, "connections are still open")


def test_client_sigstop_is_a_slow_reader_that_loses_its_place_after_the_stall_limit(server: ServerProcess) -> None:
    neighbour = Neighbour(server)
    ended = ("requests_total", DECODER)
    # Every token with all its alternatives: more than HTTP/2's windows hold.
    frozen = client(server, DECODER, tokens=93, alternatives=280)
    try:
        frozen.send_signal(signal.SIGSTOP)
        before = server.metrics()[ended]
        neighbour.check()
        server.settle()
        assert server.metrics()[ended] >= before
        neighbour.check()
    finally:
        frozen.send_signal(signal.SIGKILL)
        frozen.wait()
        assert frozen.stdout is not None
        frozen.stdout.close()


def test_queue_full_is_resource_exhausted_within_a_moment_and_has_no_effect_on_others(server: ServerProcess) -> None:
    neighbour = Neighbour(server)
    with server.channel() as channel:
        stub = GenerationServiceStub(channel)
        calls = [stub.Generate.future(greedy(DECODER, max_tokens=60), timeout=60) for _ in range(200)]
        codes = [call.code().name for call in calls]
        assert set(codes) == {"OK", "RESOURCE_EXHAUSTED"}
        # As many as there are slots and waiting places had theirs from the start.
        assert codes.count("OK") >= 12
        for call in calls:
            if call.code().name == "OK":
                assert len(call.result().outputs[0].token_ids) == 60
    server.settle()
    neighbour.check()


def test_half_open_tcp_connections_do_not_keep_others_out(server: ServerProcess) -> None:
    import socket

    neighbour = Neighbour(server)
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    try:
        neighbour.check()
    finally:
        for connection in idle:
            connection.close()
    until(lambda: server.num_descriptors() < 100, "connections are still open")


def test_cancelling_at_each_stage_leaves_no_leak(server: ServerProcess) -> None:
    neighbour = Neighbour(server)
    with server.channel() as channel:
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
