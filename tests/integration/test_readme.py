"""The README's commands do what it says: each line of its shell block is run, training cut to a few steps."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.frame.servers import serving
from tests.environment import ROOT, environment

TIMEOUT_SECONDS = 500


def readme_commands() -> list[str]:
    block = (ROOT / "README.md").read_text(encoding="utf-8").split("```sh\n")[1].split("```")[0]
    return block.strip().splitlines()


def run(command: str, folder: Path, **environ: str) -> str:
    words = shlex.split(command)
    assert words[0] == "python"
    finished = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=folder,
        env=environment(**environ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout


@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_readme_commands_run(tmp_path):
    commands = readme_commands()
    serve = next(command for command in commands if " serve " in command)
    before, asks = commands[: commands.index(serve)], commands[commands.index(serve) + 1 :]
    assert before
    assert asks
    for command in before:
        run(f"{command} --set steps=3" if " train " in command else command, tmp_path)
    assert serve == "python -m service serve --models build/models"
    with serving(tmp_path / "build" / "models", "--no-metrics") as target:
        for command in asks:
            run(command, tmp_path, ONWARD_TARGET=target)
