"""Holds what a client measured to what the fake server did, request by request, on the one clock of the host."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from loadtest.records import Outcome, Record

TOLERANCE = 0.05
"""Of a median."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One finished request by both accounts; the client's times are moved to the host's clock."""

    record: Record
    began: float
    done: Mapping[str, Any]

    @property
    def arrivals(self) -> list[float]:
        return [self.began + at for at in self.record.arrivals]


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
    first = [(pair.record.first_token_seconds, pair.done["sent"][0] - pair.done["arrived"]) for pair in both]
    gaps = [
        (seen, later - earlier)
        for pair in both
        for seen, earlier, later in zip(pair.record.gaps, pair.done["sent"], pair.done["sent"][1:], strict=False)
    ]
    whole = [(pair.record.end_to_end_seconds, pair.done["sent"][-1] - pair.done["arrived"]) for pair in both]
    for measured in (first, gaps, whole):
        seen, done = zip(*measured, strict=True)
        assert statistics.median(seen) == pytest.approx(statistics.median(done), rel=TOLERANCE)
        # And one by one, not only as a heap.
        assert statistics.median(one / two for one, two in measured) == pytest.approx(1.0, abs=TOLERANCE)
