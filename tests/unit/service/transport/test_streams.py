"""Bidirectional streams are bounded, and a silent one loses its place to another caller."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import ClientStalled, RateLimited
from service.transport import streams
from service.transport.flooding import FloodGuard
from service.transport.streams import OpenStream, OpenStreams

MESSAGE = 100


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def four_streams(monkeypatch: pytest.MonkeyPatch) -> OpenStreams:
    monkeypatch.setattr(streams, "_MAX_STREAM_BYTES", MESSAGE * 4)
    return OpenStreams(MESSAGE, FloodGuard(MESSAGE))


async def test_streams_that_bring_many_requests_are_bounded(four_streams: OpenStreams) -> None:
    bound = four_streams
    async with bound.open("ipv4:127.0.0.1:1", "a"), bound.open("ipv4:127.0.0.1:1", "a"):
        with pytest.raises(RateLimited):
            await bound.open("ipv4:127.0.0.1:1", "a").__aenter__()
        async with bound.open("ipv4:127.0.0.1:1", "b"):
            pass
    async with bound.open("ipv4:127.0.0.1:1", "a"), bound.open("ipv4:127.0.0.1:1", "a"):
        pass


async def test_the_longest_silent_stream_of_the_greediest_ends_for_another_caller(four_streams: OpenStreams) -> None:
    bound = four_streams
    opened: dict[str, OpenStream] = {}
    ended: dict[str, ClientStalled] = {}

    async def hold(name: str) -> None:
        try:
            async with bound.open("ipv4:127.0.0.1:1", name[0]) as opened[name]:
                await asyncio.Event().wait()
        except ClientStalled as error:
            ended[name] = error

    async def begun(*names: str) -> None:
        tasks.extend(asyncio.create_task(hold(name)) for name in names)
        await settle()

    tasks: list[asyncio.Task[None]] = []
    await begun("a1", "b1", "b2", "c1")
    # It is the oldest, but a request of it runs.
    with opened["b1"].working():
        await begun("d1")
        assert list(ended) == ["b2"]
        # Each has one now.
        await begun("e1")
        assert list(ended) == ["b2", "a1"]
        # One more than an equal has is not to be had.
        with pytest.raises(RateLimited):
            await bound.open("ipv4:127.0.0.1:1", "d").__aenter__()
    assert "silent" in str(ended["b2"])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with bound.open("ipv4:127.0.0.1:1", "f"), bound.open("ipv4:127.0.0.1:1", "f"):
        pass


async def test_a_stream_is_silent_since_it_last_worked(four_streams: OpenStreams) -> None:
    bound = four_streams
    async with bound.open("ipv4:127.0.0.1:1", "a") as first:
        with pytest.raises(ClientStalled):  # noqa: PT012 (where it is raised is the point)
            async with bound.open("ipv4:127.0.0.1:1", "a"), bound.open("ipv4:127.0.0.1:1", "b"):
                with first.working():
                    pass
                async with bound.open("ipv4:127.0.0.1:1", "b"), bound.open("ipv4:127.0.0.1:1", "c"):
                    await asyncio.Event().wait()
        assert not first.is_ended
