"""The event loop's side of the engine thread: its start and end, and calls of functions on it that are awaited."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable

from service.engine.interfaces import EngineHandle, StepEngine
from service.errors import EngineFailed, NotServing
from service.runtime.engine_thread import EngineThread, Result


class ThreadClient:
    """Awaits what the engine thread does. No wait outlives the thread. Event loop only."""

    def __init__(self) -> None:
        self._thread: EngineThread | None = None
        self._ended: asyncio.Future[EngineFailed | None] | None = None
        # Done once the thread has released an engine that was replaced or removed.
        self._releasing: set[asyncio.Future[None]] = set()

    async def call(
        self, engine: EngineHandle, function: Callable[[StepEngine], Result], max_wait_seconds: float | None
    ) -> Result:
        """Runs `function` on an engine once that is idle; new requests of its model wait behind it.

        Cancelling takes the call back, unless `function` has begun: then it runs to its end and its result is dropped.

        Raises:
            RequestError: raised by `function`; EngineFailed for anything else it raised; NotServing if it never ran, as
                the engine was not idle for `max_wait_seconds` (None waits without limit) or does not serve any more, or
                the thread is over.
        """
        call = self._running.call(engine, function)
        complaint = f"{engine.model} was not idle for {max_wait_seconds or 0:g} s; try again"
        return await self._answer(call, max_wait_seconds, complaint)

    async def do(self, function: Callable[[], Result]) -> Result:
        """Runs `function` on the engine thread, between two steps, while all models wait.

        Raises:
            Exception: raised by `function`; EngineFailed or NotServing if the thread is over.
        """
        return await self._answer(self._running.do(function))

    async def wait_ended(self) -> EngineFailed | None:
        """Waits until the engine thread is over; returns the error that ended it, None after a stop."""
        return await asyncio.shield(self._end)

    @property
    def _running(self) -> EngineThread:
        if self._thread is None:
            raise NotServing("the server is starting")
        return self._thread

    @property
    def _end(self) -> asyncio.Future[EngineFailed | None]:
        if self._ended is None:
            raise NotServing("the server is starting")
        return self._ended

    async def _answer(
        self, call: concurrent.futures.Future[Result], max_wait_seconds: float | None = None, complaint: str = ""
    ) -> Result:
        """The result of a call; NotServing with this complaint if it has not begun for so long."""
        result, ended = asyncio.wrap_future(call), self._end
        either = (result, ended)
        try:
            done, _ = await asyncio.wait(either, timeout=max_wait_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                if call.cancel():
                    raise NotServing(complaint)
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
            raise ended.result() or NotServing("the server has stopped")
        finally:
            # Waiting for a future does not cancel it, and a call that is not cancelled runs.
            result.cancel()

    def _release(self) -> asyncio.Future[None]:
        """A future that is done once an engine is released, at the latest when the thread ends."""
        released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._end.done():
            released.set_result(None)
            return released
        self._releasing.add(released)
        released.add_done_callback(self._releasing.discard)
        return released

    def _thread_ended(self, error: EngineFailed | None) -> None:
        self._end.set_result(error)
        for released in tuple(self._releasing):
            finish(released)


def finish(future: asyncio.Future[None]) -> None:
    """Ends the wait for a future, unless it has ended."""
    if not future.done():
        future.set_result(None)
