"""Servers in processes of their own (`loadtest.serving`), their metrics, and what the system counts of a process."""

from __future__ import annotations

import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from loadtest.serving import serving as served
from loadtest.serving import wait_served

__all__ = ["cpu_seconds", "num_descriptors", "proportional_bytes", "read_metrics", "served", "serving", "wait_ready"]

_TIMEOUT_SECONDS = 60.0


@contextmanager
def serving(models: Path, *flags: str) -> Iterator[str]:
    """Serves the artifacts under `models`; yields "host:port" once every model has passed its proof.

    Raises:
        RuntimeError: if the server ends before it is ready, or does not end cleanly.
    """
    with served(models, *flags) as server:
        yield server.target


def wait_ready(process: subprocess.Popen[str]) -> str:
    """The "host:port" that a starting server announces.

    Raises:
        RuntimeError: if it ends before.
    """
    return wait_served(process).target


def fetch_metrics(address: str) -> bytes:
    """The metrics page of "host:port"."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_SECONDS) as answer:
        page: bytes = answer.read()
    return page


def read_metrics(address: str) -> list[Any]:
    """All samples of the metrics at "host:port"."""
    families = text_string_to_metric_families(fetch_metrics(address).decode())
    return [sample for family in families for sample in family.samples]


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, to a hundredth of a second."""
    # The second field is its name in brackets, which may have spaces.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def proportional_bytes(pid: int) -> int:
    """Proportional set size of a process; 0 if it is gone."""
    lines: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def num_descriptors(pid: int) -> int:
    """Open files and sockets of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
