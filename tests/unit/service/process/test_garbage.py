"""Garbage among objects that were set aside is collected on demand alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service import __main__, app
from service.app import Endpoint, Ready
from service.config import ServeConfig
from service.process import garbage


class Cycle:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _nothing_set_aside() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_frozen_objects_are_skipped_by_collections_except_on_demand() -> None:
    known, later = Cycle(), Cycle()
    garbage.set_aside()
    new = Cycle()
    found = [weakref.ref(each) for each in (known, later, new)]
    del known, new
    gc.collect()
    assert [each() is None for each in found] == [False, False, True]
    garbage.collect()
    assert [each() is None for each in found] == [True, False, True]
    del later
    gc.collect()
    assert found[1]() is not None, "what is left is set aside again"


def test_nothing_is_frozen_again_if_nothing_was() -> None:
    garbage.collect()
    assert gc.get_freeze_count() == 0


def test_a_server_freezes_its_objects_when_it_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def serve(config: ServeConfig, announce: Callable[[Ready], None]) -> int:
        announce(Ready(Endpoint(config.host, 1, None), {}, {}))
        return 0

    monkeypatch.setattr(app, "serve", serve)
    assert __main__._serve(ServeConfig(models=tmp_path)) == 0
    assert gc.get_freeze_count() > 0
