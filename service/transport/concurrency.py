"""Refuses calls beyond the concurrency limit, and those with too much metadata, before they are read.

gRPC's own limit counts all services together: a full server could not answer health checks, and a balancer would take
it for dead and send its work to others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from functools import partial
from typing import Any

import grpc

from service.transport.places import REFUSAL_SECONDS, Places
from service.transport.sending import Context, abort
from service.transport.status import Status

# HTTP/2 counts this for each header besides its name and value (RFC 9113, 6.5.2).
_HEADER_BYTES = 32


class CallLimit(grpc.aio.ServerInterceptor):
    """Refuses calls with RESOURCE_EXHAUSTED. It goes before all other interceptors.

    A call counts from its headers until gRPC frees it, whether or not its request arrives. A refused call counts among
    refused calls, of which there may be as many.

    Args:
        max_calls: at once.
        max_message_bytes: largest answer.
        max_metadata_bytes: of a call. gRPC itself enforces it only after a client has acknowledged the server's
            settings, and takes up to 16 MiB before.
        apart: full names of methods with as many places of their own each.
    """

    def __init__(
        self, max_calls: int, max_message_bytes: int, max_metadata_bytes: int, *, apart: Collection[str] = ()
    ) -> None:
        self._max_calls = max_calls
        self._max_metadata_bytes = max_metadata_bytes
        self._places = Places(max_calls, max_message_bytes, apart)
        # Streams: gRPC would read a unary request before it calls the handler.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._unknown: Any = grpc.stream_stream_rpc_method_handler(_refuse_unknown)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Takes a place for a call until it is over, or refuses it."""
        place = self._places.take(handler_call_details.method.lstrip("/"))
        if place is None:
            return self._refusal
        # Counted once: an unacknowledged limit lets hundreds of thousands of headers through.
        if (num_bytes := _num_bytes(handler_call_details.invocation_metadata)) > self._max_metadata_bytes:
            return grpc.stream_stream_rpc_method_handler(partial(self._refuse_metadata, num_bytes))
        # Without a handler gRPC would send the same status, and wait for the client without a limit.
        return await continuation(handler_call_details) or self._unknown

    async def _refuse(self, _: AsyncIterator[bytes], context: Context) -> None:
        limit = f"{self._max_calls} calls run, which is the most there may be at once"
        await abort(context, Status(grpc.StatusCode.RESOURCE_EXHAUSTED, limit), REFUSAL_SECONDS)

    async def _refuse_metadata(self, num_bytes: int, _: AsyncIterator[bytes], context: Context) -> None:
        limit = f"metadata: must have at most {self._max_metadata_bytes} bytes, got {num_bytes}"
        await abort(context, Status(grpc.StatusCode.RESOURCE_EXHAUSTED, limit), REFUSAL_SECONDS)


def _num_bytes(metadata: Any) -> int:
    """At most what HTTP/2 counts: gRPC withholds some headers and decodes values."""
    return sum(len(name) + len(value) + _HEADER_BYTES for name, value in metadata or ())


async def _refuse_unknown(_: AsyncIterator[bytes], context: Context) -> None:
    await abort(context, Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"), REFUSAL_SECONDS)
