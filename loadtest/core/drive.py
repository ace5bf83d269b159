"""Putting load on a server from one asyncio loop: by a schedule, or by users who each wait for their answer.

In an open loop requests are sent when they are due, whatever became of those before; in a closed loop a user asks again
when the answer is there, so that a slow server is asked less. Both end when what is in flight has ended, and give one
record for each request. Knows no protocol and no figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from loadtest.core import wire
from loadtest.core.clients import Call, Client
from loadtest.core.figures import Run
from loadtest.core.meter import Meter
from loadtest.core.records import Record, Watch
from loadtest.core.workload import Prompt, Workload

_CANCEL_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class _Flight:
    """A request under way and the call that can end it."""

    watch: Watch
    call: Call

    def give_up(self) -> None:
        self.watch.is_given_up = True
        self.call.cancel()


class Driver:
    """One run against one client; made for it, used once.

    Args:
        client: who is asked.
        workload: what is asked.
        timeout_seconds: deadline of each request; None for none.
        drain_seconds: how long to wait, once nothing more is to be sent, for what is in flight; then it is given up.
    """

    def __init__(
        self, client: Client, workload: Workload, *, timeout_seconds: float | None = None, drain_seconds: float = 60.0
    ) -> None:
        self._client = client
        self._workload = workload
        self._timeout_seconds = timeout_seconds
        self._drain_seconds = drain_seconds
        self._name = uuid.uuid4().hex[:8]
        self._stop = asyncio.Event()
        self._is_given_up = False
        self._flights: set[_Flight] = set()
        self._records: list[Record] = []
        self._offered = 0
        self._meter = Meter()
        self.began = time.monotonic()

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return len(self._flights)

    def stop(self) -> None:
        """Sends nothing more; when nothing more is to be sent anyway, gives up what is in flight."""
        if self._stop.is_set():
            self._give_up()
        self._stop.set()

    async def open_loop(self, schedule: Sequence[float], max_concurrency: int | None = None) -> Run:
        """Sends each request at its time, in seconds from now.

        With `max_concurrency` a request waits while so many are in flight. Its latency counts from the schedule all the
        same: the cap is this client's, the waiting is the asker's.
        """
        prompts = [self._workload.prompt(number) for number in range(len(schedule))]
        places = asyncio.Semaphore(max_concurrency or len(schedule) or 1)
        tasks = []
        self._begin()
        for number, due in enumerate(schedule):
            if await self._stopped_before(due):
                break
            self._offered += 1
            tasks.append(asyncio.create_task(self._ask_in_turn(number, due, prompts[number], places)))
        return await self._finish(tasks, is_open=True)

    async def closed_loop(self, users: int, *, count: int | None = None, seconds: float | None = None) -> Run:
        """So many users ask, each again as soon as it has its answer, until a count or a time is reached."""
        numbers = itertools.count() if count is None else iter(range(count))

        async def use() -> None:
            while not self._stop.is_set() and (seconds is None or self._now() < seconds):
                if (number := next(numbers, None)) is None:
                    break
                prompt = self._workload.prompt(number)
                self._offered += 1
                await self._ask(number, None, prompt)

        self._begin()
        tasks = [asyncio.create_task(use()) for _ in range(users)]
        done = asyncio.create_task(asyncio.wait(tasks))
        stopped = asyncio.create_task(self._stop.wait())
        limit = None if seconds is None else max(0.0, seconds - self._now())
        await asyncio.wait([done, stopped], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return await self._finish(tasks, is_open=False)

    def _begin(self) -> None:
        self.began = time.monotonic()
        self._meter = Meter()

    def _now(self) -> float:
        return time.monotonic() - self.began

    async def _stopped_before(self, due: float) -> bool:
        """Waits until then, or until the run is stopped; whether it was."""
        if (delay := due - self._now()) > 0.0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stop.wait()
        return self._stop.is_set()

    async def _ask_in_turn(self, number: int, due: float, prompt: Prompt, places: asyncio.Semaphore) -> None:
        async with places:
            await self._ask(number, due, prompt)

    async def _ask(self, number: int, due: float | None, prompt: Prompt) -> None:
        """One request from its sending to its end; None is due when it is sent."""
        request_id = f"{self._name}-{number}"
        now = self._now()
        watch = Watch(
            number=number,
            request_id=request_id,
            stage="",
            intended=now if due is None else due,
            sent=now,
            prompt_tokens=self._client.known_prompt_tokens(prompt),
        )
        if self._is_given_up:
            watch.is_given_up = True
            self._records.append(watch.over("CANCELLED", self._now()))
            return
        flight = _Flight(watch, self._client.ask(prompt, request_id, self._timeout_seconds))
        self._flights.add(flight)
        patience = None
        if prompt.patience_seconds is not None:
            patience = asyncio.get_running_loop().call_later(prompt.patience_seconds, flight.give_up)
        try:
            code, detail = await self._read(flight)
        finally:
            self._flights.discard(flight)
            flight.call.cancel()
            if patience is not None:
                patience.cancel()
        self._records.append(watch.over(code, self._now(), detail))

    async def _read(self, flight: _Flight) -> tuple[str, str]:
        """Notes all that comes; the code and the words with which it ended."""
        watch = flight.watch
        try:
            async with contextlib.aclosing(flight.call.pieces()) as pieces:
                async for piece in pieces:
                    watch.saw(piece, self._now())
                    if piece.error:
                        return wire.status_in(piece.error)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        except asyncio.CancelledError:
            # Ending a call ends the reading of it as if this task were to end.
            if not watch.is_given_up:
                raise
            return "CANCELLED", ""
        return "OK", ""

    def _give_up(self) -> None:
        """Ends what is in flight; what still waits for its turn is not sent any more."""
        self._is_given_up = True
        for flight in tuple(self._flights):
            flight.give_up()

    async def _finish(self, tasks: Sequence[asyncio.Task[None]], *, is_open: bool) -> Run:
        """Waits for what is in flight, gives up what takes too long, and counts."""
        self._stop.set()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=self._drain_seconds)
            if pending:
                self._give_up()
                _, pending = await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
            if pending:
                raise RuntimeError(f"{len(pending)} requests did not end within {_CANCEL_SECONDS} s of being given up")
        for task in tasks:
            task.result()
        seconds = max((record.ended for record in self._records), default=self._now())
        return Run(self._records, self._offered, seconds, (self._meter.read(),), is_open)
