"""A real Ray Serve: a child process in Ray's own environment (`make ray` installs it), on free ports.

Only one can run on a machine at a time: Ray's HAProxy keeps its files in fixed places.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build" / "ray-venv" / "bin" / "python"
REPLICA = "ray::ServeReplica:"
"""Titles of replicas begin with it."""
_STOP_SECONDS = 180.0
_LAST_LINES = 30


@dataclass(frozen=True, slots=True)
class RayServe:
    """A running Ray Serve: the process that started it, where it takes calls ("host:port"), and its output."""

    process: subprocess.Popen[str]
    target: str
    said: list[str]

    def processes(self) -> Mapping[int, str]:
        """Its process tree: titles by process id."""
        children: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                # The second field is a name in brackets, which may have spaces.
                parent = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(path.parent.name))
        found: dict[int, str] = {}
        left = [self.process.pid]
        while left:
            pid = left.pop()
            left += children.get(pid, [])
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found

    def replicas(self) -> list[int]:
        """Process ids of the replicas."""
        return sorted(pid for pid, title in self.processes().items() if title.startswith(REPLICA))

    def others(self) -> list[int]:
        """Process ids of everything but the replicas."""
        return sorted(pid for pid, title in self.processes().items() if not title.startswith(REPLICA))


@contextmanager
def on_ray(module: str, *words: str) -> Iterator[RayServe]:
    """Runs a module that starts Ray Serve until the block ends.

    Args:
        module: prints "listening on HOST:PORT", takes `--port` and `--http-port`, ends at SIGTERM.
        words: further arguments.

    Raises:
        RuntimeError: if Ray is not installed or does not start.
    """
    if not PYTHON.exists():
        raise RuntimeError("Ray is not installed: make ray")
    target = f"127.0.0.1:{_free_port()}"
    ports = [f"--port={target.rpartition(':')[2]}", f"--http-port={_free_port()}"]
    command = [str(PYTHON), "-m", module, *ports, *words]
    both: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, cwd=ROOT, **both) as process:
        try:
            assert process.stdout is not None  # noqa: S101 (PIPE was asked for; for the type checker)
            said: list[str] = []
            for line in process.stdout:
                said.append(line)
                if line.rstrip().endswith(f"listening on {target}"):
                    break
            else:
                last = "".join(said[-_LAST_LINES:])
                raise RuntimeError(f"Ray Serve ended before it was ready, exit code {process.wait()}: {last}")
            # Unread output would block it at a full pipe.
            threading.Thread(target=_keep, args=(process.stdout, said), daemon=True).start()
            yield RayServe(process, target, said)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _keep(lines: Iterable[str], kept: list[str]) -> None:
    for line in lines:
        kept.append(line)  # noqa: PERF402 (one by one, as they come)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
