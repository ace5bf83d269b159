"""Places of reads: a bounded number of messages are read at once, shared fairly between callers.

A caller has at most half of the places; connections of one address share as one caller. A free place goes to the
waiting caller that holds fewest. After `_PATIENCE_SECONDS` a waiting caller ends a read of the caller that holds most,
or a slow one of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from service.errors import RateLimited
from service.transport.flooding import Reading
from service.transport.places import uncount

# How long a caller waits for a place before a read is ended for it.
_PATIENCE_SECONDS = 0.5
# A caller's only read has this long in any case: an honest one is seldom longer, and a slow one is not cut at once.
_MIN_READ_SECONDS = 1.0
# The part of its time that a read has while others of its own caller wait, which may be many clients behind a proxy.
_OWN_PART = 1 / 6
# Least time between two measurements of what reads brought.
_MEASURE_SECONDS = 0.25
# Until a read may have ended: nothing predicts it.
_RETRY_SECONDS = 1.0


class Arrivals(Protocol):
    """Measures what connections bring, as `FloodGuard` does."""

    def brought(self, peers: Collection[str]) -> Mapping[str, int]:
        """Bytes that connections brought, of those that are found. Only differences have a meaning."""


class Connection(NamedTuple):
    """The caller of a method that needs no key; connections of an address share their places."""

    address: str
    peer: str


@dataclass(eq=False, slots=True)
class _Read:
    """A message on its way."""

    caller: Hashable
    peer: str
    begun: float
    max_seconds: float
    # Time of its first measurement, and what its connection had brought by then.
    first: tuple[float, int] | None = None
    # Bytes per second since, of the connection's per read of it; None until measured.
    rate: float | None = None


class ReadPlaces:
    """The places of one kind of calls' reads. Event loop only.

    Args:
        num_places: reads at once.
        timely_rate: bytes per second at which the largest message arrives in time.
        arrivals: of the connections that are read from.
    """

    def __init__(self, num_places: int, timely_rate: float, arrivals: Arrivals) -> None:
        self.num_held = 0
        self._num_places = num_places
        self._timely_rate = timely_rate
        self._arrivals = arrivals
        self._held = Counter[Hashable]()
        # The same by address, for connections.
        self._shares = Counter[Hashable]()
        # Both in the order in which they began.
        self._reads: dict[Reading, _Read] = {}
        self._waiting: dict[Hashable, dict[asyncio.Future[None], None]] = {}
        self._measured_at = -inf

    async def take(self, caller: Hashable, max_wait_seconds: float) -> None:
        """Waits for a place.

        Raises:
            RateLimited: when none is free for too long.
        """
        if self._has_place(caller):
            self._hold(caller)
            return
        loop = asyncio.get_running_loop()
        turn, latest = loop.create_future(), loop.time() + max_wait_seconds
        self._waiting.setdefault(caller, {})[turn] = None
        try:
            while not turn.done():
                await asyncio.wait((turn,), timeout=_PATIENCE_SECONDS)
                if not turn.done():
                    if loop.time() >= latest:
                        raise RateLimited("too many other requests are on their way", _RETRY_SECONDS)
                    self._end_a_read(caller)
        except (asyncio.CancelledError, RateLimited):
            if turn.done():
                self.release(caller)
            else:
                self._stop_waiting(caller, turn)
            raise

    def release(self, caller: Hashable) -> None:
        """Gives the place to the waiting caller that holds fewest."""
        self.num_held -= 1
        uncount(self._held, caller)
        uncount(self._shares, _share(caller))
        waiting = [each for each in self._waiting if self._has_place(each)]
        if waiting:
            following = min(waiting, key=lambda each: (self._shares[_share(each)], self._held[each]))
            turn = next(iter(self._waiting[following]))
            self._stop_waiting(following, turn)
            # Behind its equals: a caller with many waiting reads is not always first.
            self._wait_last([following])
            self._hold(following)
            turn.set_result(None)

    def begin(self, reading: Reading, caller: Hashable, peer: str, max_seconds: float) -> None:
        """A read begins in the caller's place; `reading` is expired if it must end."""
        self._reads[reading] = _Read(caller, peer, asyncio.get_running_loop().time(), max_seconds)

    def end(self, reading: Reading) -> None:
        """The read is over."""
        self._reads.pop(reading, None)

    def _has_place(self, caller: Hashable) -> bool:
        return self.num_held < self._num_places and self._shares[_share(caller)] < self._num_places // 2

    def _hold(self, caller: Hashable) -> None:
        self.num_held += 1
        self._held[caller] += 1
        self._shares[_share(caller)] += 1

    def _stop_waiting(self, caller: Hashable, turn: asyncio.Future[None]) -> None:
        del self._waiting[caller][turn]
        if not self._waiting[caller]:
            del self._waiting[caller]

    def _wait_last(self, callers: Iterable[Hashable]) -> None:
        for caller in callers:
            if caller in self._waiting:
                self._waiting[caller] = self._waiting.pop(caller)

    def _end_a_read(self, caller: Hashable) -> None:
        """Ends a read of the caller that holds most, if that makes the places more even; else one of this caller."""
        now = asyncio.get_running_loop().time()
        self._measure(now)
        # The slowest; of equal ones the oldest, which comes first.
        for reading, read in sorted(self._candidates(caller, now), key=lambda each: each[1].rate or 0.0):
            if not reading.expired():
                del self._reads[reading]
                reading.reschedule(0.0)
                # Or the evicted caller may have the very place again.
                share = _share(read.caller)
                self._wait_last([each for each in self._waiting if _share(each) == share != _share(caller)])
                self._wait_last([read.caller])
                return

    def _candidates(self, caller: Hashable, now: float) -> list[tuple[Reading, _Read]]:
        """The reads of which one may end for the caller."""
        own, most = _share(caller), max(self._shares.values(), default=0)
        # If no other share is larger: only between the connections of its address.
        is_own = self._shares[own] > 0 and most <= self._shares[own] + 1
        found = [
            (reading, read)
            for reading, read in self._reads.items()
            if (_share(read.caller) == own if is_own else self._shares[_share(read.caller)] == most)
        ]
        num_most = max((self._held[read.caller] for _, read in found), default=0)
        if is_own and self._held[caller] and num_most <= self._held[caller] + 1:
            return self._own_candidates(caller, now)
        found = [(reading, read) for reading, read in found if self._held[read.caller] == num_most]
        if (num_most if is_own else most) > 1:
            return found
        # Each caller has one read. The half of them that bring most is kept, or a slow upload would never finish.
        num_kept = (self._shares[own] if is_own else self.num_held) // 2
        rates = sorted((read.rate or 0.0 for _, read in found), reverse=True)
        kept = rates[:num_kept] or [inf]
        return [(reading, read) for reading, read in found if self._is_beaten(read, kept[-1], now)]

    def _own_candidates(self, caller: Hashable, now: float) -> list[tuple[Reading, _Read]]:
        """The caller's own reads that had their part of the time and are too slow, or bring nothing."""
        found = [each for each in self._reads.items() if each[1].caller == caller]
        # The half that bring most, and of equal ones the older, may finish.
        found.sort(key=lambda each: each[1].rate or 0.0, reverse=True)
        num_kept = len(found) // 2
        return [
            (reading, read)
            for rank, (reading, read) in enumerate(found)
            if read.rate is not None
            and read.rate < self._timely_rate
            and read.begun <= now - read.max_seconds * _OWN_PART
            and (rank >= num_kept or not read.rate)
        ]

    def _is_beaten(self, read: _Read, kept_rate: float, now: float) -> bool:
        """Whether a caller's only read is old enough, and brings nothing or less than those that are kept."""
        is_old = read.begun <= now - _MIN_READ_SECONDS
        return is_old and read.rate is not None and (not read.rate or read.rate < kept_rate)

    def _measure(self, now: float) -> None:
        """Updates the rates of reads; 0 for connections that the system does not report."""
        if now < self._measured_at + _MEASURE_SECONDS:
            return
        self._measured_at = now
        num_reads = Counter(read.peer for read in self._reads.values())
        brought = {} if self._timely_rate == inf else self._arrivals.brought(num_reads)
        for read in self._reads.values():
            if read.peer not in brought:
                read.rate = 0.0
            elif read.first is None:
                read.first = now, brought[read.peer]
            else:
                begun, num_bytes = read.first
                rate = (brought[read.peer] - num_bytes) / (now - begun) / num_reads[read.peer]
                read.rate = max(0.0, rate)


def _share(caller: Hashable) -> Hashable:
    """The share that a caller belongs to: the address of a connection, else its own."""
    return caller.address if isinstance(caller, Connection) else caller
