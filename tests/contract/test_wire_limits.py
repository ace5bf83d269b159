"""What is built of a request, counted: no message makes the server build more elements than its limits allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from onward.inference import open_inference_pb2
from onward.v1 import generation_pb2, model_pb2
from onward.v1 import generation_pb2 as pb
from service.app import App
from service.config import RequestLimits
from service.errors import InvalidRequest, PromptTooLong
from service.repository.entry import ModelEntry, Models
from service.transport import wire_limits
from service.transport.server import SERVICES
from service.transport.wire_limits import FREE, MAX_FIELDS, Limit, WireLimits, request_limits
from tests.faults.messages import draw_message
from tests.servers import CONFIG, engine_for, served_model

METHODS = {
    f"{service.full_name}/{method.name}": method
    for file in (generation_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR, open_inference_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}
# More than any limit, and what takes a megabyte at most.
NUM_ENTRIES = 100_000
LIMITS = RequestLimits(max_detokenize_tokens=FREE)
DELIMITED = 2
WIRE_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: 1,
    FieldDescriptor.TYPE_FLOAT: 5,
    FieldDescriptor.TYPE_STRING: DELIMITED,
    FieldDescriptor.TYPE_BYTES: DELIMITED,
    FieldDescriptor.TYPE_MESSAGE: DELIMITED,
}
# The shortest value of each wire type.
SHORTEST = {0: b"\x00", 1: bytes(8), DELIMITED: b"\x00", 5: bytes(4)}
UNKNOWN = 1999
GENERATE = "onward.v1.GenerationService/Generate"


def varint(value: int) -> bytes:
    data = b""
    while value > 127:
        data += bytes((value & 127 | 128,))
        value >>= 7
    return data + bytes((value,))


def key(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def delimited(number: int, payload: bytes) -> bytes:
    return key(number, DELIMITED) + varint(len(payload)) + payload


def paths(kind: Descriptor, outer: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of a message and of those inside it, with the fields that lead there."""
    for field in kind.fields:
        yield (*outer, field)
        if field.message_type is not None:
            yield from paths(field.message_type, (*outer, field))


def floods(kind: Descriptor) -> Iterator[tuple[str, bytes]]:
    """For every field, and one that is unknown, a message that has it as often as it can."""

    def wrap(outer: tuple[Any, ...], data: bytes) -> bytes:
        for field in reversed(outer):
            data = delimited(field.number, data)
        return data

    yield "unknown", (key(UNKNOWN, 0) + b"\x00") * NUM_ENTRIES
    for *outer, field in paths(kind):
        wire_type = WIRE_TYPES.get(field.type, 0)
        name = ".".join(each.name for each in (*outer, field))
        single = key(field.number, wire_type) + SHORTEST[wire_type]
        yield name, wrap(tuple(outer), single * NUM_ENTRIES)
        if field.message_type is not None:
            yield f"unknown in {name}", wrap((*outer, field), (key(UNKNOWN, 0) + b"\x00") * NUM_ENTRIES)
        if field.is_repeated and wire_type != DELIMITED:
            yield f"{name}, packed", wrap((*outer, field), SHORTEST[wire_type] * NUM_ENTRIES)
            half = delimited(field.number, SHORTEST[wire_type] * 50)
            yield f"{name}, packed in parts", wrap(tuple(outer), half * (NUM_ENTRIES // 50))


def num_elements(message: Message) -> int:
    """Values that were built of a message, those inside it included."""
    total = 0
    for field, value in message.ListFields():
        values = list(value.values() if hasattr(value, "values") else value) if field.is_repeated else [value]
        total += len(values) + sum(num_elements(each) for each in values if isinstance(each, Message))
    return total


class Context:
    """A call that brings one message, and whose status is looked at."""

    def __init__(self, data: bytes) -> None:
        self._messages: list[Any] = [grpc.aio.EOF, data]
        self.aborted: list[Any] = []

    async def read(self) -> Any:
        return self._messages.pop()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, *details: Any) -> None:
        self.aborted.append(details)
        raise grpc.aio.AbortError


async def call(app: App, path: str, data: bytes) -> tuple[int, Context]:
    """Sends bytes through a server's own interceptor; elements that its parser built, and how the call ended."""
    method, built = METHODS[path], [0]

    def parse(given: bytes) -> Any:
        message = GetMessageClass(method.input_type).FromString(given)
        built[0] += num_elements(message)
        return message

    async def unary(request: Any, context: Any) -> bytes:
        return b""

    async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
        if method.client_streaming:
            async for _ in request:
                pass
        return
        yield b""

    async def continuation(_: Any) -> Any:
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, parse, bytes)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, parse, bytes)
        return grpc.unary_unary_rpc_method_handler(unary, parse, bytes)

    handler = await app._calls.intercept_service(continuation, SimpleNamespace(method=f"/{path}"))  # type: ignore[arg-type]
    context = Context(data)

    async def messages() -> AsyncIterator[bytes]:
        while (message := await context.read()) is not grpc.aio.EOF:
            yield message

    with suppress(grpc.aio.AbortError):
        await (handler.stream_stream or handler.stream_unary)(messages(), context)
    return built[0], context


@pytest.mark.parametrize("path", METHODS)
async def test_no_flood_of_any_field_builds_more_elements_than_its_limit(path: str) -> None:
    model = served_model()
    app = App(replace(CONFIG, limits=LIMITS), [model], {model.name: engine_for(model)})
    for name, data in floods(METHODS[path].input_type):
        built, context = await call(app, path, data)
        assert built <= FREE, f"{path}, {name}: {built} elements of {len(data)} bytes"
        (status,) = context.aborted or [None]
        assert status is not None, f"{path}, {name}: was let in"
        assert status[0] in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE), name
        # It names a field, says how many there may be, and is short.
        assert "must have at most" in status[1], f"{path}, {name}: {status[1]}"
        assert len(status[1]) < 500


def limits(context: int = 64, **changes: Any) -> WireLimits:
    models = Models()
    models.insert(ModelEntry(served_model(context=context), Mock(), None))
    return request_limits(SERVICES, replace(LIMITS, **changes), models)


def refusal(checks: WireLimits, message: Message, method: str = "Generate") -> InvalidRequest | None:
    """What a message is refused with."""
    return caught(checks, f"onward.v1.GenerationService/{method}", message.SerializeToString())


def caught(checks: WireLimits, path: str, data: bytes) -> InvalidRequest | None:
    try:
        deque(checks.check(path, data))
    except InvalidRequest as error:
        return error
    return None


def test_token_ids_are_limited_by_the_longest_context_that_is_served() -> None:
    def ids(count: int) -> pb.GenerateRequest:
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * count))

    checks = limits(context=10_000)
    assert refusal(checks, ids(10_000)) is None
    error = refusal(checks, ids(10_001))
    assert isinstance(error, PromptTooLong)
    assert str(error) == "prompt.token_ids.ids: must have at most 10000 tokens, got '10001 or more'"
    inside = refusal(checks, pb.EstimateRequest(request=ids(10_001)), "Estimate")
    assert inside is not None
    assert inside.field == "prompt.token_ids.ids"
    target = pb.ScoreRequest(text="a", target_token_ids=pb.TokenIds(ids=[3] * 10_001))
    error = refusal(checks, target, "Score")
    assert error is not None
    assert error.field == "target.target_token_ids.ids"
    # Where nothing is served, what is asked for is not found: that is for others to say.
    nothing = request_limits(SERVICES, LIMITS, Models())
    assert refusal(nothing, ids(FREE)) is None
    assert refusal(nothing, ids(FREE + 1)) is not None


def test_operators_limits_above_what_is_free_hold() -> None:
    checks = limits(max_logit_bias=20_000, max_stop_token_ids=9000, max_detokenize_tokens=50_000)
    bias = dict.fromkeys(range(20_000), 1.0)
    assert refusal(checks, pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias=bias))) is None
    bias[20_000] = 1.0
    error = refusal(checks, pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias=bias)))
    assert error is not None
    assert error.field == "sampling.logit_bias"
    assert refusal(checks, pb.GenerateRequest(stopping=pb.StoppingParams(stop_token_ids=[1] * 9000))) is None
    assert refusal(checks, pb.GenerateRequest(stopping=pb.StoppingParams(stop_token_ids=[1] * 9001))) is not None
    assert refusal(checks, pb.DetokenizeRequest(token_ids=[1] * 50_000), "Detokenize") is None
    assert refusal(checks, pb.DetokenizeRequest(token_ids=[1] * 50_001), "Detokenize") is not None


def test_entries_of_one_list_in_many_parts_are_counted_together() -> None:
    part = pb.GenerateRequest(stopping=pb.StoppingParams(stop_token_ids=[1] * 1000)).SerializeToString()
    # A field that comes again is merged with the one before.
    assert caught(limits(), GENERATE, part * 4) is None
    with pytest.raises(InvalidRequest, match=r"^stopping.stop_token_ids: must have at most 64 entries"):
        deque(limits().check(GENERATE, part * 5))


def test_fields_that_come_too_often_are_refused_by_name() -> None:
    again = pb.GenerateRequest(text="a").SerializeToString()
    most = MAX_FIELDS + 3 * LIMITS.max_logit_bias
    assert caught(limits(), GENERATE, again * most) is None
    with pytest.raises(InvalidRequest, match=rf"^prompt.text: the message must have at most {most} fields"):
        deque(limits().check(GENERATE, again * (most + 1)))


@pytest.mark.parametrize(
    ("data", "most"),
    # Of a field its tag and its length are looked at.
    [(b"\x1a\x00" * MAX_FIELDS, 2 * 512), (delimited(8, delimited(4, b"\x01" * (4 << 20))), 2 * 512 + (64 << 10))],
    ids=["fields", "packed list"],
)
def test_no_step_looks_at_more_than_a_few_hundred_fields_or_64_kib(data: bytes, most: int) -> None:
    # So that the event loop is not held: all of it takes tens of milliseconds.
    looked: list[int] = []

    class Counted(bytes):
        def __getitem__(self, at: Any) -> Any:
            looked.append(at.stop - at.start if isinstance(at, slice) else 1)
            return super().__getitem__(at)

    steps = limits(max_stop_token_ids=8 << 20).check(GENERATE, Counted(data))
    num_looked = 0
    for _ in steps:
        num_looked += sum(looked)
        assert sum(looked) <= most
        looked.clear()
    assert num_looked >= len(data) // 2


LONG = b"\x1a" + varint(FREE) + bytes(FREE)
MALFORMED = {
    "no tag": LONG + b"\x80",
    "endless tag": LONG + b"\x80" * 20,
    "tag beyond 32 bits": LONG + varint(1 << 35 | 0x1A) + b"\x00",
    "length beyond the end": LONG + b"\x1a\x05a",
    "endless length": LONG + b"\x1a" + b"\xff" * 20,
    "number beyond the end": LONG + b"\x58\x80",
    "endless number": LONG + b"\x58" + b"\x80" * 20,
    "fixed number beyond the end": LONG + b"\x61\x00",
    "field beyond its message": LONG + delimited(7, b"\x09\x00") + bytes(8),
    "nested groups": b"\x0b" * 2 * FREE,
    "unknown wire type": LONG + b"\x1f",
    "packed numbers that never end": LONG + delimited(8, delimited(4, b"\x80" * FREE)),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_message_is_refused_by_walk_or_by_parser(data: bytes) -> None:
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(data)
    error = caught(limits(), GENERATE, data)
    if error is not None:
        assert str(error) == f"request: must be a message of the method's type, got '{len(data)} bytes'"


@given(source=st.randoms(use_true_random=False), index=st.integers(0, len(METHODS) - 1))
def test_any_message_is_walked_to_its_end(source: random.Random, index: int) -> None:
    path, method = list(METHODS.items())[index]
    data = draw_message(GetMessageClass(method.input_type), source).SerializeToString()
    fields = WireLimits(SERVICES, {})._requests[path]
    deque(wire_limits._walk(data, fields, len(data)))


@given(
    parts=st.lists(
        st.tuples(st.sampled_from(["packed", "single", "overlong"]), st.lists(st.integers(0, 2**32 - 1), max_size=4)),
        max_size=6,
    )
)
def test_numbers_are_counted_as_the_parser_counts_them(parts: list[tuple[str, list[int]]]) -> None:
    """So that no spelling of a list passes for a shorter one."""
    ids = b""
    for spelling, numbers in parts:
        if spelling == "packed":
            ids += delimited(1, b"".join(map(varint, numbers)))
        elif spelling == "single":
            ids += b"".join(key(1, 0) + varint(number) for number in numbers)
        else:
            # The key, its length and the numbers, each with bytes that add nothing.
            ids += b"\x8a\x00" + bytes((4 * len(numbers) | 0x80,)) + b"\x00" + b"\x81\x80\x80\x00" * len(numbers)
    count = len(pb.TokenIds.FromString(ids).ids)
    fields = WireLimits(SERVICES, {"onward.v1.TokenIds.ids": Limit(lambda: count)})._requests[GENERATE]
    data = delimited(4, ids) + b"\x58\x01"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_limits, "FREE", 0)
        deque(wire_limits._walk(data, fields, FREE))
        if count:
            with pytest.raises(InvalidRequest, match=f"must have at most {count} entries, got '{count + 1} or more'"):
                deque(wire_limits._walk(data + delimited(4, delimited(1, b"\x00")), fields, FREE))


def test_limit_is_read_when_it_is_needed() -> None:
    asked = []

    def most() -> int:
        asked.append(True)
        return 5000

    checks = WireLimits(["onward.v1.GenerationService"], {"onward.v1.TokenIds.ids": Limit(most)})
    assert refusal(checks, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3] * FREE))) is None
    assert not asked
    assert refusal(checks, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3] * 5000))) is None
    assert asked
