"""Where a figure comes from: the commit and the day, and how far the measured code has moved on since."""

from __future__ import annotations

import ast
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

MEASURED = ("service", "model", "export", "onward", "proto", "loadtest", "benchmarks", "constraints.txt")
"""Folders and files that decide figures."""
_ROOT = Path(__file__).resolve().parents[1]


def here() -> dict[str, str | None]:
    """`date`, as YYYY-MM-DD, and `commit`, abbreviated; "+" behind it stands for changes that are not committed.

    `commit` is None outside a git repository.
    """
    commit = _git("rev-parse", "--short=9", "HEAD")
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit and commit + "+" * is_changed()}


def is_changed() -> bool:
    """Whether measured code has changes that are not committed."""
    return bool(_git("status", "--porcelain", "--", *MEASURED))


def commits_since(commit: str, code: Sequence[str] = MEASURED) -> int | None:
    """Commits that changed this code, as git's pathspecs, after this one; None if it does not lead here.

    None changed it if nothing but comments and docstrings of Python differs.
    """
    if _git("merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    changed = _git("diff", "--name-only", "--no-renames", commit, "HEAD", "--", *code)
    if changed is not None and all(_statements(commit, path) == _statements("HEAD", path) for path in changed.split()):
        return 0
    count = _git("rev-list", "--count", f"{commit}..HEAD", "--", *code)
    return None if count is None else int(count)


def _statements(commit: str, path: str) -> str | None:
    """A file without comments and docstrings, if it is Python; None where the commit lacks it."""
    text = _git("show", f"{commit}:{path}")
    if text is None or not path.endswith(".py"):
        return text
    tree = ast.parse(text)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree)


def _git(*arguments: str) -> str | None:
    """What git prints; None where it fails."""
    command = ["git", "-C", str(_ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return None
