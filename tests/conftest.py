"""What holds for every test: Hypothesis draws the same examples each time and is not hurried on a busy machine.

How much harm the tests of faults try is told here: a little with every run of the suite, a lot with `make faults`.
Tests that need Debian's Prometheus are skipped where it is not installed, unless `--require-prometheus` forbids that.
"""

from __future__ import annotations

import shutil

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--fuzz", type=int, default=1500, help="fuzzed requests")
    group.addoption("--kills", type=int, default=8, help="clients killed in the middle of a stream")
    group.addoption("--soak-seconds", type=float, default=12.0, help="length of the soak")
    parser.addoption(
        "--require-prometheus", action="store_true", help="fail, and do not skip, where Prometheus is not installed"
    )


def _tool(name: str, config: pytest.Config) -> str:
    found = shutil.which(name)
    if found is None:
        told = f"{name} is not installed: apt-get install prometheus"
        pytest.fail(told) if config.getoption("--require-prometheus") else pytest.skip(told)
    return found


@pytest.fixture(scope="session")
def promtool(pytestconfig: pytest.Config) -> str:
    """Where Prometheus' checker is."""
    return _tool("promtool", pytestconfig)


@pytest.fixture(scope="session")
def prometheus(pytestconfig: pytest.Config) -> str:
    """Where Prometheus itself is."""
    return _tool("prometheus", pytestconfig)
