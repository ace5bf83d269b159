"""Debian's Prometheus beside a real server: it scrapes, records, answers every panel; the arithmetic of two clocks."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from benchmarks.frame import models
from benchmarks.frame.models import Subject
from benchmarks.frame.scenario import Run
from benchmarks.frame.servers import served
from benchmarks.infra import prometheus
from benchmarks.infra.envoy import balancing
from benchmarks.infra.prometheus import Series, scraping
from benchmarks.scenarios import clocks, dashboard
from benchmarks.scenarios.clocks import Histogram, Stream
from benchmarks.scenarios.dashboard import Answered, Panel
from tests.artifacts import tiny_artifact


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """A tiny artifact, which scenarios serve."""
    place = tmp_path / "fp32" / "model"
    place.parent.mkdir()
    place.symlink_to(tiny_artifact("decoder-only"), target_is_directory=True)
    made = Subject(place, threads=1, max_batch=4)
    monkeypatch.setattr(models, "make_subject", lambda *_, **__: made)
    return made


def facts(settings: object) -> dict[str, object]:
    """What the frame adds to results."""
    return {"settings": asdict(settings), "machine": {"processor": "p"}}  # type: ignore[call-overload]


# Two clocks.

BOUNDS = (0.1, 0.2, 0.4, 0.8, math.inf)


def stream(sent: float, *messages: tuple[float, int]) -> Stream:
    return Stream(sent, messages, messages[-1][0] + 0.05)


def test_message_of_several_tokens_is_as_many_waits_of_equal_parts() -> None:
    found = stream(1.0, (1.5, 2), (1.8, 1), (2.4, 3))
    assert found.first_token_seconds == 0.5
    assert found.seconds == pytest.approx(1.45)
    # Two tokens that came with the first message have waited for nothing that the client could see.
    assert found.token_waits == pytest.approx([0.3, 0.2, 0.2, 0.2])
    assert [count for _, count in found.waits] == [1, 3]


def histograms(**quantiles: float) -> dict[str, Histogram]:
    """Of ten streams with eleven tokens each, as they are seen below."""
    given = {"first token": 0.15, "between tokens": 0.15, "request": 0.7, **quantiles}
    counts = {"first token": 10.0, "between tokens": 100.0, "request": 10.0}
    return {
        name: Histogram(BOUNDS, (0.0, 1.0, 2.0, 3.0, counts[name]), dict.fromkeys(clocks.SHARES, given[name]))
        for name in clocks.HISTOGRAMS
    }


STREAMS = [Stream(0.0, tuple((0.15 + 0.05 * number, 1) for number in range(11)), 0.7) for _ in range(10)]
SCRAPES = {
    "count": 9.0,
    "median": 0.01,
    "p99": 0.02,
    "max": 0.05,
    "samples": 7.0,
    "mean_running": 4.0,
    "mean_waiting": 1.0,
}


@pytest.mark.parametrize(
    ("seen", "apart", "agree"),
    [
        ({}, 1, True),
        ({"first token": 0.2}, 1, True),
        ({"first token": 0.39}, 1, True),
        ({"first token": 0.41}, 2, False),
        ({"between tokens": 0.3}, 2, False),
        ({"request": 0.05}, 3, False),
    ],
)
def test_clocks_agree_when_every_percentile_is_a_bucket_away_at_most(
    seen: dict[str, float], apart: int, agree: bool
) -> None:
    found = clocks.judge(STREAMS, histograms(**seen), SCRAPES)
    assert (found["most_buckets_apart"], found["clocks_agree"]) == (apart, agree)
    assert found["percentiles"]["request"]["p99"]["client"] == 0.7
    assert (found["tokens"], found["tokens_in_company_share"]) == (110, 0)


def test_tokens_that_came_in_company_are_told() -> None:
    streams = [*STREAMS[:9], stream(0.0, (0.15, 3), (0.4, 2), *((0.5 + number / 100, 1) for number in range(6)))]
    found = clocks.judge(streams, histograms(), SCRAPES)
    assert found["tokens_in_company_share"] == pytest.approx(5 / 110)
    assert found["tokens_with_the_first"] == 2


def test_other_requests_than_the_clients_own_are_noticed() -> None:
    with pytest.raises(RuntimeError, match="onward_e2e_request_latency_seconds counts 10, the client 9"):
        clocks.judge(
            STREAMS[:9],
            histograms()
            | {
                "first token": replace(histograms()["first token"], counts=(9.0,)),
                "between tokens": replace(histograms()["between tokens"], counts=(90.0,)),
            },
            SCRAPES,
        )


@pytest.mark.parametrize(("slowest", "in_time"), [(0.1, True), (0.11, False)])
def test_slowest_scrape_is_what_counts(slowest: float, in_time: bool) -> None:
    assert clocks.judge(STREAMS, histograms(), {**SCRAPES, "max": slowest})["scrapes_in_time"] is in_time


@pytest.mark.usefixtures("prometheus")
def test_a_scrape_that_failed_is_not_waited_for(tmp_path: Path) -> None:
    failures: list[None] = []

    class Target(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if failures:
                failures.pop()
                self.send_error(503)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(b"sheep 1\n")

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Target) as target:
        serving = threading.Thread(target=target.serve_forever)
        serving.start()
        try:
            with scraping([f"127.0.0.1:{target.server_port}"], tmp_path, interval_seconds=0.5) as prometheus:
                prometheus.wait_scraped(time.time())
                failures += [None] * 3
                when = prometheus.wait_scraped(time.time())
                assert not failures
                assert prometheus.number("sheep", when) == 1
        finally:
            target.shutdown()
            serving.join()


@pytest.mark.usefixtures("subject", "prometheus")
def test_clocks_are_compared_on_a_real_server(tmp_path: Path) -> None:
    settings = clocks.ClockSettings(
        requests=40, warm_up=4, slots=4, in_flight=6, prompt_least=4, prompt_most=32, new_least=4, new_most=24
    )
    results = clocks.measure(settings, Run(tmp_path)) | facts(settings)
    # That it counts exactly the client's tokens is checked in there; which bucket they fall in is for a quiet machine.
    assert results["requests"] == 40
    assert set(results["percentiles"]) == set(clocks.HISTOGRAMS)
    assert results["scrapes"]["count"] >= 1
    assert results["scrapes"]["samples"] > 900, "vLLM's names are among them"
    assert "| request, p99 |" in clocks.render(results)
    assert "<svg" in clocks.draw_picture(results)
    json.dumps(results, allow_nan=False)


# The dashboard.

PANEL = Panel(
    "Sheep",
    "short",
    is_stacked=False,
    is_logarithmic=False,
    is_heat_map=False,
    queries={"{{name}} counted": "sheep_total", "asleep": "0 / 0"},
)


def test_query_that_answers_with_nothing_or_no_number_has_no_data() -> None:
    numbers, none = Series({"name": "Dolly"}, ((1.0, 2.0),)), Series({}, ((1.0, math.nan),))
    full = Answered(PANEL, {"{{name}} counted": (none, numbers), "asleep": (numbers,)})
    assert full.without_data == []
    assert set(full.lines) == {"Dolly counted", "asleep"}
    empty = Answered(PANEL, {"{{name}} counted": (), "asleep": (none,)})
    assert empty.without_data == ["sheep_total", "0 / 0"]
    dashboard.require_data([full], [])
    with pytest.raises(RuntimeError, match=r"panel Sheep: no data for sheep_total; panel Sheep: .*; rule r is wrong"):
        dashboard.require_data([full, empty], ["rule r is wrong"])


@pytest.mark.usefixtures("subject", "prometheus")
def test_every_panel_and_every_rule_has_data_on_a_real_server(tmp_path: Path) -> None:
    # With this seed the very first wishes of all clients are of all kinds, so that it takes no more of them.
    settings = dashboard.DashboardSettings(
        clients=(2, 12, 3), seconds=4.5, slots=2, queue=2, prompt_least=4, prompt_most=16, shared=24, new_most=24,
        scrape_seconds=0.25, seed=27,
    )  # fmt: skip
    results = dashboard.measure(settings, Run(tmp_path)) | facts(settings)
    assert len(results["panels"]) == len(dashboard.read_panels(dashboard.DASHBOARD)) > 20
    assert results["rules"]["recording"] >= 20
    assert {"OK", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "OUT_OF_RANGE"} <= set(results["asked"])
    picture = dashboard.draw_picture(results)
    assert all(panel["title"] in picture for panel in results["panels"])
    assert f"All {len(results['panels'])} panels" in dashboard.render(results)


SUMMED = (
    "Requests that ended",
    "Requests in the server",
    "Tokens a second",
    "Calls that failed",
    "Preemptions a second",
    "Requests a second",
    "Times to first token",
    "Times between tokens",
    "Times in the queue",
)
BY_SERVER = ("Memory", "Processors in use", "Scrapes")


@pytest.mark.usefixtures("prometheus")
def test_dashboard_puts_two_servers_behind_envoy_together(subject: Subject, tmp_path: Path) -> None:
    settings = dashboard.DashboardSettings(
        clients=(12, 6), seconds=3.0, slots=2, queue=2, prompt_least=4, prompt_most=16, shared=24, new_most=24
    )
    flags = [
        "--threads", "1", "--no-calibrate", "--max-batch-size", "2", "--max-queue-size", "2", "--metrics-port", "0",
        "--log-level", "error", "--slo-e2e-latency", "2",
    ]  # fmt: skip
    with ExitStack() as stack:
        servers = [stack.enter_context(served(subject.folder.parent, *flags)) for _ in range(2)]
        envoy = stack.enter_context(balancing([server.target for server in servers], tmp_path))
        instances = [server.metrics for server in servers]
        prometheus = stack.enter_context(scraping(instances, tmp_path, interval_seconds=0.25))
        prometheus.wait_scraped(time.time())
        begin = time.time()
        asyncio.run(dashboard.press(envoy.target, settings, subject.config))
        end = prometheus.wait_scraped(time.time())
        prometheus.wait_scraped(end)

        def ask(query: str, instance: str) -> dict[tuple[tuple[str, str], ...], float]:
            found = prometheus.query(dashboard.fill(query, end - begin, instance), end)
            return {tuple(sorted(each.labels.items())): each.last for each in found if each.has_data}

        answers = {
            (panel.title, query): (ask(query, ".+"), [ask(query, instance) for instance in instances])
            for panel in dashboard.read_panels(dashboard.DASHBOARD)
            for query in panel.queries.values()
        }
    compared = set()
    for (title, query), (together, parts) in answers.items():
        for labels, value in together.items():
            found = [part[labels] for part in parts if labels in part]
            if title in SUMMED:
                assert value == pytest.approx(sum(found)), query
            elif title in BY_SERVER:
                assert found == [value], query
            elif len(found) == len(parts):
                # A ratio, a mean, a percentile, a least or a largest of both lies between theirs.
                low, high = min(found), max(found)
                assert low - 0.01 * abs(low) <= value <= high + 0.01 * abs(high), query
            else:
                continue
            compared.add(title)
    assert compared >= {*SUMMED[:4], *BY_SERVER, "Time to first token", "Where a request's time goes", "Rows of a step"}
    # Both had a share in it.
    (work,) = (parts for (_, query), (_, parts) in answers.items() if "onward_generation_tokens_total" in query)
    assert all(value > 0 for part in work for value in part.values())
    assert all(work)


def test_requests_repeat_themselves_and_are_of_all_kinds() -> None:
    class Config:
        vocab_size, context = 100, 200

    def wishes() -> list[dashboard._Wish]:
        made = dashboard._Wishes(dashboard.DashboardSettings(), Config, [9] * 5, random.Random(1))  # type: ignore[arg-type]
        return [made.next() for _ in range(300)]

    first = wishes()
    assert first == wishes()
    assert {wish.request.priority for wish in first} == {0, 5}
    assert {wish.request.sampling.n for wish in first} == {0, 2}
    assert sum(wish.seconds is not None for wish in first) > 0 < sum(wish.messages is not None for wish in first)
    assert any(list(wish.request.token_ids.ids[:5]) == [9] * 5 for wish in first)


# Prometheus itself.


def test_absence_of_prometheus_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus.shutil, "which", lambda _: None)
    with pytest.raises(RuntimeError, match="apt-get install prometheus"), scraping(["127.0.0.1:1"], tmp_path):
        pass


@pytest.mark.usefixtures("prometheus")
def test_configuration_that_prometheus_refuses_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"did not start: .*is not a valid hostname"),
        scraping(["http://127.0.0.1:1"], tmp_path),
    ):
        pass


@pytest.mark.usefixtures("prometheus")
def test_query_that_prometheus_refuses_is_said(tmp_path: Path) -> None:
    with scraping(["127.0.0.1:1"], tmp_path, interval_seconds=0.2) as running:
        with pytest.raises(RuntimeError, match=r"parse error.*\(sum by\)"):
            running.query("sum by")
        with pytest.raises(RuntimeError, match="has 0 series"):
            running.number("nothing")
        assert running.number("1 + 1") == 2
