"""Concurrency limits of calls and of the bytes of their answers, and what one caller may hold of both.

    headers ──> place ──> claimed by its caller ──> answer being sent ──> taken ──> place given back
                  └─ refused ──> its status being sent ──┘    └─ not taken for too long ──> stalled

A call keeps its place for as long as gRPC holds the call: gRPC cannot cancel it, and keeps its answer until the client
takes it or leaves. So stalled calls are evicted, by closing their connections, when other calls need what they hold.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Hashable
from contextlib import suppress
from contextvars import ContextVar

from service.errors import RateLimited
from service.transport.connections import find, shut

MAX_ANSWER_BYTES = 128 << 20
"""Bound on all answers being sent, or room for 4 of the largest. As many bytes may wait for room."""
REFUSAL_SECONDS = 1.0
"""A refused call whose status is not sent by then is stalled."""
_MIN_ANSWERS = 4
# Not counted: there is at most one per call.
_SMALL_ANSWER_BYTES = 4 << 10
# gRPC copies an answer, and Python's bytes live on beside the copy.
_NUM_COPIES = 2
# A connection is closed if its stalled calls hold this part of everything, or are half of its calls.
_EVICTED_PART = 8
# Between two searches for what can be evicted: there may be thousands of calls, and of refusals per second.
_REST_SECONDS = 0.05
# An answer that waits for room searches again: other calls may have stalled meanwhile.
_LOOK_SECONDS = 0.5
# Until a call of the caller may have ended, or an answer is taken: nothing predicts it.
_RETRY_SECONDS = 1.0


def uncount(counts: Counter[Hashable], key: Hashable, num: int = 1) -> None:
    """Subtracts from one count, and drops it at zero; `-=` would visit all of them."""
    if counts[key] > num:
        counts[key] -= num
    else:
        counts.pop(key, None)


class _Shares:
    """A number of places or bytes, of which a caller may hold as many as are free.

    The first caller gets at most half, each later one less, but some: with a fixed half, two callers would take all.
    """

    def __init__(self, num_all: int) -> None:
        self.num_all = num_all
        self.num_taken = 0
        self.held = Counter[Hashable]()
        # The same by connection.
        self.at: dict[str, Counter[Hashable]] = {}
        # Next search for what can be evicted: of one caller, and of all.
        self.rested_at = {True: 0.0, False: 0.0}

    @property
    def num_free(self) -> int:
        return self.num_all - self.num_taken

    def has_room(self, caller: Hashable, num: int) -> bool:
        return self.held[caller] + num <= self.num_free

    def take(self, caller: Hashable, peer: str, num: int) -> None:
        self.num_taken += num
        self.held[caller] += num
        self.at.setdefault(peer, Counter())[caller] += num

    def give_back(self, caller: Hashable, peer: str, num: int) -> None:
        self.num_taken -= num
        uncount(self.held, caller, num)
        uncount(self.at[peer], caller, num)
        if not self.at[peer]:
            del self.at[peer]


class Places:
    """The places of all calls, and the bytes of their answers. Event loop only.

    Args:
        max_calls: at once; as many refused ones besides.
        max_message_bytes: largest answer.
        apart: full names of methods with as many places of their own each.
    """

    def __init__(self, max_calls: int, max_message_bytes: int, apart: Collection[str] = ()) -> None:
        num_bytes = max(MAX_ANSWER_BYTES, _MIN_ANSWERS * _NUM_COPIES * max_message_bytes)
        self.answers, self.waiting_answers = _Shares(num_bytes), _Shares(num_bytes)
        self.refusals = _Shares(max_calls)
        self._apart = {method: _Shares(max_calls) for method in apart}
        self._calls = _Shares(max_calls)
        # Calls that may be evicted.
        self.stalled: dict[Place, None] = {}
        self._eviction: asyncio.Future[None] | None = None
        self._given_back = asyncio.Event()

    def take(self, method: str) -> Place | None:
        """Takes a place for the call that the running task serves, until the task ends; None if all are taken."""
        calls = self._apart.get(method, self._calls)
        # gRPC handles each call, including the choice of its handler, in a task of its own. The handler's end would not
        # do: gRPC does not call the handler of a client that leaves before its request has arrived.
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (this is called by a coroutine)
        place = Place(self, task)
        _PLACE.set(place)
        task.add_done_callback(lambda _: place.release())
        if not calls.num_free:
            self.evict(calls)
            return None
        place.hold(calls)
        return place

    def answer_taken(self) -> None:
        """Wakes answers that wait for room."""
        self._given_back.set()
        self._given_back = asyncio.Event()

    async def wait_taken(self) -> None:
        """Waits until there may be room for an answer, or something more to evict."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._given_back.wait()

    def evict(self, wanted: _Shares, caller: Hashable = None) -> None:
        """Closes the connections whose stalled calls hold most of what is wanted.

        A connection on which most calls proceed is spared, unless it holds a considerable part.

        Args:
            wanted: what another call needs.
            caller: closes connections that only this caller uses; None for any.
        """
        now, is_own = asyncio.get_running_loop().time(), caller is not None
        if now < wanted.rested_at[is_own] or (self._eviction is not None and not self._eviction.done()):
            return
        wanted.rested_at[is_own] = now + _REST_SECONDS
        held = Counter[str]()
        for place in self.stalled:
            held[place.peer] += place.held_of(wanted)
        held = Counter(
            {
                peer: num
                for peer, num in held.items()
                if num
                and (_EVICTED_PART * num >= wanted.num_all or 2 * num >= wanted.at[peer].total())
                and (not is_own or self._callers(wanted, peer) == {caller})
            }
        )
        most = max(held.values(), default=0)
        # Connections that hold less than half as much are rather slow than hostile.
        if peers := {peer for peer, num in held.items() if 2 * num > most}:
            self._eviction = asyncio.ensure_future(self._close(peers))

    def _callers(self, wanted: _Shares, peer: str) -> set[Hashable]:
        """The callers that use a connection: for this, or for calls of the usual kind."""
        return {*wanted.at.get(peer, ()), *self._calls.at.get(peer, ())}

    async def _close(self, peers: Collection[str]) -> None:
        connections = await asyncio.to_thread(find, peers)
        for place in [each for each in self.stalled if each.peer in connections]:
            # Or gRPC would log a traceback for each answer that cannot be sent. If the connection is not found, gRPC
            # keeps the call, and the call its place.
            place.task.cancel()
        shut(connections)


class Place:
    """What one call holds: a place of its kind, claimed for its caller, or a place of refused calls, or nothing."""

    def __init__(self, places: Places, task: asyncio.Task[object]) -> None:
        self.task = task
        self.shares: _Shares | None = None
        self.caller: Hashable = None
        self.peer = ""
        # Whether initial metadata were given to gRPC, and whether gRPC sent them.
        self.has_begun = self.has_headers = False
        self._num_bytes = 0
        self._places = places

    @property
    def is_claimed(self) -> bool:
        """Whether the call counts against a caller's share."""
        return self.caller is not None

    def held_of(self, shares: _Shares) -> int:
        """The bytes of answers, or places, that the call holds."""
        return self._num_bytes if shares is self._places.answers else int(self.shares is shares)

    def hold(self, shares: _Shares) -> None:
        """Takes a place."""
        self.shares = shares
        shares.take(self.caller, self.peer, 1)

    def claim(self, caller: Hashable, peer: str) -> None:
        """Counts the call against a caller's share; `peer` is gRPC's name of its connection.

        Raises:
            RateLimited: when the caller's share is used up; the place is given back.
        """
        if (calls := self.shares) is None:
            return
        self.release()
        if not calls.has_room(caller, 1):
            self._places.evict(calls, caller)
            limited = f"{calls.held[caller]} calls of this caller are open, its share of {calls.num_all}"
            raise RateLimited(limited, _RETRY_SECONDS)
        self.caller, self.peer = caller, peer
        self.hold(calls)

    def refuse(self, peer: str) -> None:
        """Moves a call that is not claimed to the places of refused calls, until its status is sent.

        Otherwise refusals over a connection that takes no bytes would fill the server, and count against no key.
        """
        if self.is_claimed:
            return
        self.release()
        self.peer = peer
        # Even beyond their number: those that precede the first stall are evicted then.
        self.hold(self._places.refusals)
        if self._places.refusals.num_free <= 0:
            self._places.evict(self._places.refusals)

    async def answer(self, num_bytes: int, max_seconds: float) -> None:
        """Counts an answer, or a part of one, that is given to gRPC; waits for room for it.

        Raises:
            RateLimited: when there is no room for `max_seconds`, or too much waits for it.
        """
        if num_bytes <= _SMALL_ANSWER_BYTES or self.shares is None:
            return
        num_bytes *= _NUM_COPIES
        answers, waiting = self._places.answers, self._places.waiting_answers
        if not answers.has_room(self.caller, num_bytes):
            limited = RateLimited("answers that clients did not take yet leave no room for this one", _RETRY_SECONDS)
            if not waiting.has_room(self.caller, num_bytes):
                raise limited
            waiting.take(self.caller, self.peer, num_bytes)
            try:
                async with asyncio.timeout(max_seconds):
                    while not answers.has_room(self.caller, num_bytes):
                        is_full = num_bytes > answers.num_free
                        self._places.evict(answers, None if is_full else self.caller)
                        await self._places.wait_taken()
            except TimeoutError:
                raise limited from None
            finally:
                waiting.give_back(self.caller, self.peer, num_bytes)
        answers.take(self.caller, self.peer, num_bytes)
        self._num_bytes += num_bytes

    def answered(self) -> None:
        """The client has taken all answers of the call."""
        if self._num_bytes:
            self._places.answers.give_back(self.caller, self.peer, self._num_bytes)
            self._num_bytes = 0
            self._places.answer_taken()

    def stall(self) -> None:
        """The client has not taken an answer or a status for too long: the call may be evicted."""
        if self.shares is not None:
            self._places.stalled[self] = None

    def release(self) -> None:
        """Gives back all that the call holds."""
        if self.shares is not None:
            self.answered()
            self.shares.give_back(self.caller, self.peer, 1)
            self._places.stalled.pop(self, None)
            self.shares = None


# Of the call that the running task serves.
_PLACE: ContextVar[Place | None] = ContextVar("onward_place", default=None)


def current_place() -> Place | None:
    """The place of the call that the running task serves; None without `CallLimit`."""
    return _PLACE.get()


def stall_after(seconds: float) -> None:
    """Marks the running task's call as stalled if gRPC has not sent what the handler left within the time.

    gRPC sends it within the call's task; without `CallLimit` that task is cancelled.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 (this is called by a coroutine)
    place = _PLACE.get()
    stall = asyncio.get_running_loop().call_later(seconds, task.cancel if place is None else place.stall)
    task.add_done_callback(lambda _: stall.cancel())


def claim(caller: Hashable, peer: str) -> None:
    """`Place.claim` for the running task's call; without `CallLimit` nothing is counted.

    Raises:
        RateLimited: when the caller's share is used up.
    """
    if (place := _PLACE.get()) is not None:
        place.claim(caller, peer)
