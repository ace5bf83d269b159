"""A line on stderr that says how far a run is: on a terminal one that is rewritten, elsewhere one every ten seconds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

from loadtest.core.drive import Driver

_TERMINAL_SECONDS = 0.5
_LOG_SECONDS = 10.0


@asynccontextmanager
async def shown(driver: Driver, out: TextIO, *, count: int | None, seconds: float | None) -> AsyncIterator[None]:
    """Shows the progress of a run of `count` requests or `seconds` of sending while the block runs."""
    is_terminal = out.isatty()
    began = time.monotonic()

    async def show() -> None:
        while True:
            await asyncio.sleep(_TERMINAL_SECONDS if is_terminal else _LOG_SECONDS)
            line = describe(driver.ended, driver.in_flight, time.monotonic() - began, count=count, seconds=seconds)
            out.write(f"\r\033[K{line}" if is_terminal else f"{line}\n")
            out.flush()

    task = asyncio.create_task(show())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if is_terminal:
            out.write("\r\033[K")
            out.flush()


def describe(ended: int, in_flight: int, elapsed: float, *, count: int | None, seconds: float | None) -> str:
    """The line; the time left is that of the sooner end, requests at the rate so far or seconds of sending."""
    done = f"{ended} of {count}" if count else f"{ended}"
    rests = [] if seconds is None else [max(0.0, seconds - elapsed)]
    if count and ended:
        rests.append(elapsed / ended * (count - ended))
    left = f", about {min(rests):.0f} s left" if rests else ""
    return f"{done} requests ended, {in_flight} in flight, {elapsed:.0f} s{left}"
