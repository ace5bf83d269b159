"""Every request message, and bytes that are none: a status for each, nobody else disturbed, nothing left behind."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from proto.onward.v1 import generation_pb2, model_pb2
from tests.faults.messages import draw_message
from tests.faults.process import Neighbour, ServerProcess, serving

Code = grpc.StatusCode
DOCUMENTED = {
    Code.OK,
    Code.INVALID_ARGUMENT,
    Code.OUT_OF_RANGE,
    Code.NOT_FOUND,
    Code.UNIMPLEMENTED,
    Code.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED,
    Code.FAILED_PRECONDITION,
}
# They take the models away that everybody else asks; tests/integration/test_server_models.py has them.
LEFT_OUT = {"LoadModel", "UnloadModel", "ReloadModel", "VerifyParity"}
METHODS = [
    method
    for file in (generation_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
    if method.name not in LEFT_OUT
]
Call = Callable[[bytes], tuple[Code, str]]
BATCH = 25
WORKERS = 8
# What must never be in the words of a status.
TELLTALE = re.compile(r"Traceback|site-packages|\.py\b|0x[0-9a-f]{6}|/tmp/")
TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("models"), "--max-generated-tokens", "64") as server:
        yield server


@pytest.fixture(scope="module")
def calls(server: ServerProcess) -> Iterator[dict[str, Call]]:
    """Each method as a function from bytes to a status."""
    with server.channel() as channel:
        yield {method.full_name: _call(channel, method) for method in METHODS}


def _call(channel: grpc.Channel, method: Any) -> Call:
    path = f"/{method.containing_service.full_name}/{method.name}"
    # As bytes: what a client's library would refuse to send is the point.
    unary = channel.unary_unary(path)
    stream = channel.unary_stream(path)

    def call(data: bytes) -> tuple[Code, str]:
        try:
            if method.server_streaming:
                for _ in stream(data, timeout=TIMEOUT_SECONDS):
                    pass
            else:
                unary(data, timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
        return Code.OK, ""

    return call


def test_fuzzed_messages_get_a_documented_status_and_leave_nothing_behind(
    server: ServerProcess, calls: dict[str, Call], fuzz: int
) -> None:
    source = random.Random(0)
    neighbour, found = Neighbour(server), Counter[tuple[str, Code]]()
    # The first round warms what is made once.
    descriptors, threads = server.num_descriptors(), server.status("Threads")
    with ThreadPoolExecutor(WORKERS) as pool:
        for number in range(max(1, fuzz // BATCH)):
            drawn = [_draw(source) for _ in range(BATCH)]
            answers = pool.map(lambda each: calls[each[0]](each[1]), drawn)
            for (name, data), (code, words) in zip(drawn, answers, strict=True):
                assert code in DOCUMENTED, f"{name} {code} {words} {data.hex()}"
                assert not TELLTALE.search(words), words
                found[name, code] += 1
            if number % 8 == 0:
                neighbour.check()
    neighbour.check()
    server.settle()
    assert server.process.poll() is None
    assert {name for name, _ in found} == set(calls)
    assert sum(count for (_, code), count in found.items() if code is Code.OK) > fuzz / 20, "hardly any was sane"
    assert server.num_descriptors() <= descriptors + WORKERS
    assert server.status("Threads") <= threads + WORKERS
    print(
        f"{sum(found.values())} requests: "
        + ", ".join(f"{name} {code.name} {count}" for (name, code), count in sorted(found.items(), key=str))
    )


def _draw(source: random.Random) -> tuple[str, bytes]:
    """A method, and bytes for it: mostly a message of its type, sometimes one with a few bytes gone wrong."""
    method = source.choice(METHODS)
    kind: type[Message] = GetMessageClass(method.input_type)
    data = draw_message(kind, source).SerializeToString()
    if data and source.random() < 0.15:
        garbled = bytearray(data)
        for _ in range(source.randint(1, 4)):
            garbled[source.randrange(len(garbled))] = source.randrange(256)
        data = bytes(garbled[: source.choice((len(garbled), source.randrange(len(garbled) + 1)))])
    return method.full_name, data


@given(data=st.binary(max_size=400), index=st.integers(0, len(METHODS) - 1))
def test_garbage_bytes_get_a_documented_status(calls: dict[str, Call], data: bytes, index: int) -> None:
    assert calls[METHODS[index].full_name](data)[0] in DOCUMENTED


@given(source=st.randoms(use_true_random=False), index=st.integers(0, len(METHODS) - 1))
def test_any_message_hypothesis_thinks_of_gets_a_documented_status(
    calls: dict[str, Call], source: random.Random, index: int
) -> None:
    method = METHODS[index]
    data = draw_message(GetMessageClass(method.input_type), source).SerializeToString()
    assert calls[method.full_name](data)[0] in DOCUMENTED


def test_the_models_folder_is_as_it_was(server: ServerProcess, tmp_path: Path) -> None:
    """Nothing that was asked wrote anything beside the models."""
    assert list(tmp_path.iterdir()) == []
    assert server.stop() == 0
