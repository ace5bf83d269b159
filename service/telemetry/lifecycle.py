"""A request's phases, computed from its timings: queue, prefill and decode."""

from __future__ import annotations

from dataclasses import dataclass

from service.engine.types import RequestTimings
from service.errors import EngineFailed, NotServing

# Outcomes reported without the engine, which alone knows whether the request was scheduled.
_WITHOUT_ENGINE = frozenset({EngineFailed.label, NotServing.label})


@dataclass(frozen=True, slots=True)
class Phase:
    """A named interval of `time.monotonic()` seconds."""

    name: str
    start: float
    end: float


def phases(timings: RequestTimings, outcome: str) -> tuple[Phase, ...]:
    """The phases of an ended request, back to back; the last one lasts until its end.

    Empty for a request that was lost with its engine: it may have waited or run.

    Args:
        timings: of the request.
        outcome: its finish reason or error label.
    """
    arrival, scheduled, first, finished = (
        timings.arrival_time,
        timings.scheduled_time,
        timings.first_token_time,
        timings.finished_time,
    )
    if scheduled is None:
        return () if outcome in _WITHOUT_ENGINE else (Phase("queue", arrival, finished),)
    queue = Phase("queue", arrival, scheduled)
    if first is None:
        return queue, Phase("prefill", scheduled, finished)
    return queue, Phase("prefill", scheduled, first), Phase("decode", first, finished)
