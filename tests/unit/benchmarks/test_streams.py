"""Streams amid which something happens: when they begin and end, and which waits belong to which. A scripted server."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from benchmarks.frame.streams import running, table, timed, waits_overlapping, waits_within
from onward.v1 import generation_pb2 as pb

GAPS = [(1.0, 2.0), (2.0, 3.0), (3.0, 5.0), (5.0, 9.0)]


class Call:
    """One stream: a token whenever the loop comes round, until it has all or is given up."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.sent = 0

    async def __aiter__(self) -> AsyncIterator[pb.GenerateStreamResponse]:
        while self.sent < self._count:
            await asyncio.sleep(0)
            self.sent += 1
            yield pb.GenerateStreamResponse(delta=pb.GenerateStreamResponse.Delta(token_ids=[1]))

    def cancel(self) -> None:
        self._count = 0


class Server:
    """Remembers who asked for what. Streams after a prompt that begins with 0 end early."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.models: list[str] = []
        self.calls: list[Call] = []

    def GenerateStream(self, request: pb.GenerateStreamRequest) -> Call:  # noqa: N802
        self.prompts.append(tuple(request.token_ids.ids))
        self.models.append(request.model)
        count = request.stopping.max_tokens if request.token_ids.ids[0] else 1
        self.calls.append(Call(count))
        return self.calls[-1]


def stub() -> Any:
    return Server()


async def test_the_body_begins_once_every_stream_has_begun_and_ends_them_all() -> None:
    server = stub()
    async with running(server, [[[1, 1]], [[2, 2]]], 10**9, begun=5, model="m") as answers:
        assert all(call.sent >= 5 for call in server.calls)
        assert answers == []
        before = [call.sent for call in server.calls]
        for _ in range(3):
            await asyncio.sleep(0)
        assert all(call.sent > count for call, count in zip(server.calls, before, strict=True))
    assert (server.prompts, server.models) == ([(1, 1), (2, 2)], ["m", "m"])
    assert len(answers) == 2
    assert all(len(answer.arrivals) >= 5 for answer in answers)


async def test_a_stream_asks_with_one_prompt_after_the_other_until_the_body_ends() -> None:
    server = stub()
    prompts: Iterator[list[int]] = ([1, number] for number in itertools.count())
    async with running(server, [prompts, prompts], 3, begun=2) as answers:
        while len(answers) < 10:  # noqa: ASYNC110 (the test's own timeout is the limit)
            await asyncio.sleep(0)
    assert server.prompts == [(1, number) for number in range(len(server.prompts))]
    assert len(answers) == len(server.prompts) <= 14
    assert {len(answer.arrivals) for answer in answers[:10]} == {3}


async def test_a_stream_that_fails_ends_the_body_and_the_other_streams() -> None:
    server = stub()
    with pytest.raises(ExceptionGroup) as raised:
        async with running(server, [[[1]], [[1], [0]]], 20, begun=1):
            await asyncio.sleep(60)
    (reason,) = raised.value.exceptions
    assert str(reason) == "asked for 20 tokens, got 1"


async def test_streams_without_room_to_begin_are_refused_rather_than_waited_for() -> None:
    with pytest.raises(RuntimeError, match="streams of 4 tokens never have 5: too little context"):
        async with running(stub(), [[[1]]], 4, begun=5):
            pass


async def test_a_call_is_made_within_its_span() -> None:
    moments: list[float] = []

    async def call() -> None:
        moments.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.001)

    began, ended = await timed(call)
    assert len(moments) == 1
    assert ended - began >= 0.0005


def test_waits_are_sorted_by_what_they_have_a_moment_in_common_with() -> None:
    assert waits_within(GAPS, 2.0, 5.0) == [1.0, 2.0]
    assert waits_overlapping(GAPS, [(2.5, 2.6)]) == [1.0]
    # One that ends when another begins has no moment with it, and none counts twice.
    assert waits_overlapping(GAPS, [(3.0, 5.0), (4.0, 4.5)]) == [2.0]
    assert waits_overlapping(GAPS, [(2.9, 3.1), (8.0, 20.0)]) == [1.0, 2.0, 4.0]


def test_a_table_has_a_further_column_when_that_has_a_name() -> None:
    waits = {"p50": 0.001, "p99": 0.0025, "max": 1.0, "count": 3}
    assert table({"before": waits})[1:] == ["| --- | ---: | ---: | ---: |", "| before | 1.0 ms | 2.5 ms | 1000.0 ms |"]
    lines = table({"before": waits, "load": waits}, "took", {"load": "2 s"})
    assert lines[0] == "| wait between tokens | p50 | p99 | largest | took |"
    assert [line.rpartition("ms |")[2] for line in lines[2:]] == ["  |", " 2 s |"]
