"""The source data: what is read, what is left out, and which side of the split it falls on."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.data import stdlib


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Sixty small modules, so that both sides of any split by hash are there."""
    for index in range(60):
        (tmp_path / f"module{index}.py").write_text(f"x = {index}\n", encoding="utf-8")
    return tmp_path


def paths(files: tuple[stdlib.SourceFile, ...]) -> set[str]:
    return {file.path for file in files}


def test_the_running_pythons_library_splits_into_disjoint_parts() -> None:
    split = stdlib.split()
    training, held_out = paths(split.training), paths(split.held_out)
    assert not training & held_out
    assert "argparse.py" in training | held_out
    assert sum(len(file.text) for file in split.training) > 20 * sum(len(file.text) for file in split.held_out)


def test_no_top_level_name_is_on_both_sides() -> None:
    split = stdlib.split()
    training, held_out = (
        {path.split("/")[0].removesuffix(".py") for path in paths(files)} for files in (split.training, split.held_out)
    )
    assert not training & held_out


def test_the_split_is_the_same_each_time(library: Path) -> None:
    assert stdlib.split(library) == stdlib.split(library)


def test_a_modules_side_does_not_depend_on_what_else_is_there(library: Path) -> None:
    before = paths(stdlib.split(library).held_out)
    for index in range(0, 60, 2):
        (library / f"module{index}.py").unlink()
    after = paths(stdlib.split(library).held_out)
    assert after == {path for path in before if int(path.removeprefix("module").removesuffix(".py")) % 2}


def test_a_packages_files_stay_together(library: Path) -> None:
    for index in range(60):
        package = library / f"package{index}" / "inner"
        package.mkdir(parents=True)
        for name in ("one.py", "two.py"):
            (package / name).write_text("pass\n", encoding="utf-8")
    split = stdlib.split(library)
    sides = [{path.split("/")[0] for path in paths(files)} for files in (split.training, split.held_out)]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize(("copy", "original"), [("_pyio", "io"), ("_io", "io"), ("posixpath", "ntpath")])
def test_near_copies_stay_on_one_side(copy: str, original: str) -> None:
    assert stdlib.module_of(copy) == stdlib.module_of(original)


@pytest.mark.parametrize(
    "path",
    [
        "test/test_x.py",
        "unittest/test/test_x.py",
        "encodings/cp1252.py",
        "idlelib/help.py",
        "site-packages/torch/nn.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "json/__pycache__/decoder.py",
        "notes.txt",
        "compiled.pyc",
    ],
)
def test_what_is_no_source_of_the_library_proper_is_left_out(library: Path, path: str) -> None:
    before = stdlib.split(library)
    (library / path).parent.mkdir(parents=True, exist_ok=True)
    (library / path).write_text("x = 1\n", encoding="utf-8")
    assert stdlib.split(library) == before


def test_a_file_that_is_not_utf8_is_left_out(library: Path) -> None:
    before = stdlib.split(library)
    (library / "latin.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    assert stdlib.split(library) == before


def test_text_keeps_its_line_ends(library: Path) -> None:
    (library / "module0.py").write_bytes(b"a = 1\r\nb = 2\n")
    split = stdlib.split(library)
    (file,) = (file for file in (*split.training, *split.held_out) if file.path == "module0.py")
    assert file.text == "a = 1\r\nb = 2\n"


def test_a_large_module_is_never_held_out(library: Path) -> None:
    held_out = paths(stdlib.split(library).held_out)
    largest = min(held_out)
    (library / largest).write_text("#" * 100_000, encoding="utf-8")
    assert paths(stdlib.split(library).held_out) == held_out - {largest}


def test_the_hash_follows_every_name_and_every_text(library: Path) -> None:
    hashes = [stdlib.split(library).sha256]
    (library / "module0.py").write_text("x = -1\n", encoding="utf-8")
    hashes.append(stdlib.split(library).sha256)
    (library / "module0.py").rename(library / "renamed.py")
    hashes.append(stdlib.split(library).sha256)
    assert len(set(hashes)) == 3


def test_a_folder_without_enough_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="too little Python source"):
        stdlib.split(tmp_path)
