"""Writes docs/serve/flags.md: the help of every command, as it is printed.

python -m tests.reference
"""

from __future__ import annotations

import importlib
import io
import os
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

from loadtest.__main__ import COMMANDS as OF_LOADTEST

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
    with patch.dict(os.environ, COLUMNS="118"):
        return {command: _help(command) for command in COMMANDS}


def _help(command: str) -> str:
    package, *words = command.split()
    module = OF_LOADTEST[words.pop(0)][0] if package == "loadtest" else f"{package}.__main__"
    printed = io.StringIO()
    with patch("sys.argv", [f"{package}/__main__.py"]), redirect_stdout(printed), suppress(SystemExit):
        importlib.import_module(module).main([*words, "--help"])
    return printed.getvalue().partition("\n\n")[2].strip()


def main() -> None:
    """Writes the page."""
    sections = [f"## python -m {command}\n\n```text\n{text}\n```\n" for command, text in helps().items()]
    PAGE.write_text("\n".join([_TITLE, *sections]), encoding="utf-8")


if __name__ == "__main__":
    main()
