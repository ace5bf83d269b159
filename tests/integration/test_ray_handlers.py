"""What stands between Ray and our handlers, without Ray: a context like its, and calls that end as over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from deploy.ray.handlers import METHODS, Handlers, Refused
from proto.onward.v1 import model_pb2
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
    kinds,
    served_model,
    stream_request,
    tokens_of,
)

# gRPC's poller holds on to every event loop it has met: one for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = (1, *spell("ab"))


@dataclass(slots=True)
class Context:
    """As Ray's: it is told a status, and knows of no deadline."""

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
        assert made[0].health() is False
        await app.verify_all()
        yield made[0], registry
    assert made[0].health() is False


def handled(registry: CollectorRegistry, method: str, code: str) -> float:
    labels = {"grpc_method": method, "grpc_code": code}
    return registry.get_sample_value("onward_grpc_server_handled_total", labels) or 0.0


async def test_every_method_is_there() -> None:
    assert set(METHODS) == set(PERMISSIONS)
    async with taking() as (handlers, _):
        assert (handlers.health(), handlers.health(MODEL), handlers.health("nobody")) == (True, True, None)
        described: Any = await handlers.call("GetModel", model_pb2.GetModelRequest(), Context())
        assert described.model == MODEL


async def test_answers_and_streams_are_those_of_a_server() -> None:
    async with taking() as (handlers, registry):
        answer: Any = await handlers.call("Generate", generate_request(max_tokens=6), Context())
        events: Any = [
            each async for each in handlers.stream("GenerateStream", stream_request(max_tokens=6), Context())
        ]
        assert handled(registry, "Generate", "OK") == handled(registry, "GenerateStream", "OK") == 1
    assert list(answer.outputs[0].token_ids) == tokens_of(events) == expected_tokens(PROMPT, 6)
    assert (kinds(events)[0], kinds(events)[-1]) == ("accepted", "summary")


async def test_refusals_tell_the_context_code_words_and_details() -> None:
    async with taking() as (handlers, _):
        unary, streamed = Context(), Context()
        with pytest.raises(Refused):
            await handlers.call("Generate", generate_request(max_tokens=0), unary)
        with pytest.raises(Refused):
            [each async for each in handlers.stream("GenerateStream", stream_request(max_tokens=0), streamed)]
    for context in (unary, streamed):
        assert context.code is grpc.StatusCode.INVALID_ARGUMENT
        assert context.details.startswith("stopping.max_tokens: ")
        assert [name for name, _ in context.trailing] == ["grpc-status-details-bin"]


async def test_a_stream_that_is_closed_gives_its_place_back() -> None:
    async with taking(context=100_000) as (handlers, registry):
        for _ in range(3 * SLOTS):
            answers = handlers.stream("GenerateStream", stream_request(max_tokens=60_000), Context())
            async with aclosing(answers):
                async for event in answers:
                    if event.HasField("delta"):
                        break
        await eventually(lambda: handled(registry, "GenerateStream", "CANCELLED") == 3 * SLOTS)
        gauge = "onward_num_requests_running"
        await eventually(lambda: registry.get_sample_value(gauge, {"model_name": MODEL}) == 0)


async def test_a_call_that_is_cancelled_gives_its_place_back() -> None:
    gate = Gate()
    async with taking(FakeRunner(SLOTS, before_run=gate)) as (handlers, registry):
        gate.entered.clear()  # The golden cases have come through it.
        with gate.closed():
            call = asyncio.ensure_future(handlers.call("Generate", generate_request(), Context()))
            await gate.until_entered()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await eventually(lambda: handled(registry, "Generate", "CANCELLED") == 1)
