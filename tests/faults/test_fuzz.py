"""Every request message, and bytes that are none: a status for each, no other client disturbed, nothing left behind."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from onward.v1 import model_pb2
from onward.v1.model_pb2_grpc import ModelServiceStub
from tests import contracts
from tests.faults.messages import draw_message
from tests.faults.process import MODELS, Neighbour, ServerProcess, put_complete_artifacts, serving, until

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
# Those that manage take away the models that everybody else asks, and have a test of their own.
METHODS = [method for path, method in contracts.METHODS.items() if path not in contracts.MANAGING]
ASKING = {"Generate", "ModelInfer"}
# gRPC's own services parse what they are sent by themselves.
FOREIGN = {"/grpc.health.v1.Health/Check", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}
Call = Callable[[bytes], tuple[Code, str]]
BATCH = 25
WORKERS = 8
# What must never be in the words of a status.
TELLTALE = re.compile(r"Traceback|site-packages|\.py\b|0x[0-9a-f]{6}|/tmp/")
# For a call without an answer.
TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    put_complete_artifacts(folder)
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[ServerProcess]:
    with serving(models, "--max-generated-tokens", "64", "--drain-grace-seconds", "2") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def calls(server: ServerProcess) -> Iterator[dict[str, Call]]:
    """Each method as a function from bytes to a status."""
    with server.channel() as channel:
        yield {method.full_name: _call(channel, method) for method in METHODS}


def _call(channel: grpc.Channel, method: Any) -> Call:
    path = f"/{method.containing_service.full_name}/{method.name}"
    # As bytes: what a client's library would refuse to send is the point.
    unary, stream, exchange = channel.unary_unary(path), channel.unary_stream(path), channel.stream_stream(path)
    answer_type: type[Message] = GetMessageClass(method.output_type)

    def call(data: bytes) -> tuple[Code, str]:
        began = time.monotonic()
        words = []
        try:
            if method.client_streaming:
                answers = list(exchange(iter([data]), timeout=TIMEOUT_SECONDS))
            elif method.server_streaming:
                answers = list(stream(data, timeout=TIMEOUT_SECONDS))
            else:
                answers = [unary(data, timeout=TIMEOUT_SECONDS)]
        except grpc.RpcError as error:
            assert time.monotonic() - began < TIMEOUT_SECONDS, f"{path} hangs: {data.hex()}"
            return error.code(), error.details() or ""
        # What went wrong with one request of a stream is in its answer.
        words = [str(getattr(answer_type.FromString(answer), "error_message", "")) for answer in answers]
        return Code.OK, "\n".join(words)

    return call


def test_every_method_that_the_server_offers_is_fuzzed(server: ServerProcess) -> None:
    """By the server's own reflection, so that no new method is forgotten."""
    fuzzed = set(contracts.METHODS)
    with server.channel() as channel:
        ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        (listed,) = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name for service in listed.list_services_response.service}
        assert {path[1:].partition("/")[0] for path in FOREIGN} <= names
        offered = set()
        for name in names - {path[1:].partition("/")[0] for path in FOREIGN}:
            (found,) = ask(iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)]))
            for data in found.file_descriptor_response.file_descriptor_proto:
                file = FileDescriptorProto.FromString(data)
                services = (each for each in file.service if f"{file.package}.{each.name}" == name)
                offered |= {f"{name}/{method.name}" for service in services for method in service.method}
    assert offered == fuzzed


def test_fuzzed_messages_get_a_documented_status_and_leave_nothing_behind(
    server: ServerProcess, calls: dict[str, Call], fuzz: int
) -> None:
    source = random.Random(0)
    neighbour, found = Neighbour(server), Counter[tuple[str, Code]]()
    rounds = max(2, fuzz // BATCH)
    with neighbour.beside(), ThreadPoolExecutor(WORKERS) as pool:
        for number in range(rounds):
            # The first half makes what is made once: threads, connections, processes that compile.
            if number == rounds // 2:
                descriptors, threads = server.num_descriptors(), server.status("Threads")
            found += _fuzz(calls, source, pool, DOCUMENTED)
    neighbour.check()
    server.settle()
    assert server.process.poll() is None
    assert {name for name, _ in found} == set(calls)
    sane = {name for name, code in found if code is Code.OK}
    assert sane == set(calls), f"hardly any was sane: {set(calls) - sane}"
    until(lambda: server.num_descriptors() <= descriptors + WORKERS, "connections are still open")
    assert server.status("Threads") <= threads + WORKERS
    print(
        f"{sum(found.values())} requests beside {neighbour.num_checks} of a neighbour: "
        + ", ".join(f"{name} {code.name} {count}" for (name, code), count in sorted(found.items(), key=str))
    )


def _fuzz(
    calls: Mapping[str, Call], source: random.Random, pool: ThreadPoolExecutor, documented: set[Code]
) -> Counter[tuple[str, Code]]:
    """A batch of messages, several at a time; what became of them."""
    drawn = [
        _draw(source, [each for each in contracts.METHODS.values() if each.full_name in calls]) for _ in range(BATCH)
    ]
    answers = pool.map(lambda each: calls[each[0]](each[1]), drawn)
    found = Counter[tuple[str, Code]]()
    for (name, data), (code, words) in zip(drawn, answers, strict=True):
        assert code in documented, f"{name} {code} {words} {data.hex()}"
        assert not TELLTALE.search(words), words
        assert "[INTERNAL]" not in words, f"{name} {data.hex()}"
        found[name, code] += 1
    return found


def _draw(source: random.Random, methods: list[Any]) -> tuple[str, bytes]:
    """A method, and bytes for it: mostly a message of its type, sometimes one with a few bytes gone wrong."""
    method = source.choice(methods)
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


@pytest.mark.parametrize("path", sorted(FOREIGN))
def test_garbage_for_health_and_reflection_hurts_nobody(server: ServerProcess, path: str) -> None:
    source, neighbour = random.Random(2), Neighbour(server)
    codes = set()
    with server.channel() as channel, neighbour.beside():
        ask = channel.stream_stream(path)
        for _ in range(100):
            data = source.randbytes(source.choice((1, 3, 20, 400)))
            try:
                list(ask(iter([data]), timeout=TIMEOUT_SECONDS))
            except grpc.RpcError as error:
                codes.add(error.code())
    assert codes <= {Code.NOT_FOUND, Code.INTERNAL, Code.UNKNOWN, Code.INVALID_ARGUMENT}
    assert server.process.poll() is None


def test_fuzzed_management_gets_a_documented_status_and_models_come_back_as_they_were(
    server: ServerProcess, fuzz: int
) -> None:
    source, found = random.Random(3), Counter[tuple[str, Code]]()
    # What asks a model meanwhile finds it there, gone or going.
    documented = DOCUMENTED | {Code.UNAVAILABLE}
    methods = contracts.METHODS.items()
    chosen = [method for path, method in methods if path in contracts.MANAGING or method.name in ASKING]
    with server.channel() as channel:
        neighbour = Neighbour(server)
        calls = {method.full_name: _call(channel, method) for method in chosen}
        with ThreadPoolExecutor(WORKERS) as pool:
            for _ in range(max(2, fuzz // (20 * BATCH))):
                found += _fuzz(calls, source, pool, documented)
        library = ModelServiceStub(channel)
        for model in MODELS:
            library.LoadModel(model_pb2.LoadModelRequest(model=model), timeout=TIMEOUT_SECONDS)
            library.ReloadModel(model_pb2.ReloadModelRequest(model=model), timeout=TIMEOUT_SECONDS)
        neighbour.check()
        server.settle()
        assert {name for name, _ in found} == set(calls)


def test_nothing_that_was_asked_has_changed_the_models_folder(server: ServerProcess, models: Path) -> None:
    neighbour = Neighbour(server)
    before = _state(models)
    with server.channel() as channel, ThreadPoolExecutor(WORKERS) as pool:
        calls = {method.full_name: _call(channel, method) for method in METHODS}
        _fuzz(calls, random.Random(4), pool, DOCUMENTED)
    neighbour.check()
    assert _state(models) == before


def _state(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}
