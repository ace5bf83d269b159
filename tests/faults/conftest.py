"""How much harm is tried, from the command line."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def fuzz(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--fuzz"))


@pytest.fixture(scope="session")
def kills(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--kills"))


@pytest.fixture(scope="session")
def victims(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--victims"))


@pytest.fixture(scope="session")
def soak_seconds(pytestconfig: pytest.Config) -> float:
    return float(pytestconfig.getoption("--soak-seconds"))


@pytest.fixture(scope="session")
def rounds(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--large-rounds"))


@pytest.fixture(scope="session")
def siege_seconds(pytestconfig: pytest.Config) -> float:
    return float(pytestconfig.getoption("--siege-seconds"))
