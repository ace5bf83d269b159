"""How many calls may be at once, and how many of them one caller's: what is beyond is refused before it is read.

gRPC's own limit counts all services together, so that a server that is merely full could not say that it is well, and
whoever asks after its health would take it for dead and send its work to the others. Knows nothing of what a call asks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import grpc

from service.errors import RateLimited
from service.transport.sending import MAX_REFUSAL_SECONDS, abort
from service.transport.status import Status

Context = grpc.aio.ServicerContext[Any, Any]

# Until a call of the caller may have ended: nothing predicts it.
_RETRY_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class _Places:
    """The places of one kind of calls. `held` counts those whose caller is known."""

    max_calls: int
    num_open: int = 0
    held: Counter[Hashable] = field(default_factory=Counter)


class Place:
    """One call's place. The call has no caller until it is claimed, and holds nothing once it is refused."""

    def __init__(self, places: _Places) -> None:
        self._places: _Places | None = places
        self._caller: Hashable = None
        places.num_open += 1

    @property
    def is_claimed(self) -> bool:
        """Whether the call counts against a caller's share."""
        return self._caller is not None

    def claim(self, caller: Hashable) -> None:
        """Counts the call as a caller's, who may hold as many places as are free.

        That is half of all for the first and less for each that comes later, who finds one: a fixed half would leave
        nothing beside two callers.

        Raises:
            RateLimited: when the caller has its share; the place is given back.
        """
        places = self._places
        if places is None:
            return
        if places.held[caller] > places.max_calls - places.num_open:
            self.release()
            limited = f"{places.held[caller]} calls of this caller are open, its share of {places.max_calls}"
            raise RateLimited(limited, _RETRY_SECONDS)
        self._caller = caller
        places.held[caller] += 1

    def release(self) -> None:
        """Gives the place back, at most once."""
        if self._places is not None:
            self._places.num_open -= 1
            uncount(self._places.held, self._caller)
            self._places = None


# Of the call that the running task serves.
_PLACE: ContextVar[Place] = ContextVar("onward_place")


def claim(caller: Hashable) -> None:
    """Counts the running task's call as a caller's; see `Place.claim`. Without `CallLimit` nothing is counted.

    Raises:
        RateLimited: when the caller has its share.
    """
    if (place := _PLACE.get(None)) is not None:
        place.claim(caller)


def uncount(counts: Counter[Hashable], key: Hashable) -> None:
    """One less of a key: without a look at the others, as `-=` would take, and without a zero that stays."""
    if counts[key] > 1:
        counts[key] -= 1
    else:
        counts.pop(key, None)


def refusal_seconds(max_stall_seconds: float) -> float:
    """How long the running task's call may take to send an error.

    A call that is no caller's share gives its place back now: refusals over a connection that takes no bytes would
    fill the server, and count against no key.
    """
    place = _PLACE.get(None)
    if place is None or place.is_claimed:
        return max_stall_seconds
    place.release()
    return min(MAX_REFUSAL_SECONDS, max_stall_seconds)


class CallLimit(grpc.aio.ServerInterceptor):
    """Refuses calls with RESOURCE_EXHAUSTED while there are as many as may be; goes before all other interceptors.

    A call counts from its headers to its end, whether or not its request ever comes.

    Args:
        max_calls: at once.
        apart: full names of methods that have as many places of their own each.
    """

    def __init__(self, max_calls: int, *, apart: Collection[str] = ()) -> None:
        self._max_calls = max_calls
        self._places = {kind: _Places(max_calls) for kind in ("", *apart)}
        # Of the kind that is not given its request: others would read all of it first.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._unknown: Any = grpc.stream_stream_rpc_method_handler(_refuse_unknown)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Passes a call on, and holds a place for it until it is over; or refuses it."""
        places = self._places.get(handler_call_details.method.lstrip("/"), self._places[""])
        if places.num_open >= self._max_calls:
            return self._refusal
        # gRPC handles each call, this look-up of its handler included, in a task of its own. The handler's end would
        # not do: it is not even called for a client that goes away before its request is there.
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (this is a coroutine)
        place = Place(places)
        _PLACE.set(place)
        task.add_done_callback(lambda _: place.release())
        handler = await continuation(handler_call_details)
        if handler is None:
            # gRPC would answer as much, and take any time for it.
            place.release()
            return self._unknown
        return handler

    async def _refuse(self, _: AsyncIterator[bytes], context: Context) -> None:
        limit = f"{self._max_calls} calls run, which is the most there may be at once"
        await abort(context, Status(grpc.StatusCode.RESOURCE_EXHAUSTED, limit), MAX_REFUSAL_SECONDS)


async def _refuse_unknown(_: AsyncIterator[bytes], context: Context) -> None:
    await abort(context, Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"), MAX_REFUSAL_SECONDS)
