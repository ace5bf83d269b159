"""How many calls may be at once: what is beyond that is refused before anything of its request is read.

gRPC's own limit counts all services together, so that a server that is merely full could not say that it is well, and
whoever asks after its health would take it for dead and send its work to the others. Knows nothing of what a call asks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]


class CallLimit(grpc.aio.ServerInterceptor):
    """Refuses calls with RESOURCE_EXHAUSTED while there are as many as may be; goes before all other interceptors.

    A call counts from its headers to its end, whether or not its request ever comes.

    Args:
        max_calls: at once.
        apart: full names of methods that have as many places of their own each.
    """

    def __init__(self, max_calls: int, *, apart: Collection[str] = ()) -> None:
        self._max_calls = max_calls
        self._apart = frozenset(apart)
        self._num_open = Counter[str]()
        # Of the kind that is not given its request: others would read all of it first.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Passes a call on, and holds a place for it until it is over; or refuses it."""
        method = handler_call_details.method.lstrip("/")
        kind = method if method in self._apart else ""
        if self._num_open[kind] >= self._max_calls:
            return self._refusal
        # gRPC handles each call, this look-up of its handler included, in a task of its own. The handler's end would
        # not do: it is not even called for a client that goes away before its request is there.
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (this is a coroutine)
        self._num_open[kind] += 1
        task.add_done_callback(lambda _: self._num_open.subtract({kind: 1}))
        return await continuation(handler_call_details)

    async def _refuse(self, _: AsyncIterator[bytes], context: Context) -> None:
        await context.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._max_calls} calls run, which is the most there may be at once"
        )
