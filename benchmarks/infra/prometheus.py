"""A real Prometheus: a child process on loopback with our rules, and its answers.

It reads `deploy/prometheus/prometheus.yml` with other targets, scrape interval and address. Debian and Ubuntu have it
as the package `prometheus`.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "prometheus.yml"
_READY_SECONDS = 60.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.05
_LISTENING = re.compile(r'msg="Listening on".* address=(\S+)')


@dataclass(frozen=True, slots=True)
class Series:
    """A series: labels, and values by time in seconds since 1970."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        """Its newest value."""
        return self.points[-1][1]

    @property
    def has_data(self) -> bool:
        """Whether any value is a number; 0/0 is none."""
        return any(not math.isnan(value) for _, value in self.points)


class Prometheus:
    """A running Prometheus at `address` ("host:port")."""

    def __init__(self, address: str, pid: int) -> None:
        self.address = address
        self.pid = pid

    def query(self, expression: str, at: float | None = None) -> list[Series]:
        """An expression's value, now or at a time.

        Raises:
            RuntimeError: with Prometheus' error.
        """
        parameters = {"query": expression} | ({} if at is None else {"time": f"{at:.3f}"})
        return _series(self._get("/api/v1/query", parameters))

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        """Its values from `start` to `end`, every `step` seconds.

        Raises:
            RuntimeError: with Prometheus' error.
        """
        parameters = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        return _series(self._get("/api/v1/query_range", parameters))

    def number(self, expression: str, at: float | None = None) -> float:
        """The value of an expression that has one series.

        Raises:
            RuntimeError: if it has none, or several.
        """
        found = self.query(expression, at)
        if len(found) != 1:
            raise RuntimeError(f"{expression} has {len(found)} series, one was expected")
        return found[0].last

    def rules(self) -> list[Mapping[str, Any]]:
        """Every rule that it evaluates, as its API has it."""
        return [rule for group in self._get("/api/v1/rules", {})["groups"] for rule in group["rules"]]

    def wait_scraped(self, since: float, job: str = "onward") -> float:
        """Waits until every target of a job has answered a scrape at or after a time; the time of the last of these.

        A failed scrape ends every series for a while.

        Raises:
            RuntimeError: if that takes too long.
        """
        up = f'up{{job="{job}"}}'
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            answered = self.query(f"timestamp({up}) and {up} == 1")
            if len(answered) == len(self.query(up)) > 0 and all(series.last >= since for series in answered):
                return max(series.last for series in answered)
            time.sleep(_POLL_SECONDS)
        raise RuntimeError(f"Prometheus did not scrape {job} within {_READY_SECONDS:g} s")

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        try:
            status, _ = self._request("/-/ready")
        except OSError:
            return False
        return status == http.client.OK

    def _get(self, path: str, parameters: Mapping[str, str]) -> Any:
        _, body = self._request(f"{path}?{urllib.parse.urlencode(parameters)}")
        answer = json.loads(body)
        if answer["status"] != "success":
            raise RuntimeError(f"Prometheus: {answer['error']} ({parameters.get('query', path)})")
        return answer["data"]

    def _request(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=_READY_SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextmanager
def scraping(targets: Sequence[str], folder: Path, *, interval_seconds: float = 1.0) -> Iterator[Prometheus]:
    """A Prometheus that scrapes servers and evaluates our rules until the block ends.

    Args:
        targets: "host:port" of each server's metrics.
        folder: for its data, its configuration and its log.
        interval_seconds: between two scrapes.

    Raises:
        RuntimeError: if Prometheus is not installed, or does not start.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        raise RuntimeError("Prometheus is not installed: apt-get install prometheus")
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(yaml.safe_dump(_configure(targets, interval_seconds)), encoding="utf-8")
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0"]
    with log.open("wb") as output, subprocess.Popen([binary, *flags], stdout=output, stderr=output) as process:
        try:
            yield _wait_ready(process, log)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _configure(targets: Sequence[str], interval_seconds: float) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    interval = f"{round(1000 * interval_seconds)}ms"
    config["global"] |= {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    # No Alertmanager listens here.
    del config["alerting"]
    config["rule_files"] = [str(CONFIG.parent / each) for each in config["rule_files"]]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": list(targets)}]
    return config


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> Prometheus:
    deadline = time.monotonic() + _READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        listening = _LISTENING.search(log.read_text(encoding="utf-8", errors="replace"))
        if listening and (prometheus := Prometheus(listening[1], process.pid)).is_ready():
            return prometheus
        time.sleep(_POLL_SECONDS)
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise RuntimeError(f"Prometheus did not start: {''.join(last)}")


def _series(data: Mapping[str, Any]) -> list[Series]:
    match data["resultType"]:
        case "vector":
            return [Series(each["metric"], (_point(each["value"]),)) for each in data["result"]]
        case "matrix":
            return [Series(each["metric"], tuple(map(_point, each["values"]))) for each in data["result"]]
        case "scalar":
            return [Series({}, (_point(data["result"]),))]
    raise RuntimeError(f"Prometheus answered with a {data['resultType']}")


def _point(pair: tuple[float, str]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])
