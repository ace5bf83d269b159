"""Pre-faulted memory for copies of K/V: how much, for which copies, and only while the engine is idle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from model.spec import artifact
from service.engine import factory
from service.engine.batch import KVDrop, KVRestore, KVRetain, KVSave, ScheduledBatch
from service.engine.engine import Engine, LastRun
from service.engine.interfaces import EngineHandle
from service.engine.kv.budget import memory_needs, plan_kv_memory, prefault_bytes
from service.engine.kv.prefaulted_memory import PrefaultedMemory
from service.engine.sampling.sampler import Sampler
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.sessions.session import SessionOptions
from service.engine.slots_backend.kv_cache import SlotKV
from service.engine.types import StepOutput
from service.errors import EngineFailed, RequestError
from service.runtime.engine_thread import EngineThread
from tests.artifacts import paged_artifact, tiny_artifact, tiny_config
from tests.fakes import FakeRunner, drain, events_of, expected_tokens, fake_engine, fake_model, request, tokens_of
from tests.scripted import ScriptedEngine, token

SHAPE = (2, 3, 4, 5)
SIZE = 2 * 3 * 4 * 5 * 4


def test_prefaulted_memory_fills_its_pool_and_is_taken_first() -> None:
    pool = PrefaultedMemory(SHAPE, np.float32, 3 * SIZE + 1)
    assert [pool.prefault() for _ in range(4)] == [True, True, False, False]
    assert pool.num_bytes == 3 * SIZE
    taken = [pool.take(SHAPE) for _ in range(4)]
    assert pool.num_bytes == 0
    assert {(array.shape, array.dtype.name) for array in taken} == {(SHAPE, "float32")}
    for number, array in enumerate(taken):
        array.fill(number)
    assert [array[0, 0, 0, 0] for array in taken] == [0, 1, 2, 3], "no two share memory"
    for array in taken:
        pool.give_back(array)
    assert pool.num_bytes == 3 * SIZE
    assert not pool.prefault()


def test_prefaulted_memory_touches_a_large_array_in_steps_and_stays_in_its_limit() -> None:
    shape = (3, 1 << 20)
    pool = PrefaultedMemory(shape, np.float32, 2 * 12 << 20)
    assert [pool.prefault() for _ in range(4)] == [True] * 4
    assert pool.num_bytes == 2 * 12 << 20
    assert len(pool._arrays) == 1
    # The pool is full: an array that is given back meanwhile is freed.
    pool.give_back(np.ones(shape, np.float32))
    assert [pool.prefault() for _ in range(3)] == [True, False, False]
    assert pool.num_bytes == 2 * 12 << 20
    assert not np.any([pool.take(shape) for _ in range(2)])


def test_prefaulted_memory_has_one_shape() -> None:
    pool = PrefaultedMemory(SHAPE, np.int8, SIZE)
    pool.prefault()
    before = pool.num_bytes
    other = pool.take((2, 3, 9, 5))
    assert (other.shape, other.dtype) == ((2, 3, 9, 5), np.int8)
    pool.give_back(other)
    assert pool.num_bytes == before


@pytest.mark.parametrize(("shape", "num_bytes"), [(SHAPE, SIZE - 1), (SHAPE, 0), ((2, 3, 0, 5), 1000)])
def test_prefaulted_memory_below_one_array_is_none(shape: tuple[int, ...], num_bytes: int) -> None:
    pool = PrefaultedMemory(shape, np.float32, num_bytes)
    assert not pool.prefault()
    pool.give_back(pool.take(shape))
    assert pool.num_bytes == 0


def test_prefaulted_memory_holds_saved_chunks_and_is_reused() -> None:
    config = tiny_config("decoder-only")
    size = config.kv_bytes_per_token * 16
    kv = SlotKV(config, 2, chunk_tokens=16, prefault_bytes=2 * size)
    assert kv.prefault()
    assert not kv.prefault()
    made = [array.ctypes.data for array in kv._prefaulted._arrays]
    rng = np.random.default_rng(0)
    for buffer in kv.own:
        buffer[0] = rng.standard_normal(buffer[0].shape)
    for handle, (start, end) in enumerate([(0, 16), (16, 32), (32, 48), (0, 5)]):
        kv.apply(KVSave(0, handle, end, 0, start))
    assert kv.stored_bytes == 3 * size + 5 * config.kv_bytes_per_token, "the pool does not count"
    assert sorted(saved.own.ctypes.data for saved in (kv._saved[0], kv._saved[1])) == sorted(made)
    for handle in range(3):
        kv.apply(KVRestore(handle, 1))
    for buffer in kv.own:
        np.testing.assert_array_equal(buffer[1, :, :48], buffer[0, :, :48])
    for handle in range(4):
        kv.apply(KVDrop(handle))
    assert kv.stored_bytes == 0
    assert kv._prefaulted.num_bytes == 2 * size
    kv.apply(KVSave(0, 9, 16, 0))
    kv.apply(KVSave(0, 10, 32, 0, 16))
    kv.apply(KVRetain(frozenset({10})))
    assert list(kv._saved) == [10]
    assert (kv.stored_bytes, kv._prefaulted.num_bytes) == (size, size)


def build(folder: Path) -> tuple[Engine, int]:
    """An engine, and its pre-faulted bytes."""
    manifest = artifact.load(folder)
    limits = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=8)
    engine = factory.build_engine(folder, manifest, str, limits, SessionOptions(intra_op_threads=1), LastRun())
    return engine, prefault_bytes(manifest, plan_kv_memory(manifest, 4, None), 4)


def test_prefaulted_memory_of_an_engine_is_an_eighth_of_its_budget() -> None:
    engine, most = build(tiny_artifact("decoder-only"))
    budget = engine.kv_memory_bytes
    assert most == budget // 8
    num_chunks = 1
    while engine.prepare():
        num_chunks += 1
    chunk = 8 * tiny_config("decoder-only").kv_bytes_per_token
    assert num_chunks == most // chunk
    assert not engine.prepare()


def test_prefaulted_memory_is_none_for_encoder_decoders_and_blocks() -> None:
    for folder in (tiny_artifact("encoder-decoder"), paged_artifact("decoder-only")):
        engine, most = build(folder)
        assert most == 0
        assert not engine.prepare()


@pytest.mark.parametrize("part", [0.3, 1.0, 5.0])
def test_prefaulted_memory_is_what_memory_needs_counts(part: float) -> None:
    manifest = artifact.load(tiny_artifact("decoder-only"))
    whole = plan_kv_memory(manifest, 4, None).num_bytes
    budget = plan_kv_memory(manifest, 4, int(part * whole))
    assert prefault_bytes(manifest, budget, 4) == int(min(part, 1.0) * whole) // 8
    assert prefault_bytes(manifest, budget, 4) == memory_needs(manifest, 4, 0).prefaulted(budget.num_bytes)


def test_prefaulted_memory_is_none_for_chunks_beyond_the_context() -> None:
    folder = tiny_artifact("decoder-only")
    limits = EngineLimits(max_batch_size=4, prefill_chunk=128, max_prefill_tokens=128)
    options = SessionOptions(intra_op_threads=1)
    engine = factory.build_engine(folder, artifact.load(folder), str, limits, options, LastRun())
    assert not engine.prepare()


@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_prefaulting_that_fails_is_not_tried_again(error: type[Exception]) -> None:
    calls: list[int] = []

    def fail() -> bool:
        calls.append(1)
        raise error

    scheduler = Scheduler(EngineLimits(max_batch_size=4), fake_model(), str)
    engine = Engine(scheduler, FakeRunner(4), Sampler(), LastRun(), prepare=fail)
    assert not engine.prepare()
    assert not engine.prepare()
    assert len(calls) == 1


def test_copies_that_wait_are_made_while_it_is_idle_and_lost_if_that_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = False

    def fail(batch: ScheduledBatch) -> None:
        if failing:
            raise MemoryError("no memory")

    runner = FakeRunner(2, before_run=fail)
    engine = fake_engine(runner, limits=EngineLimits(max_batch_size=2, prefill_chunk=8, max_prefill_tokens=8))
    prompt = range(3, 3 + 24)
    engine.add_request(request("a", prompt, max_tokens=1))
    with pytest.raises(RuntimeError, match="not idle"):
        engine.prepare()
    drain(engine)
    assert len(runner.kept) == 2
    while engine.prepare():
        pass
    assert len(runner.kept) == 3
    engine.add_request(request("b", prompt[::-1], max_tokens=1))
    drain(engine)
    failing = True
    assert not engine.prepare()
    assert "background preparation failed" in caplog.text
    failing = False
    engine.add_request(request("c", prompt, max_tokens=3))
    outputs = drain(engine)
    assert tokens_of(outputs, "c") == expected_tokens(prompt, 3)
    assert events_of(outputs, "c")[0].num_cached_tokens == 0


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


def test_prefaulting_ends_when_done_or_when_a_request_arrives() -> None:
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
