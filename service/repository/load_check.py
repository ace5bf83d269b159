"""The load check: a large artifact is loaded and proven in a child process before a running server loads it.

An artifact that is unfit, or that crashes ONNX Runtime, is found there, and one that is fit is in the page cache then.
The child is nice to the running streams and does not spin. Its address space is limited to what such an artifact needs;
if the machine runs out of memory all the same, the kernel kills this process first.

`python -m service.repository.load_check NAME` is the child. It reads the server's configuration from stdin, pickled.
The last line of its stdout is JSON: the problems of the artifact and how long its sessions took to make.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from service.config import ServeConfig
from service.engine.engine import LastRun
from service.engine.kv.budget import weight_bytes
from service.errors import StartupError
from service.repository.loading import load_model, manifest_of, needs_of, share_memory
from service.repository.startup import prepare

_LOGGER = logging.getLogger(__name__)

MIN_BYTES = 64 << 20
"""The size from which an artifact is checked."""
MAX_SECONDS = 600.0

_NICENESS = 5
# Libraries and what they reserve; for each thread its stack and its arena. A server of small models has 1 GiB.
_LIBRARY_BYTES = 4 << 30
_THREAD_BYTES = 128 << 20
# Weights in the file, as they are read, and in float32 once or twice: int4 weights were seen to take nine times their
# size.
_WEIGHT_FACTOR = 24


class LoadCheck:
    """Runs the child, one at a time, until it is closed."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def run(self, config: ServeConfig, name: str, kv_memory: int | None) -> None:
        """Checks a model with so many bytes of K/V, by default with what it needs. Blocks.

        Raises:
            StartupError: with what the child found, or how it ended.
        """
        config = dataclasses.replace(config, spin=False, kv_memory=kv_memory, kv_shares=())
        command = [sys.executable, "-m", "service.repository.load_check", name]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as child:  # noqa: S603 (ourselves)
            self._child = child
            if self._is_closed:
                child.kill()
            try:
                out, err = child.communicate(pickle.dumps(config), MAX_SECONDS)
            except subprocess.TimeoutExpired as error:
                child.kill()
                raise StartupError([f"its load check did not end in {MAX_SECONDS:g} s"]) from error
            finally:
                if self._child is child:
                    self._child = None
        answer = _last_json(out.decode())
        if answer is None:
            _LOGGER.error("the load check of %s ended with %d: %s", name, child.returncode, err.decode()[-2000:])
            raise StartupError([f"the process of its load check ended with {_ending(child.returncode)}"])
        if problems := answer["problems"]:
            raise StartupError(problems)
        _LOGGER.info("%s has passed its load check: its sessions took %.1f s to make", name, answer["session_seconds"])

    def close(self) -> None:
        """Kills the child that runs now, and those that follow."""
        self._is_closed = True
        if self._child is not None:
            self._child.kill()


def main(argv: Sequence[str]) -> int:
    """The child; 0 whether the model is fit or not."""
    os.nice(_NICENESS)
    (name,) = argv
    config: ServeConfig = pickle.load(sys.stdin.buffer)  # noqa: S301 (of the server that started this process)
    problems: list[str] = []
    seconds = 0.0
    _limit_memory(config.models / name, config)
    try:
        model = load_model(config.models / name, config.device)
        kv_bytes = share_memory([model], config).parts[name]
        seconds = prepare(config, model, kv_bytes, LastRun()).session_seconds
    except StartupError as error:
        problems += error.problems
    except MemoryError as error:
        problems.append(f"it needs more memory than its manifest implies: {error}")
    sys.stdout.write(json.dumps({"problems": problems, "session_seconds": seconds}) + "\n")
    return 0


def _limit_memory(folder: Path, config: ServeConfig) -> None:
    """Limits the child's address space to a few times what fit artifacts were seen to take."""
    try:
        manifest = manifest_of(folder, config.device)
    except StartupError:
        return  # loading it says so again, before anything of it is read
    needs = needs_of(manifest, config)
    kv_bytes = needs.whole if config.kv_memory is None else config.kv_memory
    num_threads = (os.cpu_count() or 1) + (config.threads or 0)
    num_bytes = _LIBRARY_BYTES + num_threads * _THREAD_BYTES + _WEIGHT_FACTOR * weight_bytes(manifest)
    # Rows reserve address space at full length, whatever they may hold.
    num_bytes += 2 * (max(kv_bytes, needs.whole) + needs.besides)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _ending(returncode: int) -> str:
    """A process's exit status, or the name of the signal that ended it."""
    if returncode < 0 and -returncode in {*signal.Signals}:
        return signal.Signals(-returncode).name
    return str(returncode)


def _last_json(text: str) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = json.loads(text.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
