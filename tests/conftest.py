"""What holds for every test: Hypothesis draws the same examples each time and is not hurried on a busy machine.

How much harm the tests of faults try is told here: a little with every run of the suite, a lot with `make faults`.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--fuzz", type=int, default=1500, help="fuzzed requests")
    group.addoption("--kills", type=int, default=8, help="clients killed in the middle of a stream")
    group.addoption("--soak-seconds", type=float, default=12.0, help="length of the soak")
