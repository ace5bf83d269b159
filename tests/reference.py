"""Writes docs/serve/flags.md: the help of every command, as it is printed.

python -m tests.reference
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "serve" / "flags.md"
COMMANDS = (
    *(f"service {verb}" for verb in ("serve", "plan", "ask", "chat", "explain", "health", "trace")),
    *(f"model {verb}" for verb in ("train", "evaluate", "init", "import", "lesson")),
    "export",
    "export verify",
    "model.kernels",
    *(f"loadtest {verb}" for verb in ("bench", "capacity", "scaling")),
)
_TITLE = """# Flags

Written by `make reference` from the commands' own help. Flags of the server's commands have the environment variable in
brackets as a twin; the flag wins. `onward VERB` is the same for serve, plan, ask,
chat, explain, health, trace, import, train, lesson, export and bench.
"""


def helps() -> dict[str, str]:
    """What each command prints for `--help`, without its usage."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(COMMANDS, pool.map(_help, COMMANDS), strict=True))


def _help(command: str) -> str:
    asked = [sys.executable, "-m", *command.split(), "--help"]
    environ = {**os.environ, "COLUMNS": "118"}
    done = subprocess.run(asked, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.partition("\n\n")[2].strip()


def main() -> None:
    """Writes the page."""
    sections = [f"## python -m {command}\n\n```text\n{text}\n```\n" for command, text in helps().items()]
    PAGE.write_text("\n".join([_TITLE, *sections]), encoding="utf-8")


if __name__ == "__main__":
    main()
