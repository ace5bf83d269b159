"""Rules, alerts and dashboard: Prometheus accepts them, each alert has been seen to fire and clear, all names exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.scenarios.dashboard import DASHBOARD, read_panels
from deploy.grafana import dashboard
from service.config import ServeConfig
from service.telemetry.metrics import OUTCOMES, Metrics, Objectives
from tests.environment import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
ALERTMANAGER = ROOT / "deploy" / "alertmanager" / "alertmanager.yml"
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
# What Prometheus says of every target by itself.
ITS_OWN = {"up", "scrape_duration_seconds", "ALERTS"}


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_configuration_and_rules_are_what_prometheus_takes(promtool: str) -> None:
    assert f"{len(RULES)} rule files found" in run(promtool, "check", "config", PROMETHEUS / "prometheus.yml")


def test_alerts_fire_and_clear_as_their_tests_say(promtool: str) -> None:
    assert run(promtool, "test", "rules", *TESTS).count("SUCCESS") == len(TESTS)


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@cache
def rules() -> list[dict[str, Any]]:
    return [rule for file in RULES for group in read(file)["groups"] for rule in group["rules"]]


@cache
def stories() -> list[dict[str, Any]]:
    return [story for file in TESTS for story in read(file)["tests"]]


ALERTS = [rule["alert"] for rule in rules() if "alert" in rule]


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_is_seen_quiet_then_firing_then_quiet_again(alert: str) -> None:
    seen: defaultdict[str, list[bool]] = defaultdict(list)
    for story in stories():
        for case in story.get("alert_rule_test", []):
            if case["alertname"] == alert:
                seen[story["name"]].append(bool(case.get("exp_alerts")))
    assert [False, True, False] in [[fires for fires, _ in groupby(story)] for story in seen.values()]


def test_every_alert_has_its_section_in_the_runbook_and_links_to_it() -> None:
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules() if "alert" in rule}
    (base,) = {link.partition("#")[0] for link in links.values()}
    assert links == {alert: f"{base}#{alert.lower()}" for alert in ALERTS}
    # Set in one place, and a page of the repository where it is not set.
    label, page = re.fullmatch(r'{{ or \$externalLabels\.(\w+) "(.+)" }}', base).groups()  # type: ignore[union-attr]
    assert read(PROMETHEUS / "prometheus.yml")["global"]["external_labels"] == {label: page}
    text = (ROOT / page).read_text(encoding="utf-8")
    urgency = [(rule["alert"], rule["labels"]["severity"]) for rule in rules() if "alert" in rule]
    assert re.findall(r"^## (\w+)\n\n\*\*Means\*\* \((\w+)\)", text, re.MULTILINE) == urgency
    # What it says to look at is on the dashboard.
    panels = {panel["title"] for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]}
    assert set(re.findall(r'"([A-Z][^"]+)"', " ".join(text.split()))) <= panels


def test_every_objectives_budget_is_seen_to_burn() -> None:
    seen = {
        alert["exp_labels"]["slo"]
        for story in stories()
        for case in story.get("alert_rule_test", [])
        if case["alertname"] == "OnwardBudgetBurnsFast"
        for alert in case.get("exp_alerts", [])
    }
    budgets = {rule["labels"]["slo"] for rule in rules() if rule.get("record") == "slo:onward_error_budget:ratio"}
    assert seen == budgets == {"availability", *(field.name for field in fields(Objectives))}


@cache
def exposed() -> set[str]:
    """The names of all series of a server with objectives."""
    return {sample.name for family in full_registry().collect() for sample in family.samples}


def full_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = Metrics(registry, Objectives(time_to_first_token=(0.2,)))
    model = metrics.for_model("m")
    model.parity_checked(0.0, passed=True)
    model.cost_model({"prefill_token": 1e-6}, 0.1)
    metrics.handled.labels("Generate", "OK")
    metrics.http_handled.labels("/v1/completions", "200")
    return registry


def expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in read_panels(DASHBOARD):
        for query in panel.queries.values():
            yield panel.title, query


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_metric_that_is_asked_for_is_there(where: str, expression: str) -> None:
    known = exposed() | ITS_OWN | {rule["record"] for rule in rules() if "record" in rule}
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
    bare = re.sub(r"\b(?:by|on|ignoring|without)\s*\([^)]*\)|\{[^}]*\}", "", bare)
    words = set(re.findall(r"[a-zA-Z_:][\w:]*(?![\w:]*\s*\()", bare))
    words -= {"and", "or", "unless", "group_left", "group_right", "bool"}
    assert words or re.fullmatch(r"vector\([\d.]+\)", expression), "there is no metric in it"
    for reasons in re.findall(r'finish_reason=~?"([^"]*)"', expression):
        assert set(reasons.split("|")) <= set(OUTCOMES)
    assert words <= known


def test_metrics_are_named_as_prometheus_wants_them(promtool: str) -> None:
    lines = generate_latest(full_registry()).decode().splitlines(keepends=True)
    text = "".join(line for line in lines if "_created" not in line)
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_dashboard_is_the_one_that_the_program_writes() -> None:
    assert DASHBOARD == dashboard.FILE
    assert dashboard.main(["--check"]) == 0


def test_stale_dashboard_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "onward.json"
    stale.write_text(dashboard.FILE.read_text(encoding="utf-8").replace("Onward", "Inward"), encoding="utf-8")
    monkeypatch.setattr(dashboard, "FILE", stale)
    assert dashboard.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert dashboard.main([]) == dashboard.main(["--check"]) == 0


def test_dashboard_fits_its_provisioning() -> None:
    folder = DASHBOARD.parents[1] / "provisioning"
    (source,) = read(folder / "datasources" / "prometheus.yml")["datasources"]
    config = read(PROMETHEUS / "prometheus.yml")
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    assert read(folder / "dashboards" / "onward.yml")["providers"]
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert {panel["datasource"]["type"] for panel in board["panels"] if panel["type"] != "row"} == {source["type"]}


def test_prometheus_scrapes_the_server_and_grafana_reads_prometheus() -> None:
    (job,) = read(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    assert job["job_name"] == "onward", "the rules ask for it"
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{ServeConfig(models=Path('any')).metrics_port}"]}]
    (source,) = read(DASHBOARD.parents[1] / "provisioning" / "datasources" / "prometheus.yml")["datasources"]
    assert source["url"] == "http://localhost:9090", "where Prometheus listens by default"
    services = read(ROOT / "deploy" / "compose.yaml")["services"]
    for name in ("prometheus", "alertmanager", "grafana", "load"):
        assert services[name]["network_mode"] == "service:onward", "one loopback for all of them"
    (mounted,) = [each.split(":")[1] for each in services["grafana"]["volumes"] if "/dashboards:" in each]
    (provider,) = read(DASHBOARD.parents[1] / "provisioning" / "dashboards" / "onward.yml")["providers"]
    assert provider["options"]["path"] == mounted
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{mounted}/{DASHBOARD.name}"


def test_prometheus_sends_alerts_to_the_alertmanager_of_compose() -> None:
    (manager,) = read(PROMETHEUS / "prometheus.yml")["alerting"]["alertmanagers"]
    assert manager["static_configs"] == [{"targets": ["127.0.0.1:9093"]}]
    services = read(ROOT / "deploy" / "compose.yaml")["services"]
    assert "127.0.0.1:9093:9093" in services["onward"]["ports"]
    (mount,) = [each for each in services["alertmanager"]["volumes"] if each.startswith("./")]
    assert f"--config.file={mount.split(':')[1]}/{ALERTMANAGER.name}" in services["alertmanager"]["command"]
    assert (ROOT / "deploy" / mount.split(":")[0] / ALERTMANAGER.name) == ALERTMANAGER


def test_alertmanager_takes_its_configuration_and_routes_each_alert_by_its_urgency(amtool: str) -> None:
    assert "SUCCESS" in run(amtool, "check-config", ALERTMANAGER)
    for severity in {rule["labels"]["severity"] for rule in rules() if "alert" in rule}:
        command = ("config", "routes", "test", f"--config.file={ALERTMANAGER}", f"severity={severity}")
        # It also warns that the flag has a meaning elsewhere.
        assert [line for line in run(amtool, *command).splitlines() if "Warning" not in line] == [severity]
    named = re.findall(r'alertname!?="(\w+)"', ALERTMANAGER.read_text(encoding="utf-8"))
    assert named
    assert set(named) <= set(ALERTS)
