"""Threads for work on text, off the event loop and behind the engine: tokenizing, templates, large messages.

Tokenizing takes about two microseconds per byte (a megabyte: two seconds) and cannot be interrupted. So long texts have
one thread of their own, with a low priority and a short queue: they neither delay short texts nor take the engine's
cores. Tenants take turns on every thread (`FairQueue`), so that what one of them asks for does not hold up another.
`model.spec.tokenizer` releases the interpreter's lock while it tokenizes. Knows nothing of what the work is.
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
"""Texts of more bytes are long."""
MAX_LONG = 16
"""Long texts that may run or wait at once; each holds no more than its message."""
# What work counts for at least while it is in an executor: nothing is done in no time.
_LEAST_BYTES = 1 << 10
# Of the long texts' thread: with this, Linux gives it a tenth of a core that another thread wants.
_NICENESS = 10
# Estimates of when a long text's place is free.
_SECONDS_PER_BYTE = 2e-6
_MIN_RETRY_SECONDS = 0.05


class FairQueue:
    """A queue in front of an executor: tenants take turns, one piece of work each (round robin).

    Work conserving: a tenant that is alone has every thread. The executor has what its threads run, and behind that no
    more than `LONG_BYTES` of short work, so that threads do not wait for the event loop between short texts. The rest
    waits here; cancelled work leaves at once, with its text. Used on one event loop.

    Args:
        executor: runs the work.
        num_threads: of the executor.
    """

    def __init__(self, executor: Executor, num_threads: int) -> None:
        self._executor = executor
        self._num_threads = num_threads
        # Of the work in the executor.
        self._num_begun = self._num_begun_bytes = 0
        # By tenant, the next one first, what waits: the future of its turn, and its bytes. No tenant's is empty.
        self._waiting: dict[str, dict[asyncio.Future[None], int]] = {}

    async def run(self, tenant: str, num_bytes: int, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Runs `work` on a thread. Cancelling takes back work that has not begun.

        Args:
            tenant: whose work it is.
            num_bytes: how long the text is, at least.
            work: what to do.
            arguments: what to do it with.
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
        # Not when the caller leaves: a thread is busy to the end of its work.
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the executor after what it does; work that waits is cancelled."""
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
        """Begins what the executor has room for."""
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
    """A limited number of places. A tenant with a name, which has an API key, takes half of them at most.

    Args:
        what: the places are for, in an `Overloaded`.
        limit: how many there are.
    """

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._taken = Counter[str]()

    @property
    def num_taken(self) -> int:
        """Places that are taken."""
        return self._taken.total()

    @contextmanager
    def take(self, tenant: str, retry_after_seconds: float) -> Iterator[None]:
        """Takes a place for the length of the block.

        Args:
            tenant: whose work it is; empty where calls need no key.
            retry_after_seconds: when a place should be free.

        Raises:
            Overloaded: when all places are taken, or the tenant has its half of them.
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
        self._long = FairQueue(ThreadPoolExecutor(1, thread_name_prefix=f"long-{name}", initializer=_lower_priority), 1)
        self._long_places = TenantSlots(f"{name} with long texts", MAX_LONG)
        self._long_sizes: list[int] = []

    async def run(self, tenant: str, num_bytes: int, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Runs `work` on a thread. Cancelling takes back work that has not begun.

        Args:
            tenant: whose work it is; empty where calls need no key.
            num_bytes: how long the text is, at least.
            work: what to do.
            arguments: what to do it with.

        Raises:
            Overloaded: when the text is long and `MAX_LONG` others run or wait, or half as many of a tenant with a
                name.
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
        """Ends the threads after what they do; work that waits is cancelled."""
        for queue in (self._short, self._long):
            queue.close()


def _lower_priority() -> None:
    """On Linux, of the calling thread alone; elsewhere it would be the whole process's."""
    if sys.platform == "linux":
        os.nice(_NICENESS)
