"""Runs a Python module as a command in a child process."""

from __future__ import annotations

import subprocess
import sys

_MAX_SAID = 500
"""Characters of stderr in the error of a failed command, counted from its end."""


def run_module(module: str, *arguments: str) -> str:
    """Runs `python -m module …` with this interpreter; returns its stdout.

    Raises:
        RuntimeError: if it fails, with the end of its stderr.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (our own program)
    if done.returncode != 0:
        raise RuntimeError(f"{module} exited with {done.returncode}: {done.stderr.strip()[-_MAX_SAID:]}")
    return done.stdout
