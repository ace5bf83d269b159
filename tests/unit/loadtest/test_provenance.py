"""How far measured code has moved on: by what it does, along one line of history."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from loadtest import provenance

CODE = (
    '"""Adds."""\n\nMOST = 3\n"""So many."""\n\n\ndef add(a, b):\n    """Their sum."""\n    return a + b  # plainly\n'
)


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit of two files."""
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    # As a hook has them, they name another repository.
    for name in [each for each in os.environ if each.startswith("GIT_")]:
        monkeypatch.delenv(name)
    git("init", "--quiet")
    (tmp_path / "add.py").write_text(CODE)
    (tmp_path / "add.cc").write_text("// Adds.\n")
    commit()
    return tmp_path


def git(*arguments: str) -> str:
    who = ("-c", "user.name=tester", "-c", "user.email=tester@localhost", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(provenance._ROOT), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    git("add", "--all")
    git("commit", "--quiet", "--message", "x")
    return git("rev-parse", "HEAD")


def moved_on(since: str) -> int | None:
    return provenance.commits_since(since, ["add.py", "add.cc"])


def test_words_about_the_code_do_not_count_and_code_does(history: Path) -> None:
    first = git("rev-parse", "HEAD")
    assert moved_on(first) == 0
    (history / "add.py").write_text(
        CODE.replace("Their sum", "The sum of both").replace("plainly", "as said").replace("So", "As")
    )
    commit()
    assert moved_on(first) == 0
    (history / "add.py").write_text(CODE.replace("a + b", "b + a"))
    changed = commit()
    assert (moved_on(first), moved_on(changed)) == (2, 0)


@pytest.mark.parametrize("name", ["add.cc", "add.py"])
def test_other_files_count_whole_and_so_does_one_that_is_gone(history: Path, name: str) -> None:
    first = git("rev-parse", "HEAD")
    if name == "add.cc":
        (history / name).write_text("// Adds two.\n")
    else:
        (history / name).unlink()
    commit()
    assert moved_on(first) == 1


def test_a_commit_that_does_not_lead_here_is_none(history: Path) -> None:
    first = git("rev-parse", "HEAD")
    (history / "other").touch()
    ahead = commit()
    git("checkout", "--quiet", first)
    assert moved_on(ahead) is None
    assert moved_on("0" * 40) is None
