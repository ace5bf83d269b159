"""What some tests need beside Python's packages: they are skipped without it, unless an option forbids that."""

from __future__ import annotations

from typing import NoReturn

import pytest

OPTIONS = {
    "--require-prometheus": "Prometheus or Alertmanager's amtool is not installed",
    "--require-node": "Node or its packages are not installed",
    "--require-sanitizers": "the kernels cannot be built with GCC's sanitizers",
}
"""Options of pytest, each with what it makes a failure. `.ci/run` and `tests.stress` pass `--require-all`."""


def lacking(problem: str, option: str, config: pytest.Config) -> NoReturn:
    """Skips the test; fails it where the option is given, or `--require-all`."""
    if config.getoption(option) or config.getoption("--require-all"):
        pytest.fail(problem)
    pytest.skip(problem)
