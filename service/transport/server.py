"""The gRPC server: options, services, health and reflection put together.

Health reports "" (everything), each service, and each model by its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from grpc_reflection.v1alpha import reflection

from onward.inference import open_inference_pb2
from onward.inference.open_inference_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)
from onward.v1 import generation_pb2, model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from onward.v1.model_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server
from service.errors import StartupError
from service.transport.concurrency import CallLimit
from service.transport.health import CHECK, EVERYTHING, WATCH, HealthServicer, add_health
from service.transport.health import SERVICE as HEALTH_SERVICE

GENERATION_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
MODEL_SERVICE = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
INFERENCE_SERVICE = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
SERVICES = (GENERATION_SERVICE, MODEL_SERVICE, INFERENCE_SERVICE)

_REFLECTION = f"{reflection.SERVICE_NAME}/ServerReflectionInfo"
# For a live client to answer a ping, or to say something after it has connected.
_MAX_ANSWER_SECONDS = 10.0
_MAX_ACKNOWLEDGE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Limits of the transport; larger messages, more metadata and more calls end with RESOURCE_EXHAUSTED.

    Health checks, watchers and reflection have `max_concurrent_rpcs` places of their own each, so a full server still
    answers checks. A caller may hold as many places as are free, at most half of all: a key, or a connection where no
    key is needed; for health and reflection an address.
    A call whose client takes no bytes for `max_stall_seconds` ends. gRPC still holds it, so it keeps its place until
    another call needs one; then its connection is closed. Answers being sent are bounded (`places.MAX_ANSWER_BYTES`).
    Connections beyond `max_connections` are closed on arrival. A client that was quiet for `keepalive_seconds` is
    pinged, and disconnected if it does not answer.
    """

    max_message_bytes: int
    max_metadata_bytes: int
    max_concurrent_rpcs: int
    max_stall_seconds: float
    max_connections: int
    keepalive_seconds: float


class Server(Protocol):
    """Takes calls for an app, as `GrpcServer` does."""

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port."""

    def set_health(self, name: str, *, is_serving: bool) -> None:
        """Sets the health of everything (""), a service or a model."""

    def withdraw(self) -> None:
        """Sets all health to NOT_SERVING, for good."""

    async def wait_ended(self) -> None:
        """Waits until no call is accepted any more."""

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, and ends those in flight after the grace."""


class GrpcServer:
    """One listening server.

    Args:
        generation: answers `GenerationService`.
        models: answers `ModelService`.
        inference: answers the Open Inference Protocol.
        interceptors: around every call, outermost first.
        limits: of the transport.
        credentials: for TLS; None serves unencrypted.
        has_reflection: serves the wire contract, without an API key.
    """

    def __init__(
        self,
        generation: GenerationServiceServicer,
        models: ModelServiceServicer,
        inference: GRPCInferenceServiceServicer,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        limits: TransportLimits,
        *,
        credentials: grpc.ServerCredentials | None = None,
        has_reflection: bool = True,
    ) -> None:
        self._credentials = credentials
        apart = (CHECK, WATCH, _REFLECTION)
        options = [
            # A second server on the same port must fail, not take half of the calls.
            ("grpc.so_reuseport", 0),
            # Detects a client that vanished, and frees what it held.
            ("grpc.keepalive_time_ms", _milliseconds(limits.keepalive_seconds)),
            # The time for an answer; `keepalive_timeout_ms` has no effect where this is longer.
            ("grpc.http2.ping_timeout_ms", _milliseconds(min(limits.keepalive_seconds, _MAX_ANSWER_SECONDS))),
            # Pings clients without calls too, and without limit: each holds a descriptor.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # gRPC unpacks a compressed message in full, to a thousand times its size, before it checks the limit.
            ("grpc.compression_enabled_algorithms_bitset", 1 << grpc.Compression.NoCompression),
            # Probing widens every stream's window to megabytes, which are buffered before a read begins.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.max_receive_message_length", limits.max_message_bytes),
            ("grpc.max_send_message_length", limits.max_message_bytes),
            ("grpc.max_allowed_incoming_connections", limits.max_connections),
            # All places of all kinds.
            ("grpc.max_concurrent_streams", (1 + len(apart)) * limits.max_concurrent_rpcs),
            # Closes a client that connects and sends nothing.
            ("grpc.server_handshake_timeout_ms", _milliseconds(_MAX_ANSWER_SECONDS)),
            # gRPC enforces the metadata limit below only once the client has acknowledged it.
            ("grpc.http2.settings_timeout", _milliseconds(_MAX_ACKNOWLEDGE_SECONDS)),
            ("grpc.max_metadata_size", limits.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        ]
        places = CallLimit(limits.max_concurrent_rpcs, limits.max_message_bytes, limits.max_metadata_bytes, apart=apart)
        self._server = grpc.aio.server(interceptors=(places, *interceptors), options=options)
        add_GenerationServiceServicer_to_server(generation, self._server)
        add_ModelServiceServicer_to_server(models, self._server)
        add_GRPCInferenceServiceServicer_to_server(inference, self._server)
        self._health = HealthServicer(limits.max_stall_seconds)
        add_health(self._health, self._server)
        if has_reflection:
            names = (*SERVICES, HEALTH_SERVICE, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listens, with health NOT_SERVING; returns the port, which the system chooses for 0.

        Raises:
            StartupError: when the address cannot be used.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for name in (EVERYTHING, *SERVICES):
            self.set_health(name, is_serving=False)
        try:
            if self._credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise StartupError([f"cannot listen on {address}: {error}"]) from error
        before = asyncio.all_tasks()
        await self._server.start()
        # The task in which gRPC accepts calls. `wait_for_termination` is second best: it also waits for open calls: a
        # long stream would hide that no other call is accepted.
        begun = [task for task in asyncio.all_tasks() - before if _is_accepting(task)]
        self._accepting = begun[0] if begun else asyncio.create_task(self._server.wait_for_termination())
        return bound

    def set_health(self, name: str, *, is_serving: bool) -> None:
        """Sets the health of everything (""), a service or a model."""
        self._health.set(name, is_serving=is_serving)

    def withdraw(self) -> None:
        """Sets all health to NOT_SERVING, for good: load balancers turn away, calls still work."""
        self._health.withdraw()

    async def wait_ended(self) -> None:
        """Waits until no call is accepted any more: `stop` was called, or gRPC's serving task has failed."""
        await asyncio.wait([self._accepting])

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, ends health watchers, and cancels calls in flight after the grace."""
        self._health.close()
        await self._server.stop(grace_seconds)


def _is_accepting(task: asyncio.Task[Any]) -> bool:
    return "_server_main_loop" in getattr(task.get_coro(), "__qualname__", "")


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
