"""Conditions of `loadtest bench`: what they read, when they fail, and what CI sees of it."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from loadtest.core.conditions import parse_condition, to_junit
from loadtest.core.figures import summarize
from loadtest.core.progress import describe
from tests.unit.loadtest.test_load_figures import record, run

RUN = run(
    record(intended=0.0, arrivals=(0.5, 0.6), counts=(1, 1)),
    record(intended=0.0, arrivals=(0.1, 0.4), counts=(1, 1)),
    seconds=2.0,
)


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("ttft_p99>0.5", False),
        ("ttft_p99>0.49", True),
        ("ttft_median > 0.3", False),
        ("ttft_median>=0.3", True),
        ("ttft_mean<=0.3", True),
        ("itl_p100>0.29", True),
        ("request_throughput<1", False),
        ("request_throughput<1.1", True),
        ("completed<2", False),
    ],
)
def test_condition_compares_seconds_and_figures_of_the_report(text: str, fails: bool) -> None:
    complaint = parse_condition(text).complaint(RUN, summarize(RUN))
    assert (complaint is not None) == fails


def test_what_no_request_has_fails_and_what_the_report_lacks_is_named() -> None:
    nothing = run()
    assert parse_condition("ttft_p99>5").complaint(nothing, summarize(nothing))
    for text in ("sheep>1", "errors>1"):
        with pytest.raises(ValueError, match="the report has no number"):
            parse_condition(text).complaint(RUN, summarize(RUN))
    for text in ("ttft_p99", "ttft_p99>", "ttft_p99>fast", "ttft_p101>1", "ttft_p99>inf", "ttft>1 or tpot>1"):
        with pytest.raises(ValueError, match="is no condition"):
            parse_condition(text)


def test_junit_has_a_case_for_each_condition() -> None:
    good, bad = parse_condition("completed<2"), parse_condition("ttft_p99>0.1")
    verdicts = [(each, each.complaint(RUN, summarize(RUN))) for each in (good, bad)]
    suite = ElementTree.fromstring(to_junit(verdicts, RUN.seconds))
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    first, second = suite.findall("testcase")
    assert first.find("failure") is None
    failure = second.find("failure")
    assert failure is not None
    assert "0.496" in str(failure.get("message"))


def test_progress_says_what_ends_first() -> None:
    assert describe(10, 4, 5.0, count=40, seconds=None) == "10 of 40 requests ended, 4 in flight, 5 s, about 15 s left"
    assert "about 2 s left" in describe(10, 4, 5.0, count=40, seconds=7.0)
    assert describe(3, 1, 5.0, count=None, seconds=None) == "3 requests ended, 1 in flight, 5 s"
