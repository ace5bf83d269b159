"""Memory for copies of K/V that is made ready while nobody waits: how much, for whom, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from model.spec import artifact
from service.engine import factory
from service.engine.batch import KVDrop, KVRestore, KVRetain, KVSave
from service.engine.engine import Engine, LastRun
from service.engine.kv.budget import memory_needs, plan_kv_memory, ready_bytes
from service.engine.kv.prefaulted_memory import ReadyMemory
from service.engine.sampling.sampler import Sampler
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.sessions.session import SessionOptions
from service.engine.slots_backend.kv_cache import SlotKV
from service.engine.step_engine import EngineHandle
from service.engine.types import StepOutput
from service.errors import EngineFailed, RequestError
from service.runtime.engine_thread import EngineThread
from tests.artifacts import paged_artifact, tiny_artifact, tiny_config
from tests.fakes import FakeRunner, fake_model, request
from tests.scripted import ScriptedEngine, token

SHAPE = (2, 3, 4, 5)
SIZE = 2 * 3 * 4 * 5 * 4


def test_as_much_is_made_ready_as_there_may_be_and_taken_first() -> None:
    ready = ReadyMemory(SHAPE, np.float32, 3 * SIZE + 1)
    assert [ready.prepare() for _ in range(4)] == [True, True, False, False]
    assert ready.num_bytes == 3 * SIZE
    taken = [ready.take(SHAPE) for _ in range(4)]
    assert ready.num_bytes == 0
    assert {(array.shape, array.dtype.name) for array in taken} == {(SHAPE, "float32")}
    for number, array in enumerate(taken):
        array.fill(number)
    assert [array[0, 0, 0, 0] for array in taken] == [0, 1, 2, 3], "no two share memory"
    for array in taken:
        ready.give_back(array)
    assert ready.num_bytes == 3 * SIZE
    assert not ready.prepare()


def test_much_is_made_ready_piece_by_piece_and_never_too_much() -> None:
    shape = (3, 1 << 20)
    ready = ReadyMemory(shape, np.float32, 2 * 12 << 20)
    assert [ready.prepare() for _ in range(4)] == [True] * 4
    assert ready.num_bytes == 2 * 12 << 20
    assert len(ready._arrays) == 1
    # There is no room for what others leave meanwhile.
    ready.give_back(np.ones(shape, np.float32))
    assert [ready.prepare() for _ in range(3)] == [True, False, False]
    assert ready.num_bytes == 2 * 12 << 20
    assert not np.any([ready.take(shape) for _ in range(2)])


def test_other_shapes_have_none() -> None:
    ready = ReadyMemory(SHAPE, np.int8, SIZE)
    ready.prepare()
    before = ready.num_bytes
    other = ready.take((2, 3, 9, 5))
    assert (other.shape, other.dtype) == ((2, 3, 9, 5), np.int8)
    ready.give_back(other)
    assert ready.num_bytes == before


@pytest.mark.parametrize(("shape", "num_bytes"), [(SHAPE, SIZE - 1), (SHAPE, 0), ((2, 3, 0, 5), 1000)])
def test_less_than_an_array_is_none(shape: tuple[int, ...], num_bytes: int) -> None:
    ready = ReadyMemory(shape, np.float32, num_bytes)
    assert not ready.prepare()
    ready.give_back(ready.take(shape))
    assert ready.num_bytes == 0


def test_copies_of_whole_chunks_lie_in_it_and_leave_it_behind() -> None:
    config = tiny_config("decoder-only")
    size = config.kv_bytes_per_token * 16
    kv = SlotKV(config, 2, kept_tokens=16, ready_bytes=2 * size)
    assert kv.prepare()
    assert not kv.prepare()
    made = [array.ctypes.data for array in kv._ready._arrays]
    rng = np.random.default_rng(0)
    for buffer in kv.own:
        buffer[0] = rng.standard_normal(buffer[0].shape)
    for handle, (start, end) in enumerate([(0, 16), (16, 32), (32, 48), (0, 5)]):
        kv.apply(KVSave(0, handle, end, 0, start))
    assert kv.stored_bytes == 3 * size + 5 * config.kv_bytes_per_token, "what is ready is nobody's"
    assert sorted(kept.own.ctypes.data for kept in (kv._kept[0], kv._kept[1])) == sorted(made)
    for handle in range(3):
        kv.apply(KVRestore(handle, 1))
    for buffer in kv.own:
        np.testing.assert_array_equal(buffer[1, :, :48], buffer[0, :, :48])
    for handle in range(4):
        kv.apply(KVDrop(handle))
    assert kv.stored_bytes == 0
    assert kv._ready.num_bytes == 2 * size
    kv.apply(KVSave(0, 9, 16, 0))
    kv.apply(KVSave(0, 10, 32, 0, 16))
    kv.apply(KVRetain(frozenset({10})))
    assert list(kv._kept) == [10]
    assert (kv.stored_bytes, kv._ready.num_bytes) == (size, size)


def build(folder: Path) -> tuple[Engine, int]:
    """An engine, and how much it may make ready."""
    manifest = artifact.load(folder)
    limits = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=8)
    engine = factory.build_engine(folder, manifest, str, limits, SessionOptions(intra_op_threads=1), LastRun())
    return engine, ready_bytes(manifest, plan_kv_memory(manifest, 4, None), 4)


def test_an_engine_makes_an_eighth_of_its_budget_ready() -> None:
    engine, most = build(tiny_artifact("decoder-only"))
    budget = engine.kv_memory_bytes
    assert most == budget // 8
    num_pieces = 1
    while engine.prepare():
        num_pieces += 1
    chunk = 8 * tiny_config("decoder-only").kv_bytes_per_token
    assert num_pieces == most // chunk
    assert not engine.prepare()


def test_copies_of_all_sizes_and_blocks_that_are_shared_have_none() -> None:
    for folder in (tiny_artifact("encoder-decoder"), paged_artifact("decoder-only")):
        engine, most = build(folder)
        assert most == 0
        assert not engine.prepare()


@pytest.mark.parametrize("part", [0.3, 1.0, 5.0])
def test_no_more_is_made_ready_than_is_counted_whatever_the_part(part: float) -> None:
    manifest = artifact.load(tiny_artifact("decoder-only"))
    whole = plan_kv_memory(manifest, 4, None).num_bytes
    budget = plan_kv_memory(manifest, 4, int(part * whole))
    assert ready_bytes(manifest, budget, 4) == int(min(part, 1.0) * whole) // 8
    counted = memory_needs(manifest, 4, 0).besides - 4 * manifest.config.vocab_size * 4
    assert ready_bytes(manifest, budget, 4) <= counted == whole // 8


def test_nothing_is_made_ready_for_chunks_that_no_prompt_fills() -> None:
    folder = tiny_artifact("decoder-only")
    limits = EngineLimits(max_batch_size=4, prefill_chunk=128, max_prefill_tokens=128)
    options = SessionOptions(intra_op_threads=1)
    engine = factory.build_engine(folder, artifact.load(folder), str, limits, options, LastRun())
    assert not engine.prepare()


@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_what_cannot_be_prepared_is_left_out_and_not_tried_again(error: type[Exception]) -> None:
    calls: list[int] = []

    def fail() -> bool:
        calls.append(1)
        raise error

    scheduler = Scheduler(EngineLimits(max_batch_size=4), fake_model(), str)
    engine = Engine(scheduler, FakeRunner(4), Sampler(), LastRun(), prepare=fail)
    assert not engine.prepare()
    assert not engine.prepare()
    assert len(calls) == 1


class Preparing(ScriptedEngine):
    """Has ever more to be done ahead; `prepared` is called each time."""

    def __init__(self, prepared: Callable[[int], bool]) -> None:
        super().__init__(lambda _: [[token(3)]])
        self._prepared = prepared
        self.num_prepared = 0

    def prepare(self) -> bool:
        self.num_prepared += 1
        return self._prepared(self.num_prepared)


class Heard:
    """What an engine thread tells."""

    def __init__(self) -> None:
        self.stepped, self.over = threading.Event(), threading.Event()

    def step_done(self, engine: EngineHandle, output: StepOutput, now: float) -> None:
        self.stepped.set()

    def rejected(self, engine: EngineHandle, request_id: str, error: RequestError, now: float) -> None:
        raise AssertionError(request_id)

    def ended(self, error: EngineFailed | None) -> None:
        self.over.set()


def test_what_is_done_ahead_ends_once_it_is_done_or_somebody_wants_something() -> None:
    heard = Heard()
    counts: list[int] = []

    def prepared(number: int) -> bool:
        if number == 3:
            # There is more to be done, and somebody comes meanwhile.
            thread.submit(handle, request("a"))
        elif number == 4:
            counts.append(int(heard.stepped.is_set()))
        return number < 6

    engine = Preparing(prepared)
    handle = EngineHandle("one")
    thread = EngineThread({handle: engine}, heard, lambda call: call(), {})
    thread.start()
    assert heard.stepped.wait(60)
    thread.stop()
    assert heard.over.wait(60)
    assert counts in ([], [1]), "the request came first"
    assert engine.num_prepared <= 6
