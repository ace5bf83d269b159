"""A system under test as a process: questions and answers with timeouts, and no process left behind.

Speaks `benchmarks.peers.protocol`.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_STOP_SECONDS = 60
_MAX_SAID = 300
_READ_BYTES = 1 << 16


class SystemFailed(Exception):
    """The system answered with an error, too late, not in JSON, or ended; the message is for a row of the table."""


class Child:
    """A running system. Made by `running`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        self._received = b""
        self._is_usable = True

    @property
    def is_usable(self) -> bool:
        """False after a timeout, an end, or something that was no answer."""
        return self._is_usable

    def ask(self, question: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """The answer to one question.

        Raises:
            SystemFailed: see there; `is_usable` says whether more questions make sense.
        """
        stdin = self._process.stdin
        assert stdin is not None  # noqa: S101 (PIPE was asked for; for the type checker)
        with suppress(BrokenPipeError):  # it ended: reading fails next
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
        line = self._read_line(timeout_seconds, str(question["do"]))
        try:
            answer: dict[str, Any] = json.loads(line)
            is_ok = answer.pop("ok")
        except (ValueError, KeyError, AttributeError, TypeError):
            self._is_usable = False
            raise SystemFailed(f"not an answer: {line[:_MAX_SAID]!r}") from None
        if not is_ok:
            raise SystemFailed(str(answer.get("error")))
        return answer

    def _read_line(self, timeout_seconds: float, name: str) -> bytes:
        deadline = time.monotonic() + timeout_seconds
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101 (PIPE was asked for; for the type checker)
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._is_usable = False
                    raise SystemFailed(f"{name}: no answer in {timeout_seconds:g} s")
                if not (chunk := os.read(stdout.fileno(), _READ_BYTES)):
                    self._is_usable = False
                    raise SystemFailed(f"{name}: ended with {_code(self._process)}{_said(self._log)}")
                self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[Child]:
    """Starts a system; at the end its stdin is closed, and if it does not end in time it is killed with its children.

    Args:
        command: of the system.
        environment: added to ours.
        log: where its stderr goes, replaced.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    settings = [f"{name}={value}" for name, value in environment.items()]
    with log.open("wb") as stderr:
        # A session of its own: one id ends it with its children, and an interrupt reaches it through us only.
        process = subprocess.Popen(
            ["/usr/bin/env", *settings, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    is_ended = False
    try:
        child = Child(process, log)
        yield child
        is_ended = child.is_usable and _ends(process)
    finally:
        if not is_ended:
            _kill(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def _ends(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process ends by itself once its stdin has."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    # What it left running goes with it.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _code(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        return "its stdout closed"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _said(log: Path) -> str:
    """The last line of a log, if any."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f": {lines[-1][:_MAX_SAID]}" if lines else ""
