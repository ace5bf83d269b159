"""The load check in a child process: which process a stopping server ends."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Self
from unittest import mock

import pytest

from service.config import ServeConfig
from service.repository import load_check
from service.repository.load_check import LoadCheck


class Child:
    """A process that ends when the test lets it, or killed. `begun` is released when it is waited for."""

    def __init__(self, begun: threading.Semaphore) -> None:
        self._begun = begun
        self.ends = threading.Event()
        self.is_killed = False
        self.returncode = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def communicate(self, config: bytes, _: float) -> tuple[bytes, bytes]:
        self.config = pickle.loads(config)
        self._begun.release()
        self.ends.wait()
        return json.dumps({"problems": [], "session_seconds": 0.0}).encode(), b""

    def kill(self) -> None:
        self.is_killed = True
        self.ends.set()


class Children(list[Child]):
    """All that were started."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()

    def make(*_: object, **__: object) -> Child:
        made.append(Child(made.begun))
        return made[-1]

    fake = SimpleNamespace(Popen=make, PIPE=None, TimeoutExpired=TimeoutError)
    with mock.patch.object(load_check, "subprocess", fake):
        yield made
    for child in made:
        child.ends.set()


def test_a_check_whose_change_was_given_up_leaves_the_next_one_to_be_ended_with_the_server(
    children: Children,
) -> None:
    check, config = LoadCheck(), ServeConfig(models=Path("models"), look_up=3, kv_memory=1 << 40)
    threads = []
    for number in range(2):
        threads.append(threading.Thread(target=check.run, args=(config, f"model {number}", 1)))
        threads[-1].start()
        assert children.begun.acquire(timeout=60)
    # The first one's thread was left to itself, and comes to its end while the next is checked.
    children[0].ends.set()
    threads[0].join()
    check.close()
    assert [child.is_killed for child in children] == [False, True]
    threads[1].join()
    assert [child.config for child in children] == [replace(config, spin=False, kv_memory=1)] * 2
