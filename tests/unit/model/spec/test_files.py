"""Files in their places: whole ones, or those of before."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from model.spec.files import StagedFiles, remove_leftovers, write_atomically


def test_a_write_that_fails_leaves_the_old_file_and_nothing_over(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, None)  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_no_file_is_in_its_place_before_all_are_written(tmp_path: Path) -> None:
    with StagedFiles(tmp_path / "new") as files:
        for name in ("a", "b"):
            staged = files.add(name, lambda path: path.write_text("new"))
            assert staged.read_text() == "new"
            assert not (tmp_path / "new" / name).exists()
        files.commit()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a", "b"]


def test_files_that_are_not_committed_are_gone(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"old")
    with StagedFiles(tmp_path) as files:
        files.add("a", lambda path: path.write_text("new"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_files_may_be_read_by_whom_the_umask_says(tmp_path: Path) -> None:
    def write_privately(path: Path) -> None:
        path.write_text("")
        path.chmod(0o600)

    before = os.umask(0o022)
    try:
        with StagedFiles(tmp_path) as files:
            files.add("a", write_privately)
            files.commit()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(tmp_path: Path) -> None:
    files = StagedFiles(tmp_path)
    files.add("a", lambda path: path.write_text("half"))
    (tmp_path / "kept.tmp").write_text("")
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.tmp"]
