"""Runs a server process on a free loopback port for the duration of a measurement."""

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
_HTTP = re.compile(r"HTTP on port (\d+)")
_METRICS = re.compile(r"metrics on http://(\S+?:\d+)")
_STOP_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Server:
    """Addresses of a server and its metrics, as "host:port" (`metrics` is empty if it has none), and its process.

    `http_port` is 0 where it serves gRPC alone.
    """

    target: str
    metrics: str
    pid: int
    http_port: int = 0

    def peak_bytes(self) -> int | None:
        """Peak resident memory; None if the system does not report it."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


@contextmanager
def serving(models: Path, *flags: str) -> Iterator[Server]:
    """Serves the artifacts under `models`; enters the block when every model has passed its parity check.

    Raises:
        RuntimeError: if the server ends before it is ready, or does not end cleanly.
    """
    command: Sequence[str] = [sys.executable, "-m", "service", "serve", "--models", str(models), "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 (our own program)
        try:
            yield wait_served(process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise RuntimeError(f"the server did not stop within {_STOP_SECONDS} s") from None
        if code != 0:
            raise RuntimeError(f"the server exited with {code}")


def wait_served(process: subprocess.Popen[str]) -> Server:
    """Reads a starting server's addresses from its stdout.

    Raises:
        RuntimeError: if it ends before it is ready.
    """
    assert process.stdout is not None  # noqa: S101 (stdout is a pipe; for the type checker)
    for line in process.stdout:
        if match := _READY.search(line):
            metrics, http = _METRICS.search(line), _HTTP.search(line)
            return Server(match[1], metrics[1] if metrics else "", process.pid, int(http[1]) if http else 0)
    raise RuntimeError(f"the server ended before it was ready, exit code {process.wait()}")
