"""The capacity plan's arithmetic on round figures, what it says of figures that nobody has, and its document."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import capacity_plan
from benchmarks.capacity_plan import FIGURES, Assumptions, Deployment, Limit, MissingFigures, Plan, erlang_c

ROUND = {
    "capacity": 10.0, "slots": 8.0, "threads": 2.0, "prompt": 100.0, "answer": 96.0, "spread": 0.0,
    "message_cpu": 10e-6, "call_cpu": 200e-6, "check_cpu": 50e-6, "server_check_cpu": 250e-6,
    "envoy_base": 50e6, "envoy_per_server": 100e3, "envoy_sockets": 2.0, "samples": 500.0,
    "prometheus_base": 100e6, "series_bytes": 8e3, "sample_cpu": 5e-6, "rules_per_server": 1e-3,
    "start": 10.0, "server_bytes": 400e6, "server_files": 60.0, "artefact_bytes": 125e6,
}  # fmt: skip
DEPLOYED = Deployment(
    check_seconds=1.0, clusters=2, ring=1024, balance=1.5, streams=1024, envoys=2, workers=2, envoy_bytes=2.0**30,
    pod_cores=2.0, probe_seconds=5.0, max_replicas=16, surge_percent=10, scrape_seconds=15.0, rule_seconds=15.0,
)  # fmt: skip


@pytest.fixture
def plan() -> Plan:
    return Plan(ROUND, DEPLOYED, Assumptions())


def limit(plan: Plan, what: str) -> Limit:
    (found,) = [each for each in plan.limits() if each.what == what]
    return found


# Waiting.


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95])
def test_of_one_server_as_many_wait_as_find_it_busy(share: float) -> None:
    assert erlang_c(1, share) == pytest.approx(share)


@pytest.mark.parametrize(("servers", "load"), [(2, 1.2), (8, 4.8), (10, 8.0), (20, 19.9)])
def test_erlangs_formula_is_the_one_with_factorials(servers: int, load: float) -> None:
    all_busy = load**servers / math.factorial(servers) * servers / (servers - load)
    some_free = sum(load**number / math.factorial(number) for number in range(servers))
    assert erlang_c(servers, load) == pytest.approx(all_busy / (some_free + all_busy))


def test_among_thousands_of_servers_nobody_waits() -> None:
    assert 0 <= erlang_c(8000, 4800) < 1e-12


@pytest.mark.parametrize("load", [-0.1, 4.0, 5.0])
def test_queue_that_grows_for_ever_has_no_share(load: float) -> None:
    with pytest.raises(ValueError, match="load must be at least 0 and below 4, got"):
        erlang_c(4, load)


def test_who_waits_does_so_for_the_next_free_slot(plan: Plan) -> None:
    # Eight slots of 1.25 answers a second, of which 6 a second are taken: the others end at 4 a second.
    share, seconds = plan.wait(8)
    assert share == pytest.approx(erlang_c(8, 4.8))
    assert seconds == pytest.approx(share / 4)


# Sizes.


def test_replicas_are_those_that_the_peak_takes_at_their_utilisation(plan: Plan) -> None:
    # A million a day are 11.6 a second, 34.7 at the peak; a replica does six.
    assert plan.replicas_per_day == 6
    assert (plan.rate(1000), plan.running(1000)) == pytest.approx((6000, 4800))


def test_envoys_are_as_many_as_calls_take_and_at_least_those_deployed(plan: Plan) -> None:
    # A call and 99 messages take 1.19 ms, six of them a second 7.14; two threads at 60 % do 1,200 ms a second.
    assert plan.proxy_cores(1000) == pytest.approx(7.14)
    assert [plan.envoys(replicas) for replicas in (1, 336, 337, 1000)] == [2, 2, 3, 6]
    assert plan.checks(1000) == 2000
    # Two from each of six Envoys.
    assert plan.server_checks(1000) == 12
    assert plan.envoy_sockets(1000) == 6000
    assert plan.server_sockets(1000) == 60 + 6 * 6


def test_lengths_count_by_their_mean_and_not_by_their_median() -> None:
    plan = Plan({**ROUND, "spread": 0.5}, DEPLOYED, Assumptions())
    assert plan.answer_tokens == pytest.approx(96 * math.exp(0.125))
    assert plan.prompt_tokens == pytest.approx(100 * math.exp(0.125))


def test_metrics_are_reckoned_by_samples(plan: Plan) -> None:
    assert (plan.series(1000), plan.samples(1000)) == (500_000, pytest.approx(500_000 / 15))
    assert plan.prometheus_bytes(1000) == pytest.approx(100e6 + 500_000 * 8e3)


def test_bytes_of_a_request_are_the_contracts(plan: Plan) -> None:
    # 400 letters and what frames them; 99 messages of four letters, a token and what frames those.
    assert 400 + 99 * (4 + 14) < plan.request_bytes() < 420 + 99 * (4 + 14 + 15)
    assert plan.envoy_bits(1000) == pytest.approx(2 * 8 * 6000 * plan.request_bytes() / 2)


@pytest.mark.parametrize(("replicas", "batches", "together"), [(2, 2, 1), (10, 10, 1), (11, 6, 2), (1000, 10, 100)])
def test_rolling_update_takes_as_long_as_its_batches_one_after_the_other(
    plan: Plan, replicas: int, batches: int, together: int
) -> None:
    # An artifact of a gigabit by ten gigabits a second.
    assert plan.surge(replicas) == together
    assert plan.update_seconds(replicas) == pytest.approx(batches * (10 + 0.1 * together + 5))


def test_keys_are_the_less_even_the_fewer_places_each_server_has(plan: Plan) -> None:
    assert plan.unevenness(1) == 0
    assert plan.unevenness(65) == pytest.approx(0.25, rel=0.01)
    # Envoy gives each server one place at the least: gaps are exponential then.
    assert plan.unevenness(100_000) == pytest.approx(1.0, rel=0.001)


# What breaks.


def test_limit_is_reached_by_the_first_that_is_too_many() -> None:
    def made(most: float) -> int | None:
        return Limit("sheep", lambda n: 2.0 * n, most, str, "", "").reached_at()

    assert [made(most) for most in (1, 2, 10, 11)] == [1, 2, 6, 6]
    assert made(1e12) is None


def test_every_limit_holds_until_it_is_reached_and_the_first_comes_first(plan: Plan) -> None:
    reached = [(each, each.reached_at()) for each in plan.limits()]
    for each, at in reached:
        if at is not None:
            assert each.value(at) > each.most
            assert at == 1 or each.value(at - 1) <= each.most, each.what
    numbers = [at for _, at in reached if at is not None]
    assert numbers == sorted(numbers)
    assert reached[0][0].what == "pods that the autoscaler makes"


@pytest.mark.parametrize(
    ("what", "at"),
    [
        ("pods that the autoscaler makes", 17),
        # 2.4 cores at 7.14 ms a second for each replica.
        ("processor time of all Envoys", 337),
        # Two checks a second of 50 microseconds for each.
        ("processor time of one Envoy's health checks", 10_001),
        ("sockets of one Envoy to servers", 171),
        ("requests at once on one connection of a client", 214),
        ("DNS answer, bytes", 4_093),
        ("machines of a cluster", 40_001),
        ("time of all rules, one after the other", 15_001),
    ],
)
def test_limits_are_reached_where_a_pencil_finds_them(plan: Plan, what: str, at: int) -> None:
    assert limit(plan, what).reached_at() == at


# Figures.


def put(folder: Path, without: str = "") -> None:
    """Round figures where the plan looks for them, but for one."""
    files: dict[str, Any] = {figure.file: {} for figure in FIGURES.values()}
    for name, figure in FIGURES.items():
        place = files[figure.file]
        for key in figure.path[:-1]:
            place = place.setdefault(key, {})
        if name != without:
            place[figure.path[-1]] = ROUND[name]
    files["goodput"]["machine"] = {"processor": "Abacus"}
    files["goodput"]["settings"] |= {"model": "m", "precision": "int8"}
    for way in ("direct", "envoy"):
        costs = {"added_call_seconds": 3e-4, "added_message_seconds": 1e-4, "throughput_share": 0.5}
        files["scaling-out-cost"]["ways"].setdefault(way, {}).update(costs)
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")


def test_figures_are_read_from_where_they_were_left(tmp_path: Path) -> None:
    put(tmp_path)
    assert capacity_plan.read_figures(tmp_path) == ROUND


def test_figures_that_nobody_has_are_named_with_what_measures_them(tmp_path: Path) -> None:
    put(tmp_path, without="samples")
    with pytest.raises(MissingFigures) as missing:
        capacity_plan.read_figures(tmp_path)
    assert str(missing.value) == "fleet.json lacks server.samples: python -m benchmarks.fleet --docs"
    (tmp_path / "scaling-out-cost.json").unlink()
    with pytest.raises(MissingFigures, match=r"scaling-out-cost\.json lacks ways\.envoy\.cpu_seconds_per_message: "):
        capacity_plan.read_figures(tmp_path)


def test_deployment_is_what_the_files_say() -> None:
    deployed = capacity_plan.read_deployment()
    assert (deployed.ring, deployed.balance, deployed.clusters) == (65_536, 1.5, 2)
    assert (deployed.check_seconds, deployed.scrape_seconds, deployed.probe_seconds) == (1, 15, 5)
    assert (deployed.envoys, deployed.workers, deployed.envoy_bytes) == (2, 2, 2**30)
    assert (deployed.pod_cores, deployed.max_replicas, deployed.surge_percent) == (2, 16, 10)


def test_document_tells_both_sizes_and_what_breaks_in_order(tmp_path: Path) -> None:
    put(tmp_path)
    told = capacity_plan.render(ROUND, DEPLOYED, Assumptions(), tmp_path)
    assert "it carries **173,000 requests a day**" in told
    assert "| replicas | 6 | 1,000 |" in told
    assert "| Envoys | 2 | 6 |" in told
    assert "The first: pods that the autoscaler makes, at 17 replicas." in told
    assert "| 17 | pods that the autoscaler makes | 6 | **1,000** | 16 |" in told
    assert "| 337 | processor time of all Envoys | 0.0428 cores | **7.14 cores** | 2.4 cores |" in told
    assert "| envoy | 300.0 µs | 100.0 µs | 50% | - | - |" in told
    assert all(f"[{figure.file}.json]" in told for figure in FIGURES.values())


def test_plan_without_figures_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capacity_plan, "read_figures", _lack)
    assert capacity_plan.main(["--docs"]) == 1
    assert "capacity plan: nobody has measured" in capsys.readouterr().err


def _lack() -> dict[str, float]:
    raise MissingFigures("nobody has measured")


@pytest.mark.parametrize("arguments", [["--peak", "0"], ["--replicas", "-1"], ["--gigabits", "inf"]])
def test_assumptions_out_of_range_are_refused_by_name(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        capacity_plan.main(arguments)
    assert f"{arguments[0]} must be finite and above 0" in capsys.readouterr().err


def test_document_is_what_its_figures_say_now(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        capacity_plan.read_figures()
    except MissingFigures as error:
        pytest.skip(f"figures are for an idle machine: {error}")
    assert capacity_plan.main(["--check"]) == 0, capsys.readouterr().err
