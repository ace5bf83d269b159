"""Work on text: long texts have a thread of low priority and a short queue, and short ones do not wait for them."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from service.errors import Overloaded
from service.text_pool import LONG_BYTES, MAX_LONG, TextPool

LONG = LONG_BYTES + 1


class Panic(BaseException):
    """As extension modules raise them."""


@pytest.fixture
def pool() -> Iterator[TextPool]:
    pool = TextPool("texts", 1)
    yield pool
    pool.close()


async def test_short_text_does_not_wait_behind_a_long_one(pool: TextPool) -> None:
    release = threading.Event()
    waiting = asyncio.create_task(pool.run(LONG, release.wait))
    try:
        assert await pool.run(LONG_BYTES, lambda text: text, "short") == "short"
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

    tasks = [asyncio.create_task(pool.run(LONG, work, number)) for number in range(MAX_LONG)]
    try:
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=f"^{MAX_LONG} requests of texts with long texts") as caught:
            await pool.run(LONG, work, -1)
        assert caught.value.retry_after_seconds > 0
        # A place comes back with its caller's leave, and what has not begun never does.
        tasks[-1].cancel()
        await asyncio.gather(tasks.pop(), return_exceptions=True)
        tasks.append(asyncio.create_task(pool.run(LONG, work, MAX_LONG)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await pool.run(LONG, work, -1)
    finally:
        release.set()
    expected = [*range(MAX_LONG - 1), MAX_LONG]
    assert await asyncio.gather(*tasks) == done == expected
    assert await pool.run(LONG, work, 99) == 99


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
async def test_long_texts_yield_to_other_threads(pool: TextPool) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = niceness()
    assert await pool.run(0, niceness) == own
    assert await pool.run(LONG, niceness) == min(own + 10, 19)
    assert niceness() == own


@pytest.mark.parametrize("num_bytes", [0, LONG])
async def test_panic_reaches_its_caller_and_the_thread_goes_on(pool: TextPool, num_bytes: int) -> None:
    def work() -> None:
        raise Panic

    with pytest.raises(Panic):
        await pool.run(num_bytes, work)
    assert await pool.run(num_bytes, lambda: 1) == 1
