"""Hostile models find no fault of memory, of undefined behavior or between threads in kernels built to report each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model import kernels
from tests.environment import ROOT
from tests.faults.sanitized import build, runtime, sources_with_tiles
from tests.requirements import lacking

# A session is slow to end where its threads wait for a busy machine.
_GRACE_SECONDS = 240
_SHOWN = 6000  # characters of a report
# Of the first so many, which every run draws alike, some are computed and some refused by the kernels' own words.
_MIN_CASES = 40
_ROUNDS = 3


@pytest.fixture(autouse=True)
def built(pytestconfig: pytest.Config) -> None:
    """The kernels, as they are shipped."""
    if not kernels.operators():
        problem = "the kernels are not built, or this processor can run none"
        lacking(problem, "--require-sanitizers", pytestconfig)


def _environment(**options: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **options}


def test_hostile_models_are_refused_or_computed_without_a_fault(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer see what kernels do, not what ONNX Runtime does by itself."""
    preloaded = [runtime(name, pytestconfig) for name in ("libasan.so", "libstdc++.so")]
    runtime("libubsan.so", pytestconfig)
    flags = ("-shared", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    library = build("kernels.so", flags, sources_with_tiles(tmp_path))
    seconds = float(pytestconfig.getoption("--kernel-fuzz-seconds"))
    environment = _environment(
        LD_PRELOAD=":".join(map(str, preloaded)),
        # ONNX Runtime and Python keep what they have at exit; an allocation that cannot succeed is refused.
        ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=2048",
        UBSAN_OPTIONS="print_stacktrace=1",
    )
    command = [sys.executable, "-m", "tests.faults.kernel_fuzz", str(library), str(seconds), str(_MIN_CASES)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=seconds + _GRACE_SECONDS
    )
    *seeds, last = done.stdout.splitlines()
    assert done.returncode == 0, f"seed {last}: {done.stderr[:_SHOWN]}"
    result = json.loads(last)
    print(result)
    assert result["cases"] == len(seeds) >= _MIN_CASES
    assert sum(result["computed"].values()) > 0
    assert sum(count for words, count in result["refused"].items() if "ONNX Runtime" not in words) > 0


@pytest.mark.whole
def test_kernels_by_four_threads_and_for_two_callers_have_no_race(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """By threads of the test's own: ThreadSanitizer cannot follow those of ONNX Runtime, which is not built for it."""
    runtime("libtsan.so", pytestconfig)
    program = Path(__file__).with_name("kernel_threads.cc")
    sources = [path for path in sources_with_tiles(tmp_path) if path.suffix == ".cc" and path.name != "plugin.cc"]
    built = build("threads", ("-fsanitize=thread", "-O1"), [*sources, program])
    command = [str(built), str(_ROUNDS)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[:_SHOWN]
    assert done.stdout.endswith(f" 0 of {2 * _ROUNDS} rounds wrong\n")
