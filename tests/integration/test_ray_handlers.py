"""What stands between Ray and our handlers, without Ray: a context like its, and calls that end as over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

from deploy.ray.handlers import FOR_ONE, METHODS, Handlers, Refused, add_methods
from onward.inference import open_inference_pb2 as oip
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from service.app import App
from service.transport.permissions import PERMISSIONS
from tests.fakes import FakeRunner, Gate, expected_tokens, spell
from tests.servers import (
    CONFIG,
    MODEL,
    SLOTS,
    engine_for,
    eventually,
    generate_request,
    infer_request,
    kinds,
    served_model,
    stream_request,
    tokens_of,
)

PROMPT = (1, *spell("ab"))


@dataclass(slots=True)
class Context:
    """As Ray's: takes a status and has no deadline."""

    metadata: tuple[tuple[str, str], ...] = ()
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    trailing: list[Any] = field(default_factory=list)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.metadata

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self.trailing = list(trailing_metadata)


@asynccontextmanager
async def taking(
    runner: FakeRunner | None = None, context: int = 64
) -> AsyncIterator[tuple[Handlers, CollectorRegistry]]:
    made: list[Handlers] = []

    def make(*services: Any, **options: Any) -> Handlers:
        made.append(Handlers(*services, **options))
        return made[-1]

    model, registry = served_model(context=context), CollectorRegistry()
    app = App(CONFIG, [model], {MODEL: engine_for(model, runner)}, registry, make_server=make)
    async with app.listening():
        assert not made[0].is_serving()
        await app.verify_all()
        yield made[0], registry
    assert not made[0].is_serving()


async def generated(handlers: Handlers, context: Context | None = None, **fields: Any) -> pb.GenerateResponse:
    data = generate_request(**fields).SerializeToString()
    return pb.GenerateResponse.FromString(await handlers.call("Generate", data, context or Context()))


async def streamed(
    handlers: Handlers, context: Context | None = None, **fields: Any
) -> list[pb.GenerateStreamResponse]:
    answers = handlers.stream("GenerateStream", stream_request(**fields).SerializeToString(), context or Context())
    return [pb.GenerateStreamResponse.FromString(each) async for each in answers]


def handled(registry: CollectorRegistry, method: str, code: str) -> float:
    labels = {"grpc_method": method, "grpc_code": code}
    return registry.get_sample_value("onward_grpc_server_handled_total", labels) or 0.0


async def test_every_method_is_there_and_health_besides() -> None:
    assert set(METHODS) == {*PERMISSIONS, "Check"} - {"List"}
    async with taking() as (handlers, _):
        data = await handlers.call("GetModel", model_pb2.GetModelRequest().SerializeToString(), Context())
    assert model_pb2.GetModelResponse.FromString(data).model == MODEL


async def test_every_method_is_registered_with_bytes_on_both_sides() -> None:
    server, found = Mock(), {}
    add_methods(Mock(), server)
    for call in server.add_generic_rpc_handlers.call_args_list:
        (handlers,) = call.args[0]
        for name, method in METHODS.items():
            path = f"/{method.containing_service.full_name}/{name}"
            if handler := handlers.service(Mock(method=path)):
                found[name] = handler
    assert set(found) == set(METHODS)
    for name, handler in found.items():
        assert (handler.request_deserializer, handler.response_serializer) == (None, None)
        assert handler.request_streaming == METHODS[name].client_streaming
        assert handler.response_streaming == METHODS[name].server_streaming


async def test_health_is_that_of_everything_a_service_or_a_model_and_of_nobody_else() -> None:
    def asked(name: str) -> bytes:
        return bytes(health_pb2.HealthCheckRequest(service=name).SerializeToString())

    nobody = Context()
    async with taking() as (handlers, _):
        assert handlers.is_serving()
        for name in ("", MODEL, "onward.v1.GenerationService"):
            data = await handlers.call("Check", asked(name), Context())
            assert health_pb2.HealthCheckResponse.FromString(data).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(Refused):
            await handlers.call("Check", asked("nobody"), nobody)
    assert nobody.code is grpc.StatusCode.NOT_FOUND


async def test_answers_and_streams_are_those_of_a_server() -> None:
    async with taking() as (handlers, registry):
        answer = await generated(handlers, max_tokens=6)
        events = await streamed(handlers, max_tokens=6)
        assert handled(registry, "Generate", "OK") == handled(registry, "GenerateStream", "OK") == 1
    assert list(answer.outputs[0].token_ids) == tokens_of(events) == expected_tokens(PROMPT, 6)
    assert (kinds(events)[0], kinds(events)[-1]) == ("accepted", "summary")


async def test_a_stream_of_requests_is_answered_while_more_may_come() -> None:
    is_answered = asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        for name in ("x", "y"):
            yield infer_request(request_id=name, max_tokens=4).SerializeToString()
        await is_answered.wait()

    seen: set[str] = set()
    async with taking() as (handlers, registry):
        async for data in handlers.stream("ModelStreamInfer", requests(), Context()):
            message = oip.ModelStreamInferResponse.FromString(data)
            assert not message.error_message
            seen.add(message.infer_response.id)
            if len(seen) == 2:
                is_answered.set()
        assert handled(registry, "ModelStreamInfer", "OK") == 1
    assert seen == {"x", "y"}


async def test_refusals_set_the_contexts_code_message_and_details() -> None:
    async with taking() as (handlers, _):
        unary, stream = Context(), Context()
        with pytest.raises(Refused):
            await generated(handlers, unary, max_tokens=0)
        with pytest.raises(Refused):
            await streamed(handlers, stream, max_tokens=0)
    for context in (unary, stream):
        assert context.code is grpc.StatusCode.INVALID_ARGUMENT
        assert context.details.startswith("stopping.max_tokens: ")
        assert [name for name, _ in context.trailing] == ["grpc-status-details-bin"]


async def test_what_is_no_message_is_an_invalid_argument_and_counted() -> None:
    context = Context()
    async with taking() as (handlers, registry):
        with pytest.raises(Refused):
            await handlers.call("Generate", b"\xff\xff", context)
        assert handled(registry, "Generate", "INVALID_ARGUMENT") == 1
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_is_for_one_server_is_refused() -> None:
    async with taking() as (handlers, _):
        for name in FOR_ONE:
            context = Context()
            with pytest.raises(Refused):
                await handlers.call(name, b"", context)
            assert context.code is grpc.StatusCode.PERMISSION_DENIED, name
        assert handlers.is_serving()


async def test_a_stream_that_is_closed_gives_its_place_back() -> None:
    async with taking(context=100_000) as (handlers, registry):
        for _ in range(3 * SLOTS):
            request = stream_request(max_tokens=60_000).SerializeToString()
            answers = handlers.stream("GenerateStream", request, Context())
            async with aclosing(answers):
                async for data in answers:
                    if pb.GenerateStreamResponse.FromString(data).HasField("delta"):
                        break
        await eventually(lambda: handled(registry, "GenerateStream", "CANCELLED") == 3 * SLOTS)
        gauge = "onward_num_requests_running"
        await eventually(lambda: registry.get_sample_value(gauge, {"model_name": MODEL}) == 0)


async def test_a_call_that_is_cancelled_gives_its_place_back() -> None:
    gate = Gate()
    async with taking(FakeRunner(SLOTS, before_run=gate)) as (handlers, registry):
        with gate.closed():
            call = asyncio.ensure_future(generated(handlers))
            await gate.until_entered()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await eventually(lambda: handled(registry, "Generate", "CANCELLED") == 1)
