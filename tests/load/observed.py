"""Compares a client's measurements with the fake server's log and plan, request by request, on the host's clock."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.core.records import Outcome, Record
from tests.load.fake_server import Plan

TOLERANCE = 0.05
"""Of a median, relative."""
DELAYS: dict[str, Any] = {"ttft": (0.2, 0.4), "itl": (0.1, 0.2)}
"""Planned delays; 5 % of them is more than a quiet machine's scheduling delay."""
SCALES = (1, 4, 12)
"""Factors of the delays, for retries on a busy machine."""
LATE_SECONDS = 0.003
"""A quiet machine wakes a sleeping task within one or two milliseconds."""


class Disagreement(AssertionError):
    """Medians differ by more than the tolerance."""


def delays(scale: int) -> dict[str, Any]:
    """The planned delays times the scale."""
    return {name: (scale * least, scale * most) for name, (least, most) in DELAYS.items()}


@dataclass(frozen=True, slots=True)
class Pair:
    """One finished request with its log entry; all of its spans are: first token, gaps, whole answer."""

    record: Record
    began: float
    done: Mapping[str, Any]

    @property
    def seen(self) -> list[float]:
        first = self.record.first_token_seconds
        assert first is not None
        return [first, *self.record.gaps, self.record.end_to_end_seconds]

    @property
    def logged(self) -> list[float]:
        times = [self.done["arrived"], *self.done["sent"]]
        return [*(later - earlier for earlier, later in itertools.pairwise(times)), times[-1] - times[0]]

    def planned(self, plan: Plan) -> list[float]:
        ttft, itl = plan.delays(self.record.number)
        gaps = [itl] * len(self.record.gaps)
        return [ttft, *gaps, ttft + sum(gaps)]


def pairs(records: Sequence[Record], began: float, log: Mapping[str, Mapping[str, Any]]) -> list[Pair]:
    finished = [record for record in records if record.outcome is Outcome.FINISHED]
    return [Pair(record, began, log[record.request_id]) for record in finished]


def hold_order(both: Sequence[Pair], plan: Plan) -> None:
    """No event is seen before it happened, and the server was never faster than planned."""
    assert both
    for pair in both:
        arrived, sent = pair.done["arrived"], pair.done["sent"]
        seen = [pair.began + at for at in pair.record.arrivals]
        assert pair.began + pair.record.sent <= arrived
        assert all(at >= done for at, done in zip(seen, sent, strict=True))
        assert pair.began + pair.record.ended >= sent[-1]
        # Rounding differs from the server's repeated addition.
        due = itertools.accumulate(pair.planned(plan)[:-1], initial=arrived)
        assert all(at >= planned - 1e-6 for at, planned in zip([arrived, *sent], due, strict=True))


def hold_medians(both: Sequence[Pair], known: Callable[[Pair], list[float]]) -> None:
    """Medians of the measured first tokens, gaps and whole answers are the known ones within 5 %.

    Raises:
        Disagreement: if one is not.
    """
    for part in (slice(1), slice(1, -1), slice(-1, None)):
        seen, expected = (
            np.concatenate([each(pair)[part] for pair in both]) for each in (lambda pair: pair.seen, known)
        )
        # The medians may agree although the pairs do not.
        ratios = np.median(seen) / np.median(expected), np.median(seen / expected)
        if max(abs(ratio - 1) for ratio in ratios) > TOLERANCE:
            raise Disagreement(f"medians are {ratios[0]:.3f} of the known ones, pair by pair {ratios[1]:.3f}")


def lateness(both: Sequence[Pair], plan: Plan) -> float:
    """The server's mean delay against its plan at each token, in seconds, by its own log."""
    late = [
        at - due
        for pair in both
        for at, due in zip(
            itertools.accumulate(pair.logged[:-1]), itertools.accumulate(pair.planned(plan)[:-1]), strict=True
        )
    ]
    return statistics.mean(late)


def holds(both: Sequence[Pair], scale: int) -> bool:
    """Compares the measurement with log and plan; returns False if the machine was too busy to decide.

    Only differing medians are excused, only if the server itself was late or the load exceeds the number of
    processors, and only if a larger scale remains. The log has the server's own scheduling delays, the plan has none.
    """
    plan = Plan(**delays(scale))
    last_minute, *_ = os.getloadavg()
    hold_order(both, plan)
    try:
        hold_medians(both, lambda pair: pair.logged)
        hold_medians(both, lambda pair: pair.planned(plan))
    except Disagreement:
        is_quiet = lateness(both, plan) < LATE_SECONDS and last_minute < len(os.sched_getaffinity(0)) + 1
        if is_quiet or scale == SCALES[-1]:
            raise
        return False
    return True
