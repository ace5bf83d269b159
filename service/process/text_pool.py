"""Threads for work on text off the event loop: tokenizing, chat templates, large messages.

Tokenizing takes about two microseconds per byte (a megabyte: two seconds) and cannot be interrupted. Long texts
therefore have one thread of their own, with low priority and a short queue: they neither delay short texts nor take the
engine's cores. Tenants share every thread by round robin (`FairQueue`). `model.spec.tokenizer` releases the
interpreter's lock while it tokenizes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

from service.errors import Overloaded

_Result = TypeVar("_Result")

LONG_BYTES = 32 << 10
"""Texts above this size are long."""
MAX_LONG = 16
"""Long texts that may run or wait at once."""
# Least size that work in an executor counts for.
_LEAST_BYTES = 1 << 10
# Of the long texts' thread: Linux gives it a tenth of a core that another thread wants.
_NICENESS = 10
# For the retry delay of a refused long text.
_SECONDS_PER_BYTE = 2e-6
_MIN_RETRY_SECONDS = 0.05


class FairQueue:
    """A queue in front of an executor: round robin over tenants, one work item each.

    Work conserving: a tenant that is alone gets every thread. The executor holds one item per thread plus at most
    `LONG_BYTES` of short work, so that threads do not wait for the event loop between short texts. The rest waits here;
    canceled work leaves at once. Used on one event loop.

    Args:
        executor: runs the work.
        num_threads: of the executor.
    """

    def __init__(self, executor: Executor, num_threads: int) -> None:
        self._executor = executor
        self._num_threads = num_threads
        # Work in the executor.
        self._num_begun = self._num_begun_bytes = 0
        # Waiting work by tenant, the next tenant first: the future of its turn → its bytes. No entry is empty.
        self._waiting: dict[str, dict[asyncio.Future[None], int]] = {}

    async def run(self, tenant: str, num_bytes: int, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Runs `work(*arguments)` on a thread. Canceling withdraws work that has not begun.

        Args:
            tenant: the owner of the work.
            num_bytes: the text's length, at least.
            work: runs on the thread.
            arguments: of `work`.
        """
        loop, num_bytes = asyncio.get_running_loop(), max(num_bytes, _LEAST_BYTES)
        await self._take_turn(tenant, num_bytes)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended before the thread
                loop.call_soon_threadsafe(self._release, num_bytes)

        try:
            future = self._executor.submit(work, *arguments)
        except BaseException:  # closed, or no thread can be started
            self._release(num_bytes)
            raise
        # At the work's end, even if the caller was canceled: the thread is busy until then.
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the executor after its running work; waiting work is canceled."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for turns in self._waiting.values():
            for turn in turns:
                turn.cancel()

    async def _take_turn(self, tenant: str, num_bytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, {})[turn] = num_bytes
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(num_bytes)
            elif turn in self._waiting.get(tenant, ()):
                self._leave(tenant, turn)
                self._begin()
            raise

    def _begin(self) -> None:
        """Starts as much work as the executor has room for."""
        while self._waiting:
            tenant, turns = next(iter(self._waiting.items()))
            turn, num_bytes = next(iter(turns.items()))
            if turn.cancelled():  # its task will not wake before the loop's next round
                self._leave(tenant, turn)
                continue
            if self._num_begun >= self._num_threads and self._num_begun_bytes + num_bytes > LONG_BYTES:
                return
            self._leave(tenant, turn)
            if turns:  # behind the other tenants
                self._waiting[tenant] = self._waiting.pop(tenant)
            self._num_begun += 1
            self._num_begun_bytes += num_bytes
            turn.set_result(None)

    def _release(self, num_bytes: int) -> None:
        self._num_begun -= 1
        self._num_begun_bytes -= num_bytes
        self._begin()

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        del self._waiting[tenant][turn]
        if not self._waiting[tenant]:
            del self._waiting[tenant]


class TenantSlots:
    """A limited number of slots. A named tenant (with an API key) gets at most half of them.

    Args:
        what: the slots are for, in an `Overloaded`.
        limit: their number.
    """

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._taken = Counter[str]()

    @property
    def num_taken(self) -> int:
        """Slots in use."""
        return self._taken.total()

    @contextmanager
    def take(self, tenant: str, retry_after_seconds: float) -> Iterator[None]:
        """Holds a slot inside the block.

        Args:
            tenant: the owner of the work; empty where calls need no key.
            retry_after_seconds: when a slot should be free.

        Raises:
            Overloaded: all slots are taken, or the tenant holds half of them.
        """
        if (taken := self.num_taken) >= self._limit:
            raise Overloaded(self._what, taken, self._limit, retry_after_seconds)
        if tenant and (taken := self._taken[tenant]) >= self._limit // 2:
            raise Overloaded(f"{self._what} with this API key", taken, self._limit // 2, retry_after_seconds)
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken -= Counter((tenant,))


class TextPool:
    """Runs work on text. Used on one event loop; its threads start with their first work.

    Args:
        name: of its threads, and of itself in an `Overloaded`.
        num_threads: for short texts.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._short = FairQueue(ThreadPoolExecutor(num_threads, thread_name_prefix=name), num_threads)
        self._long = FairQueue(ThreadPoolExecutor(1, thread_name_prefix=f"long-{name}", initializer=lower_priority), 1)
        self._long_places = TenantSlots(f"{name} with long texts", MAX_LONG)
        self._long_sizes: list[int] = []

    async def run(self, tenant: str, num_bytes: int, work: Callable[..., _Result], *arguments: object) -> _Result:
        """As `FairQueue.run`.

        Raises:
            Overloaded: the text is long and `MAX_LONG` others run or wait, or half as many of a named tenant.
        """
        if num_bytes <= LONG_BYTES:
            return await self._short.run(tenant, num_bytes, work, *arguments)
        retry = max(_SECONDS_PER_BYTE * next(iter(self._long_sizes), 0), _MIN_RETRY_SECONDS)
        with self._long_places.take(tenant, retry):
            self._long_sizes.append(num_bytes)
            try:
                return await self._long.run(tenant, num_bytes, work, *arguments)
            finally:
                self._long_sizes.remove(num_bytes)

    def close(self) -> None:
        """Ends the threads after their running work; waiting work is canceled."""
        for queue in (self._short, self._long):
            queue.close()


def lower_priority() -> None:
    """Of the calling thread; only on Linux, as elsewhere `nice` changes the whole process."""
    if sys.platform == "linux":
        os.nice(_NICENESS)
