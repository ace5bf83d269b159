"""How a stream sends a message, and how a stalled one ends: one rule for our streams and for health watchers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from service.errors import ClientStalled
from service.transport.status import Status

Context = grpc.aio.ServicerContext[Any, Any]

MAX_REFUSAL_SECONDS = 5.0
"""For the status of a call that holds no place to be sent: nothing else bounds how many there are."""


async def send(message: Any, context: Context, max_stall_seconds: float) -> None:
    """Waits until the message is on its way: what a client does not read it need not be sent more of.

    Raises:
        ClientStalled: when the client takes no bytes for `max_stall_seconds`.
        asyncio.CancelledError: when the call has ended.
    """
    stall = asyncio.timeout(max_stall_seconds)
    # An end of the call that the event loop has in hand comes first: gRPC never gives back what it took to send a
    # message that fails, some hundred bytes of every client that goes away amid a stream (grpc/grpc#43360).
    await asyncio.sleep(0)
    try:
        async with stall:
            await context.write(message)
    except TimeoutError as error:
        if not stall.expired():
            raise
        raise ClientStalled(max_stall_seconds) from error
    except grpc.aio.InternalError as error:
        # The call ended before its handler was cancelled.
        raise asyncio.CancelledError from error


async def abort(context: Context, status: Status, max_seconds: float) -> None:
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

    The status follows the message that the client does not read. To wait for it is to hold the call's place for as long
    as the client likes. It cannot be sent at all if the unread message is the first: that one brings the headers.
    """
    await abort(context, status, 0)
    raise asyncio.CancelledError
