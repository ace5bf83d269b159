"""Drives load from one asyncio loop: open loop by a schedule, or closed loop by a number of users.

An open loop sends each request when it is due. In a closed loop each user sends its next request after its answer, so a
slow server gets fewer requests. Both wait for the requests in flight and return one record per request.
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
    """A request in flight and its call."""

    watch: Watch
    call: Call

    def cancel(self) -> None:
        self.watch.is_cancelled = True
        self.call.cancel()


class Driver:
    """One run against one client. Use each instance once.

    Args:
        client: the server's client.
        workload: the requests.
        timeout_seconds: deadline of each request; None for none.
        drain_seconds: how long to wait for the requests in flight at the end, before cancelling them.
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
        self._is_cancelled = False
        self._flights: set[_Flight] = set()
        self._records: list[Record] = []
        self._offered = 0
        self._meter = Meter()
        self.began = time.monotonic()

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""
        return len(self._flights)

    @property
    def ended(self) -> int:
        """The number of requests that have ended."""
        return len(self._records)

    def stop(self) -> None:
        """Stops sending; the second call cancels the requests in flight."""
        if self._stop.is_set():
            self._cancel()
        self._stop.set()

    async def open_loop(self, schedule: Sequence[float], max_concurrency: int | None = None) -> Run:
        """Sends each request at its time, in seconds from now.

        `max_concurrency` delays requests while so many are in flight; the delay counts as latency.
        """
        prompts = [self._workload.prompt(number) for number in range(len(schedule))]
        slots = asyncio.Semaphore(max_concurrency or len(schedule) or 1)
        tasks = []
        self._begin()
        for number, due in enumerate(schedule):
            if await self._stopped_before(due):
                break
            self._offered += 1
            tasks.append(asyncio.create_task(self._ask_in_slot(number, due, prompts[number], slots)))
        return await self._finish(tasks, is_open=True)

    async def closed_loop(self, users: int, *, count: int | None = None, seconds: float | None = None) -> Run:
        """Each user sends its next request after its answer, until a count or a time is reached."""
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
        """Waits until `due` or until the run is stopped; returns whether it was stopped."""
        if (delay := due - self._now()) > 0.0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stop.wait()
        return self._stop.is_set()

    async def _ask_in_slot(self, number: int, due: float, prompt: Prompt, slots: asyncio.Semaphore) -> None:
        async with slots:
            await self._ask(number, due, prompt)

    async def _ask(self, number: int, due: float | None, prompt: Prompt) -> None:
        """Runs one request to its end; `due` None means now."""
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
        if self._is_cancelled:
            watch.is_cancelled = True
            self._records.append(watch.over("CANCELLED", self._now()))
            return
        flight = _Flight(watch, self._client.ask(prompt, request_id, self._timeout_seconds))
        self._flights.add(flight)
        patience = None
        if prompt.patience_seconds is not None:
            patience = asyncio.get_running_loop().call_later(prompt.patience_seconds, flight.cancel)
        try:
            code, detail = await self._read(flight)
        finally:
            self._flights.discard(flight)
            flight.call.cancel()
            if patience is not None:
                patience.cancel()
        self._records.append(watch.over(code, self._now(), detail))

    async def _read(self, flight: _Flight) -> tuple[str, str]:
        """Records every message; returns the final code and detail."""
        watch = flight.watch
        try:
            async with contextlib.aclosing(flight.call.pieces) as pieces:
                async for piece in pieces:
                    watch.saw(piece, self._now())
                    if piece.error:
                        return wire.status_in(piece.error)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        except asyncio.CancelledError:
            # Cancelling a call raises CancelledError in its reader, as cancelling this task would.
            if not watch.is_cancelled:
                raise
            return "CANCELLED", ""
        return "OK", ""

    def _cancel(self) -> None:
        """Cancels the requests in flight and those that wait for a slot."""
        self._is_cancelled = True
        for flight in tuple(self._flights):
            flight.cancel()

    async def _finish(self, tasks: Sequence[asyncio.Task[None]], *, is_open: bool) -> Run:
        """Waits for the requests in flight, cancels those that take too long, and builds the run."""
        self._stop.set()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=self._drain_seconds)
            if pending:
                self._cancel()
                _, pending = await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
            if pending:
                raise RuntimeError(f"{len(pending)} requests did not end within {_CANCEL_SECONDS} s of being cancelled")
        for task in tasks:
            task.result()
        seconds = max((record.ended for record in self._records), default=self._now())
        return Run(self._records, self._offered, seconds, (self._meter.read(),), is_open)
