"""The process from outside: signals under load, deadlines in every phase, resources that are not to be had."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub
from tests.environment import environment
from tests.faults.process import (
    DECODER,
    LONG,
    LONG_TOKENS,
    SLOTS,
    TRANSLATOR,
    Neighbour,
    greedy,
    put_long_artifact,
    serving,
    streamed,
    until,
)
from tests.faults.stuck_disk import STUCK

NUM_STREAMS = 32


@pytest.mark.parametrize(
    ("grace", "kinds", "short_tokens"),
    [
        ("60", (DECODER, TRANSLATOR), 80),
        ("4", (DECODER, LONG), 8),
        pytest.param("0", (LONG, LONG), 0, marks=pytest.mark.whole),
    ],
    ids=["all in time", "half of them", "none"],
)
def test_sigterm_with_streams_in_flight_lets_them_finish_within_the_grace_and_exits_0(
    tmp_path: Path, grace: str, kinds: tuple[str, str], short_tokens: int
) -> None:
    if LONG in kinds:
        put_long_artifact(tmp_path)
    with serving(tmp_path, "--drain-grace-seconds", grace) as server, server.channel() as channel:
        stub = GenerationServiceStub(channel)
        ends: list[tuple[str, str]] = []
        begun = threading.Semaphore(0)

        def read(model: str) -> None:
            wanted = LONG_TOKENS if model == LONG else short_tokens
            call = stub.GenerateStream(streamed(greedy(model, max_tokens=wanted)))
            num_tokens, is_whole = 0, False
            try:
                for event in call:
                    if event.WhichOneof("event") == "accepted":
                        begun.release()
                    num_tokens += len(event.delta.token_ids)
                    is_whole = event.HasField("summary")
            except grpc.RpcError as error:
                ends.append((model, error.code().name))
            else:
                ends.append((model, "OK" if is_whole and num_tokens == wanted else "incomplete"))

        readers = [threading.Thread(target=read, args=(kinds[number % 2],)) for number in range(NUM_STREAMS)]
        for reader in readers:
            reader.start()
        for _ in readers:
            assert begun.acquire(timeout=300)
        assert server.stop(signal.SIGTERM) == 0
        for reader in readers:
            reader.join(60)
        assert len(ends) == NUM_STREAMS, "a stream was lost without a status"
        assert set(ends) <= {(model, "OK") for model in kinds} | {(LONG, "UNAVAILABLE")}
        # Half of the long ones have to wait for a slot before they even begin.
        assert ((LONG, "UNAVAILABLE") in ends) == (LONG in kinds)


def blocked(path: Path) -> int:
    """Waits until a pipe has a reader; returns the end to write to, which keeps the reader waiting."""
    found: list[int] = []

    def is_read() -> bool:
        with suppress(OSError):  # while it has none
            found.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return bool(found)

    until(is_read, "it has no reader")
    return found[0]


def test_sigterm_while_a_model_is_loaded_does_not_wait_for_it(tmp_path: Path) -> None:
    given = {"module": "tests.faults.stuck_disk"}
    with serving(tmp_path, "--drain-grace-seconds", "0", **given) as server, server.channel() as channel:
        (tmp_path / "slow").mkdir()
        os.mkfifo(tmp_path / "slow" / STUCK)
        call = ModelServiceStub(channel).LoadModel.future(model_pb2.LoadModelRequest(model="slow"))
        end = blocked(tmp_path / "slow" / STUCK)
        try:
            Neighbour(server).check()
            assert server.stop(signal.SIGTERM) == 0
            assert call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        finally:
            os.close(end)


def test_sigterm_before_anything_is_served_ends_the_process_with_0(tmp_path: Path) -> None:
    """A container's first process would not even be ended by a signal that it has no handler for."""
    (tmp_path / "slow").mkdir()
    os.mkfifo(tmp_path / "slow" / STUCK)
    module = "tests.faults.stuck_disk"
    command = [sys.executable, "-m", module, "serve", "--models", tmp_path, "--port", "0", "--no-metrics"]
    with subprocess.Popen(command) as process:
        end = blocked(tmp_path / "slow" / STUCK)
        try:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            os.close(end)
            process.kill()


def test_server_writes_nothing_anywhere_and_a_full_disk_does_not_matter(tmp_path: Path) -> None:
    """As a container with a read-only root wants it: no cache, no id, no file beside its models."""

    def no_byte_to_any_file() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    names = ("models", "home", "tmp", "cwd")
    for name in names:
        (tmp_path / name).mkdir()
    surroundings = {
        **{name: value for name, value in environment().items() if name != "ORT_DISABLE_TELEMETRY"},
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
    }
    given = {"environment": surroundings, "cwd": tmp_path / "cwd", "limit": no_byte_to_any_file}
    with serving(tmp_path / "models", **given) as server:
        before = set(tmp_path.rglob("*"))
        neighbour = Neighbour(server)
        with server.channel() as channel:
            ModelServiceStub(channel).ReloadModel(model_pb2.ReloadModelRequest(model=DECODER), timeout=300)
        neighbour.check()
        assert server.stop() == 0
        assert set(tmp_path.rglob("*")) == before
        assert [path for name in names[1:] for path in (tmp_path / name).iterdir()] == []


@pytest.mark.whole
def test_deadlines_long_and_short_are_met_or_exceeded_and_give_everything_back(tmp_path: Path) -> None:
    # Admission would refuse them before.
    with serving(tmp_path, "--prefill-chunk", "4", "--admission", "off") as server, server.channel() as channel:
        neighbour, stub = Neighbour(server), GenerationServiceStub(channel)
        began = time.monotonic()
        stub.Generate(greedy(DECODER, max_tokens=90), timeout=300)
        whole = time.monotonic() - began
        # All slots are taken and others wait: a little of the time that one needs lets it pass in every phase.
        codes: set[grpc.StatusCode] = set()
        while grpc.StatusCode.DEADLINE_EXCEEDED not in codes:
            calls = [
                stub.Generate.future(
                    greedy(DECODER, text="a" * 60, max_tokens=90), timeout=whole * (1 + number % 40) / 20
                )
                for number in range(SLOTS * 10)
            ]
            codes |= {call.code() for call in calls}
            # The first answer may have taken much longer than the others do: all of them would be in time.
            whole /= 2
        assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED}
        server.settle()
        neighbour.check()
        assert server.stop() == 0


def test_descriptors_used_up_are_found_again(tmp_path: Path) -> None:
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
        until(lambda: server.num_descriptors() >= 60, "there are some left")
        for connection in flood:
            connection.close()
        until(lambda: server.num_descriptors() < 60, "connections are still open")
        neighbour.check()
        assert server.stop() == 0


def test_metrics_port_down_or_slow_does_not_hold_up_answers(tmp_path: Path) -> None:
    """Scrapers that ask and never read, a hundred of them."""
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
