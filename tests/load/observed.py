"""Holds what a client measured to what the fake server did, request by request, on the one clock of the host.

And what the server did to its plan: so that what comes out are the delays that were known before.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.core.records import Outcome, Record
from tests.load.fake_server import Plan

TOLERANCE = 0.05
"""Of a median."""
DELAYS: dict[str, Any] = {"ttft": (0.2, 0.4), "itl": (0.1, 0.2)}
"""The known ones, long enough for 5 % of them to outlast what a machine adds."""
SCALES = (1, 4, 12)
"""Where the machine is too busy for that they are so many times as long in the next run."""
LATE_SECONDS = 0.003
"""A quiet machine wakes a sleeper within one or two milliseconds."""


class Disagreement(AssertionError):
    """Medians are further apart than they may be."""


def delays(scale: int) -> dict[str, Any]:
    """The known ones, so many times as long."""
    return {name: (scale * least, scale * most) for name, (least, most) in DELAYS.items()}


@dataclass(frozen=True, slots=True)
class Pair:
    """One finished request by both accounts; the client's times are moved to the host's clock."""

    record: Record
    began: float
    done: Mapping[str, Any]

    @property
    def arrivals(self) -> list[float]:
        return [self.began + at for at in self.record.arrivals]

    @property
    def first_token_seconds(self) -> float:
        assert self.record.first_token_seconds is not None
        return self.record.first_token_seconds


def pairs(records: Sequence[Record], began: float, log: Mapping[str, Mapping[str, Any]]) -> list[Pair]:
    finished = [record for record in records if record.outcome is Outcome.FINISHED]
    return [Pair(record, began, log[record.request_id]) for record in finished]


def hold(both: Sequence[Pair]) -> None:
    """Nothing is seen before it was done, and the medians of all delays are those of the server within 5 %.

    The server's delays are taken from its own account: what a busy machine adds to them there, it adds on both sides.
    """
    assert both
    for pair in both:
        sent = pair.done["sent"]
        assert len(pair.arrivals) == len(sent)
        assert pair.began + pair.record.sent <= pair.done["arrived"]
        assert all(seen >= at for seen, at in zip(pair.arrivals, sent, strict=True))
        assert pair.began + pair.record.ended >= sent[-1]
    first = [(pair.first_token_seconds, pair.done["sent"][0] - pair.done["arrived"]) for pair in both]
    gaps = [
        (seen, later - earlier)
        for pair in both
        for seen, (earlier, later) in zip(pair.record.gaps, itertools.pairwise(pair.done["sent"]), strict=True)
    ]
    whole = [(pair.record.end_to_end_seconds, pair.done["sent"][-1] - pair.done["arrived"]) for pair in both]
    for measured in (first, gaps, whole):
        _agree(measured)


def hold_to_plan(both: Sequence[Pair], plan: Plan) -> None:
    """The server was never quicker than planned, and what was measured is what was planned, within 5 %."""
    first, gaps, whole = [], [], []
    for pair in both:
        ttft, itl = plan.delays(pair.record.number)
        for number, at in enumerate(pair.done["sent"]):
            # A sum rounds otherwise than the server adds up.
            assert at >= pair.done["arrived"] + ttft + number * itl - 1e-6
        first.append((pair.first_token_seconds, ttft))
        gaps += [(seen, itl) for seen in pair.record.gaps]
        whole.append((pair.record.end_to_end_seconds, ttft + len(pair.record.gaps) * itl))
    for measured in (first, gaps, whole):
        _agree(measured)


def lateness(both: Sequence[Pair], plan: Plan) -> float:
    """By how many seconds the server was late for its plan, on average and by its own clock: the machine's doing."""
    late = []
    for pair in both:
        ttft, itl = plan.delays(pair.record.number)
        late += [at - pair.done["arrived"] - ttft - number * itl for number, at in enumerate(pair.done["sent"])]
    return statistics.mean(late)


def holds(both: Sequence[Pair], scale: int) -> bool:
    """Whether `hold` and `hold_to_plan` are content; if not, they raise, unless the machine was too busy to tell.

    Only medians that differ can be put down to that, only where the server itself was late or clearly more has wanted
    to run than there are processors (what is between server and client may be late where the server is not), and only
    while there is a larger scale to look again.
    """
    plan = Plan(**delays(scale))
    last_minute, *_ = os.getloadavg()
    try:
        hold(both)
        hold_to_plan(both, plan)
    except Disagreement:
        is_quiet = lateness(both, plan) < LATE_SECONDS and last_minute < len(os.sched_getaffinity(0)) + 1
        if is_quiet or scale == SCALES[-1]:
            raise
        return False
    return True


def _agree(measured: Sequence[tuple[float, float]]) -> None:
    seen, known = zip(*measured, strict=True)
    ratio = statistics.median(seen) / statistics.median(known)
    # And one by one, not only as a heap.
    by_one = statistics.median(one / two for one, two in measured)
    if max(abs(ratio - 1), abs(by_one - 1)) > TOLERANCE:
        raise Disagreement(f"medians are {ratio:.3f} of what they should be, one by one {by_one:.3f}")
