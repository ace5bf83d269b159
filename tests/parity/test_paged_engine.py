"""The engine over blocks serves the tokens of the engine over slots, on graphs of standard operators.

Both get the same requests at the same steps. Blocks are NaN while they are free: a read beyond a row's tokens
shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.spec import artifact, golden
from model.spec.artifact import DECODER, ENCODER, MOVE, Manifest
from model.spec.config import Architecture, ModelConfig
from service.engine.batch import KVCopy, KVDrop, KVFree, KVRestore, KVSave, ScheduledBatch
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_paged_runner, build_runner, model_shape
from service.engine.interfaces import Runner
from service.engine.kv.budget import plan_kv_memory
from service.engine.kv.reservations import KVBudget
from service.engine.paged_backend.device_blocks import DeviceBlocks
from service.engine.paged_backend.paged_kv import HostBlocks, PagedKV
from service.engine.paged_backend.paged_runner import PagedRunner
from service.engine.sampling.sampler import Sampler
from service.engine.sampling.top_logits import TopLogits
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.sessions.cuda_provider import Cuda
from service.engine.sessions.session import GraphSession, SessionOptions
from service.engine.types import (
    BeamSearchParams,
    GenerationRequest,
    PromptScoring,
    SamplingParams,
    StepOutput,
    StoppingParams,
    TokenEvent,
)
from service.errors import StartupError
from tests.artifacts import paged_artifact, tiny_artifact
from tests.fakes import drain

THREADS = SessionOptions(intra_op_threads=1, allow_spinning=False)
DECODER_ONLY, ENCODER_DECODER = Architecture.DECODER_ONLY, Architecture.ENCODER_DECODER
LIMITS = EngineLimits(max_batch_size=8, prefill_chunk=16, max_prefill_tokens=32)
# Chunks of sixteen tokens are a block, or a part of one.
VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "rotary-16": (DECODER_ONLY, 16, {}),
    "rotary-64": (DECODER_ONLY, 64, {}),
    "sinusoidal-16": (ENCODER_DECODER, 16, {}),
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


class NaNBlocks(HostBlocks):
    """Blocks that are NaN until they are written."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for blocks in self.caches:
            blocks[...] = np.nan

    def release(self, block: int) -> None:
        for blocks in self.caches:
            blocks[block] = np.nan


class Watched:
    """A runner that counts operations and calls `after` with every batch."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.operations: Counter[type] = Counter()
        self.after: Callable[[ScheduledBatch], None] = lambda _: None

    def own_weights(self) -> None:
        self._runner.own_weights()

    def run(self, batch: ScheduledBatch) -> np.ndarray[Any, np.dtype[np.float32]]:
        logits = self._runner.run(batch)
        self.operations.update(map(type, batch.kv_operations))
        self.after(batch)
        return logits


@cache
def slot_runner(family: str, variant: str) -> Runner:
    folder = tiny_artifact(family, **VARIANTS[variant][2])
    return build_runner(folder, artifact.load(folder), LIMITS, THREADS)


def paged_folder(variant: str) -> Path:
    family, size, overrides = VARIANTS[variant]
    return paged_artifact(family, block_size=size, **overrides)


@cache
def sessions(variant: str) -> tuple[Manifest, GraphSession, GraphSession | None]:
    folder = paged_folder(variant)
    manifest = artifact.load(folder)
    encoder = GraphSession(folder, manifest.graphs[ENCODER], THREADS) if ENCODER in manifest.graphs else None
    return manifest, GraphSession(folder, manifest.graphs[DECODER], THREADS), encoder


def paged_runner(
    variant: str, budget: KVBudget, device: str | None = None, top: TopLogits | None = None
) -> PagedRunner:
    """The server's runner, with as many blocks as the budget pays for."""
    manifest, decoder, encoder = sessions(variant)
    size = manifest.kv_cache.block_size
    num_blocks = budget.num_bytes // (size * budget.token_bytes)
    memory: HostBlocks | DeviceBlocks = NaNBlocks(manifest.config, num_blocks, size)
    if device is not None:
        memory = on_device(manifest, num_blocks, device, paged_folder(variant))
    kv = PagedKV(memory, LIMITS.max_batch_size)
    return PagedRunner(manifest.config, kv, memory, decoder, encoder, LIMITS.max_prefill_tokens, device, top)


def on_device(manifest: Manifest, num_blocks: int, device: str, folder: Path) -> DeviceBlocks:
    kv = manifest.kv_cache
    move = GraphSession(folder, manifest.graphs[MOVE], THREADS)
    memory = DeviceBlocks(manifest.config, num_blocks, kv.block_size, kv.precision.dtype, device, move)
    for tensor in memory.caches:
        tensor.write(np.full(tensor.shape, np.nan, np.float32))
    return memory


def paged_budget(variant: str, num_rows: int = LIMITS.max_batch_size) -> KVBudget:
    """A budget for full-length sequences."""
    manifest, _, _ = sessions(variant)
    return plan_kv_memory(manifest, num_rows, None)


@pytest.fixture(scope="module", autouse=True)
def sessions_are_released() -> Iterator[None]:
    yield
    slot_runner.cache_clear()
    sessions.cache_clear()


class Pair:
    """One model over slots and over blocks, given the same requests step by step."""

    def __init__(self, variant: str, num_rows: int = LIMITS.max_batch_size, device: str | None = None) -> None:
        family, _, _ = VARIANTS[variant]
        self.config = sessions(variant)[0].config
        budget = paged_budget(variant, num_rows)
        top = None if device is None else TopLogits()
        runner = paged_runner(variant, budget, device, top)
        self.kv, self.memory = runner.kv, runner.memory
        self.num_whole_reads = count_whole_reads(runner)
        self.num_preemptions = 0
        self.num_copies = 0
        self._count_copies(runner)
        self.runners = Watched(slot_runner(family, variant)), Watched(runner)
        self.runners[1].after = lambda _: self.kv.check_invariants()
        # One budget for both, so that they preempt and evict alike.
        samplers = Sampler(), Sampler(top)
        self.engines = [
            self._engine(variant, runner, budget, sampler)
            for runner, sampler in zip(self.runners, samplers, strict=True)
        ]

    def _count_copies(self, runner: PagedRunner) -> None:
        copy = runner.memory.copy

        def counted(*arguments: int) -> None:
            self.num_copies += 1
            copy(*arguments)

        runner.memory.copy = counted  # type: ignore[method-assign]

    def _engine(self, variant: str, runner: Runner, budget: KVBudget, sampler: Sampler) -> Engine:
        manifest = sessions(variant)[0]
        scheduler = Scheduler(LIMITS, model_shape(manifest), lambda ids: "".join(map(chr, ids)), budget)
        return Engine(scheduler, runner, sampler, LastRun(), clock=lambda: 0.0)

    def run(self, arrivals: Sequence[tuple[int, GenerationRequest]]) -> list[TokenEvent]:
        """Adds requests after so many steps each; returns the paged engine's events, which must be those of slots."""
        outputs: list[list[StepOutput]] = [[], []]
        for engine, steps in zip(self.engines, outputs, strict=True):
            for delay, request in arrivals:
                steps.extend(engine.step() for _ in range(delay))
                engine.add_request(request)
            steps.extend(drain(engine))
        self.num_preemptions = sum(output.stats.num_preemptions for output in outputs[1])
        slots, blocks = ([event for output in seen for event in output.events] for seen in outputs)
        assert all(event.error is None for event in blocks), [event.error for event in blocks if event.error]
        assert [_seen(event) for event in blocks] == [_seen(event) for event in slots]
        for mine, theirs in zip(blocks, slots, strict=True):
            for one, other in zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        return blocks


def count_whole_reads(runner: PagedRunner) -> Callable[[], int]:
    """Counts fetches of whole logits from the device from now on."""
    found = runner._on_device
    if found is None:
        return lambda: 0
    rows: list[int] = []
    read = found.read

    def counted(logits: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        rows.append(len(logits))
        read(logits)

    found.read = counted  # type: ignore[method-assign]
    return lambda: len(rows)


def _seen(event: TokenEvent) -> tuple[Any, ...]:
    scored = len(event.prompt_logprobs)
    return (event.request_id, event.output_index, event.token_id, event.finish_reason, event.num_cached_tokens, scored)


def make_request(
    config: ModelConfig, name: str, prompt: Sequence[int], *, max_tokens: int = 8, **wishes: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        model="tiny",
        prompt_token_ids=tuple(prompt),
        sampling=wishes.pop("sampling", SamplingParams(temperature=0.0)),
        stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        **wishes,
    )


def draw_prompt(config: ModelConfig, length: int, seed: int) -> list[int]:
    longest = config.source_context if config.is_encoder_decoder else config.context - 1
    vocab_size = config.source_vocab_size if config.is_encoder_decoder else config.vocab_size
    return np.random.default_rng(seed).integers(3, vocab_size, min(length, longest)).tolist()


# Prompts of one token, within a chunk, at its end, over several, with a remainder of one, up to the context.
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 48, 61, 64, 94)


def pool(config: ModelConfig) -> list[GenerationRequest]:
    return [
        make_request(config, f"r{number}", draw_prompt(config, length, number), max_tokens=5 + number)
        for number, length in enumerate(LENGTHS)
    ]


@EVERY_VARIANT
def test_paged_engine_gives_the_tokens_of_slots_one_by_one_and_in_a_crowd(variant: str) -> None:
    pair = Pair(variant)
    requests = pool(pair.config)
    for request in requests[::5]:
        pair.run([(0, request)])
    events = pair.run([(number % 3, request) for number, request in enumerate(requests)])
    assert {event.request_id for event in events} == {request.request_id for request in requests}


@EVERY_VARIANT
def test_paged_engine_shares_cached_prefixes(variant: str) -> None:
    """Also after blocks were reused, and where prompts diverge in the middle of a block."""
    pair = Pair(variant)
    config = pair.config
    first = draw_prompt(config, 60, 1)
    others = [first, [*first[:40], *draw_prompt(config, 20, 2)], [*first[:17], 5], [*first[:48], *first[:12]]]
    requests = [make_request(config, f"p{number}", prompt) for number, prompt in enumerate(others)]
    events = pair.run([(9, request) for request in requests])
    cached = {event.request_id: event.num_cached_tokens for event in events}
    if config.is_encoder_decoder:
        again = pair.run([(1, make_request(config, f"q{number}", first)) for number in range(3)])
        assert {event.num_cached_tokens for event in again if event.finish_reason} == {len(first)}
    else:
        assert cached == {"p0": 0, "p1": 32, "p2": 16, "p3": 48}
    assert pair.runners[1].operations[KVRestore]


@EVERY_VARIANT
def test_paged_engine_resumes_preempted_requests(variant: str) -> None:
    pair = Pair(variant, num_rows=12)
    config = pair.config
    lesser = [
        make_request(config, f"l{number}", draw_prompt(config, 20 + 5 * number, number), max_tokens=30)
        for number in range(LIMITS.max_batch_size)
    ]
    urgent = [make_request(config, f"u{number}", draw_prompt(config, 50, 90 + number), priority=1) for number in (0, 1)]
    pair.run([*((1, each) for each in lesser), (5, urgent[0]), (3, urgent[1])])
    assert pair.num_preemptions >= 2
    assert pair.runners[1].operations[KVSave]
    assert pair.runners[1].operations[KVDrop]
    assert pair.runners[0].operations == pair.runners[1].operations


@EVERY_VARIANT
def test_paged_engine_forks_outputs_and_searches_beams(variant: str) -> None:
    pair = Pair(variant)
    config = pair.config
    prompts = [draw_prompt(config, length, length) for length in (21, 35)]
    search = BeamSearchParams(beam_size=4, num_hypotheses=2)
    sampled = SamplingParams(temperature=1.0, seed=11, n=3)
    events = pair.run(
        [
            (0, make_request(config, "beams", prompts[0], max_tokens=14, beam_search=search)),
            (2, make_request(config, "several", prompts[1], max_tokens=12, sampling=sampled)),
        ]
    )
    several = [event for event in events if event.request_id == "several"]
    outputs = {tuple(event.token_id for event in several if event.output_index == index) for index in range(3)}
    assert len(outputs) == 3
    assert pair.runners[1].operations[KVCopy] > 4


@pytest.mark.parametrize("variant", [name for name in VARIANTS if VARIANTS[name][0] == DECODER_ONLY])
def test_paged_engine_scores_prompts(variant: str) -> None:
    pair = Pair(variant)
    config = pair.config
    requests = [
        make_request(config, f"s{length}", draw_prompt(config, length, length), max_tokens=max_tokens, scoring=scoring)
        for length, max_tokens, scoring in (
            (2, 0, PromptScoring()),
            (49, 0, PromptScoring()),
            (40, 6, PromptScoring(start=20)),
            (93, 1, PromptScoring()),
        )
    ]
    events = pair.run([(0, request) for request in requests])
    scored = Counter({request.request_id: 0 for request in requests})
    for event in events:
        scored[event.request_id] += len(event.prompt_logprobs)
    assert scored == {"s2": 1, "s49": 48, "s40": 20, "s93": 92}


@EVERY_VARIANT
def test_paged_engine_releases_all_blocks(variant: str) -> None:
    pair = Pair(variant)
    (engine,) = pair.engines[1:]
    pair.run([(1, request) for request in pool(pair.config)])
    engine.verify_golden((), golden.Tolerance(absolute=1.0))  # empties the prefix cache
    engine.add_request(make_request(pair.config, "last", draw_prompt(pair.config, 3, 3), max_tokens=1))
    engine.step()
    held = pair.memory.num_blocks - pair.kv.num_free_blocks
    assert held <= 2, "its own and its source's"
    assert pair.runners[1].operations[KVFree]


def test_paged_runner_refuses_chunks_that_lie_across_blocks() -> None:
    folder = paged_artifact(DECODER_ONLY)
    manifest = artifact.load(folder)
    for chunk in (8, 16, 48):
        build_paged_runner(folder, manifest, EngineLimits(prefill_chunk=chunk), THREADS)
    with pytest.raises(StartupError, match="prefill_chunk is 24, must divide the blocks of 16 tokens or be a multiple"):
        build_paged_runner(folder, manifest, EngineLimits(prefill_chunk=24), THREADS)
    source = paged_artifact(ENCODER_DECODER)
    build_paged_runner(source, artifact.load(source), EngineLimits(prefill_chunk=24), THREADS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_paged_engine_on_a_device_gives_the_tokens_of_slots(variant: str) -> None:
    """K/V and inputs in device tensors (on this CPU), copies by a graph, decode steps in buckets."""
    pair = Pair(variant, num_rows=12, device="cpu")
    config = pair.config
    first = draw_prompt(config, 60, 1)
    shared = [make_request(config, f"p{i}", [*first[: 17 + 9 * i], 5], max_tokens=20) for i in range(4)]
    search = BeamSearchParams(beam_size=3)
    urgent = make_request(config, "u", draw_prompt(config, 50, 7), priority=1)
    pair.run([*((number % 2, request) for number, request in enumerate(pool(config))), (4, urgent)])
    pair.run([*((3, request) for request in shared), (0, make_request(config, "b", first, beam_search=search))])
    assert pair.num_copies > 10
    assert pair.num_preemptions or pair.runners[1].operations[KVCopy]
    assert pair.num_whole_reads(), "beams need whole rows"


def test_device_blocks_hold_what_host_blocks_hold_after_the_same_copies() -> None:
    """Also where one copy reads or overwrites the target of another."""
    variant = "rotary-16"
    manifest, _, _ = sessions(variant)
    host = HostBlocks(manifest.config, 9, 16)
    device = on_device(manifest, 9, "cpu", paged_folder(variant))
    draw = np.random.default_rng(5)
    for blocks, tensor in zip(host.caches, device.caches, strict=True):
        blocks[...] = draw.standard_normal(blocks.shape, np.float32)
        tensor.write(np.ascontiguousarray(blocks))
    assert (device.num_blocks, device.block_size) == (host.num_blocks, host.block_size)
    for _ in range(300):
        source, target = draw.choice(9, 2, replace=False) + 1
        start, stop = sorted(draw.choice(17, 2, replace=False))
        for memory in (host, device):
            memory.copy(int(source), int(target), int(start), int(stop))
        if draw.random() < 0.1:
            device.flush()
    device.flush()
    for blocks, tensor in zip(host.caches, device.caches, strict=True):
        np.testing.assert_array_equal(tensor.read(), blocks)


def test_graph_for_cuda_is_refused_where_there_is_none() -> None:
    folder = paged_folder("rotary-16")
    with pytest.raises(StartupError, match=r"decoder\.onnx: this onnxruntime has no CUDAExecutionProvider: install"):
        GraphSession(folder, artifact.load(folder).graphs[DECODER], THREADS, cuda=Cuda(records=True))


# Logits that leave the device

GREEDY = SamplingParams(temperature=0.0)
TOP_K = SamplingParams(temperature=1.2, top_k=7, seed=5, n=2)
PENALISED = SamplingParams(temperature=0.0, presence_penalty=0.5)
NUCLEUS = SamplingParams(temperature=1.1, top_p=0.8, seed=3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_paged_engine_on_a_device_needs_no_whole_logits_for_greedy_and_top_k_tokens(variant: str) -> None:
    """Also in steps with prompts; every token is that of slots."""
    pair = Pair(variant, device="cpu")
    config = pair.config
    requests = [
        make_request(config, f"r{i}", draw_prompt(config, length, i), max_tokens=6 + i, sampling=sampling)
        for i, (length, sampling) in enumerate([(2, GREEDY), (40, TOP_K), (17, GREEDY), (33, TOP_K)])
    ]
    pair.run([(2, request) for request in requests])
    assert pair.num_whole_reads() == 0
    whole = [
        make_request(config, "penalised", draw_prompt(config, 20, 1), sampling=PENALISED),
        make_request(config, "nucleus", draw_prompt(config, 20, 2), sampling=NUCLEUS),
        make_request(config, "logprobs", draw_prompt(config, 20, 3), logprobs=2),
    ]
    for number, request in enumerate(whole):
        before = pair.num_whole_reads()
        pair.run([(0, request), *((1, make_request(config, f"{number}-{i}", [5, 6, i + 3])) for i in range(2))])
        assert pair.num_whole_reads() > before
