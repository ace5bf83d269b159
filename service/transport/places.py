"""How many calls there may be at once, how many bytes of answers, and how much of both is one caller's.

    headers ──> place ──> claimed by its caller ──> answer on its way ──> taken ──> place given back
                                                           └─ not taken for too long ──> stalled

A call that is stalled keeps its place: gRPC cannot cancel it, and holds its answer until the client takes it or goes
away. So the connections with most stalled calls are closed once another call needs their places. Knows nothing of what
a call asks, and nothing of gRPC.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from contextvars import ContextVar

from service.errors import RateLimited
from service.transport.connections import shut

MAX_REFUSAL_SECONDS = 5.0
"""For the status of a call that holds no place to be sent: nothing else bounds how many there are."""
MAX_ANSWER_BYTES = 128 << 20
"""Bound on what all answers take that are on their way, or room for 4 of the largest."""
_MIN_ANSWERS = 4
# Of which there may be one for each call: they are not counted.
_SMALL_ANSWER_BYTES = 4 << 10
# gRPC copies an answer. Of a call that has one, Python's bytes live on beside the copy.
_NUM_COPIES = 2
# Until a call of the caller may have ended, or an answer is taken: nothing predicts it.
_RETRY_SECONDS = 1.0


def uncount(counts: Counter[Hashable], key: Hashable, num: int = 1) -> None:
    """So many less of a key: without a look at the others, as `-=` would take, and without a zero that stays."""
    if counts[key] > num:
        counts[key] -= num
    else:
        counts.pop(key, None)


class _Shares:
    """So many of something, of which a caller may hold as many as are free.

    That is half of all for the first and less for each that comes later, who finds some: a fixed half would leave
    nothing beside two callers.
    """

    def __init__(self, num_all: int) -> None:
        self.num_all = num_all
        self.num_taken = 0
        self.held = Counter[Hashable]()

    @property
    def num_free(self) -> int:
        return self.num_all - self.num_taken

    def has_room(self, caller: Hashable, num: int) -> bool:
        return self.held[caller] + num <= self.num_free

    def take(self, caller: Hashable, num: int) -> None:
        self.num_taken += num
        self.held[caller] += num

    def give_back(self, caller: Hashable, num: int) -> None:
        self.num_taken -= num
        uncount(self.held, caller, num)


class Places:
    """The places of all calls, and the bytes of their answers. Event loop only.

    Args:
        max_calls: at once.
        max_message_bytes: largest answer.
        apart: full names of methods that have as many places of their own each.
    """

    def __init__(self, max_calls: int, max_message_bytes: int, apart: Collection[str] = ()) -> None:
        self._calls = {kind: _Shares(max_calls) for kind in ("", *apart)}
        self._answers = _Shares(max(MAX_ANSWER_BYTES, _MIN_ANSWERS * _NUM_COPIES * max_message_bytes))
        self._stalled: dict[Place, None] = {}
        self._closing: asyncio.Future[None] | None = None

    def take(self, method: str) -> Place | None:
        """The place of the call that the running task serves, until the task has ended; None where all are taken.

        Args:
            method: its full name.
        """
        calls = self._calls.get(method, self._calls[""])
        if not calls.num_free:
            self.make_room(lambda place: place.calls is calls)
            return None
        # gRPC handles each call, the look-up of its handler included, in a task of its own. The handler's end would not
        # do: it is not even called for a client that goes away before its request is there.
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (this is called by a coroutine)
        place = Place(self, calls, self._answers, task)
        _PLACE.set(place)
        task.add_done_callback(lambda _: place.release())
        return place

    def add_stalled(self, place: Place) -> None:
        """From now on the place may be taken from its call."""
        self._stalled[place] = None

    def discard(self, place: Place) -> None:
        """The place is given back."""
        self._stalled.pop(place, None)

    def make_room(self, is_wanted: Callable[[Place], bool]) -> None:
        """Closes the connections whose stalled calls hold most, if there are any; their places come back soon."""
        if self._closing is not None and not self._closing.done():
            return
        held = Counter[str]()
        for place in self._stalled:
            if is_wanted(place):
                held[place.peer] += place.num_bytes + _SMALL_ANSWER_BYTES
        most = max(held.values(), default=0)
        # Those that hold less than half of it are rather slow than hostile.
        peers = {peer for peer, num_bytes in held.items() if 2 * num_bytes > most}
        if not peers:
            return
        for place in [each for each in self._stalled if each.peer in peers]:
            self.discard(place)
            # Or gRPC would log a traceback for each answer that cannot be sent.
            place.task.cancel()
        self._closing = asyncio.ensure_future(asyncio.to_thread(shut, peers))


class Place:
    """One call's place. The call has no caller until it is claimed, and holds nothing once it is refused."""

    def __init__(self, places: Places, calls: _Shares, answers: _Shares, task: asyncio.Task[object]) -> None:
        self.calls = calls
        self.task = task
        self.peer = ""
        # Whether initial metadata are sent.
        self.is_begun = False
        self.num_bytes = 0
        self._places = places
        self._answers = answers
        self._caller: Hashable = None
        self._is_held = True
        calls.take(None, 1)

    @property
    def is_claimed(self) -> bool:
        """Whether the call counts against a caller's share."""
        return self._caller is not None

    def claim(self, caller: Hashable) -> None:
        """Counts the call as a caller's.

        Raises:
            RateLimited: when the caller has its share; the place is given back.
        """
        if not self._is_held:
            return
        self.calls.give_back(None, 1)
        if not self.calls.has_room(caller, 1):
            self.calls.take(None, 1)
            self.release()
            self._places.make_room(lambda place: place.calls is self.calls and place.is_of(caller))
            limited = f"{self.calls.held[caller]} calls of this caller are open, its share of {self.calls.num_all}"
            raise RateLimited(limited, _RETRY_SECONDS)
        self._caller = caller
        self.calls.take(caller, 1)

    def is_of(self, caller: Hashable) -> bool:
        """Whether it is a caller's."""
        return self._caller == caller

    def answer(self, num_bytes: int) -> None:
        """Counts an answer, or a part of one, that is given to gRPC.

        Raises:
            RateLimited: when the caller's other answers have its share of the bytes that there may be.
        """
        if num_bytes <= _SMALL_ANSWER_BYTES or not self._is_held:
            return
        num_bytes *= _NUM_COPIES
        if not self._answers.has_room(self._caller, num_bytes):
            is_full = num_bytes > self._answers.num_free
            self._places.make_room(lambda place: is_full or place.is_of(self._caller))
            limited = "other answers to this caller are on their way, which it has to take before this one"
            raise RateLimited(limited, _RETRY_SECONDS)
        self._answers.take(self._caller, num_bytes)
        self.num_bytes += num_bytes

    def answered(self) -> None:
        """The client has taken all that it was answered."""
        if self.num_bytes:
            self._answers.give_back(self._caller, self.num_bytes)
            self.num_bytes = 0

    def stall(self, peer: str) -> None:
        """The client has not taken an answer for too long: its connection may be closed where others need the place."""
        if self._is_held:
            self.peer = peer
            self._places.add_stalled(self)

    def release(self) -> None:
        """Gives the place back, at most once."""
        if self._is_held:
            self._is_held = False
            self.answered()
            self.calls.give_back(self._caller, 1)
            self._places.discard(self)


# Of the call that the running task serves.
_PLACE: ContextVar[Place | None] = ContextVar("onward_place", default=None)


def current_place() -> Place | None:
    """The place of the call that the running task serves; None where calls are not counted."""
    return _PLACE.get()


def claim(caller: Hashable) -> None:
    """Counts the running task's call as a caller's; see `Place.claim`. Without `CallLimit` nothing is counted.

    Raises:
        RateLimited: when the caller has its share.
    """
    if (place := _PLACE.get()) is not None:
        place.claim(caller)


def refusal_seconds(max_stall_seconds: float) -> float:
    """How long the running task's call may take to send an error.

    A call that is no caller's share gives its place back now: refusals over a connection that takes no bytes would
    fill the server, and count against no key.
    """
    place = _PLACE.get()
    if place is None or place.is_claimed:
        return max_stall_seconds
    place.release()
    return min(MAX_REFUSAL_SECONDS, max_stall_seconds)
