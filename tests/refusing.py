"""A server that refuses as often as configured, like the real one, and then answers: for tests of retries."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from onward.v1.model_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server
from service.errors import RequestError
from service.transport.status import to_status

EVENTS = (
    pb.GenerateStreamResponse(accepted=pb.GenerateStreamResponse.Accepted(request_id="drawn", model="m")),
    pb.GenerateStreamResponse(delta=pb.GenerateStreamResponse.Delta(text="do", token_ids=[1])),
    pb.GenerateStreamResponse(delta=pb.GenerateStreamResponse.Delta(text="ne", token_ids=[2])),
    pb.GenerateStreamResponse(
        finished=pb.GenerateStreamResponse.Finished(
            finish_reason=pb.FINISH_REASON_STOP, matched_stop=pb.MatchedStop(token_id=2)
        )
    ),
    pb.GenerateStreamResponse(summary=pb.GenerateStreamResponse.Summary(usage=pb.Usage(generated_tokens=2))),
)


@dataclass(frozen=True, slots=True)
class Heard:
    """One attempt of a client."""

    request: Message
    metadata: dict[str, Any]
    left_seconds: float | None
    at: float


def answering(make: Callable[[Any], Message]) -> Any:
    """A unary method that answers once nothing is left to refuse."""

    async def method(self: Refusing, request: Message, context: Any) -> Message:
        self._hear(request, context)
        await self._refuse(context)
        return make(request)

    return method


@dataclass(slots=True)
class Refusing(GenerationServiceServicer, ModelServiceServicer):
    """Refuses as often as there are `refusals`, a stream after its first `num_events`. `heard` has every attempt."""

    refusals: deque[RequestError]
    num_events: int = 0
    has_summary: bool = True
    heard: list[Heard] = field(default_factory=list)
    target: str = ""

    Generate = answering(
        lambda request: pb.GenerateResponse(
            outputs=[pb.GenerationOutput(text="done", token_ids=[1, 2], finish_reason=pb.FINISH_REASON_LENGTH)],
            request_id=request.request_id or "drawn",
            model="m",
            usage=pb.Usage(generated_tokens=2),
        )
    )
    ListModels = answering(
        lambda _: model_pb2.ListModelsResponse(models=[model_pb2.ListModelsResponse.Model(name="m")])
    )
    VerifyParity = answering(lambda _: model_pb2.VerifyParityResponse())
    LoadModel = answering(lambda _: model_pb2.LoadModelResponse())
    UnloadModel = answering(lambda _: model_pb2.UnloadModelResponse())
    ReloadModel = answering(lambda _: model_pb2.ReloadModelResponse())

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self._hear(request, context)
        events = EVENTS if self.has_summary else EVENTS[:-1]
        if self.refusals:
            for event in events[: self.num_events]:
                yield event
            await self._refuse(context)
        for event in events:
            yield event

    def _hear(self, request: Message, context: Any) -> None:
        metadata = dict(context.invocation_metadata() or ())
        self.heard.append(Heard(request, metadata, context.time_remaining(), time.monotonic()))

    async def _refuse(self, context: Any) -> None:
        if self.refusals:
            status = to_status(self.refusals.popleft())
            await context.abort(status.code, status.message, status.trailing_metadata)


@asynccontextmanager
async def refusing(
    *refusals: RequestError, num_events: int = 0, has_summary: bool = True, port: int = 0
) -> AsyncIterator[Refusing]:
    """Serves a `Refusing` on a loopback port; `target` is its address."""
    servicer = Refusing(deque(refusals), num_events, has_summary)
    server = grpc.aio.server()
    add_GenerationServiceServicer_to_server(servicer, server)
    add_ModelServiceServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(grace=None)
