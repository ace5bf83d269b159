"""Fixtures of the tests of `service.runtime`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes import Gate


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate that is closed, but not for ever."""
    gate = Gate()
    with gate.closed():
        yield gate
