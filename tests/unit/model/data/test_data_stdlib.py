"""The source data: what is read, what is left out, and which side of the split it falls on."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.data import stdlib
from model.data.corpus import Document


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Sixty small modules, so that all sides of a split by hash are there."""
    for index in range(60):
        (tmp_path / f"module{index}.py").write_text(f"x = {index}\n", encoding="utf-8")
    return tmp_path


def paths(files: tuple[Document, ...]) -> set[str]:
    return {file.name for file in files}


def test_the_running_pythons_library_splits_into_disjoint_parts() -> None:
    split = stdlib.split()
    training, validation, held_out = (paths(files) for files in split)
    assert not training & validation
    assert not (training | validation) & held_out
    assert "argparse.py" in training | validation | held_out
    modules = [{path.split("/")[0].removesuffix(".py") for path in side} for side in (training, validation, held_out)]
    assert len(modules[0] | modules[1] | modules[2]) == sum(map(len, modules))
    assert sum(len(file.text) for file in split.training) > 20 * sum(len(file.text) for file in split.validation)
    assert sum(len(file.text) for file in split.training) > 20 * sum(len(file.text) for file in split.held_out)


def test_a_modules_side_does_not_depend_on_what_else_is_there(library: Path) -> None:
    before = [paths(files) for files in stdlib.split(library)]
    for index in range(0, 60, 2):
        (library / f"module{index}.py").unlink()
    after = [paths(files) for files in stdlib.split(library)]
    for was, files in zip(before, after, strict=True):
        assert files == {path for path in was if int(path.removeprefix("module").removesuffix(".py")) % 2}


def test_a_packages_files_stay_together(library: Path) -> None:
    for index in range(60):
        package = library / f"package{index}" / "inner"
        package.mkdir(parents=True)
        for name in ("one.py", "two.py"):
            (package / name).write_text("pass\n", encoding="utf-8")
    sides = [{path.split("/")[0] for path in paths(files)} for files in stdlib.split(library)]
    assert len(sides[0] | sides[1] | sides[2]) == sum(map(len, sides))


@pytest.mark.parametrize(("copy", "original"), [("_pyio", "io"), ("_io", "io"), ("posixpath", "ntpath")])
def test_near_copies_stay_on_one_side(copy: str, original: str) -> None:
    assert stdlib.module_of(copy) == stdlib.module_of(original)


def test_what_is_no_source_of_the_library_proper_is_left_out(library: Path) -> None:
    before = stdlib.split(library)
    for path in (
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
        "latin.py",
    ):
        (library / path).parent.mkdir(parents=True, exist_ok=True)
        (library / path).write_bytes(b"x = '\xe9'\n" if path == "latin.py" else b"x = 1\n")
        assert stdlib.split(library) == before, path


def test_text_keeps_its_line_ends(library: Path) -> None:
    (library / "module0.py").write_bytes(b"a = 1\r\nb = 2\n")
    split = stdlib.split(library)
    every = (*split.training, *split.validation, *split.held_out)
    (file,) = (file for file in every if file.name == "module0.py")
    assert file.text == "a = 1\r\nb = 2\n"


def test_a_large_module_is_always_trained_on(library: Path) -> None:
    before = stdlib.split(library)
    large = {min(paths(before.validation)), min(paths(before.held_out))}
    for path in large:
        (library / path).write_text("#" * 100_000, encoding="utf-8")
    # Small ones in their place, or a side may be left empty.
    for index in range(60, 200):
        (library / f"module{index}.py").write_text("pass\n", encoding="utf-8")
    after = stdlib.split(library)
    assert large <= paths(after.training)
    assert paths(before.held_out) - large <= paths(after.held_out)


def test_a_folder_without_enough_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="too little Python source"):
        stdlib.split(tmp_path)
