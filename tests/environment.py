"""Variables of processes that tests start."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**changes: str) -> dict[str, str]:
    """This process' variables, changed, with the repository's root ahead of what PYTHONPATH has."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **changes}


def run_shown(command: str, folder: Path, **variables: str) -> str:
    """Runs a documented `python …` command in a folder, with variables; returns its output."""
    words = shlex.split(command)
    assert words[0] == "python"
    finished = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout
