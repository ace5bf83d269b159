"""A server of one's own for as long as a measurement lasts: a real process on a free loopback port.

Knows how to start it, where it listens and how to stop it by its id; knows nothing of what it is asked.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_READY = re.compile(r"listening on (\S+?:\d+)")
_METRICS = re.compile(r"metrics on http://(\S+?:\d+)")
_STOP_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Served:
    """Where a server listens, "host:port" each; `metrics` is empty where there are none."""

    target: str
    metrics: str


@contextmanager
def serving(models: Path, *flags: str) -> Iterator[str]:
    """Serves the artefacts under `models`; yields "host:port" once every model has passed its proof.

    Raises:
        RuntimeError: when the server ends before it is ready, or does not end cleanly.
    """
    with served(models, *flags) as server:
        yield server.target


@contextmanager
def served(models: Path, *flags: str) -> Iterator[Served]:
    """As `serving`; yields where the metrics are, too."""
    command: Sequence[str] = [sys.executable, "-m", "service", "serve", "--models", str(models), "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _wait_served(process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise RuntimeError(f"the server did not stop within {_STOP_SECONDS} s") from None
        if code != 0:
            raise RuntimeError(f"the server exited with {code}")


def wait_ready(process: subprocess.Popen[str]) -> str:
    """The "host:port" that a starting server announces.

    Raises:
        RuntimeError: when it ends before.
    """
    return _wait_served(process).target


def _wait_served(process: subprocess.Popen[str]) -> Served:
    assert process.stdout is not None  # noqa: S101 (PIPE was asked for; this tells the type checker)
    for line in process.stdout:
        if match := _READY.search(line):
            metrics = _METRICS.search(line)
            return Served(match[1], metrics[1] if metrics else "")
    raise RuntimeError(f"the server ended before it was ready, exit code {process.wait()}")
