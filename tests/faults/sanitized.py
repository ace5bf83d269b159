"""The kernels' sources built as tests need them, as with sanitizers: once, under build/, by a digest of the sources."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model import kernels
from model.kernels.build import BuildError, find_compiler
from tests.environment import ROOT
from tests.requirements import lacking

_FOLDER = ROOT / "build" / "sanitized"
# Unoptimized: what the compiler might drop is checked, too, and it takes half as long.
_FLAGS = ("-std=c++17", "-g1", "-O0", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-pthread")
_TIMEOUT_SECONDS = 600


def runtime(name: str, config: pytest.Config) -> Path:
    """Where GCC has a shared library, as `libasan.so`; without it the test is skipped, or fails if it is required."""
    try:
        compiler = find_compiler(None)
    except BuildError as error:
        lacking(str(error), "--require-sanitizers", config)
    command = [compiler, f"-print-file-name={name}"]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip())
    if not path.is_absolute():
        lacking(f"the compiler has no {name}", "--require-sanitizers", config)
    return path


def sources_with_tiles(folder: Path) -> list[Path]:
    """The kernels' sources, linked into an empty folder, with a double of AMX's tile registers in plain C++."""
    for path in (*kernels.FOLDER.glob("*.h"), *kernels.sources(kernels.FOLDER)):
        if path.stem != "tiles":
            (folder / path.name).symlink_to(path)
    (folder / "tiles.h").symlink_to(Path(__file__).with_name("tiles.h"))
    return kernels.sources(folder)


def build(name: str, flags: Sequence[str], sources: Sequence[Path]) -> Path:
    """The file that sources are built to; GCC's own words where it fails."""
    compiler = find_compiler(None)
    folder = sources[0].parent
    headers = sorted(folder.glob("*.h"))
    digest = hashlib.sha256("\0".join([compiler, *_FLAGS, *flags]).encode())
    for path in (*sources, *headers):
        digest.update(path.read_bytes())
    target = _FOLDER / f"{digest.hexdigest()[:12]}-{name}"
    if target.is_file():
        return target
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER) as work:
        units = [path for path in sources if path.suffix == ".cc"]
        objects = [Path(work) / f"{path.stem}.o" for path in units]
        include = f"-I{folder}"

        def compile_one(unit: Path, target: Path) -> None:
            _call(compiler, *_FLAGS, *flags, include, "-c", "-o", str(target), str(unit))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, units, objects))
        scripts = [path for path in sources if path.suffix != ".cc"]
        made = Path(work) / target.name
        _call(compiler, *_FLAGS, *flags, "-o", str(made), *map(str, [*objects, *scripts]))
        made.replace(target)
    return target


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
