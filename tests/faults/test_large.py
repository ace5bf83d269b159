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
INFER = "/inference.GRPCInferenceService/ModelInfer"
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


# What each is, the method and its request.
LARGE: dict[str, tuple[str, bytes]] = {
    "text": (GENERATE, generate(text="a" * ROOM)),
    "wide text": (GENERATE, generate(text="😀" * (ROOM // 4))),
    "text for a long context": (GENERATE, generate(LONG, text="a" * ROOM)),
    "ids": (GENERATE, generate(token_ids=pb.TokenIds(ids=[3] * ROOM))),
    "ids for a long context": (GENERATE, generate(LONG, token_ids=pb.TokenIds(ids=[3] * ROOM))),
    "empty chat messages": (GENERATE, delimited(5, b"\x0a\x00" * (ROOM // 2))),
    "chat message": (GENERATE, chat("a" * ROOM)),
    "chat messages": (GENERATE, chat(*["a" * 1000] * 4000)),
    "stop texts": (GENERATE, generate(text="a", stopping=pb.StoppingParams(stop=["a"] * (ROOM // 3)))),
    "long stop texts": (GENERATE, generate(text="a", stopping=pb.StoppingParams(stop=["a" * 1000] * 4000))),
    "allowed ids": (GENERATE, generate(text="a", sampling=pb.SamplingParams(allowed_token_ids=[3] * ROOM))),
    "biases": (GENERATE, delimited(3, b"a") + delimited(7, b"\x52\x00" * (ROOM // 2))),
    "samplings that are merged": (GENERATE, b"\x3a\x00" * (LARGEST // 2)),
    "unknown fields": (GENERATE, (key(1999, 0) + b"\x00") * (LARGEST // 3)),
    "model's name": (GENERATE, generate("m" * ROOM, text="a")),
    "request's id": (GENERATE, generate(text="a", request_id="\u00e9" * (ROOM // 2))),
    "estimate": (ESTIMATE, delimited(1, generate(text="a " * (ROOM // 2)))),
    "target to score": (SCORE, pb.ScoreRequest(model=DECODER, text="a", target_text="a" * ROOM).SerializeToString()),
    "text that a long context might hold": (GENERATE, generate(LONG, text="a" * 300_000)),
    "text to tokenize": (
        "/onward.v1.GenerationService/Tokenize",
        pb.TokenizeRequest(model=DECODER, text="a" * ROOM).SerializeToString(),
    ),
    "ids to detokenize": (
        "/onward.v1.GenerationService/Detokenize",
        pb.DetokenizeRequest(model=DECODER, token_ids=[3] * ROOM).SerializeToString(),
    ),
    "open inference: text": (INFER, infer("a" * ROOM)),
    "open inference: ids as JSON": (INFER, infer(stop_token_ids=f"[{'3,' * (ROOM // 2 - 8)}3]")),
    "open inference: many lists as JSON": (
        INFER,
        infer(
            **dict.fromkeys(("stop", "stop_token_ids", "allowed_token_ids"), f"[{'3,' * 16_000}3]"),
            logit_bias="{" + '"1":1,' * 5000 + '"2":1}',
        ),
    ),
    "open inference: number": (INFER, infer(temperature="9" * ROOM)),
    "open inference: empty parameters": (INFER, b"\x22\x00" * (LARGEST // 2)),
    "open inference: empty inputs": (INFER, b"\x2a\x00" * (LARGEST // 2)),
    "open inference: parameter's name": (INFER, infer(**{"x" * ROOM: "y"})),
}

# How each is refused, and the field that the message begins with, or its parent.
REFUSALS = {
    "text": ("OUT_OF_RANGE", "prompt.text"),
    "wide text": ("OUT_OF_RANGE", "prompt.text"),
    "text for a long context": ("OUT_OF_RANGE", "prompt.text"),
    "ids": ("OUT_OF_RANGE", "prompt.token_ids.ids"),
    "ids for a long context": ("OUT_OF_RANGE", "prompt.token_ids.ids"),
    "empty chat messages": ("INVALID_ARGUMENT", "prompt.chat.messages"),
    "chat message": ("OUT_OF_RANGE", "prompt.chat.messages"),
    "chat messages": ("OUT_OF_RANGE", "prompt.chat.messages"),
    "stop texts": ("INVALID_ARGUMENT", "stopping.stop"),
    "long stop texts": ("INVALID_ARGUMENT", "stopping.stop"),
    "allowed ids": ("INVALID_ARGUMENT", "sampling.allowed_token_ids"),
    "biases": ("INVALID_ARGUMENT", "sampling.logit_bias"),
    "samplings that are merged": ("INVALID_ARGUMENT", "sampling"),
    "unknown fields": ("INVALID_ARGUMENT", "request"),
    "model's name": ("NOT_FOUND", "model"),
    "request's id": ("INVALID_ARGUMENT", "request_id"),
    "estimate": ("OUT_OF_RANGE", "prompt.text"),
    "target to score": ("OUT_OF_RANGE", "target.target_text"),
    "text that a long context might hold": ("OUT_OF_RANGE", "prompt.text"),
    "text to tokenize": ("INVALID_ARGUMENT", "text"),
    "ids to detokenize": ("INVALID_ARGUMENT", "token_ids"),
    "open inference: text": ("OUT_OF_RANGE", "text_input"),
    "open inference: ids as JSON": ("INVALID_ARGUMENT", "parameters.stop_token_ids"),
    # Whichever protobuf has first.
    "open inference: many lists as JSON": ("INVALID_ARGUMENT", "parameters"),
    "open inference: number": ("INVALID_ARGUMENT", "parameters.temperature"),
    "open inference: empty parameters": ("INVALID_ARGUMENT", "parameters"),
    "open inference: empty inputs": ("INVALID_ARGUMENT", "inputs"),
    # Cut to 200 characters, of which the last says so.
    "open inference: parameter's name": ("INVALID_ARGUMENT", f"parameters.{'x' * 188}"),
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
def test_largest_message_of_any_kind_has_a_short_status_and_hurts_nobody(
    server: ServerProcess, kind: str, record_property: pytest.RecordProperty, rounds: int
) -> None:
    path, data = LARGE[kind]
    status, field = REFUSALS[kind]
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
