"""A request's phases: queue, prefill and decode, cut from its times. Knows neither engines nor what draws them."""

from __future__ import annotations

from dataclasses import dataclass

from service.engine.types import RequestTimings
from service.errors import EngineFailed, NotServing

# Outcomes reported without the engine, by code that knows of the request no more than when it arrived.
_UNKNOWN_FATE = frozenset({EngineFailed.label, NotServing.label})


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's life, in `time.monotonic()` seconds."""

    name: str
    start: float
    end: float


def phases(timings: RequestTimings, outcome: str) -> tuple[Phase, ...]:
    """The phases that a request went through, back to back; the one in which it ended lasts until its end.

    None is claimed of a request that was lost with its engine: it may have waited until then, or run.

    Args:
        timings: when things happened to it.
        outcome: the finish reason or the error's label with which it ended.
    """
    arrival, scheduled, first, finished = (
        timings.arrival_time,
        timings.scheduled_time,
        timings.first_token_time,
        timings.finished_time,
    )
    if scheduled is None:
        return () if outcome in _UNKNOWN_FATE else (Phase("queue", arrival, finished),)
    queue = Phase("queue", arrival, scheduled)
    if first is None:
        return queue, Phase("prefill", scheduled, finished)
    return queue, Phase("prefill", scheduled, first), Phase("decode", first, finished)
