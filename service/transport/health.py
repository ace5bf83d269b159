"""`grpc.health.v1`: the states of the server, of its services and of its models, checked, listed and watched.

    set, withdraw ──> states ──> Check, List
                        └─ wakes ──> each watcher of the name ──> sends the newest state

A change of state is synchronous and waits for no client. Each watcher sends by itself, under the stall limit of every
stream. grpcio-health-checking's servicer writes to watchers under the lock that a change needs, and a watcher that
leaves cuts the others off (grpc/grpc#43403).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, empty_pb2, message_factory
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.errors import ClientStalled
from service.transport.sending import Context, abort, abort_stalled, send
from service.transport.status import Status, to_status

EVERYTHING = ""
SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
CHECK, LIST, WATCH = (f"{SERVICE}/{method}" for method in ("Check", "List", "Watch"))

_MAX_REQUEST_BYTES = 1024
_State = health_pb2.HealthCheckResponse


@dataclass(eq=False, slots=True)
class _Watcher:
    """One stream; `changed` is set when the state of its name may differ from the last sent."""

    name: str
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class HealthServicer:
    """Answers `grpc.health.v1.Health`. Event loop only.

    Args:
        max_stall_seconds: a watcher that takes no bytes for so long ends with ABORTED.
    """

    def __init__(self, max_stall_seconds: float) -> None:
        self._max_stall_seconds = max_stall_seconds
        self._states: dict[str, int] = {}
        self._watchers: set[_Watcher] = set()
        self._is_withdrawn = False
        self._is_closed = False

    def is_serving(self, name: str) -> bool:
        """Whether the state of a name is SERVING."""
        return bool(self._states.get(name) == _State.SERVING)

    def set(self, name: str, *, is_serving: bool) -> None:
        """Sets the state of a name; without effect after `withdraw`."""
        if not self._is_withdrawn:
            self._set(name, _State.SERVING if is_serving else _State.NOT_SERVING)

    def withdraw(self) -> None:
        """Sets all states to NOT_SERVING, for good."""
        self._is_withdrawn = True
        for name in self._states:
            self._set(name, _State.NOT_SERVING)

    def close(self) -> None:
        """Ends all watchers with UNAVAILABLE, later ones too."""
        self._is_closed = True
        for watcher in self._watchers:
            watcher.changed.set()

    def _set(self, name: str, state: int) -> None:
        self._states[name] = state
        for watcher in self._watchers:
            if watcher.name == name:
                watcher.changed.set()

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802 (the protocol's)
        """The state of a name; NOT_FOUND for an unknown one."""
        state = self._states.get(request.service)
        if state is None:
            await abort(context, Status(grpc.StatusCode.NOT_FOUND, ""), self._max_stall_seconds)
        return _State(status=state)

    async def List(self, request: empty_pb2.Empty, context: Context) -> Message:  # noqa: ARG002, N802 (the protocol's)
        """The states of all names."""
        answer: Any = _HealthListResponse()
        for name, state in self._states.items():
            answer.statuses[name].status = state
        return answer  # type: ignore[no-any-return]

    async def Watch(self, request: Any, context: Context) -> None:  # noqa: N802 (the protocol's)
        """Sends the state of a name when it differs from the last sent; states between may be skipped."""
        if request.ByteSize() > _MAX_REQUEST_BYTES:
            # The request lives as long as the watcher, with all of its unknown fields.
            limit = f"request: must have at most {_MAX_REQUEST_BYTES} bytes"
            await abort(context, Status(grpc.StatusCode.INVALID_ARGUMENT, limit), self._max_stall_seconds)
        watcher = _Watcher(request.service)
        self._watchers.add(watcher)
        sent: int | None = None
        try:
            while not self._is_closed:
                # Before the state is read: the next turn then finds a change during `send`.
                watcher.changed.clear()
                state = self._states.get(watcher.name, _State.SERVICE_UNKNOWN)
                if state == sent:
                    await watcher.changed.wait()
                else:
                    await send(_State(status=state), context, self._max_stall_seconds)
                    sent = state
            stopped = Status(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
            await abort(context, stopped, self._max_stall_seconds)
        except ClientStalled as error:
            await abort_stalled(context, to_status(error))
        finally:
            self._watchers.discard(watcher)


def add_health(health: HealthServicer, server: grpc.aio.Server) -> None:
    """Registers all three methods with a server."""
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    # The package's stubs have no `List`. Its request has no fields.
    parse, serialize = empty_pb2.Empty.FromString, _HealthListResponse.SerializeToString
    handler = grpc.unary_unary_rpc_method_handler(health.List, parse, serialize)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"List": handler}),))


def _list_response() -> Any:
    """The class of `HealthListResponse`, which grpc/grpc-proto defines and grpcio-health-checking lacks.

    It is in a pool of its own, so that a later release of the package can define it.
    """
    kinds = descriptor_pb2.FieldDescriptorProto
    package = health_pb2.DESCRIPTOR.package
    file = descriptor_pb2.FileDescriptorProto(
        name="health_list.proto", package=package, syntax="proto3", dependency=[health_pb2.DESCRIPTOR.name]
    )
    response = file.message_type.add(name="HealthListResponse")
    entry = response.nested_type.add(name="StatusesEntry", options={"map_entry": True})
    entry.field.add(name="key", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_STRING)
    entry.field.add(name="value", number=2, label=kinds.LABEL_OPTIONAL, type_name=f".{_State.DESCRIPTOR.full_name}")
    response.field.add(
        name="statuses",
        number=1,
        label=kinds.LABEL_REPEATED,
        type_name=f".{package}.{response.name}.{entry.name}",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{response.name}"))


_HealthListResponse = _list_response()
