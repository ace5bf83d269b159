"""How a stream sends a message, and how a stalled one ends: one rule for our streams and for health watchers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from service.errors import ClientStalled
from service.transport.places import current_place
from service.transport.status import Status

Context = grpc.aio.ServicerContext[Any, Any]


async def send(message: Any, context: Context, max_stall_seconds: float) -> None:
    """Waits until the message is on its way: what a client does not read it need not be sent more of.

    Args:
        message: bytes, or a message of protobuf's.
        context: gRPC's.
        max_stall_seconds: how long the client may take no bytes.

    Raises:
        ClientStalled: when it takes none for so long.
        RateLimited: when the caller has to take other answers first.
        asyncio.CancelledError: when the call has ended.
    """
    place = current_place()
    if place is not None:
        place.answer(len(message) if isinstance(message, bytes) else message.ByteSize())
    stall = asyncio.timeout(max_stall_seconds)
    # An end of the call that the event loop has in hand comes first: gRPC never gives back what it took to send a
    # message that fails, some hundred bytes of every client that goes away amid a stream (grpc/grpc#43360).
    await asyncio.sleep(0)
    try:
        async with stall:
            if place is not None and not place.is_begun:
                # By themselves they need no window. With a message that is not taken they would wait, and with them the
                # status of the call.
                await context.send_initial_metadata(())
                place.is_begun = True
            await context.write(message)
    except TimeoutError as error:
        if not stall.expired():
            raise
        raise ClientStalled(max_stall_seconds) from error
    except grpc.aio.InternalError as error:
        # The call ended before its handler was cancelled.
        raise asyncio.CancelledError from error
    if place is not None:
        place.answered()


async def abort(context: Context, status: Status, max_seconds: float | None) -> None:
    """Ends a call with a status, and gives up where the client takes no bytes.

    Raises:
        grpc.aio.AbortError: gRPC's, when the status is on its way.
        asyncio.CancelledError: when it is not, or the call has ended.
    """
    try:
        async with asyncio.timeout(max_seconds):
            await context.abort(status.code, status.message, status.trailing_metadata)
    except (TimeoutError, grpc.aio.InternalError) as error:
        raise asyncio.CancelledError from error


async def abort_stalled(context: Context, status: Status) -> None:
    """Ends a call after `ClientStalled`. Does not return: raises `CancelledError` or gRPC's `AbortError`.

    The status follows the message that the client does not read, and may take as long as the client likes. All the
    while gRPC holds the call, and the call its place, which may be taken from it.
    """
    place = current_place()
    if place is not None:
        place.stall(context.peer())
    await abort(context, status, 0 if place is None else None)
    raise asyncio.CancelledError
