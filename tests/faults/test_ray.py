"""Two replicas on Ray Serve: answers, refusals, cancelled streams, keys. Needs `make ray` once; skipped without it."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from proto.onward.v1 import generation_pb2 as pb
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.routing import ROUTING_KEY
from tests.artifacts import tiny_artifact
from tests.faults.process import DECODER, greedy, serving, streamed

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "ray-venv" / "bin" / "python"
START_SECONDS = 400

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="Ray is not installed: make ray"),
    pytest.mark.timeout(600),
]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / DECODER).symlink_to(tiny_artifact(DECODER, context=2048), target_is_directory=True)
    return folder


@pytest.fixture(scope="module")
def channel(models: Path) -> Iterator[grpc.Channel]:
    """To Ray's ingress."""
    command = [
        PYTHON, "-m", "deploy.ray", "--models", models, "--port", str(free_port()), "--http-port", str(free_port()),
        "--cores", "0.5", "--by-key", "--",
        "--threads", "1", "--no-spin", "--no-calibrate", "--max-batch-size", "8", "--log-level", "error",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("onward: ")), "")
            assert line, f"it did not start: {process.wait()}"
            with grpc.insecure_channel(line.split()[-1]) as channel:
                yield channel
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)


def test_answers_are_those_of_a_server(channel: grpc.Channel, tmp_path: Path) -> None:
    (tmp_path / DECODER).symlink_to(tiny_artifact(DECODER, context=2048), target_is_directory=True)
    request, stub = greedy(DECODER, max_tokens=40), GenerationServiceStub(channel)
    with serving(tmp_path, "--no-calibrate") as server, server.channel() as direct:
        expected = list(GenerationServiceStub(direct).Generate(request).outputs[0].token_ids)
    assert list(stub.Generate(request, timeout=60).outputs[0].token_ids) == expected
    events = list(stub.GenerateStream(streamed(request), timeout=60))
    assert [token for event in events for token in event.delta.token_ids] == expected
    assert (events[0].HasField("accepted"), events[-1].HasField("summary")) == (True, True)


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (greedy(DECODER, max_tokens=0), "INVALID_ARGUMENT", "stopping.max_tokens: "),
        (greedy(DECODER, text="a" * 5000), "OUT_OF_RANGE", "prompt.text: "),
        (greedy("nobody"), "NOT_FOUND", "model: 'nobody' is not served"),
        (greedy(DECODER, max_tokens=1500, timeout_seconds=0.001), None, ""),
    ],
    ids=["invalid", "too long", "unknown", "deadline in the request"],
)
def test_refusals_have_the_code_and_the_words_of_a_server(
    channel: grpc.Channel, request_: pb.GenerateRequest, code: str | None, words: str
) -> None:
    stub = GenerationServiceStub(channel)
    for call in (
        stub.Generate.future(request_, timeout=60),
        stub.GenerateStream(streamed(request_), timeout=60),
    ):
        if code is None:
            assert call.code().name in ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
        else:
            assert (call.code().name, call.details()[: len(words)]) == (code, words)


def test_200_cancelled_streams_leave_places_for_others(channel: grpc.Channel) -> None:
    stub = GenerationServiceStub(channel)
    for _ in range(20):
        calls = [stub.GenerateStream(streamed(greedy(DECODER, max_tokens=1900))) for _ in range(10)]
        for call in calls:
            next(iter(call))
        for call in calls:
            call.cancel()
    # Each replica has eight places: those that were given up would hold all of them for many seconds.
    answers = [stub.Generate.future(greedy(DECODER, max_tokens=4), timeout=20) for _ in range(32)]
    assert {answer.code().name for answer in answers} == {"OK"}


def test_prompts_with_a_key_find_what_was_computed(channel: grpc.Channel) -> None:
    stub = GenerationServiceStub(channel)
    cached = []
    for number in range(8):
        request = greedy(DECODER, text="k" * 600 + "x" * number, max_tokens=1)
        cached.append(stub.Generate(request, timeout=60, metadata=[(ROUTING_KEY, "k")]).usage.cached_tokens)
    assert cached[0] == 0
    assert min(cached[1:]) >= 512
