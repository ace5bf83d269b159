"""Python modules that are commands, each run to its end in a process of its own."""

from __future__ import annotations

import subprocess
import sys

_MAX_SAID = 500
"""Characters of a failed command's last words: the end is what says why."""


def run_module(module: str, *arguments: str) -> str:
    """Runs `python -m module …` with this interpreter; what it wrote to stdout.

    Raises:
        RuntimeError: when it fails, with the last that it wrote to stderr.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (our own program)
    if done.returncode != 0:
        raise RuntimeError(f"{module} exited with {done.returncode}: {done.stderr.strip()[-_MAX_SAID:]}")
    return done.stdout
