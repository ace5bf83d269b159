"""What every parity test needs: torch on one thread, since models this small only wait for a second one.

And graphs that are written quickly, as most of these tests write some.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.artifacts import keep_operator_table


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def quick_exports() -> None:
    keep_operator_table()
