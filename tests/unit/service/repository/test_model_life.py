"""Models that are loaded, reloaded, unloaded, verified and fail, in any order: a state machine over a whole server.

`tests.model_world` says what moves and what must hold.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.engine.types import Device
from tests.by_hand import FAULTS, Shelved
from tests.model_world import World

NAMES = st.sampled_from(["a", "b"])
ARTIFACTS = st.builds(
    Shelved,
    context=st.sampled_from([32, 16]),
    is_readable=st.sampled_from([True, True, True, False]),
    is_proven=st.sampled_from([True, True, True, False]),
)


class Life(RuleBasedStateMachine):
    """Every order of changes, requests, faults and time."""

    device = Device.CPU

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.num_asked = 0

    @initialize(
        names=st.sampled_from(["a", "ab"]), fault=st.sampled_from([None, None, None, *FAULTS]), calibrate=st.booleans()
    )
    def begin(self, names: str, fault: str | None, calibrate: bool) -> None:
        shelf = {name: Shelved() for name in "ab"}
        self.world = World(shelf, names, self.device, {"a": fault} if fault else None, calibrate=calibrate)

    @rule(name=NAMES, found=ARTIFACTS)
    def put(self, name: str, found: Shelved) -> None:
        self.w.shelf[name] = found

    @rule(name=NAMES)
    def load(self, name: str) -> None:
        self.w.load(name)

    @rule(name=NAMES)
    def reload(self, name: str) -> None:
        self.w.reload(name)

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        self.w.unload(name)

    @rule(name=NAMES)
    def verify(self, name: str) -> None:
        self.w.verify(name)

    @rule(
        name=NAMES,
        count=st.integers(1, 4),
        max_tokens=st.integers(1, 12),
        timeout=st.sampled_from([None, None, 3.0]),
        is_named=st.booleans(),
    )
    def ask(self, name: str, count: int, max_tokens: int, timeout: float | None, is_named: bool) -> None:
        for number in range(count):
            self.num_asked += 1
            # A client may use its names again.
            request_id = f"mine {number}" if is_named else f"r{self.num_asked}"
            self.w.ask(name, request_id, max_tokens, timeout)

    @rule(number=st.integers(0, 7))
    def leave(self, number: int) -> None:
        if self.w.asked:
            self.w.asked[number % len(self.w.asked)].task.cancel()

    @rule(name=NAMES, fault=st.sampled_from([None, *FAULTS]))
    def go_wrong(self, name: str, fault: str | None) -> None:
        if name in self.w.current:
            self.w.current[name].go_wrong(fault)

    @rule(count=st.integers(1, 12))
    def turn_loop(self, count: int) -> None:
        for _ in range(count):
            self.w.turn_loop()

    @rule(count=st.integers(1, 12))
    def turn_thread(self, count: int) -> None:
        for _ in range(count):
            self.w.thread.turn()

    @rule(number=st.integers(0, 3))
    def run_job(self, number: int) -> None:
        self.w.jobs.run(number)

    @rule(count=st.integers(1, 8))
    def turn_all(self, count: int) -> None:
        for _ in range(count):
            self.w.turn_loop()
            self.w.thread.turn()
            self.w.jobs.run()

    @rule(seconds=st.sampled_from([0.05, 1.0, 6.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.w.now += seconds

    @rule()
    def rest(self) -> None:
        self.w.rest()
        self.w.check_rest()

    @precondition(lambda self: self.num_asked > 6)
    @rule()
    def stop(self) -> None:
        self.w.stop()

    @invariant()
    def holds(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            self.world.rest()
            if not self.world.is_stopping:
                self.world.check_rest()
                for name in self.world.app.models.names:
                    self.world.unload(name)
                self.world.rest()
                self.world.check_rest()
                assert not self.world.pool.parts
        finally:
            self.world.close()
        self.world.check()

    @property
    def w(self) -> World:
        assert self.world is not None
        return self.world


class DeviceLife(Life):
    """The same where engines are made and released by the engine thread."""

    device = Device.CUDA


TestLife: Any = Life.TestCase
TestDeviceLife: Any = DeviceLife.TestCase
TestLife.settings = settings(max_examples=settings.default.max_examples // 2)
TestDeviceLife.settings = settings(max_examples=settings.default.max_examples // 4)
