"""A server's methods without a server: called by their names, by whoever takes the calls. Knows nothing of Ray.

Stands where `service.transport.server.GrpcServer` does, so that what a call goes through is the same: keys are asked
for, errors become statuses, calls are counted and traced. What the caller's context must have is `CallContext`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from proto.inference import open_inference_pb2
from proto.inference.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from proto.onward.v1 import generation_pb2, model_pb2
from proto.onward.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from proto.onward.v1.model_pb2_grpc import add_ModelServiceServicer_to_server
from service.transport.server import EVERYTHING, SERVICES

_FILES = (generation_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR, open_inference_pb2.DESCRIPTOR)
METHODS = {
    method.name: method for file in _FILES for service in file.services_by_name.values() for method in service.methods
}
"""Every method of ours; no two have the same name, which a test of permissions relies on too."""


class CallContext(Protocol):
    """What a caller's context must have; Ray's has."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """What came with the call."""
        ...

    def peer(self) -> str:
        """Who calls."""
        ...

    def set_code(self, code: grpc.StatusCode) -> None:
        """How the call ends."""
        ...

    def set_details(self, details: str) -> None:
        """Why."""
        ...

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """What is sent after that."""
        ...


class Refused(Exception):
    """A call that ends with another status than OK; the context has been told which."""


class Handlers:
    """The methods of our services, wrapped as a listening server would.

    Args: those of `GrpcServer`; limits of the transport, credentials and reflection are whoever's who listens.
    """

    def __init__(
        self,
        generation: Any,
        models: Any,
        inference: Any,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        limits: object,  # noqa: ARG002
        *,
        credentials: grpc.ServerCredentials | None = None,  # noqa: ARG002
        has_reflection: bool = True,  # noqa: ARG002
    ) -> None:
        (self._interceptor,) = interceptors
        registry = _Registry()
        add_GenerationServiceServicer_to_server(generation, registry)  # type: ignore[arg-type]
        add_ModelServiceServicer_to_server(models, registry)  # type: ignore[arg-type]
        add_GRPCInferenceServiceServicer_to_server(inference, registry)  # type: ignore[arg-type]
        self._bare = registry.methods
        self._wrapped: dict[str, Any] = {}
        self._health: dict[str, bool] = {}
        self._is_withdrawn = False

    async def start(self, host: str, port: int) -> int:  # noqa: ARG002
        """Wraps the methods; nobody listens, and health is bad. Returns 0, which is no port."""
        self._health = dict.fromkeys((EVERYTHING, *SERVICES), False)
        for name, method in METHODS.items():
            path = f"/{method.containing_service.full_name}/{name}"
            bare = self._bare[path]
            details = _Details(path)

            async def continuation(_: object, bare: Any = bare) -> Any:
                return bare

            self._wrapped[name] = await self._interceptor.intercept_service(continuation, details)  # type: ignore[arg-type]
        return 0

    async def set_health(self, name: str, *, is_serving: bool) -> None:
        """Keeps it for whoever asks."""
        self._health[name] = is_serving

    async def withdraw(self) -> None:
        """All health is bad from now on."""
        self._is_withdrawn = True

    async def stop(self, grace_seconds: float) -> None:
        """Nothing to stop: whoever takes the calls stops them."""

    def health(self, name: str = EVERYTHING) -> bool | None:
        """Whether everything, a service or a model serves; None if it is not known."""
        serving = self._health.get(name)
        return False if serving and self._is_withdrawn else serving

    async def call(self, name: str, request: Message, context: CallContext) -> Message:
        """Answers a unary call.

        Raises:
            Refused: when it ends with another status than OK.
        """
        inner = _Context(context)
        data: bytes = await self._wrapped[name].unary_unary(request.SerializeToString(), inner)
        return _answer(name, data)

    async def stream(self, name: str, request: Message, context: CallContext) -> AsyncGenerator[Message, None]:
        """Answers a call with a stream; closing it cancels the call.

        Raises:
            Refused: when it ends with another status than OK.
        """
        messages: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        inner = _Context(context, messages)
        running = asyncio.ensure_future(self._wrapped[name].unary_stream(request.SerializeToString(), inner))
        try:
            while True:
                coming = asyncio.ensure_future(messages.get())
                await asyncio.wait((coming, running), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    break
                yield _answer(name, coming.result())
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def _answer(name: str, data: bytes) -> Message:
    return GetMessageClass(METHODS[name].output_type).FromString(data)


class _Details:
    """`grpc.HandlerCallDetails`, of which our interceptor looks at the method alone."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class _Registry:
    """What generated code takes for a server: it keeps what is added."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The same methods once more, for servers that look them up one by one."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """A service's methods."""
        self.methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


class _Context:
    """The caller's context as our handlers and the interceptor want it."""

    def __init__(self, outer: CallContext, messages: asyncio.Queue[bytes] | None = None) -> None:
        self._outer = outer
        self._messages = messages

    def time_remaining(self) -> None:
        """Whoever takes the calls hides their deadlines; a request may carry its own."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """What came with the call."""
        return tuple(self._outer.invocation_metadata())

    def peer(self) -> str:
        """Who calls."""
        return self._outer.peer()

    async def write(self, message: bytes) -> None:
        """Waits until the message before this one was taken."""
        assert self._messages is not None  # noqa: S101 (a unary handler does not write)
        await self._messages.put(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """Tells the caller's context and ends the call."""
        self._outer.set_code(code)
        self._outer.set_details(details)
        if trailing_metadata:
            self._outer.set_trailing_metadata(list(trailing_metadata))
        raise Refused(details)
