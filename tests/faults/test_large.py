"""The largest messages of every kind: a status for each, and how long a health check waits beside one.

The wait is recorded (`make faults` prints it), not judged: what decides is counted in `tests/contract`.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proto.inference import open_inference_pb2 as oip
from proto.onward.v1 import generation_pb2 as pb
from tests.contract.test_wire_limits import METHODS, delimited, key
from tests.faults.process import (
    DECODER,
    LONG,
    Neighbour,
    ServerProcess,
    put_complete_artefacts,
    put_long_artefact,
    serving,
)

LARGEST = 4 << 20
# What is around a text or a list.
ROOM = LARGEST - 256
GENERATE = "/onward.v1.GenerationService/Generate"
ESTIMATE = "/onward.v1.GenerationService/Estimate"
SCORE = "/onward.v1.GenerationService/Score"
INFER = "/inference.GRPCInferenceService/ModelInfer"
REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE}


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


# What each is, whom it asks, and what it is.
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("models")
    put_complete_artefacts(folder)
    put_long_artefact(folder)
    with serving(folder) as server:
        yield server
        assert server.stop() == 0


class Checking:
    """Asks for a server's health all the while; how long its longest answer took."""

    def __init__(self, server: ServerProcess) -> None:
        self._stub = health_pb2_grpc.HealthStub(server.channel())
        # Once before: what a connection takes is no wait beside a message.
        self._stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        self._is_over = threading.Event()
        self.num_checks = 0
        self.longest_seconds = 0.0

    def run(self) -> None:
        while not self._is_over.is_set():
            began = time.perf_counter()
            self._stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
            self.longest_seconds = max(self.longest_seconds, time.perf_counter() - began)
            self.num_checks += 1

    def stop(self) -> None:
        self._is_over.set()


def beside(server: ServerProcess, path: str, data: bytes) -> tuple[grpc.StatusCode, str, float]:
    """How a call ends, and the longest wait of a health check beside it."""
    checking = Checking(server)
    with server.channel(("grpc.max_send_message_length", -1)) as channel, ThreadPoolExecutor(1) as pool:
        running = pool.submit(checking.run)
        try:
            channel.unary_unary(path)(data, timeout=120)
            code, words = grpc.StatusCode.OK, ""
        except grpc.RpcError as error:
            code, words = error.code(), error.details() or ""
        finally:
            checking.stop()
            running.result()
    assert checking.num_checks
    return code, words, checking.longest_seconds


@pytest.mark.parametrize("kind", LARGE)
def test_largest_message_of_any_kind_has_a_short_status_and_hurts_nobody(
    server: ServerProcess, kind: str, record_property: pytest.RecordProperty, rounds: int
) -> None:
    path, data = LARGE[kind]
    assert path[1:] in METHODS
    assert len(data) <= LARGEST
    neighbour = Neighbour(server)
    waits = []
    for _ in range(rounds):
        code, words, seconds = beside(server, path, data)
        assert code in REFUSED | {grpc.StatusCode.NOT_FOUND}, f"{code}: {words}"
        assert len(words) < 1000
        waits.append(seconds)
    neighbour.check()
    # The least of several: what else the machine does only adds.
    record_property("longest_health_check_seconds", min(waits))
    print(f"{kind}: {len(data)} bytes, {code.name}, longest health check {1000 * min(waits):.1f} ms")
