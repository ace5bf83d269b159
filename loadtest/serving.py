"""A server of one's own for as long as a measurement lasts: a real process on a free loopback port.

Knows how to start it, where it listens, how much memory it takes as the system counts it, and how to stop it by its id;
knows nothing of what it is asked.
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
class Server:
    """Where it listens and where its metrics are, "host:port" each, the latter empty where it has none; its process."""

    target: str
    metrics: str
    pid: int

    def peak_bytes(self) -> int | None:
        """The most memory that was ever resident; None where the system does not say."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


@contextmanager
def serving(models: Path, *flags: str) -> Iterator[Server]:
    """Serves the artifacts under `models`, from when every model has passed its proof to the end of the block.

    Raises:
        RuntimeError: when the server ends before it is ready, or does not end cleanly.
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
    """What a starting server announces on its stdout, once it does.

    Raises:
        RuntimeError: when it ends before.
    """
    assert process.stdout is not None  # noqa: S101 (PIPE was asked for; this tells the type checker)
    for line in process.stdout:
        if match := _READY.search(line):
            metrics = _METRICS.search(line)
            return Server(match[1], metrics[1] if metrics else "", process.pid)
    raise RuntimeError(f"the server ended before it was ready, exit code {process.wait()}")
