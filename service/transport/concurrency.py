"""Refuses calls beyond those that there may be at once, before they are read.

gRPC's own limit counts all services together, so that a server that is merely full could not say that it is well, and
a balancer that asks after its health would take it for dead and send its work to the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc

from service.transport.places import REFUSAL_SECONDS, Places
from service.transport.sending import abort
from service.transport.status import Status

Context = grpc.aio.ServicerContext[Any, Any]


class CallLimit(grpc.aio.ServerInterceptor):
    """Refuses calls with RESOURCE_EXHAUSTED while there are as many as may be; goes before all other interceptors.

    A call counts from its headers until gRPC frees it, whether or not its request ever comes; a refused one counts
    among refused calls, of which there may be as many.

    Args:
        max_calls: at once.
        max_message_bytes: largest answer.
        apart: full names of methods that have as many places of their own each.
    """

    def __init__(self, max_calls: int, max_message_bytes: int, *, apart: Collection[str] = ()) -> None:
        self._max_calls = max_calls
        self._places = Places(max_calls, max_message_bytes, apart)
        # Of the kind that is not given its request: others would read all of it first.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._unknown: Any = grpc.stream_stream_rpc_method_handler(_refuse_unknown)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Passes a call on, and holds a place for it until it is over; or refuses it."""
        place = self._places.take(handler_call_details.method.lstrip("/"))
        if place is None:
            return self._refusal
        # gRPC would answer as much where there is no handler, and take any time for it.
        return await continuation(handler_call_details) or self._unknown

    async def _refuse(self, _: AsyncIterator[bytes], context: Context) -> None:
        limit = f"{self._max_calls} calls run, which is the most there may be at once"
        await abort(context, Status(grpc.StatusCode.RESOURCE_EXHAUSTED, limit), REFUSAL_SECONDS)


async def _refuse_unknown(_: AsyncIterator[bytes], context: Context) -> None:
    await abort(context, Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"), REFUSAL_SECONDS)
