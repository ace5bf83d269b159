"""Health and reflection: methods that need no key, so that any client may call them. Their requests are small.

Each method has read places of its own: a health check must not wait for watchers, nor for a reflection client.
"""

from __future__ import annotations

import inspect
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import grpc

from service.errors import ClientStalled, InvalidRequest, RateLimited, RequestError
from service.transport.flooding import FloodGuard
from service.transport.places import claim, stall_after, uncount
from service.transport.read_places import Connection
from service.transport.receiving import Receiver
from service.transport.sending import Context, abort, abort_stalled, send
from service.transport.status import to_status
from service.transport.wire_limits import parse

# Open calls of one connection to one method: a balancer watches dozens of names.
_MAX_CALLS = 128
# A request names one service or few.
_MAX_REQUEST_BYTES = 4 << 10
# For the one request of a call, which an honest client sends with the call.
_MAX_REQUEST_SECONDS = 5.0
# Until a call may have ended: nothing predicts it.
_RETRY_SECONDS = 1.0


class OpenMethods:
    """Wraps the handlers of methods that need no key.

    Args:
        max_message_bytes: largest message.
        max_stall_seconds: how long a call waits for its client to read, or to send.
        guard: of the server.
    """

    def __init__(self, max_message_bytes: int, max_stall_seconds: float, guard: FloodGuard) -> None:
        self._max_message_bytes = max_message_bytes
        self._max_stall_seconds = max_stall_seconds
        self._guard = guard
        self.receivers: dict[str, Receiver] = {}
        self._num_calls = Counter[Hashable]()

    def wrap(self, path: str, handler: Any) -> Any:
        """A method's handler with bounded requests. A message of more than 4 KiB is refused before it is parsed."""
        if (receiver := self.receivers.get(path)) is None:
            receiver = Receiver(self._max_message_bytes, self._max_stall_seconds, self._guard, max_bytes=0)
            self.receivers[path] = receiver
        answer = handler.stream_stream or handler.unary_stream or handler.unary_unary

        async def requests(context: Context, caller: Connection) -> AsyncIterator[Any]:
            async for data in receiver.messages(context, caller, _check):
                yield parse(handler.request_deserializer, data)

        async def call(_: AsyncIterator[Any], context: Context) -> None:
            peer = context.peer()
            caller = Connection(address_of(peer), peer)
            try:
                claim(caller.address, peer)
                with self._counted(path, caller):
                    if handler.request_streaming:
                        answers = answer(requests(context, caller), context)
                    else:
                        seconds = min(_MAX_REQUEST_SECONDS, self._max_stall_seconds)
                        request = receiver.message(context, caller, _check, seconds)
                        answers = answer(parse(handler.request_deserializer, await request), context)
                    if not inspect.isawaitable(answers):
                        async for each in answers:
                            await send(each, context, self._max_stall_seconds)
                    elif (message := await answers) is not None:
                        await send(message, context, self._max_stall_seconds)
                stall_after(self._max_stall_seconds)
            except ClientStalled as error:
                await abort_stalled(context, to_status(error))
            except RequestError as error:
                self._guard.over(peer)
                await abort(context, to_status(error), self._max_stall_seconds)

        return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)

    @contextmanager
    def _counted(self, path: str, caller: Connection) -> Iterator[None]:
        """Counts a call.

        Raises:
            RateLimited: when the connection has as many calls of the method as it may have.
        """
        key = path, caller
        if self._num_calls[key] >= _MAX_CALLS:
            raise RateLimited(f"{_MAX_CALLS} calls of this connection are open", _RETRY_SECONDS)
        self._num_calls[key] += 1
        try:
            yield
        finally:
            uncount(self._num_calls, key)


def _check(data: bytes) -> Iterator[None]:
    if len(data) > _MAX_REQUEST_BYTES:
        raise InvalidRequest("request", f"{len(data)} bytes", f"must have at most {_MAX_REQUEST_BYTES} bytes")
    return iter(())


def address_of(peer: str) -> str:
    """The address of a connection: of IPv4, or the /64 network of IPv6, of which a host has 2^64 addresses.

    Args:
        peer: gRPC's name: "ipv4:127.0.0.1:1234", "ipv6:%5B::1%5D:1234".
    """
    kind, _, rest = peer.partition(":")
    host = unquote(rest.rpartition(":")[0])
    if kind != "ipv6":
        return host
    return str(ipaddress.IPv6Network((host.strip("[]").partition("%")[0], 64), strict=False))
