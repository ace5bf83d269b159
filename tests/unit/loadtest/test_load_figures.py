"""Records and figures: each figure from given times, each outcome from a stream's end."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from loadtest.core.figures import ClientLoad, Run, Wanted, parse_objectives, render, summarize, warnings
from loadtest.core.records import INCOMPLETE, Outcome, Piece, Record, Watch


def record(**fields: Any) -> Record:
    """A finished request: due at 1.0, sent at 1.1, tokens at 1.5, 1.6 and (two at once) 1.9, over at 2.0."""
    values: dict[str, Any] = {
        "number": 0,
        "request_id": "r",
        "stage": "",
        "intended": 1.0,
        "sent": 1.1,
        "arrivals": (1.5, 1.6, 1.9),
        "counts": (1, 1, 2),
        "ended": 2.0,
        "outcome": Outcome.FINISHED,
        "code": "OK",
        "prompt_tokens": 10,
    }
    return Record(**{**values, **fields})


def run(*records: Record, offered: int | None = None, seconds: float = 10.0, is_open: bool = True) -> Run:
    clients = (ClientLoad(0.5, 0.25),)
    return Run(records, len(records) if offered is None else offered, seconds, clients, is_open)


def test_latencies_count_from_when_a_request_was_due() -> None:
    one = record()
    assert one.first_token_seconds == pytest.approx(0.5)
    assert one.end_to_end_seconds == pytest.approx(1.0)
    assert one.lateness == pytest.approx(0.1)
    assert one.generated_tokens == 4
    assert one.seconds_per_token == pytest.approx(0.5 / 3)
    assert one.gaps == pytest.approx([0.1, 0.3])


def test_what_a_request_has_not_is_none() -> None:
    none = record(arrivals=(), counts=())
    assert (none.first_token_seconds, none.seconds_per_token, none.gaps) == (None, None, [])
    assert record(arrivals=(1.5,), counts=(1,)).seconds_per_token is None


def test_tokens_are_those_the_server_counts_where_it_does() -> None:
    watch = Watch(number=0, request_id="r", stage="", intended=0.0, sent=0.0, prompt_tokens=4)
    watch.saw(Piece(1), 0.5)
    assert watch.over("OK", 1.0).generated_tokens == 1
    watch.saw(Piece(0, is_last=True, prompt_tokens=6, generated_tokens=6), 0.9)
    ended = watch.over("OK", 1.5)
    assert (ended.generated_tokens, ended.prompt_tokens) == (6, 6)
    assert ended.seconds_per_token == pytest.approx(1.0 / 5)


def test_a_record_survives_a_journey_through_json() -> None:
    one = record(detail="why", prompt_tokens=None)
    assert Record.from_dict(json.loads(json.dumps(one.to_dict()))) == one


@pytest.mark.parametrize(
    ("code", "whole", "given_up", "tokens", "outcome", "named"),
    [
        ("OK", True, False, 1, Outcome.FINISHED, "OK"),
        ("OK", False, False, 1, Outcome.FAILED, INCOMPLETE),
        ("OK", True, True, 1, Outcome.FINISHED, "OK"),
        ("RESOURCE_EXHAUSTED", False, False, 0, Outcome.REFUSED, "RESOURCE_EXHAUSTED"),
        ("RESOURCE_EXHAUSTED", False, False, 1, Outcome.FAILED, "RESOURCE_EXHAUSTED"),
        ("CANCELLED", False, True, 1, Outcome.CANCELLED, "CANCELLED"),
        # Whose cancelling was it? Not ours.
        ("CANCELLED", False, False, 1, Outcome.FAILED, "CANCELLED"),
        ("DEADLINE_EXCEEDED", False, True, 0, Outcome.FAILED, "DEADLINE_EXCEEDED"),
        ("UNAVAILABLE", False, False, 0, Outcome.FAILED, "UNAVAILABLE"),
    ],
)
def test_a_stream_ends_in_exactly_one_way(
    code: str, whole: bool, given_up: bool, tokens: int, outcome: Outcome, named: str
) -> None:
    watch = Watch(number=3, request_id="r-3", stage="s", intended=0.0, sent=0.1, prompt_tokens=None)
    watch.saw(Piece(0), 0.2)
    watch.saw(Piece(tokens, is_last=whole), 0.3)
    watch.saw(Piece(0), 0.4)
    watch.is_cancelled = given_up
    ended = watch.over(code, 0.5, "words")
    assert (ended.outcome, ended.code, ended.detail) == (outcome, named, "words")
    assert ended.arrivals == ((0.3,) if tokens else ())
    assert (ended.number, ended.request_id, ended.stage, ended.ended) == (3, "r-3", "s", 0.5)


def test_the_report_s_figures_are_those_of_finished_requests() -> None:
    report = summarize(
        run(
            record(number=0),
            record(number=1, intended=2.0, sent=2.0, arrivals=(3.5, 3.7), counts=(1, 1), ended=4.0),
            record(number=2, outcome=Outcome.REFUSED, code="RESOURCE_EXHAUSTED", arrivals=(), counts=(), detail="full"),
            record(number=3, outcome=Outcome.FAILED, code="INTERNAL", ended=1000.0),
            record(number=4, outcome=Outcome.CANCELLED, code="CANCELLED"),
        ),
        Wanted(percentiles=(50.0, 100.0)),
    )
    assert {name: report[name] for name in ("offered", *Outcome, "missing", "completed")} == {
        "offered": 5,
        "finished": 2,
        "refused": 1,
        "failed": 1,
        "cancelled": 1,
        "missing": 0,
        "completed": 2,
    }
    assert report["errors"] == {"CANCELLED": 1, "INTERNAL": 1, "RESOURCE_EXHAUSTED": 1}
    assert report["error_details"] == {"RESOURCE_EXHAUSTED": "full"}
    assert report["total_input_tokens"] == 20
    assert report["total_output_tokens"] == 6
    assert report["request_throughput"] == pytest.approx(0.2)
    assert report["output_throughput"] == pytest.approx(0.6)
    assert report["total_token_throughput"] == pytest.approx(2.6)
    assert report["mean_ttft_ms"] == pytest.approx(1000.0)
    assert report["median_ttft_ms"] == pytest.approx(1000.0)
    assert report["std_ttft_ms"] == pytest.approx(500.0)
    assert report["p100_ttft_ms"] == pytest.approx(1500.0)
    assert report["mean_tpot_ms"] == pytest.approx((500.0 / 3 + 500.0) / 2)
    # Every gap counts alike, whosever it is.
    assert report["mean_itl_ms"] == pytest.approx((100.0 + 300.0 + 200.0) / 3)
    assert report["p50_itl_ms"] == pytest.approx(200.0)
    assert report["mean_e2el_ms"] == pytest.approx(1500.0)
    assert report["p100_lateness_ms"] == pytest.approx(100.0)
    json.dumps(report, allow_nan=False)


def test_figures_have_vllms_names() -> None:
    report = summarize(run(record()), Wanted(percentiles=(99.0, 99.9)))
    names = itertools.product(("mean", "median", "std", "p99", "p99.9"), ("ttft", "tpot", "itl", "e2el"))
    assert {f"{name}_{metric}_ms" for name, metric in names} <= set(report)


def test_a_figure_without_requests_is_none() -> None:
    report = summarize(run(record(outcome=Outcome.FAILED, code="INTERNAL"), seconds=0.0))
    assert (report["finished"], report["failed"]) == (0, 1)
    assert (report["mean_ttft_ms"], report["request_throughput"]) == (None, None)
    assert "-" in render(report)
    unknown = summarize(run(record(), record(prompt_tokens=None)))
    assert (unknown["total_input_tokens"], unknown["total_token_throughput"]) == (None, None)


def test_missing_requests_and_silent_processes_are_reported() -> None:
    missing = run(record(), offered=3)
    assert summarize(missing)["missing"] == 2
    assert "2 of 3 requests are missing" in warnings(missing)[0]
    assert "Requests MISSING" in render(summarize(missing))
    silent = Run((record(),), 1, 1.0, (), is_open=False, silent=1)
    assert summarize(silent)["silent"] == 1
    assert "1 of the client's processes never reported" in render(summarize(silent))


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    good = record(number=0)  # ttft 500 ms, tpot 167 ms
    slow = record(number=1, intended=0.0)  # ttft 1500 ms
    single = record(number=2, arrivals=(1.2,), counts=(1,))  # has no tpot
    lost = record(number=3, outcome=Outcome.FAILED, code="INTERNAL")
    rows = run(good, slow, single, lost)
    for words, count in ((["ttft:500"], 2), (["ttft:500", "tpot:100"], 1), (["ttft:2000"], 3), (["e2el:999"], 0)):
        goodput = summarize(rows, Wanted(objectives=parse_objectives(words)))["request_goodput"]
        assert goodput == pytest.approx(count / 10.0), words
    assert summarize(rows)["request_goodput"] is None


@pytest.mark.parametrize("word", ["itl:5", "ttft", "ttft:soon", "ttft:0", "tpot:-1"])
def test_an_objective_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=f"--goodput: '{word}'"):
        parse_objectives([word])


def test_requests_at_once_are_counted_by_overlap() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (5.0, 6.0)]
    assert summarize(run(*(record(sent=begin, ended=end) for begin, end in spans)))["max_concurrent_requests"] == 2


def test_a_busy_client_and_a_late_one_are_doubted_an_idle_one_is_not() -> None:
    assert warnings(run(record(sent=1.001))) == []
    busy = Run((record(),), 1, 1.0, (ClientLoad(0.3, 0.1), ClientLoad(1.2, 0.95)), is_open=False)
    assert "client process 1 spent 95% of a core" in warnings(busy)[0]
    assert "sent 100.0 ms late or more, against 500.0 ms" in warnings(run(record()))[0]
    # In a closed loop nothing is due.
    assert warnings(run(record(), is_open=False)) == []
