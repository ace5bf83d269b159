"""The benchmark of what one more server costs: its arithmetic, its stand-ins, and all of it in short on real ones."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import fleet, scenario
from benchmarks.clock_server import addresses
from benchmarks.fleet import Settings
from benchmarks.peers.protocol import Options
from tests.artifacts import tiny_artifact


def test_one_more_costs_what_many_do_beyond_few() -> None:
    envoys = [
        {"servers": 2, "checks_per_second": 4.0, "cpu_share": 0.01, "server_cpu_share": 0.002,
         "pss_bytes": 50e6, "descriptors": 40},
        {"servers": 9, "checks_per_second": 18.0, "cpu_share": 0.9, "server_cpu_share": 0.9,
         "pss_bytes": 0.0, "descriptors": 0},
        {"servers": 102, "checks_per_second": 204.0, "cpu_share": 0.03, "server_cpu_share": 0.102,
         "pss_bytes": 60e6, "descriptors": 240},
    ]  # fmt: skip
    prometheuses = [
        {"servers": 2, "series": 1e3, "samples_per_second": 1e2, "cpu_share": 0.02, "pss_bytes": 9e7,
         "rule_seconds": 0.01},
        {"servers": 102, "series": 51e3, "samples_per_second": 51e2, "cpu_share": 0.07, "pss_bytes": 8e7,
         "rule_seconds": 0.21},
    ]  # fmt: skip
    found = fleet.judge({"samples": 500}, envoys, prometheuses, 1e-4)
    assert found["server"] == {"samples": 500, "cpu_seconds_per_check": pytest.approx(0.1 / 200)}
    assert found["envoy"]["bytes_per_server"] == pytest.approx(100e3)
    assert found["envoy"]["descriptors_per_server"] == pytest.approx(2)
    assert found["envoy"]["cpu_seconds_per_check"] == pytest.approx(0.02 / 200)
    assert (found["envoy"]["base_bytes"], found["envoy"]["cpu_seconds_per_call"]) == (50e6, 1e-4)
    assert found["prometheus"]["cpu_seconds_per_sample"] == pytest.approx(0.05 / 5e3)
    assert found["prometheus"]["rule_seconds_per_server"] == pytest.approx(0.002)
    assert found["prometheus"]["bytes_per_series"] == 0, "less memory for more is noise"


def test_samples_are_counted_as_prometheus_does() -> None:
    assert fleet.count_samples(b'# HELP a sheep\n# TYPE a counter\na{b="# c"} 1\n\nd 2\n') == 2


def test_one_process_is_many_servers() -> None:
    with fleet.healthy_server(3) as (targets, _):
        assert [target.rpartition(":")[0] for target in targets] == addresses(3)
        for target in targets:
            with grpc.insecure_channel(target) as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_metrics_are_served_at_every_address() -> None:
    page = b"sheep 1\n" * 1000
    with fleet.exposing(page, addresses(3)) as targets:
        assert len(targets) == 3
        for target in targets:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as answer:
                assert answer.read() == page
                assert answer.headers["Content-Type"].startswith("text/plain")


@pytest.mark.usefixtures("prometheus")
def test_all_of_it_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "fp32" / "model"
    place.parent.mkdir()
    place.symlink_to(tiny_artifact("decoder-only"), target_is_directory=True)
    options = Options(tmp_path, tmp_path, "fp32", threads=1, max_batch=4, context=0)
    monkeypatch.setattr(scenario, "make_artifact", lambda *_, **__: options)
    settings = Settings(precision="fp32", servers=(2, 6), seconds=1.0, scrape_seconds=0.3, calls=32, callers=4)
    results = fleet.measure(settings, tmp_path)
    server, envoy, prometheus = (results[name] for name in ("server", "envoy", "prometheus"))
    assert server["samples"] > 300
    assert server["start_seconds"] > 0
    assert server["artefact_bytes"] == sum(file.stat().st_size for file in place.iterdir())
    # Each is asked in two ways, by two sockets.
    assert envoy["descriptors_per_server"] == pytest.approx(2, abs=0.5)
    assert envoy["by_servers"][1]["checks_per_second"] > envoy["by_servers"][0]["checks_per_second"]
    assert [each["series"] for each in prometheus["by_servers"]] == [2 * server["samples"], 6 * server["samples"]]
    assert all(each["rule_seconds"] > 0 for each in prometheus["by_servers"])
    assert "| 6 |" in fleet.render(results)
    json.dumps(results, allow_nan=False)


@pytest.mark.parametrize("servers", ["2", "0,5", "5,2", "2,2", "two,three"])
def test_numbers_of_servers_must_rise(servers: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fleet._parse(["--servers", servers])
    assert "--servers must be" in capsys.readouterr().err
