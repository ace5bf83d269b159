"""Reads bodies, a bounded number at a time, and JSON with a bounded number of elements.

As over gRPC (`transport.receiving`): the places are shared fairly between callers, and a slow one is ended when others
wait. A connection that is not read from holds 64 KiB at most. A few megabytes of JSON can encode millions of objects,
so elements are counted, in steps, before any is built.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

from service.errors import ClientStalled, InvalidRequest
from service.transport.http.exchange import Exchange
from service.transport.read_places import ReadPlaces
from service.transport.receiving import MAX_BYTES, in_steps

_MIN_PLACES = 4
# Elements of a small body are not counted: it is parsed in less than a millisecond.
_FREE_BYTES = 4096
MAX_SCHEMA_DEPTH = 128
"""To which schemas nest: what was parsed is encoded again, and the stack must not end that."""
# One step blocks the event loop: bytes, each of which may begin or end a string.
_STEP_BYTES = 32 << 10


class Bodies:
    """Reads bodies.

    Args:
        max_bytes: largest body.
        max_stall_seconds: how long one may take.
    """

    def __init__(self, max_bytes: int, max_stall_seconds: float) -> None:
        self._max_bytes = max_bytes
        self._max_stall_seconds = max_stall_seconds
        self._arrivals = _Arrivals()
        num_places = max(_MIN_PLACES, MAX_BYTES // max_bytes)
        self._places = ReadPlaces(num_places, max_bytes / max_stall_seconds, self._arrivals)

    async def read(self, exchange: Exchange, caller: Hashable, max_elements: int) -> Any:
        """The body, which `parse` may be called on.

        Raises:
            Refusal, InvalidRequest: for too many bytes or elements.
            ClientStalled, RateLimited: when it, or a place for it, takes too long.
        """
        exchange.announced_bytes(self._max_bytes)
        await self._places.take(caller, self._max_stall_seconds)
        loop, peer = asyncio.get_running_loop(), exchange.peer()
        started = loop.time()
        try:
            reading = asyncio.timeout(self._max_stall_seconds)
            try:
                async with reading:
                    self._places.begin(reading, caller, peer, self._max_stall_seconds)
                    try:
                        data = await exchange.body(self._max_bytes, lambda num: self._arrivals.came(peer, num))
                    finally:
                        self._places.end(reading)
                        self._arrivals.forget(peer)
            except TimeoutError as error:
                if not reading.expired():
                    raise
                raise ClientStalled(loop.time() - started, "the request was on its way") from error
            await in_steps(count_elements(data, max_elements))
            return data
        finally:
            self._places.release(caller)


class _Arrivals:
    """What each connection brought of the body that is being read."""

    def __init__(self) -> None:
        self._num_bytes: dict[str, int] = {}

    def came(self, peer: str, num_bytes: int) -> None:
        self._num_bytes[peer] = self._num_bytes.get(peer, 0) + num_bytes

    def forget(self, peer: str) -> None:
        self._num_bytes.pop(peer, None)

    def brought(self, peers: Collection[str]) -> Mapping[str, int]:
        return {peer: self._num_bytes.get(peer, 0) for peer in peers}


def count_elements(data: bytes, most: int) -> Iterator[None]:
    """Counts what JSON would build (commas, lists and objects outside of strings); in steps of about a millisecond.

    Raises:
        InvalidRequest: for more than `most`.
    """
    if len(data) <= _FREE_BYTES:
        return
    count = 0
    for number in elements_of(data):
        count += number
        if count > most:
            raise InvalidRequest("body", f"{count} or more", f"must have at most {most} elements")
        yield


def elements_of(data: bytes) -> Iterator[int]:
    """How many elements JSON would build, by steps of about a millisecond."""
    at, is_inside = 0, False
    while at < len(data):
        step = data[at : at + _STEP_BYTES]
        if (len(step) - len(step.rstrip(b"\\"))) % 2:
            step = data[at : at + _STEP_BYTES + 1]  # an escape and what it escapes
        at += len(step)
        parts = step.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        yield sum(map(outside.count, (b",", b"[", b"{")))


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object of a body. Long ones take milliseconds: call this off the event loop.

    Raises:
        InvalidRequest: when it is none, has a name twice, or a number that is none.
    """
    try:
        value = loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(
            "body", f"{len(data)} bytes", f"must be a JSON object in UTF-8 ({reason[:200]})"
        ) from error
    if not isinstance(value, dict):
        raise InvalidRequest("body", value, "must be a JSON object")
    return value


def loads(text: str, **hooks: Any) -> Any:
    """As `json.loads`, of numbers that a double has."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite, **hooks)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice[:80]!r} occurs twice")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:80]} is beyond a double's range")
    return number


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def nests_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects of JSON lie in each other deeper than so."""
    level = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [each for values in level for each in (values.values() if isinstance(values, dict) else values)]
    return True
