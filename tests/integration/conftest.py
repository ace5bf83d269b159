"""Async tests of this folder share one event loop: gRPC's poller keeps every loop that it has ever used."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_asyncio import is_async_test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
