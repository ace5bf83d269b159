"""The gRPC server: options, services, health and reflection put together; no service of its own.

Health speaks of "" (everything), of each service and of each model by its name.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from proto.onward.v1 import generation_pb2, model_pb2
from proto.onward.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from proto.onward.v1.model_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server
from service.errors import StartupError

GENERATION_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
MODEL_SERVICE = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
SERVICES = (GENERATION_SERVICE, MODEL_SERVICE)
EVERYTHING = ""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcServer:
    """One listening server.

    Args:
        generation: answers `GenerationService`.
        models: answers `ModelService`.
        interceptors: around every call, outermost first.
        max_message_bytes: largest message, either way.
    """

    def __init__(
        self,
        generation: GenerationServiceServicer,
        models: ModelServiceServicer,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        max_message_bytes: int,
    ) -> None:
        options = [
            # A second server on the same port must fail, not take half of the calls.
            ("grpc.so_reuseport", 0),
            # A client that vanished without a word is noticed, and what it held is freed.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
        ]
        self._server = grpc.aio.server(interceptors=tuple(interceptors), options=options)
        add_GenerationServiceServicer_to_server(generation, self._server)
        add_ModelServiceServicer_to_server(models, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listens; health is NOT_SERVING. Returns the port, which the system chose if 0 was asked for.

        Raises:
            StartupError: when the address cannot be used.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for name in (EVERYTHING, *SERVICES):
            await self.set_health(name, is_serving=False)
        try:
            bound = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise StartupError([f"cannot listen on {address}: {error}"]) from error
        await self._server.start()
        return bound

    async def set_health(self, name: str, *, is_serving: bool) -> None:
        """Tells health checks and watchers about everything (""), a service or a model."""
        await self._health.set(name, _SERVING if is_serving else _NOT_SERVING)

    async def withdraw(self) -> None:
        """Turns all health to NOT_SERVING, for good: load balancers look elsewhere, calls still work."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, gives those in flight some time, then cancels them."""
        await self._server.stop(grace_seconds)
