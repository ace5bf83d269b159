"""Sends messages and statuses, and ends calls whose clients take none."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from service.errors import ClientStalled
from service.transport.places import REFUSAL_SECONDS, current_place, stall_after
from service.transport.status import Status

Context = grpc.aio.ServicerContext[Any, Any]


async def send(message: Any, context: Context, max_stall_seconds: float) -> None:
    """Sends a message, bytes or protobuf, and waits until the client's flow control lets it pass.

    Raises:
        ClientStalled: when the client takes no bytes for `max_stall_seconds`.
        RateLimited: when other answers leave no room for it.
        asyncio.CancelledError: when the call has ended.
    """
    place = current_place()
    if place is not None:
        num_bytes = len(message) if isinstance(message, bytes) else message.ByteSize()
        await place.answer(num_bytes, max_stall_seconds)
    stall = asyncio.timeout(max_stall_seconds)
    # A pending cancellation of the call comes first: gRPC leaks some hundred bytes for each message that fails, so for
    # every client that leaves amid a stream (grpc/grpc#43360).
    await asyncio.sleep(0)
    try:
        async with stall:
            if place is not None and not place.has_begun:
                # Alone they need no window. With a message that is not taken they would wait, and so would the status.
                place.has_begun = True
                await context.send_initial_metadata(())
                place.has_headers = True
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


async def abort(context: Context, status: Status, max_stall_seconds: float) -> None:
    """Ends a call with a status.

    If the client takes no bytes, the call stalls, and holds its place or one of refused calls.

    Raises:
        grpc.aio.AbortError: when the status is sent.
        asyncio.CancelledError: when it is not, or the call has ended.
    """
    place = current_place()
    if place is not None:
        place.refuse(context.peer())
    is_refused = place is not None and not place.is_claimed
    stall_after(min(max_stall_seconds, REFUSAL_SECONDS) if is_refused else max_stall_seconds)
    await _abort(context, status)


async def _abort(context: Context, status: Status) -> None:
    try:
        await context.abort(status.code, status.message, status.trailing_metadata)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


async def abort_stalled(context: Context, status: Status) -> None:
    """Ends a call after `ClientStalled`. Does not return: raises `CancelledError` or gRPC's `AbortError`.

    The status follows the message that the client does not read, and may wait forever. Meanwhile gRPC holds the call,
    and the call its place, from which it may be evicted.
    """
    place = current_place()
    if place is None:
        stall_after(0)
    else:
        place.stall()
        if place.has_begun and not place.has_headers:
            # gRPC would send the initial metadata again, and fail. It cancels this task when the call ends.
            await asyncio.Event().wait()
    await _abort(context, status)
    raise asyncio.CancelledError
