"""Schedules keep their laws: means, spreads, seeds, shares; and traces are read as they stand."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.core.arrivals import Arrivals, Pattern, read_trace, share

RATE = 20.0
COUNT = 20_000


def gaps(arrivals: Arrivals, count: int = COUNT) -> list[float]:
    times = (0.0, *arrivals.schedule(count=count))
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_constant_gaps_are_all_alike_and_the_first_request_is_at_once() -> None:
    assert Arrivals(pattern=Pattern.CONSTANT, rate=4.0).schedule(count=4) == (0.0, 0.25, 0.5, 0.75)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_s_mean_and_the_burstiness_s_spread(burstiness: float) -> None:
    drawn = gaps(Arrivals(pattern=Pattern.GAMMA, rate=RATE, burstiness=burstiness, seed=1))
    mean, deviation = statistics.fmean(drawn), statistics.stdev(drawn)
    # Four standard errors of each; that of a deviation is smaller than its excess kurtosis (6/burstiness) makes it.
    spread = 1.0 / math.sqrt(burstiness)
    assert mean * RATE == pytest.approx(1.0, abs=4.0 * spread / math.sqrt(COUNT))
    assert deviation / mean == pytest.approx(
        spread, rel=4.0 * math.sqrt((2.0 + 6.0 / burstiness) / 4.0 / COUNT) + 4.0 * spread / math.sqrt(COUNT)
    )


def test_poisson_is_gamma_of_burstiness_one() -> None:
    one, two = (Arrivals(pattern=pattern, rate=3.0, seed=7) for pattern in (Pattern.POISSON, Pattern.GAMMA))
    assert one.schedule(count=50) == two.schedule(count=50)


def test_a_seed_gives_one_schedule_and_another_seed_another() -> None:
    def drawn(seed: int) -> tuple[float, ...]:
        return Arrivals(pattern=Pattern.POISSON, rate=5.0, seed=seed).schedule(count=20)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_schedule_ends_by_its_count_or_its_time_whichever_comes_first() -> None:
    arrivals = Arrivals(pattern=Pattern.CONSTANT, rate=10.0)
    assert len(arrivals.schedule(count=5, seconds=100.0)) == 5
    # The end itself is not part of it.
    assert arrivals.schedule(count=500, seconds=0.3) == pytest.approx((0.0, 0.1, 0.2))
    with pytest.raises(ValueError, match="count: constant has no end of its own"):
        arrivals.schedule()


@given(st.integers(1, 200), st.integers(1, 7))
def test_shares_are_disjoint_and_together_the_whole(length: int, count: int) -> None:
    times = Arrivals(pattern=Pattern.GAMMA, rate=1.0, burstiness=0.5).schedule(count=length)
    parts = [share(times, index, count) for index in range(count)]
    assert sorted(itertools.chain(*parts)) == list(enumerate(times))


def test_a_trace_is_replayed_as_it_stands_from_its_first_time(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("# seconds\n100.5\n\n100.5  # two at once\n103\n", encoding="utf-8")
    arrivals = Arrivals(pattern=Pattern.TRACE, trace=read_trace(path))
    assert arrivals.schedule() == (0.0, 0.0, 2.5)
    assert arrivals.schedule(seconds=2.5) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1\nsoon\n", ":2: 'soon' is not a number of seconds"),
        ("1\n0.5\n", ":2: 0.5 is before 1.0"),
        ("inf\n", ":1: inf is not finite"),
        ("# none\n", "no times in it"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        read_trace(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pattern": Pattern.POISSON}, "rate: 0.0 is not a number above 0"),
        ({"pattern": Pattern.GAMMA, "rate": math.inf, "burstiness": 0.0}, "rate: inf .*; burstiness: 0.0"),
        ({"pattern": Pattern.POISSON, "rate": 1.0, "burstiness": 2.0}, "burstiness: 2.0 is for gamma"),
        ({"pattern": Pattern.TRACE}, "trace: a trace has at least one time"),
        ({"pattern": Pattern.TRACE, "trace": (1.0, 0.0)}, "trace: times must not decrease"),
        ({"pattern": Pattern.TRACE, "trace": (0.0,), "rate": 1.0}, "rate: 1.0 beside a trace"),
    ],
)
def test_a_law_that_is_none_is_refused_by_its_field(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Arrivals(**fields)  # type: ignore[arg-type]
