"""When requests are sent: seeded schedules of an open loop, in which nobody waits for an answer before asking again.

Times are seconds since the run began. Knows numbers and a file of numbers; nothing of requests, servers or clocks.
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
    """How the gaps between requests are drawn."""

    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"
    TRACE = "trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """A schedule's law.

    Args:
        pattern: the law of the gaps.
        rate: requests a second in the mean, above 0. What a trace says itself is not to be given: it stays 0.
        burstiness: shape of the gamma law of the gaps, above 0, whose mean stays 1/rate: 1 is Poisson, less comes in
            bursts, more is more even. The coefficient of variation of the gaps is 1/√burstiness. The parameter and its
            meaning are vLLM's (`vllm bench serve --burstiness`).
        trace: the times themselves, not decreasing, none below 0.
        seed: same seed, same schedule.

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
        """The times, never decreasing: without end, but for a trace.

        A random schedule begins with a gap, so that its count in any window has the law's mean; a constant one begins
        at 0.
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
        """The times up to a count, up to a duration (exclusive), or up to whichever comes first.

        Raises:
            ValueError: when nothing bounds a law without end, or a bound is not above 0.
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
    """The times in a file, moved so that the first is 0.

    One number a line, in seconds, not decreasing; empty lines and what follows a "#" are skipped.

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
    """What one of several processes sends of a schedule, each time with its number in the whole: every `count`-th.

    Together the shares are the whole, whatever its law.
    """
    return list(enumerate(times))[index::count]
