"""The process from outside: signals under load, deadlines in every phase, resources that are not to be had."""

from __future__ import annotations

import resource
import signal
import threading
import time
from pathlib import Path

import grpc
import pytest

from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.faults.process import DECODER, MODELS, SLOTS, Neighbour, greedy, serving, streamed, until

NUM_STREAMS = 32


@pytest.mark.parametrize(("grace", "all_finish"), [("60", True), ("0", False)])
def test_sigterm_with_streams_in_flight_lets_them_finish_within_the_grace_and_exits_0(
    tmp_path: Path, grace: str, all_finish: bool
) -> None:
    with serving(tmp_path, "--drain-grace-seconds", grace) as server, server.channel() as channel:
        stub = GenerationServiceStub(channel)
        ends: list[tuple[str, int]] = []
        begun = threading.Semaphore(0)

        def read(number: int) -> None:
            call = stub.GenerateStream(streamed(greedy(MODELS[number % 2], max_tokens=80)))
            num_tokens, is_whole = 0, False
            try:
                for event in call:
                    if event.WhichOneof("event") == "accepted":
                        begun.release()
                    num_tokens += len(event.delta.token_ids)
                    is_whole = event.HasField("summary")
            except grpc.RpcError as error:
                ends.append((error.code().name, num_tokens))
            else:
                ends.append(("OK" if is_whole else "incomplete", num_tokens))

        readers = [threading.Thread(target=read, args=(number,)) for number in range(NUM_STREAMS)]
        for reader in readers:
            reader.start()
        for _ in readers:
            assert begun.acquire(timeout=60)
        assert server.stop(signal.SIGTERM) == 0
        for reader in readers:
            reader.join(60)
        assert len(ends) == NUM_STREAMS, "a stream was lost without a status"
        if all_finish:
            assert set(ends) == {("OK", 80)}
        else:
            assert {code for code, _ in ends} <= {"OK", "UNAVAILABLE"}
            assert all(count == 80 for code, count in ends if code == "OK")


def test_deadline_passed_in_queue_in_prefill_in_decode_is_deadline_exceeded_and_gives_everything_back(
    tmp_path: Path,
) -> None:
    # Admission would refuse them before.
    with serving(tmp_path, "--prefill-chunk", "4", "--admission", "off") as server, server.channel() as channel:
        neighbour, stub = Neighbour(server), GenerationServiceStub(channel)
        began = time.monotonic()
        stub.Generate(greedy(DECODER, max_tokens=90), timeout=60)
        whole = time.monotonic() - began
        # All slots are taken and others wait: a little of the time that one needs lets it pass in every phase.
        calls = [
            stub.Generate.future(greedy(DECODER, text="a" * 60, max_tokens=90), timeout=whole * (1 + number % 40) / 20)
            for number in range(SLOTS * 10)
        ]
        codes = [call.code() for call in calls]
        assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED}
        assert grpc.StatusCode.DEADLINE_EXCEEDED in codes
        server.settle()
        neighbour.check()
        assert server.stop() == 0


def test_disk_full_at_load_does_not_matter_as_nothing_is_written(tmp_path: Path) -> None:
    def no_byte_to_any_file() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    with serving(tmp_path, limit=no_byte_to_any_file) as server:
        Neighbour(server).check()
        assert server.stop() == 0


def test_descriptors_used_up_are_found_again(tmp_path: Path) -> None:
    import socket

    def few_descriptors() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    with serving(tmp_path, limit=few_descriptors) as server:
        neighbour = Neighbour(server)
        flood = []
        for _ in range(200):
            connection = socket.socket()
            connection.settimeout(0.2)
            try:
                connection.connect(("127.0.0.1", server.port))
            except OSError:
                connection.close()
                continue
            flood.append(connection)
        for connection in flood:
            connection.close()
        until(lambda: server.num_descriptors() < 60, "connections are still open")
        neighbour.check()
        assert server.stop() == 0


def test_metrics_port_down_or_slow_does_not_hold_up_answers(tmp_path: Path) -> None:
    """Scrapers that ask and never read, a hundred of them."""
    import socket

    with serving(tmp_path) as server:
        neighbour = Neighbour(server)
        host, _, port = server.metrics_url.removeprefix("http://").partition("/")[0].rpartition(":")
        scrapers = []
        for _ in range(100):
            connection = socket.create_connection((host, int(port)))
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            scrapers.append(connection)
        neighbour.check()
        for connection in scrapers:
            connection.close()
        until(lambda: server.status("Threads") < 60, "threads of scrapers are still there")
        assert server.stop() == 0
