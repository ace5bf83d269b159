"""Shares of a run together equal a single process's run, and the ledger adds up exactly."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import pytest

from loadtest.core.options import LoadOptions, read_options
from loadtest.core.records import Outcome
from loadtest.locust.options import add_run_options
from loadtest.locust.session import Flight, Ledger, Session, Share


def load(*words: str) -> LoadOptions:
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    return read_options(parser.parse_args(words))


def share(index: int = 0, count: int = 1, **fields: Any) -> Share:
    values = {"run": "run", "begin": time.time(), "vocab_size": 100, "model": "m", "seconds": None}
    return Share(index=index, count=count, **{**values, **fields})


def session(*words: str, index: int = 0, count: int = 1, **fields: Any) -> Session:
    return Session(share(index, count, **fields), load(*words))


def test_parts_of_a_closed_loop_take_every_number_once() -> None:
    taken: list[int] = []
    parts = [session("--requests", "7", index=index, count=2) for index in range(2)]
    for part in parts:
        while (number := part.take()) is not None:
            taken.append(number)
        assert part.is_exhausted
    assert sorted(taken) == list(range(7))


def test_a_closed_part_gives_no_more_numbers_but_is_not_exhausted() -> None:
    part = session()
    assert part.take() == 0
    part.is_closed = True
    assert part.take() is None
    assert not part.is_exhausted


def test_every_part_asks_what_one_process_would_ask() -> None:
    two = session("--prompt-tokens", "uniform:1:50", index=1, count=2)
    one = session("--prompt-tokens", "uniform:1:50")
    assert two.offer(1)[1] == one.offer(1)[1]


def test_a_request_belongs_to_the_stage_in_which_it_was_sent() -> None:
    part = session()
    before, _ = part.offer(0)
    part.enter("64 tokens", 64)
    after, prompt = part.offer(1)
    assert len(prompt.token_ids) == 64
    assert [part.ended(flight, "OK").stage for flight in (before, after)] == ["", "64 tokens"]


def test_the_begin_is_a_time_of_day() -> None:
    part = session(begin=time.time() + 100.0)
    assert part.now() == pytest.approx(-100.0, abs=1.0)
    flight, _ = part.offer(0, due=-100.5)
    assert part.ended(flight, "OK").lateness == pytest.approx(0.5, abs=1.0)


def test_cancelling_ends_requests_that_are_sent_or_about_to_be() -> None:
    cancelled: list[int] = []
    part = session()
    flights = [part.offer(number)[0] for number in range(2)]
    flights[0].sent(lambda: cancelled.append(0))
    part.cancel()
    assert cancelled == [0]
    flights[1].sent(lambda: cancelled.append(1))
    assert cancelled == [0, 1]
    assert {part.ended(flight, "CANCELLED").outcome for flight in flights} == {Outcome.CANCELLED}
    assert part.in_flight == 0


def sent(part: Session) -> Any:
    """A report after its journey through JSON."""
    return json.loads(json.dumps(part.report()))


def end(part: Session, flight: Flight) -> None:
    flight.watch.is_whole = True
    part.ended(flight, "OK")


def test_the_ledger_adds_up_partial_reports() -> None:
    ledger = Ledger("run", 2, is_open=True)
    parts = [session(index=index, count=2) for index in range(2)]
    flights = [part.offer(part.take() or 0)[0] for part in parts for _ in range(2)]
    end(parts[0], flights[0])
    ledger.add(sent(parts[0]))
    ledger.add(sent(parts[1]))
    assert (ledger.to_run().offered, len(ledger.to_run().records)) == (4, 1)
    end(parts[0], flights[1])
    end(parts[1], flights[2])
    ledger.add(sent(parts[0]))
    ledger.add(sent(parts[1]))
    # A record is reported only once.
    ledger.add(sent(parts[0]))
    run = ledger.to_run()
    assert (run.offered, len(run.records), len(run.clients)) == (4, 3, 2)


def test_the_ledger_knows_which_shares_are_exhausted_and_drained() -> None:
    ledger = Ledger("run", 2)
    parts = [session("--requests", "2", index=index, count=2) for index in range(2)]
    assert not ledger.is_exhausted([0])
    for part in parts:
        part.offer(part.take() or 0)
    assert parts[0].take() is None
    for part in parts:
        ledger.add(sent(part))
    assert ledger.is_exhausted([0])
    assert not ledger.is_exhausted([0, 1])
    assert not ledger.is_drained([0])
    parts[0].is_drained = True
    ledger.add(sent(parts[0]))
    # A later report without records removes nothing.
    ledger.add(sent(parts[0]))
    assert ledger.is_drained([0])
    assert not ledger.is_drained([0, 1])


def test_the_ledger_ignores_reports_of_an_earlier_run() -> None:
    ledger = Ledger("run", 1)
    late = session(run="before")
    end(late, late.offer(0)[0])
    ledger.add(sent(late))
    assert (ledger.to_run().offered, ledger.to_run().records) == (0, ())
