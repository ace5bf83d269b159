"""Stages in processes of their own: started, watched, ended when their time is up, whatever state they are in.

What such a process says goes to this one's stderr as it comes, and its last words into the results where it does not
end well. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol

from benchmarks.gpu.needs import Surroundings
from benchmarks.gpu.places import ROOT
from benchmarks.gpu.stages import Stage
from model.spec.artifact import Device

_LOOK_SECONDS = 120.0
_STOP_SECONDS = 5.0
_MAX_WORDS = 12
_MAX_LETTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process is told: all paths absolute.

    Attributes:
        stage: what to run.
        ends: when its time is up, by `time.monotonic`, which is one clock for all processes of a machine.
        device: on what.
        is_quick: whether at sizes that say nothing.
        results: the file of results, in which the stage has been begun.
        work: folder for graphs and for files in passing; other stages find them there.
        artifacts: models made before, or None.
        corpus: gettext catalogs.
    """

    stage: Stage
    ends: float
    device: Device
    is_quick: bool
    results: Path
    work: Path
    artifacts: Path | None
    corpus: Path

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Order:
        """What `to_json` wrote."""
        values = json.loads(text)
        return cls(
            stage=Stage(**values["stage"]),
            ends=values["ends"],
            device=Device(values["device"]),
            is_quick=values["is_quick"],
            results=Path(values["results"]),
            work=Path(values["work"]),
            artifacts=None if values["artifacts"] is None else Path(values["artifacts"]),
            corpus=Path(values["corpus"]),
        )


class Processes(Protocol):
    """By whom the work is done."""

    def look(self, device: Device, parts: Sequence[str]) -> Surroundings:
        """See `needs.look`.

        Raises:
            RuntimeError: when it cannot be told, with the reason.
        """

    def run(self, order: Order) -> str | None:
        """Runs a stage to its end, or to that of its time; why it did not end well, None if it did."""


class Subprocesses:
    """Fresh interpreters, one after the other."""

    def look(self, device: Device, parts: Sequence[str]) -> Surroundings:
        """See `Processes`."""
        command = [sys.executable, "-m", "benchmarks.gpu.needs", str(device), *parts]
        try:
            told = subprocess.check_output(command, cwd=ROOT, timeout=_LOOK_SECONDS, text=True)
            return Surroundings.from_json(told.strip().splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            raise RuntimeError(f"the device could not be asked: {error}") from error

    def run(self, order: Order) -> str | None:
        """See `Processes`."""
        command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu.stage", order.to_json()]
        return watch(command, max(0.0, order.ends - time.monotonic()))


def watch(command: Sequence[str], seconds: float) -> str | None:
    """Runs a command for so long at most; why it did not end well, with its last words, or None if it did.

    It is the first of a group of processes, which ends with it.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    if process.stdout is None:
        raise RuntimeError("the process has no stdout")
    words = _Words(process.stdout)
    why: str | None = None
    try:
        if code := process.wait(seconds):
            why = f"the process ended by {signal.Signals(-code).name}" if code < 0 else f"the process ended with {code}"
    except subprocess.TimeoutExpired:
        why = f"its time was up after {seconds:.0f} s"
    finally:
        if process.poll() is None or (process.returncode or 0) < 0:
            _end(process)
    told = words.last()
    return f"{why}; it last said: {told}" if why and told else why


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a group: politely, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)


class _Words:
    """Passes on what a process says, and keeps the end of it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._last: deque[str] = deque(maxlen=_MAX_WORDS)
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def last(self) -> str:
        """The end of what was said, once the process is over."""
        # Whoever has left the group may hold the pipe open for ever.
        self._thread.join(_STOP_SECONDS)
        return "\n".join(tuple(self._last))[-_MAX_LETTERS:]

    def _pass_on(self) -> None:
        with self._stream:
            for line in self._stream:
                text = line.decode(errors="replace").rstrip()
                print(text, file=sys.stderr, flush=True)
                if text:
                    self._last.append(text)
