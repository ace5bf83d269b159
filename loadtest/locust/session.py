"""One process's share of a run under Locust, and the ledger that adds up the shares of all processes.

A session holds this process's requests and reports new records to the leading process, whose ledger adds them up.
Request numbers are global, so all shares together equal the requests of a single process. Imports neither Locust nor
gevent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.core.arrivals import share
from loadtest.core.figures import ClientLoad, Run
from loadtest.core.meter import Meter
from loadtest.core.options import LoadOptions
from loadtest.core.records import Record, Watch
from loadtest.core.workload import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A process's share of a run.

    Args:
        run: the run's name, a prefix of request ids.
        index: the share's number, from 0.
        count: the number of shares.
        begin: when the run begins, in seconds since the epoch, the only clock that hosts share.
        vocab_size: of the model.
        model: its name.
        seconds: limit of an endless schedule; None for none.
    """

    run: str
    index: int
    count: int
    begin: float
    vocab_size: int
    model: str
    seconds: float | None


@dataclass(slots=True, eq=False)
class Flight:
    """A request in flight; `cancel_call` is None until it is sent."""

    watch: Watch
    cancel_call: Callable[[], Any] | None = None

    def cancel(self) -> None:
        """Cancels it, now or as soon as it is sent."""
        self.watch.is_cancelled = True
        if self.cancel_call is not None:
            self.cancel_call()

    def sent(self, cancel_call: Callable[[], Any]) -> None:
        """Notes how to cancel the sent request."""
        self.cancel_call = cancel_call
        if self.watch.is_cancelled:
            cancel_call()


class Session:
    """One process's requests in one run."""

    def __init__(self, part: Share, load: LoadOptions) -> None:
        self.part = part
        self.load = load
        self.is_closed = False
        """Whether sending has stopped."""
        self.is_exhausted = False
        """Whether the whole share has been sent."""
        self.is_drained = False
        """Whether sending has stopped and no request is in flight."""
        self.is_dispatched = False
        """Whether a user already sends this share's schedule."""
        self.offered = 0
        self.began = time.monotonic() + (part.begin - time.time())
        """Begin of the run on this host's monotonic clock."""
        self._workload = load.workload(part.vocab_size)
        self._stage = ""
        self._prompt_tokens: int | None = None
        self._flights: set[Flight] = set()
        self._next = part.index
        self._unreported: list[Record] = []
        self._meter = Meter()

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""
        return len(self._flights)

    def now(self) -> float:
        """Seconds since the run began; negative before."""
        return time.monotonic() - self.began

    def enter(self, stage: str, prompt_tokens: int | None) -> None:
        """Starts a stage: later requests belong to it."""
        self._stage, self._prompt_tokens = stage, prompt_tokens

    def schedule(self) -> list[tuple[int, float]]:
        """This share of an open loop: request numbers and times since the run began.

        Raises:
            ValueError: if the run has no schedule, or an endless one.
        """
        if self.load.arrivals is None:
            raise ValueError("--arrivals: an open loop needs a schedule")
        times = self.load.arrivals.schedule(count=self.load.requests, seconds=self.part.seconds)
        return share(times, self.part.index, self.part.count)

    def take(self) -> int | None:
        """The number of the next request of a closed loop; None if there is none or sending has stopped."""
        number = self._next
        if self.load.requests is not None and number >= self.load.requests:
            self.is_exhausted = True
            return None
        if self.is_closed:
            return None
        self._next += self.part.count
        return number

    def offer(self, number: int, due: float | None = None) -> tuple[Flight, Prompt]:
        """Creates a request to be sent now; `due` may lie in the past. It counts as offered."""
        prompt = self._workload.prompt(number, self._prompt_tokens)
        now = self.now()
        watch = Watch(
            number=number,
            request_id=f"{self.part.run}-{number}",
            stage=self._stage,
            intended=now if due is None else due,
            sent=now,
            prompt_tokens=len(prompt.token_ids),
        )
        flight = Flight(watch)
        self._flights.add(flight)
        self.offered += 1
        return flight, prompt

    def ended(self, flight: Flight, code: str, detail: str = "") -> Record:
        """Ends a request with this status."""
        record = flight.watch.over(code, self.now(), detail)
        self._flights.discard(flight)
        self._unreported.append(record)
        return record

    def cancel(self) -> None:
        """Cancels every request in flight."""
        for flight in tuple(self._flights):
            flight.cancel()

    def report(self) -> dict[str, Any]:
        """The state, and the records since the last call, as plain values."""
        records, self._unreported = self._unreported, []
        return {
            "run": self.part.run,
            "index": self.part.index,
            "offered": self.offered,
            "is_exhausted": self.is_exhausted,
            "is_drained": self.is_drained,
            "began": self.began,
            "client": asdict(self._meter.read()),
            "records": [record.to_dict() for record in records],
        }


@dataclass(slots=True)
class Ledger:
    """The reports of all shares of one run."""

    run: str = ""
    count: int = 0
    is_open: bool = False
    records: list[Record] = field(default_factory=list)
    _last: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """The last report of each share, by its index."""

    def add(self, message: Mapping[str, Any]) -> None:
        """Adds a session's report; ignores those of earlier runs."""
        if message["run"] == self.run:
            self.records += [Record.from_dict(each) for each in message["records"]]
            self._last[message["index"]] = {**message, "records": ()}

    def is_exhausted(self, indices: Sequence[int]) -> bool:
        """Whether these shares have been sent completely."""
        return all(index in self._last and self._last[index]["is_exhausted"] for index in indices)

    def is_drained(self, indices: Sequence[int]) -> bool:
        """Whether these shares have stopped and have no request in flight."""
        return all(index in self._last and self._last[index]["is_drained"] for index in indices)

    @property
    def began(self) -> list[float]:
        """When each share began, on its host's monotonic clock; 0 for a silent one."""
        return [self._last[index]["began"] if index in self._last else 0.0 for index in range(self.count)]

    def to_run(self) -> Run:
        """The run so far."""
        reports = [self._last[index] for index in sorted(self._last)]
        return Run(
            records=tuple(self.records),
            offered=sum(each["offered"] for each in reports),
            seconds=max((record.ended for record in self.records), default=0.0),
            clients=tuple(ClientLoad(**each["client"]) for each in reports),
            is_open=self.is_open,
            silent=self.count - len(reports),
        )
