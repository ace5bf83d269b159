"""How many replicas it takes, and where Prometheus finds them; neither needs Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from deploy.ray.__main__ import main
from deploy.ray.demand import demands, needed, replicas
from deploy.ray.ingress import environment
from deploy.ray.targets import announced
from service.routing import ROUTING_KEY
from service.telemetry.metrics import Metrics
from tests.environment import ROOT

# Demand.


def report(slots: int = 10, **models: tuple[float, float, float]) -> dict[str, float]:
    """What a replica reports whose models have so many requests that run, that wait, and such a share of K/V memory."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for model, (running, waiting, kv_usage) in models.items():
        metrics.running.labels(model).set(running)
        metrics.waiting.labels(model).set(waiting)
        metrics.kv_usage.labels(model).set(kv_usage)
    return demands(registry, models, slots)


@pytest.mark.parametrize(
    ("state", "demand"),
    [((0, 0, 0), 0.0), ((5, 0, 0.1), 0.5), ((5, 0, 0.9), 0.9), ((10, 0, 0.2), 1.0), ((10, 25, 0.2), 3.5)],
)
def test_a_model_wants_its_places_or_its_memory_and_what_waits_besides(
    state: tuple[float, float, float], demand: float
) -> None:
    assert list(report(dates=state).values()) == [pytest.approx(demand)]


@pytest.mark.parametrize(
    ("reports", "number"),
    [
        ([{"dates": (0, 0, 0)}], 1),
        ([{"dates": (8, 0, 0)}], 1),
        ([{"dates": (9, 0, 0)}], 2),
        ([{"dates": (10, 4, 0)}, {"dates": (10, 4, 0)}], 4),
        ([{"dates": (2, 0, 0)}, {"dates": (1, 0, 0)}, {"dates": (1, 0, 0)}], 1),
        # They run side by side in each of them.
        ([{"dates": (8, 0, 0), "stdlib": (8, 0, 0)}], 1),
        ([{"dates": (8, 0, 0), "stdlib": (10, 6, 0)}], 2),
    ],
)
def test_replicas_are_as_many_as_the_neediest_model_wants(reports: list[dict[str, Any]], number: int) -> None:
    together: dict[str, dict[int, float]] = {"running_requests": {0: 1e6}}
    for index, each in enumerate(reports):
        for name, value in report(**each).items():
            together.setdefault(name, {})[index] = value
    assert needed(together) == number
    context = SimpleNamespace(aggregated_metrics=together, target_num_replicas=7)
    assert replicas(context) == (number, {})


@pytest.mark.parametrize("reports", [None, {}, {"running_requests": {0: 5.0}}])
def test_replicas_stay_as_many_without_reports(reports: Any) -> None:
    assert replicas(SimpleNamespace(aggregated_metrics=reports, target_num_replicas=7)) == (7, {})


# Targets.


def test_an_address_can_be_found_for_as_long_as_it_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "targets"
    with announced(folder, "127.0.0.1:1234"):
        (path,) = folder.iterdir()
        assert path.suffix == ".json"
        assert str(os.getpid()) in path.name
        assert json.loads(path.read_text()) == [{"targets": ["127.0.0.1:1234"]}]
    assert list(folder.iterdir()) == []


def test_who_was_killed_is_forgotten_by_who_comes_next(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys\n"
        "from deploy.ray.targets import announced\n"
        "with announced(pathlib.Path(sys.argv[1]), '127.0.0.1:1'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, cwd=ROOT)
    (left,) = tmp_path.glob("*.json")
    elsewhere = tmp_path / "another-machine-1.json"
    elsewhere.write_text("[]")
    with announced(tmp_path, "127.0.0.1:2"):
        assert not left.exists()
        assert elsewhere.exists()
        assert len(list(tmp_path.glob("*.json"))) == 2


# Ray's variables.


@pytest.mark.parametrize("by_key", [True, False])
def test_ray_is_configured_for_routing_and_message_size(by_key: bool) -> None:
    given = environment(12345, by_key=by_key)
    assert given["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] == "12345"
    assert given["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    balance = given["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"]
    assert balance.splitlines()[0] == (f"hdr({ROUTING_KEY})" if by_key else "leastconn")
    assert ("hash-type consistent" in balance) is by_key


def test_what_must_be_exported_before_ray_is_started_can_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--models", str(tmp_path), "--by-key", "--environment", "--", "--max-message-bytes", "5000"]) == 0
    shell = "\n".join((capsys.readouterr().out, "env"))
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE=5000\n" in done.stdout
    assert f"hdr({ROUTING_KEY})\n    hash-type consistent\n" in done.stdout


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--max-batch-size", "0"], "--max-batch-size is '0'"),
        (["--tls-certificate", "{pem}", "--tls-key", "{pem}"], "TLS"),
        (["--http-port", "8000"], "--http-port"),
    ],
)
def test_flags_that_are_no_good_or_mean_nothing_here_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str
) -> None:
    pem = tmp_path / "pem"
    pem.touch()
    assert main(["--models", str(tmp_path), "--", *(flag.format(pem=pem) for flag in flags)]) == 2
    assert complaint in capsys.readouterr().err
