"""How the kernels' library is named, found and built; the compiler is a script here, but for one real build."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort
import pytest

from model import kernels
from model.kernels import FOLDER, build
from model.kernels.__main__ import main
from tests.requirements import lacking

Compiler = Callable[[str], Path]

WRITES = 'while [ "$1" != -o ]; do shift; done; echo built > "$2"'


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sources, of a folder of their own."""
    found = tmp_path / "kernels"
    found.mkdir()
    (found / "one.cc").write_text('#include "one.h"\n')
    (found / "one.h").write_text("// nothing\n")
    return found


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    """Makes compilers of shell scripts."""

    def make(script: str) -> Path:
        path = tmp_path / f"compiler-{len(list(tmp_path.iterdir()))}"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return make


def libraries(folder: Path) -> list[str]:
    """All that lies beside the sources, hidden or not."""
    return sorted(path.name for path in folder.iterdir() if path.suffix not in (".cc", ".h", ".ld"))


def test_library_is_found_by_the_very_sources_that_it_was_built_of(folder: Path, compiler: Compiler) -> None:
    assert kernels.library_in(folder) is None
    path = build.build(str(compiler(WRITES)), folder).path
    assert path == folder / kernels.library_name(folder)
    assert path.name.startswith("libonward-")
    assert path.suffix == ".so"
    assert kernels.library_in(folder) == path
    header = folder / "one.h"
    before = header.read_text()
    header.write_text(before + "// more\n")
    assert kernels.library_in(folder) is None
    header.write_text(before)
    assert kernels.library_in(folder) == path
    header.rename(folder / "two.h")
    assert kernels.library_in(folder) is None


def test_library_name_depends_on_the_flags(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernels.library_name(folder)
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-g"))
    assert kernels.library_name(folder) != before


def test_libraries_of_older_sources_are_removed_once_there_is_a_newer(folder: Path, compiler: Compiler) -> None:
    build.build(str(compiler(WRITES)), folder)
    (folder / "two.cc").write_text("// new\n")
    with pytest.raises(build.BuildError):
        build.build(str(compiler("exit 1")), folder)
    assert len(libraries(folder)) == 1
    newest = build.build(str(compiler(WRITES)), folder).path
    assert libraries(folder) == [newest.name]


def test_compiler_gets_the_flags_and_every_source(folder: Path, compiler: Compiler) -> None:
    (folder / "two.cc").write_text("")
    (folder / "exports.ld").write_text("")
    build.build(str(compiler('echo "$@" > ' + f"{folder.parent}/arguments; {WRITES}")), folder)
    arguments = (folder.parent / "arguments").read_text().split()
    assert arguments[: len(kernels.FLAGS)] == list(kernels.FLAGS)
    assert arguments[-3:] == [str(folder / name) for name in ("one.cc", "two.cc", "exports.ld")]


def test_what_is_up_to_date_is_not_built_again(
    folder: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--compiler", str(compiler(WRITES))], folder) == 0
    name = kernels.library_name(folder)
    assert capsys.readouterr().out.startswith(f"kernels: {name} built by ")
    monkeypatch.setenv("PATH", "")
    assert main([], folder) == 0
    assert capsys.readouterr().out == f"kernels: {name} is up to date\n"


def test_missing_compiler_is_named_with_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert main([], folder) == 2
    problem = (
        "no C++ compiler is on PATH (g++, c++): install one, as by `apt-get install g++`, or name it by --compiler\n"
    )
    assert capsys.readouterr() == ("", f"kernels: not built: {problem}")
    assert main(["--if-possible"], folder) == 0
    notice = f"kernels: not built, graphs run by standard operators, slower; {problem}"
    assert capsys.readouterr() == (notice, "")
    assert main(["--compiler", "/no/such"], folder) == 2
    assert (
        capsys.readouterr().err == "kernels: not built: --compiler is '/no/such', must be a program that can be run\n"
    )


def test_compilers_are_looked_for_by_name_in_order(
    folder: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    for name in reversed(build.COMPILERS):
        compiler(WRITES).rename(path / name)
        assert build.find_compiler() == str(path / name)


def test_failing_compilers_last_words_are_shown(
    folder: Path, compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = str(compiler("for i in $(seq 100); do echo line $i >&2; done; exit 3"))
    assert main(["--compiler", fails], folder) == 2
    first, *words = capsys.readouterr().err.splitlines()
    assert first.startswith(f"kernels: not built: {fails} ended with 3: ")
    assert words == [f"line {i}" for i in range(81, 101)]
    assert main(["--if-possible", "--compiler", fails], folder) == 0
    (notice,) = capsys.readouterr().out.splitlines()
    assert notice.startswith(f"kernels: not built, graphs run by standard operators, slower; {fails} ended with 3: ")
    assert libraries(folder) == []


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 0", "ended with 0 and wrote no library"),
        (f"echo more >> {{folder}}/one.h; {WRITES}", "changed while they were compiled"),
    ],
)
def test_a_build_without_a_library_of_these_sources_has_failed(
    folder: Path, compiler: Compiler, script: str, problem: str
) -> None:
    with pytest.raises(build.BuildError, match=problem):
        build.build(str(compiler(script.replace("{folder}", str(folder)))), folder)
    assert libraries(folder) == []


def test_compiler_that_cannot_be_run_is_named(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    with pytest.raises(build.BuildError, match=r"program cannot be run \(No such file"):
        build.build(str(program), folder)


def test_folder_that_cannot_be_written_is_named(
    folder: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Root, as which tests may run, can write wherever it likes.
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert main(["--compiler", str(compiler(WRITES))], folder) == 2
    assert f"not built: {folder} cannot be written (Permission denied): " in capsys.readouterr().err


def test_other_machines_have_nothing_to_build(
    folder: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build.build(str(compiler(WRITES)), folder)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert kernels.library_in(folder) is None
    assert kernels.why_not() == "they are for x86-64, and this machine is aarch64"
    assert main([], folder) == 0
    assert capsys.readouterr().out.startswith("kernels: none for aarch64, they are for x86-64; ")


def test_kernels_are_found_without_torch_and_without_onnxruntime() -> None:
    unwanted = ("torch", "onnx", "onnxruntime", "numpy")
    code = f"import sys, model.kernels as k; k.library(); print(set({unwanted}) & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER.parents[1], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "set()\n"


# What each operator's kernel needs of a processor, by Linux's names.
_ROWS = {"avx512f", "avx512dq", "fma"}
_BYTES = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"}
_ATTENTION = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "fma"}
_FLOATS = _BYTES - {"avx512_vnni"}
_PRODUCTS = {"Linear": _FLOATS, "Bf16Linear": _FLOATS, "Int8Linear": _BYTES, "Int4Linear": _BYTES}
INSTRUCTIONS = {
    **{
        f"{bias}{kind}{after}": _PRODUCTS[kind]
        for kind in _PRODUCTS
        for bias in ("", "Biased")
        for after in ("", "Gelu", "SwiGLU")
        if kind not in ("Linear", "Bf16Linear") or after != "SwiGLU"
    },
    "Gather": _FLOATS,
    "Bf16Gather": _FLOATS,
    "Int8Gather": _BYTES,
    "Int4Gather": _BYTES,
    "GroupQueryAttention": _ATTENTION,
    "Int8CacheAttention": _ATTENTION,
    "SwiGLU": _ROWS,
    "AddRMSNorm": _ROWS,
    "AddLayerNorm": _ROWS,
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels are for x86-64")
@pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="needs a C++ compiler")
@pytest.mark.whole
def test_the_real_sources_are_built_without_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__", ".building-*"))
    built = build.build(folder=folder)
    assert built.warnings == ""
    assert built.path.name == kernels.library_name(FOLDER)


def test_the_library_exports_its_entry_points_alone_and_has_each_operator(pytestconfig: pytest.Config) -> None:
    if kernels.library() is None:
        lacking("the kernels are not built", "--require-sanitizers", pytestconfig)
    command = ["nm", "--dynamic", "--defined-only", str(kernels.library())]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert {line.split()[-1] for line in symbols.splitlines()} == {
        "OnwardHasTiles",
        "OnwardOperators",
        "RegisterCustomOps",
    }
    ort.SessionOptions().register_custom_ops_library(str(kernels.library()))
    # Other tests of kernels use this list.
    there = set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())
    assert set(kernels.operators()) == {name for name, needed in INSTRUCTIONS.items() if needed <= there}
