"""The README's commands do what it says: each line of its shell block is run, training cut to a few steps."""

from __future__ import annotations

import pytest

from benchmarks.frame.servers import serving
from tests.environment import ROOT, run_shown

TIMEOUT_SECONDS = 500


def readme_commands() -> list[str]:
    block = (ROOT / "README.md").read_text(encoding="utf-8").split("```sh\n")[1].split("```")[0]
    return block.strip().splitlines()


@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_readme_commands_run(tmp_path):
    commands = readme_commands()
    serve = next(command for command in commands if " serve " in command)
    before, asks = commands[: commands.index(serve)], commands[commands.index(serve) + 1 :]
    assert before
    assert asks
    for command in before:
        run_shown(f"{command} --set steps=3" if " train " in command else command, tmp_path)
    assert serve == "python -m service serve --models build/models"
    with serving(tmp_path / "build" / "models", "--no-metrics") as target:
        for command in asks:
            run_shown(command, tmp_path, ONWARD_TARGET=target)
