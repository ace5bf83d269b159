"""Seeded arrival schedules of an open loop: requests are sent when due, not when earlier answers come.

Times are seconds since the run began.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Pattern(StrEnum):
    """The distribution of the gaps between requests."""

    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"
    TRACE = "trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """A schedule's distribution; equal seeds give equal schedules.

    Args:
        pattern: the distribution of the gaps.
        rate: mean requests per second, above 0; 0 for a trace, which has its own times.
        burstiness: shape of the gamma distribution of the gaps, as in `vllm bench serve --burstiness`: 1 is Poisson,
            less is burstier, more is more even. The mean stays 1/rate; the coefficient of variation is 1/√burstiness.
        trace: the times, not decreasing, none below 0.
        seed: of the gaps.

    Raises:
        ValueError: naming every field that does not fit.
    """

    pattern: Pattern
    rate: float = 0.0
    burstiness: float = 1.0
    trace: tuple[float, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.pattern is Pattern.TRACE:
            if not self.trace:
                problems.append("trace: a trace has at least one time")
            if self.rate:
                problems.append(f"rate: {self.rate} beside a trace, which says itself when requests come")
            if any(not math.isfinite(each) or each < 0.0 for each in self.trace):
                problems.append("trace: times are finite and not below 0")
            elif any(later < earlier for earlier, later in itertools.pairwise(self.trace)):
                problems.append("trace: times must not decrease")
        elif not (math.isfinite(self.rate) and self.rate > 0.0):
            problems.append(f"rate: {self.rate} is not a number above 0")
        if not (math.isfinite(self.burstiness) and self.burstiness > 0.0):
            problems.append(f"burstiness: {self.burstiness} is not a number above 0")
        elif self.burstiness != 1.0 and self.pattern is not Pattern.GAMMA:
            problems.append(f"burstiness: {self.burstiness} is for gamma, not for {self.pattern}")
        if problems:
            raise ValueError("; ".join(problems))

    def times(self) -> Iterator[float]:
        """The times in order; endless, except for a trace.

        A random schedule begins with a gap, so that the expected count is the same in every window; a constant one
        begins at 0.
        """
        if self.pattern is Pattern.TRACE:
            yield from self.trace
        elif self.pattern is Pattern.CONSTANT:
            yield from (number / self.rate for number in itertools.count())
        else:
            # Poisson's gaps are gamma's at burstiness 1.
            source = random.Random(self.seed)  # noqa: S311 (not for secrets)
            scale = 1.0 / (self.rate * self.burstiness)
            now = 0.0
            while True:
                now += source.gammavariate(self.burstiness, scale)
                yield now

    def schedule(self, *, count: int | None = None, seconds: float | None = None) -> tuple[float, ...]:
        """The times up to a count or a duration (exclusive), whichever comes first.

        Raises:
            ValueError: if nothing bounds an endless schedule, or a bound is not above 0.
        """
        if count is None and seconds is None and self.pattern is not Pattern.TRACE:
            raise ValueError(f"count: {self.pattern} has no end of its own; give a number of requests or of seconds")
        if count is not None and count < 1:
            raise ValueError(f"count: {count} is below 1")
        if seconds is not None and not seconds > 0.0:
            raise ValueError(f"seconds: {seconds} is not above 0")
        times = self.times() if seconds is None else itertools.takewhile(lambda at: at < seconds, self.times())
        return tuple(itertools.islice(times, count))


def read_trace(path: Path) -> tuple[float, ...]:
    """Reads the times in a file, shifted so that the first is 0.

    One number a line, in seconds, not decreasing; empty lines and comments after "#" are skipped.

    Raises:
        ValueError: naming file and line.
        OSError: when the file cannot be read.
    """
    times: list[float] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            at = float(text)
        except ValueError:
            raise ValueError(f"{path}:{number}: {text!r} is not a number of seconds") from None
        if not math.isfinite(at):
            raise ValueError(f"{path}:{number}: {text} is not finite")
        if times and at < times[-1]:
            raise ValueError(f"{path}:{number}: {at} is before {times[-1]}, the time above it")
        times.append(at)
    if not times:
        raise ValueError(f"{path}: no times in it")
    return tuple(at - times[0] for at in times)


def share(times: Sequence[float], index: int, count: int) -> list[tuple[int, float]]:
    """One process's part of a schedule: every `count`-th time from `index` on, with its request number."""
    return list(enumerate(times))[index::count]
