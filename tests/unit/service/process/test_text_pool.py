"""Work on text: long texts have a thread of low priority and a short queue, and short ones do not wait for them.

Tenants take turns on every thread, and none takes all places of long texts.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from service.errors import Overloaded
from service.process.text_pool import LONG_BYTES, MAX_LONG, FairQueue, TextPool

LONG = LONG_BYTES + 1


@pytest.fixture
def pool() -> Iterator[TextPool]:
    pool = TextPool("texts", 1)
    yield pool
    pool.close()


async def test_short_text_does_not_wait_behind_a_long_one(pool: TextPool) -> None:
    release = threading.Event()
    waiting = asyncio.create_task(pool.run("", LONG, release.wait))
    try:
        assert await pool.run("", LONG_BYTES, lambda text: text, "short") == "short"
        assert not waiting.done()
    finally:
        release.set()
    assert await waiting


async def test_no_more_long_texts_wait_than_there_are_places(pool: TextPool) -> None:
    release, done = threading.Event(), list[int]()

    def work(number: int) -> int:
        release.wait()
        done.append(number)
        return number

    tasks = [asyncio.create_task(pool.run("", LONG, work, number)) for number in range(MAX_LONG)]
    try:
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=f"^{MAX_LONG} requests of texts with long texts") as caught:
            await pool.run("", LONG, work, -1)
        assert caught.value.retry_after_seconds > 0
        # A place comes back with its caller's leave, and what has not begun never does.
        tasks[-1].cancel()
        await asyncio.gather(tasks.pop(), return_exceptions=True)
        tasks.append(asyncio.create_task(pool.run("", LONG, work, MAX_LONG)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await pool.run("", LONG, work, -1)
    finally:
        release.set()
    expected = [*range(MAX_LONG - 1), MAX_LONG]
    assert await asyncio.gather(*tasks) == done == expected
    assert await pool.run("", LONG, work, 99) == 99


class Thread:
    """A pool's only thread, held by work of the tenant "a"; `begun` is what began after that, in order."""

    def __init__(self, pool: TextPool, num_bytes: int) -> None:
        self._pool = pool
        self._num_bytes = num_bytes
        self._goes_on = threading.Event()
        self.begun: list[object] = []

    async def __aenter__(self) -> Thread:
        self._held = asyncio.create_task(self._pool.run("a", self._num_bytes, self._goes_on.wait))
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._goes_on.set()
        await self._held

    async def ask(self, tenant: str, what: object) -> asyncio.Task[None]:
        """Work that waits by the time that this returns."""
        task = asyncio.create_task(self._pool.run(tenant, self._num_bytes, self.begun.append, what))
        await asyncio.sleep(0)
        return task


async def test_tenants_take_turns_however_much_one_of_them_asks_for(pool: TextPool) -> None:
    async with Thread(pool, LONG_BYTES) as thread:
        tasks = [await thread.ask("a", f"a{number}") for number in range(4)]
        tasks += [await thread.ask("b", f"b{number}") for number in range(2)]
        tasks.append(await thread.ask("", "keyless"))
    await asyncio.gather(*tasks)
    assert thread.begun == ["a0", "b0", "keyless", "a1", "b1", "a2", "a3"]


async def test_cancelled_work_leaves_the_queue_with_its_text_at_once(pool: TextPool) -> None:
    class Text:
        pass

    async with Thread(pool, LONG) as thread:
        text = Text()
        gone, kept = weakref.ref(text), [await thread.ask("a", 1)]
        tasks = [await thread.ask("a", text), await thread.ask("b", text)]
        del text
        kept.append(await thread.ask("b", 2))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        del tasks, task
        assert gone() is None
        assert not thread.begun
    await asyncio.gather(*kept)
    assert thread.begun == [1, 2]


class Held(Executor):
    """An executor whose work ends when the test lets it."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, work: Callable[..., Any], /, *_: Any, **__: Any) -> Future[Any]:
        self.futures.append(Future())
        self.futures[-1].set_running_or_notify_cancel()
        return self.futures[-1]


async def test_work_that_is_cancelled_as_its_turn_comes_leaves_its_turn_to_the_next() -> None:
    executor, loop = Held(), asyncio.get_running_loop()
    queue = FairQueue(executor, 1)
    tasks = [asyncio.create_task(queue.run("a", LONG_BYTES, print)) for _ in range(4)]
    await asyncio.sleep(0)
    # One is cancelled before its turn, with its task not awake yet; one between its turn and its task's waking.
    tasks[1].cancel()
    executor.futures[0].set_result(None)
    loop.call_soon(tasks[2].cancel)
    await asyncio.wait(tasks[:3])
    assert [task.cancelled() for task in tasks[:3]] == [False, True, True]
    await asyncio.sleep(0)
    assert len(executor.futures) == 2, "the last one's turn has come"
    executor.futures[1].set_result(None)
    await tasks[3]
    assert (queue._num_begun, queue._num_begun_bytes, queue._waiting) == (0, 0, {})


async def test_a_tenant_that_is_alone_uses_every_thread() -> None:
    pool = TextPool("texts", 2)
    together = threading.Barrier(2)
    try:
        found = await asyncio.gather(*(pool.run("a", LONG_BYTES, together.wait, 60) for _ in range(4)))
    finally:
        pool.close()
    assert sorted(found) == [0, 0, 1, 1]


async def test_a_thread_has_short_texts_behind_the_one_that_it_runs(pool: TextPool) -> None:
    async with Thread(pool, 1) as thread:
        tasks = [await thread.ask("a", number) for number in range(40)]
        assert len(pool._short._waiting["a"]) == 40 - 31
    await asyncio.gather(*tasks)
    assert thread.begun == [*range(40)]


async def test_one_tenant_has_half_of_the_places_for_long_texts(pool: TextPool) -> None:
    async with Thread(pool, LONG) as thread:
        tasks = [await thread.ask("a", number) for number in range(MAX_LONG // 2 - 1)]
        refused = str((await thread.ask("a", -1)).exception())
        assert refused.startswith(f"{MAX_LONG // 2} requests of texts with long texts with this API key run")
        tasks += [await thread.ask("b", number) for number in range(MAX_LONG // 2)]
        refused = str((await thread.ask("c", -1)).exception())
        assert refused.startswith(f"{MAX_LONG} requests of texts with long texts run")
    await asyncio.gather(*tasks)
    await pool.run("a", LONG, thread.begun.append, -1)
    assert thread.begun.count(-1) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
async def test_long_texts_yield_to_other_threads(pool: TextPool) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = niceness()
    assert await pool.run("", 0, niceness) == own
    assert await pool.run("", LONG, niceness) == min(own + 10, 19)
    assert niceness() == own


@pytest.mark.parametrize("num_bytes", [0, LONG])
async def test_work_that_no_thread_can_be_started_for_leaves_its_room(
    pool: TextPool, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            await pool.run("a", num_bytes, lambda: 0)
    assert await pool.run("a", num_bytes, lambda: 1) == 1
