"""One process's part in a run under Locust, and the book in which the parts of all processes come together.

A session says what this process sends and holds what became of it; it is told to the process that leads the run piece
by piece, and the ledger there adds up. Every request has a number in the whole run, so that the parts together are the
same requests at the same times as one process would send. Knows neither Locust nor gevent.
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
    """Which part a process has.

    Args:
        run: names the run, in request ids.
        index: the part, from 0.
        count: how many parts there are.
        begin: when the run begins, in seconds since the epoch: hosts have no other clock in common.
        vocab_size: of the model.
        model: its name by the server.
        seconds: limit of a schedule that has no end of its own; None for none.
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
    """A request under way; `cancel` is there once it is sent."""

    watch: Watch
    cancel: Callable[[], Any] | None = None

    def give_up(self) -> None:
        """Ends it, now or as soon as it is sent."""
        self.watch.is_given_up = True
        if self.cancel is not None:
            self.cancel()

    def sent(self, cancel: Callable[[], Any]) -> None:
        """It is on its way, and can be ended so."""
        self.cancel = cancel
        if self.watch.is_given_up:
            cancel()


class Session:
    """One process's part in one run.

    Args:
        part: which part.
        load: what is asked and when.
    """

    def __init__(self, part: Share, load: LoadOptions) -> None:
        self.part = part
        self.load = load
        self.is_closed = False
        """Whether nothing more is to be sent."""
        self.is_exhausted = False
        """Whether everything of this part has been sent."""
        self.is_drained = False
        """Whether nothing is in flight and nothing will be."""
        self.is_dispatched = False
        """Whether somebody sends this part's schedule."""
        self.offered = 0
        self.began = time.monotonic() + (part.begin - time.time())
        """On this host's monotonic clock."""
        self._workload = load.workload(part.vocab_size)
        self._stage = ""
        self._prompt_tokens: int | None = None
        self._flights: set[Flight] = set()
        self._next = part.index
        self._untold: list[Record] = []
        self._meter = Meter()

    @property
    def in_flight(self) -> int:
        """Requests that were offered and have not ended."""
        return len(self._flights)

    def now(self) -> float:
        """Seconds since the run began; below 0 until then."""
        return time.monotonic() - self.began

    def enter(self, stage: str, prompt_tokens: int | None) -> None:
        """What is sent from now on belongs to this stage."""
        self._stage, self._prompt_tokens = stage, prompt_tokens

    def schedule(self) -> list[tuple[int, float]]:
        """What this part sends in an open loop: numbers and times since the run began.

        Raises:
            ValueError: when the run has no schedule, or one without end.
        """
        if self.load.arrivals is None:
            raise ValueError("--arrivals: an open loop needs a schedule")
        times = self.load.arrivals.schedule(count=self.load.requests, seconds=self.part.seconds)
        return share(times, self.part.index, self.part.count)

    def take(self) -> int | None:
        """The next number of a closed loop's request; None when there is none, or nothing more is to be sent."""
        number = self._next
        if self.load.requests is not None and number >= self.load.requests:
            self.is_exhausted = True
            return None
        if self.is_closed:
            return None
        self._next += self.part.count
        return number

    def offer(self, number: int, due: float | None = None) -> tuple[Flight, Prompt]:
        """A request that is to be sent at once, though it may have been due before; from now on it is in the book."""
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
        """It ended with this status."""
        record = flight.watch.over(code, self.now(), detail)
        self._flights.discard(flight)
        self._untold.append(record)
        return record

    def give_up(self) -> None:
        """Ends all that is in flight."""
        for flight in tuple(self._flights):
            flight.give_up()

    def tell(self) -> dict[str, Any]:
        """What has happened since this was last called, as plain values, and where things stand."""
        records, self._untold = self._untold, []
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
class _Part:
    """Where one part stands, as last told."""

    offered: int = 0
    is_exhausted: bool = False
    is_drained: bool = False
    began: float = 0.0
    client: ClientLoad | None = None


@dataclass(slots=True)
class Ledger:
    """What all parts of one run have told."""

    run: str = ""
    count: int = 0
    is_open: bool = False
    records: list[Record] = field(default_factory=list)
    _parts: dict[int, _Part] = field(default_factory=dict)

    def told(self, message: Mapping[str, Any]) -> None:
        """Adds what a session told; what belongs to a run before is not for this book."""
        if message["run"] != self.run:
            return
        self.records += [Record.from_dict(each) for each in message["records"]]
        self._parts[message["index"]] = _Part(
            offered=message["offered"],
            is_exhausted=message["is_exhausted"],
            is_drained=message["is_drained"],
            began=message["began"],
            client=ClientLoad(**message["client"]),
        )

    def is_exhausted(self, indices: Sequence[int]) -> bool:
        """Whether these parts have sent all that was to be sent."""
        return all(self._part(index).is_exhausted for index in indices)

    def is_drained(self, indices: Sequence[int]) -> bool:
        """Whether these parts have nothing in flight any more and never will."""
        return all(self._part(index).is_drained for index in indices)

    @property
    def began(self) -> list[float]:
        """When each part began, on its host's monotonic clock."""
        return [self._part(index).began for index in range(self.count)]

    def _part(self, index: int) -> _Part:
        return self._parts.get(index, _Part())

    def to_run(self) -> Run:
        """The run so far, for the figures."""
        parts = [self._part(index) for index in range(self.count)]
        return Run(
            records=tuple(self.records),
            offered=sum(part.offered for part in parts),
            seconds=max((record.ended for record in self.records), default=0.0),
            clients=tuple(part.client for part in parts if part.client is not None),
            is_open=self.is_open,
            silent=self.count - len(self._parts),
        )
