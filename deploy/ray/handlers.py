"""The server's methods without a listening server, called by name. Knows nothing of Ray.

Takes the place of `service.transport.server.GrpcServer`, so that calls go through the same steps: access, wire limits,
errors as statuses, metrics, traces. Messages stay bytes. The caller's context must be a `CallContext`.

Methods that concern one replica and not all behind an address (`FOR_ONE`) are refused. `Watch` of `grpc.health.v1` is
not offered: a watcher would keep the replica that it reached from ever being idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import grpc
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from onward.inference import open_inference_pb2
from onward.inference.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from onward.v1 import generation_pb2, model_pb2
from onward.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from onward.v1.model_pb2_grpc import add_ModelServiceServicer_to_server
from service.transport.health import EVERYTHING, HealthServicer
from service.transport.permissions import MANAGING
from service.transport.server import SERVICES, TransportLimits

_FILES = (generation_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR, open_inference_pb2.DESCRIPTOR)
_OURS = {
    method.name: method for file in _FILES for service in file.services_by_name.values() for method in service.methods
}
_CHECK = health_pb2.DESCRIPTOR.services_by_name["Health"].methods_by_name["Check"]
METHODS: Mapping[str, MethodDescriptor] = {**_OURS, _CHECK.name: _CHECK}
"""Every method that is offered; no two have the same name."""
FOR_ONE = MANAGING
"""Methods that change or occupy a model of one replica, and the caller could not choose which."""
_FOR_ONE = "this is for one replica and not for all behind this address"

_KINDS: Mapping[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def add_methods(servicer: Any, server: Any) -> None:
    """Registers a servicer's methods with a gRPC server, as generated code does, but with messages as bytes."""
    services: dict[str, dict[str, Any]] = {}
    for name, method in METHODS.items():
        kind = _KINDS[method.client_streaming, method.server_streaming]
        services.setdefault(method.containing_service.full_name, {})[name] = kind(getattr(servicer, name))
    for service, handlers in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


class CallContext(Protocol):
    """What a caller's context must have; Ray's has."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """The call's metadata."""
        ...

    def peer(self) -> str:
        """The client's address."""
        ...

    def set_code(self, code: grpc.StatusCode) -> None:
        """Sets the status."""
        ...

    def set_details(self, details: str) -> None:
        """Sets the status's message."""
        ...

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Sets what is sent after the answer."""
        ...


class Refused(Exception):
    """A call that ends with another status than OK, which is set in its context."""


class Handlers:
    """The methods of our services, wrapped as a listening server would.

    Takes the arguments of `GrpcServer`; limits, credentials and reflection are those of the server that listens.
    """

    def __init__(
        self,
        generation: Any,
        models: Any,
        inference: Any,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        limits: TransportLimits,
        *,
        credentials: grpc.ServerCredentials | None = None,  # noqa: ARG002
        has_reflection: bool = True,  # noqa: ARG002
    ) -> None:
        (self._interceptor,) = interceptors
        self._health = HealthServicer(limits.max_stall_seconds)
        registry = _Registry()
        add_GenerationServiceServicer_to_server(generation, registry)  # type: ignore[arg-type]
        add_ModelServiceServicer_to_server(models, registry)  # type: ignore[arg-type]
        add_GRPCInferenceServiceServicer_to_server(inference, registry)  # type: ignore[arg-type]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, registry)
        self._bare = registry.methods
        self._wrapped: dict[str, Any] = {}

    async def start(self, host: str, port: int) -> int:  # noqa: ARG002
        """Wraps the methods, with health NOT_SERVING; listens to no port and returns 0."""
        for name in (EVERYTHING, *SERVICES):
            self.set_health(name, is_serving=False)
        for name, method in _OURS.items():
            path = f"/{method.containing_service.full_name}/{name}"
            bare = self._bare[path]
            details = _Details(path)

            async def continuation(_: object, bare: Any = bare) -> Any:
                return bare

            self._wrapped[name] = await self._interceptor.intercept_service(continuation, details)  # type: ignore[arg-type]
        return 0

    def set_health(self, name: str, *, is_serving: bool) -> None:
        """Sets the health of everything (""), a service or a model."""
        self._health.set(name, is_serving=is_serving)

    def withdraw(self) -> None:
        """Sets all health to NOT_SERVING, for good."""
        self._health.withdraw()

    async def wait_ended(self) -> None:
        """Never returns: the server that accepts the calls is not ours."""
        await asyncio.Event().wait()

    async def stop(self, grace_seconds: float) -> None:
        """Does nothing: the server that accepts the calls stops them."""

    def is_serving(self) -> bool:
        """Whether everything serves."""
        return self._health.is_serving(EVERYTHING)

    async def call(self, name: str, request: bytes, context: CallContext) -> bytes:
        """Answers a unary call.

        Raises:
            Refused: when it ends with another status than OK.
        """
        inner: Any = _Context(context, request)
        if name in FOR_ONE:
            await inner.abort(grpc.StatusCode.PERMISSION_DENIED, _FOR_ONE)
        if name == _CHECK.name:
            state = await self._health.Check(health_pb2.HealthCheckRequest.FromString(request), inner)
            return bytes(state.SerializeToString())
        # In a task of its own: a call's task is cancelled if it outlives its answer.
        answer: bytes = await asyncio.ensure_future(self._wrapped[name].stream_unary(None, inner))
        return answer

    async def stream(
        self, name: str, requests: bytes | AsyncIterator[bytes], context: CallContext
    ) -> AsyncGenerator[bytes, None]:
        """Answers a call, or a stream of requests, with a stream; closing it cancels the call.

        Raises:
            Refused: when it ends with another status than OK.
        """
        is_one = isinstance(requests, bytes)
        inner = _Context(context, requests) if isinstance(requests, bytes) else _Context(context)
        handling = self._wrapped[name].stream_stream(None if is_one else requests, inner)
        async with aclosing(inner.written(handling)) as answers:
            async for answer in answers:
                yield answer


class _Details:
    """`grpc.HandlerCallDetails`; our interceptor reads its method alone."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class _Registry:
    """Takes the place of a server in generated code, and keeps the handlers that are added."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Ignored: the same methods come by `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """A service's methods."""
        self.methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


class _Context:
    """Adapts the caller's context to our handlers and the interceptor; `read` returns `request`."""

    def __init__(self, outer: CallContext, request: bytes = b"") -> None:
        self._outer = outer
        self._request = request
        self._messages: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)

    async def written(self, handling: Awaitable[None]) -> AsyncGenerator[bytes, None]:
        """Yields what a handler writes; closing this cancels the handler and waits for it to clean up.

        Raises:
            Exception: whatever the handler raises.
        """
        running = asyncio.ensure_future(handling)
        try:
            while True:
                coming = asyncio.ensure_future(self._messages.get())
                try:
                    await asyncio.wait((coming, running), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    coming.cancel()
                if not coming.done():
                    break
                yield coming.result()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def time_remaining(self) -> None:
        """None: Ray's context hides the deadline; a request may carry its own."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """The call's metadata."""
        return tuple(self._outer.invocation_metadata())

    def peer(self) -> str:
        """The client's address."""
        return self._outer.peer()

    async def read(self) -> bytes:
        """The message of a call that has one."""
        return self._request

    async def write(self, message: bytes) -> None:
        """Waits until the message before this one was taken."""
        await self._messages.put(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """Sets the status in the caller's context and ends the call."""
        self._outer.set_code(code)
        self._outer.set_details(details)
        if trailing_metadata:
            self._outer.set_trailing_metadata(list(trailing_metadata))
        raise Refused(details)
