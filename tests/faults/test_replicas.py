"""Server processes behind a real Envoy: killed, restarted and replaced under load, and asked by everybody's clients."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.infra.envoy import Envoy, balancing
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.artifacts import tiny_artifact
from tests.environment import ROOT
from tests.faults.callers import (
    DEADLINE_SECONDS,
    LONG,
    NUM_CALLERS,
    NUM_STREAMS,
    SECONDS,
    SHORT,
    Load,
    last_json,
    run,
)
from tests.faults.process import DECODER, ServerProcess, serving, until
from tests.ports import free_port

CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Places:
    """Folders with the models of two servers, and one for Envoy."""

    one: Path
    other: Path
    envoy: Path


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """The decoder has room for streams that last."""
    folders = [tmp_path / name for name in ("one", "other", "envoy")]
    for folder in folders:
        folder.mkdir()
    for folder in folders[:2]:
        (folder / DECODER).symlink_to(tiny_artifact(DECODER, context=CONTEXT), target_is_directory=True)
    return Places(*folders)


def start(stack: ExitStack, folder: Path, port: int = 0) -> ServerProcess:
    return stack.enter_context(serving(folder, "--drain-pause-seconds", "3", "--port", str(port)))


def stop_all(*servers: ServerProcess) -> None:
    """At once, as each waits out its pause."""
    with ThreadPoolExecutor() as pool:
        assert set(pool.map(ServerProcess.stop, servers)) == {0}


def tokens_of(server: ServerProcess, request: pb.GenerateRequest) -> tuple[int, ...]:
    with server.channel() as channel:
        return tuple(GenerationServiceStub(channel).Generate(request, timeout=DEADLINE_SECONDS).outputs[0].token_ids)


def num_running(server: ServerProcess) -> float:
    return server.metrics().get(("num_requests_running", DECODER), 0.0)


def num_requests(server: ServerProcess) -> float:
    return server.metrics().get(("requests_total", DECODER), 0.0)


def num_broken(envoy: Envoy) -> int:
    """Connections to servers that broke with a call on them."""
    return envoy.counters()["cluster.onward.upstream_cx_destroy_remote_with_active_rq"]


def begin(load: Load, servers: Sequence[ServerProcess]) -> None:
    """Both servers have streams in the middle, and callers besides."""

    def are_busy() -> bool:
        counts = [num_running(server) for server in servers]
        return sum(counts) == NUM_STREAMS and all(counts)

    until(are_busy, "the streams do not run on both")
    load.call()


def test_server_sigkill_under_load_fails_only_what_it_had_begun_and_it_returns_by_itself(places: Places) -> None:
    with ExitStack() as stack:
        victim, other = start(stack, places.one, free_port()), start(stack, places.other)
        envoy = stack.enter_context(balancing([victim.target, other.target], places.envoy))
        whole, short = tokens_of(other, LONG), tokens_of(other, SHORT)
        with Load(envoy.target) as load:
            begin(load, [victim, other])
            broken_before = num_broken(envoy)
            victim.process.kill()
            victim.process.wait(SECONDS)
            # Until Envoy has found its connections broken, it may send a call on one of them.
            until(lambda: num_broken(envoy) > broken_before, "Envoy still has its connections", SECONDS)
            killed = time.monotonic()
            load.until_answers(100)
            envoy.wait_healthy([other.target])
            # What restarts it is none of Envoy's business.
            again = start(stack, places.one, victim.port)
            until(lambda: num_requests(again) >= 10, "the server that returned is not asked")
        again_ended = num_requests(again)
        stop_all(again, other)
    lost = [call for call in load.answers if call.code != "OK"]
    assert all(call.begun < killed for call in lost), "a call failed that was sent when the server was dead already"
    assert {call.code for call in lost} <= {"UNAVAILABLE"}
    assert len(lost) <= NUM_CALLERS
    assert {call.tokens for call in load.answers if call.code == "OK"} == {short}
    broken = [stream for stream in load.streams if stream.code != "OK"]
    assert 0 < len(broken) < NUM_STREAMS, "those of the other server go on"
    assert all(stream.begun < killed for stream in broken)
    assert {stream.code for stream in broken} <= {"UNAVAILABLE", "INTERNAL", "CANCELLED"}
    for stream in broken:
        # Even all of them are not the whole answer while its summary is missing.
        assert stream.tokens == whole[: len(stream.tokens)]
    assert {stream.tokens for stream in load.streams if stream.code == "OK"} == {whole}
    assert again_ended >= 10


@pytest.mark.whole
def test_rolling_update_under_load_loses_nothing(places: Places) -> None:
    with ExitStack() as stack:
        folders = [places.one, places.other]
        servers = [start(stack, folder, free_port()) for folder in folders]
        targets = [server.target for server in servers]
        envoy = stack.enter_context(balancing(targets, places.envoy))
        whole, short = tokens_of(servers[0], LONG), tokens_of(servers[0], SHORT)
        with Load(envoy.target) as load:
            begin(load, servers)
            for index, folder in enumerate(folders):
                assert servers[index].stop() == 0
                servers[index] = start(stack, folder, servers[index].port)
                envoy.wait_healthy(targets)
                load.until_answers(50)
        for server in servers:
            assert num_requests(server) > 0
            server.settle()
        stop_all(*servers)
    assert {(call.code, call.tokens) for call in load.answers} == {("OK", short)}
    assert {(stream.code, stream.tokens) for stream in load.streams} == {("OK", whole)}


@pytest.fixture(scope="module")
def envoy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Envoy]:
    """In front of two servers of both families."""
    with ExitStack() as stack:
        servers = [start(stack, tmp_path_factory.mktemp("models")) for _ in range(2)]
        targets = [server.target for server in servers]
        yield stack.enter_context(balancing(targets, tmp_path_factory.mktemp("envoy")))
        for server in servers:
            server.settle()
            assert num_requests(server) > 0


def test_our_own_client_asks_through_envoy(envoy: Envoy) -> None:
    words = ("-m", "service", "ask", DECODER, "3 May", "--target", envoy.target, "--temperature", "0")
    whole, pieces = (run(*words, "--max-tokens", "9", *more) for more in ((), ("--stream",)))
    assert whole == pieces != "\n"
    assert run("-m", "service", "health", "--target", envoy.target) == "SERVING\n"


@pytest.mark.parametrize("protocol", [pytest.param("onward", marks=pytest.mark.whole), "oip"])
def test_load_bench_finds_every_request_answered(envoy: Envoy, protocol: str) -> None:
    report = last_json(
        run(
            "-m", "loadtest", "bench", "--target", envoy.target, "--protocol", protocol, "--model", DECODER,
            "--num-prompts", "40", "--max-concurrency", "8", "--prompt-tokens", "8", "--max-tokens", "6",
        )
    )  # fmt: skip
    assert (report["offered"], report["finished"], report["missing"]) == (40, 40, 0)


@pytest.mark.whole
def test_locust_finds_every_request_answered(envoy: Envoy, tmp_path: Path) -> None:
    run(
        "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py"), "--headless", "--only-summary",
        "--host", envoy.target, "--model", DECODER, "-u", "8", "-r", "8", "--num-prompts", "40",
        "--prompt-tokens", "8", "--max-tokens", "6", "--report", str(tmp_path / "report"),
    )  # fmt: skip
    report = json.loads((tmp_path / "report").read_text(encoding="utf-8"))
    assert (report["offered"], report["finished"], report["missing"]) == (40, 40, 0)
