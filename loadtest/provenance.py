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

    It is 0 if nothing but comments of Python differs, and strings that stand for comments.
    """
    if _git("merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    changed = _git("diff", "--name-only", "--no-renames", "-z", commit, "HEAD", "--", *code)
    count = _git("rev-list", "--count", f"{commit}..HEAD", "--", *code)
    if changed is None or count is None:
        return None
    return max(1, int(count)) if any(_differs(commit, path) for path in changed.split("\0") if path) else 0


def _differs(commit: str, path: str) -> bool:
    texts = [_git("show", f"{each}:{path}") for each in (commit, "HEAD")]
    if not path.endswith(".py") or None in texts:
        return True
    before, now = (ast.dump(_WithoutComments().visit(ast.parse(text or ""))) for text in texts)
    return before != now


class _WithoutComments(ast.NodeTransformer):
    """Leaves out docstrings, and the strings under constants."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def _git(*arguments: str) -> str | None:
    """What git prints; None where it fails."""
    command = ["git", "-C", str(_ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return None
