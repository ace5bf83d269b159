"""The largest messages of every kind: a status for each, and how long a health check waits beside one.

The wait is recorded, and judged only where there are several rounds, as in `make faults`, which needs an idle machine:
what decides in every run is counted in `tests/contract`.
"""

from __future__ import annotations

import re
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from onward.inference import open_inference_pb2 as oip
from onward.v1 import generation_pb2 as pb
from tests.contract.test_wire_limits import METHODS, delimited, key
from tests.faults.http2 import Connection, code, message_header
from tests.faults.process import (
    DECODER,
    LONG,
    Neighbour,
    ServerProcess,
    put_complete_artifacts,
    put_long_artifact,
    serving,
)

LARGEST = 4 << 20
# What is around a text or a list.
ROOM = LARGEST - 256
GENERATE = "/onward.v1.GenerationService/Generate"
ESTIMATE = "/onward.v1.GenerationService/Estimate"
SCORE = "/onward.v1.GenerationService/Score"
TOKENIZE = "/onward.v1.GenerationService/Tokenize"
DETOKENIZE = "/onward.v1.GenerationService/Detokenize"
INFER = "/inference.GRPCInferenceService/ModelInfer"
IDS = pb.TokenIds(ids=[3] * ROOM)
ALLOWED = pb.SamplingParams(allowed_token_ids=[3] * ROOM)
SCORED = pb.ScoreRequest(model=DECODER, text="a", target_text="a" * ROOM)
TOKENIZED = pb.TokenizeRequest(model=DECODER, text="a" * ROOM)
DETOKENIZED = pb.DetokenizeRequest(model=DECODER, token_ids=[3] * ROOM)
# From so many rounds on their waits are a measurement.
MEASURED_ROUNDS = 5
MAX_WAIT_SECONDS = 0.05
# A status, its message of less than 1000 bytes, and both again with its details.
MAX_BLOCK_BYTES = 4000


def infer(text: str = "ab", **parameters: str) -> bytes:
    request = oip.ModelInferRequest(model_name=DECODER)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(struct.pack("<I", len(text.encode())) + text.encode())
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return request.SerializeToString()


def chat(*contents: str, model: str = DECODER) -> bytes:
    messages = [pb.ChatMessage(role="user", content=content) for content in contents]
    return pb.GenerateRequest(model=model, chat=pb.Chat(messages=messages)).SerializeToString()


def generate(model: str = DECODER, **fields: object) -> bytes:
    return pb.GenerateRequest(model=model, **fields).SerializeToString()  # type: ignore[arg-type]


INVALID, RANGE = "INVALID_ARGUMENT", "OUT_OF_RANGE"


def stopping(*stop: str) -> bytes:
    return generate(text="a", stopping=pb.StoppingParams(stop=stop))


# Status, the field that its message begins with or the field's parent, the request, and its method.
LARGE: dict[str, tuple[str, str, bytes, str]] = {
    "text": (RANGE, "prompt.text", generate(text="a" * ROOM), GENERATE),
    "wide text": (RANGE, "prompt.text", generate(text="😀" * (ROOM // 4)), GENERATE),
    "text for a long context": (RANGE, "prompt.text", generate(LONG, text="a" * ROOM), GENERATE),
    "ids": (RANGE, "prompt.token_ids.ids", generate(token_ids=IDS), GENERATE),
    "ids for a long context": (RANGE, "prompt.token_ids.ids", generate(LONG, token_ids=IDS), GENERATE),
    "empty chat messages": (INVALID, "prompt.chat.messages", delimited(5, b"\x0a\x00" * (ROOM // 2)), GENERATE),
    "chat message": (RANGE, "prompt.chat.messages", chat("a" * ROOM), GENERATE),
    "chat messages": (RANGE, "prompt.chat.messages", chat(*["a" * 1000] * 4000), GENERATE),
    "stop texts": (INVALID, "stopping.stop", stopping(*["a"] * (ROOM // 3)), GENERATE),
    "long stop texts": (INVALID, "stopping.stop", stopping(*["a" * 1000] * 4000), GENERATE),
    "allowed ids": (INVALID, "sampling.allowed_token_ids", generate(text="a", sampling=ALLOWED), GENERATE),
    "biases": (
        INVALID,
        "sampling.logit_bias",
        delimited(3, b"a") + delimited(7, b"\x52\x00" * (ROOM // 2)),
        GENERATE,
    ),
    "samplings that are merged": (INVALID, "sampling", b"\x3a\x00" * (LARGEST // 2), GENERATE),
    "unknown fields": (INVALID, "request", (key(1999, 0) + b"\x00") * (LARGEST // 3), GENERATE),
    "model's name": ("NOT_FOUND", "model", generate("m" * ROOM, text="a"), GENERATE),
    "request's id": (INVALID, "request_id", generate(text="a", request_id="\u00e9" * (ROOM // 2)), GENERATE),
    "estimate": (RANGE, "prompt.text", delimited(1, generate(text="a " * (ROOM // 2))), ESTIMATE),
    "target to score": (RANGE, "target.target_text", SCORED.SerializeToString(), SCORE),
    "text that a long context might hold": (RANGE, "prompt.text", generate(LONG, text="a" * 300_000), GENERATE),
    "text to tokenize": (INVALID, "text", TOKENIZED.SerializeToString(), TOKENIZE),
    "ids to detokenize": (INVALID, "token_ids", DETOKENIZED.SerializeToString(), DETOKENIZE),
    "open inference: text": (RANGE, "text_input", infer("a" * ROOM), INFER),
    "open inference: ids as JSON": (
        INVALID,
        "parameters.stop_token_ids",
        infer(stop_token_ids=f"[{'3,' * (ROOM // 2 - 8)}3]"),
        INFER,
    ),
    # Of whichever parameter protobuf has first.
    "open inference: many lists as JSON": (
        INVALID,
        "parameters",
        infer(
            **dict.fromkeys(("stop", "stop_token_ids", "allowed_token_ids"), f"[{'3,' * 16_000}3]"),
            logit_bias="{" + '"1":1,' * 5000 + '"2":1}',
        ),
        INFER,
    ),
    "open inference: number": (INVALID, "parameters.temperature", infer(temperature="9" * ROOM), INFER),
    "open inference: empty parameters": (INVALID, "parameters", b"\x22\x00" * (LARGEST // 2), INFER),
    "open inference: empty inputs": (INVALID, "inputs", b"\x2a\x00" * (LARGEST // 2), INFER),
    # Cut to 200 characters with an ellipsis.
    "open inference: parameter's name": (INVALID, f"parameters.{'x' * 188}", infer(**{"x" * ROOM: "y"}), INFER),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("models")
    put_complete_artifacts(folder)
    put_long_artifact(folder)
    with serving(folder) as server:
        yield server
        assert server.stop() == 0


class Checking:
    """Asks for a server's health all the while, and keeps the longest wait of checks between `begin` and `stop`."""

    def __init__(self, server: ServerProcess) -> None:
        self._stub = health_pb2_grpc.HealthStub(server.channel())
        self._has_begun, self._is_over = threading.Event(), threading.Event()
        self.longest_seconds: float | None = None
        # Once before: what a connection takes is no wait beside a message.
        self._check()

    def run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.is_set()
            is_counted = self._has_begun.is_set() and not is_last
            seconds = self._check()
            if is_counted:
                self.longest_seconds = max(self.longest_seconds or 0.0, seconds)

    def begin(self) -> None:
        self._has_begun.set()

    def stop(self) -> None:
        """The check that begins after this is the last, and does not count."""
        self._is_over.set()

    def _check(self) -> float:
        began = time.perf_counter()
        self._stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        return time.perf_counter() - began


def beside(server: ServerProcess, path: str, data: bytes) -> tuple[bytes, float]:
    """The header block that ends a call, and the longest wait of a check that began between its message and its end.

    Where none began so soon, what the server took for the message: no check could have waited for longer.
    """
    checking = Checking(server)
    with closing(Connection(server.port)) as connection, ThreadPoolExecutor(1) as pool:
        message = message_header(len(data)) + data
        stream = connection.call(path.encode(), head=message, is_complete=True)
        running = pool.submit(checking.run)
        try:
            assert connection.pump(lambda: connection.sent[stream] == len(message))
            checking.begin()
            began = time.perf_counter()
            assert connection.pump(lambda: stream in connection.ended)
            seconds = time.perf_counter() - began
        finally:
            checking.stop()
            running.result()
    return connection.ended[stream], seconds if checking.longest_seconds is None else checking.longest_seconds


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.sampled(8)
def test_largest_message_of_any_kind_has_a_short_status_and_hurts_nobody(
    server: ServerProcess, kind: str, record_property: pytest.RecordProperty, rounds: int
) -> None:
    status, field, data, path = LARGE[kind]
    assert path[1:] in METHODS
    assert len(data) <= LARGEST
    neighbour = Neighbour(server)
    waits = []
    for _ in range(rounds):
        block, seconds = beside(server, path, data)
        assert code(block) == status, block
        assert re.search(rb"grpc-message[\x00-\xff]{1,3}" + re.escape(field.encode()) + rb"[:. \[%]", block), block
        assert len(block) < MAX_BLOCK_BYTES
        waits.append(seconds)
    neighbour.check()
    record_property("longest_health_check_seconds", max(waits))
    print(f"{kind}: {len(data)} bytes, {status}, longest health check {1000 * max(waits):.1f} ms of {rounds} rounds")
    if rounds >= MEASURED_ROUNDS:
        # In most rounds: what else an idle machine does now and then adds to one.
        assert statistics.median(waits) <= MAX_WAIT_SECONDS
