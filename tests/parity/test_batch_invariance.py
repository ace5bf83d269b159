"""Batch invariance of the engine on real graphs: the bits of an answer depend on its request alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.spec import artifact, golden
from model.spec.config import ModelConfig
from service.engine.batch import (
    DecodeRow,
    EncodeRow,
    KVCopy,
    KVDrop,
    KVFree,
    KVOperation,
    KVRestore,
    KVSave,
    PrefillChunk,
    PrefillRow,
    ScheduledBatch,
)
from service.engine.engine import LastRun
from service.engine.factory import build_engine, model_shape
from service.engine.kv.budget import plan_kv_memory
from service.engine.kv.reservations import KVBudget
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.types import (
    BeamSearchParams,
    GenerationRequest,
    StepOutput,
    StoppingParams,
)
from tests.artifacts import paged_artifact, tiny_artifact
from tests.fakes import drain, events_of, tokens_of
from tests.served import (
    THREADS,
    VARIANTS,
    Served,
    alone,
    answer_of,
    ask,
    crowd,
    len_of_prompt,
    make_request,
    pool,
    run,
    served,
)


@pytest.fixture(scope="module", autouse=True)
def engines_are_released() -> Iterator[None]:
    yield
    served.cache_clear()
    alone.cache_clear()
    walked_alone.cache_clear()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled(7)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_batch_invariance_bits_depend_on_the_request_alone(variant: str, data: st.DataObject) -> None:
    """Any order and arrivals, other requests canceled at any time: the bits as alone, greedy and sampled."""
    host = served(variant)
    tokens, logits = alone(variant)
    requests = data.draw(st.lists(st.sampled_from(pool(host.config)), min_size=2, unique_by=lambda r: r.request_id))
    delays = data.draw(st.lists(st.integers(0, 4), min_size=len(requests), max_size=len(requests)))
    names = [request.request_id for request in requests]
    aborts = data.draw(st.dictionaries(st.sampled_from(names), st.integers(0, 5), max_size=len(names) // 2))
    outputs = run(host.engine(), list(zip(delays, requests, strict=True)), aborts)
    differing = [key for key, bits in host.recorder.logits.items() if logits[key] != bits]
    assert not differing, f"logits differ at (seed, output, position) {differing}"
    for name in names:
        seen = tokens_of(outputs, name)
        assert seen == tokens[name][: len(seen)]
        assert name in aborts or len(seen) == len(tokens[name])


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_invariance_among_thirty_two(variant: str) -> None:
    """A batch of the default size, first and last in it: the bits as alone in eight slots."""
    tokens, logits = alone(variant)
    host = crowd(variant)
    wanted = pool(host.config)
    others = [make_request(host.config, 100 + i, 1 + i * 5 % 50, temperature=1.0) for i in range(20)]
    for requests in (wanted + others, others + wanted):
        outputs = run(host.engine(), [(0, request) for request in requests], {})
        assert host.recorder.max_rows == 32
        for name, expected in tokens.items():
            assert tokens_of(outputs, name) == expected
        assert all(host.recorder.logits[key] == bits for key, bits in logits.items())


@pytest.mark.parametrize("variant", ["rotary", "learned", "additive"])
def test_batch_invariance_for_padding_rows_in_mid_prompt(variant: str) -> None:
    host = served(variant)
    tokens, logits = alone(variant)
    before = host.recorder.num_padding_rows
    requests = [request for request in pool(host.config) if len(request.prompt_token_ids) in (1, 61, 64)]
    outputs = run(host.engine(), [(0, request) for request in sorted(requests, key=len_of_prompt, reverse=True)], {})
    assert host.recorder.num_padding_rows > before
    for request in requests:
        assert tokens_of(outputs, request.request_id) == tokens[request.request_id]
    assert all(logits[key] == bits for key, bits in host.recorder.logits.items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_invariance_over_stale_kv(variant: str) -> None:
    """Even NaN, as a failed sequence leaves it: no kernel reads beyond a row's length. Int8 has its extreme instead."""
    tokens, logits = alone(variant)
    host = served(variant)
    for buffer in (*host.kv.own, *host.kv.cross):
        buffer[:] = np.nan if buffer.dtype == np.float32 else -128
    outputs = run(host.engine(), [(0, request) for request in pool(host.config)], {})
    assert {name: tokens_of(outputs, name) for name in tokens} == tokens
    assert host.recorder.logits == logits


class Walk:
    """One row taken through the runner by hand, chunk by chunk, from slot to slot; the other slots decode beside it.

    What a row leaves behind is NaN, and the other rows may be NaN.
    """

    NUM_SLOTS = 4

    def __init__(self, host: Served, tokens: Sequence[int], num_prompt: int, source: Sequence[int]) -> None:
        self._host = host
        self._tokens = tuple(tokens)
        self._num_prompt = num_prompt
        self._source = tuple(source)
        self._chunk_rules = Scheduler(host.limits, model_shape(host.manifest), host.decode).chunk_rules
        self._positions = [0] * self.NUM_SLOTS
        self._next_handle = 0
        self.slot = 0
        self.logits: list[bytes] = []

    @property
    def num_computed(self) -> int:
        return self._positions[self.slot]

    @property
    def is_over(self) -> bool:
        return self.num_computed == len(self._tokens)

    def start(self, slot: int, encoded_for: Sequence[int] = ()) -> None:
        """Takes a slot over stale K/V; its source is encoded for the slots `encoded_for` at once."""
        self.slot = slot
        for stale in range(self.NUM_SLOTS):
            self.spoil(stale)
        if self._source and encoded_for:
            rows = [EncodeRow(tuple(encoded_for), self._source)]
            self.apply(encodes=rows)

    def apply(self, *operations: KVOperation, encodes: Sequence[EncodeRow] = ()) -> None:
        self._host.recorder.run(
            ScheduledBatch(kv_operations=operations, encodes=self._chunk_rules.group_sources(encodes))
        )

    def spoil(self, slot: int, start: int = 0) -> None:
        loudest = np.nan if self._host.kv.own[0].dtype.kind == "f" else -127
        for buffer in self._host.kv.own:
            buffer[slot, :, start:] = loudest
        for buffer in self._host.kv.cross:
            buffer[slot] = loudest
        self._positions[slot] = start

    def swap_out_and_in(self, target: int) -> None:
        """Preemption: saved, its slot freed, and restored into another."""
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        length = self.num_computed
        self.apply(KVSave(self.slot, handle, length, len(self._source)), KVFree(self.slot))
        self.spoil(self.slot)
        self.spoil(target)
        self.apply(KVRestore(handle, target), KVDrop(handle))
        self.slot, self._positions[target] = target, length

    def fork(self, target: int, start: int = 0) -> None:
        """Goes on in a copy, while the original diverges. The first `start` tokens are shared already."""
        length = self.num_computed
        self.apply(KVCopy(self.slot, target, length, 0 if start else len(self._source), start))
        self.slot, self._positions[target] = target, length

    def advance(self, num_rows: int) -> None:
        """Feeds the next chunk as a scheduler would, beside as many rows as fit."""
        start = self.num_computed
        stop = min(start + 1, len(self._tokens))
        if start < self._num_prompt:
            stop = min((start // self._chunk_rules.chunk + 1) * self._chunk_rules.chunk, self._num_prompt)
        chunk = self._tokens[start:stop]
        rows = [
            DecodeRow(self._tokens[0] + slot, min(position, len(self._tokens)), len(self._source), slot == self.slot)
            for slot, position in enumerate(self._positions[: max(num_rows, self.slot + 1)])
        ]
        beginnings: list[PrefillRow] = []
        prefills: tuple[PrefillChunk, ...] = ()
        if len(chunk) > 1:
            rows = [] if num_rows == 0 else rows
            rows = [dataclasses.replace(row, token_id=chunk[0]) if row.is_padding else row for row in rows]
            if self._chunk_rules.is_short(start, len(chunk)):
                beginnings.append(PrefillRow(self.slot, chunk))
                # Without decode rows, others start with it, as many as fit into a step.
                others = [slot for slot in range(num_rows, self.NUM_SLOTS) if slot != self.slot]
                room = self._host.limits.max_prefill_tokens // self._chunk_rules.padded_prompt_length(len(chunk))
                others = others[: room - 1]
                beginnings += [PrefillRow(slot, chunk[::-1][slot % 2 :]) for slot in others]
            else:
                prefills = (PrefillChunk(self.slot, start, chunk),)
        else:
            rows[self.slot] = DecodeRow(chunk[0], start, len(self._source), is_padding=False)
        groups = self._chunk_rules.group_prompts(sorted(beginnings, key=lambda row: (-len(row.token_ids), row.slot)))
        output = self._host.recorder.run(ScheduledBatch(decode=tuple(rows), prefill_groups=groups, prefills=prefills))
        for row in beginnings:
            self._positions[row.slot] = len(row.token_ids)
        for slot in range(len(rows)):
            self._positions[slot] = min(self._positions[slot] + 1, self._host.config.context - 1)
        self._positions[self.slot] = stop
        self.logits.append(output[self.slot].tobytes())


@cache
def walked_alone(variant: str, number: int, num_prompt: int) -> list[bytes]:
    """The bits of a row's logits after each of its chunks, alone in the first slot."""
    host = served(variant)
    tokens, source = sequence_of(host.config, number, num_prompt)
    walk = Walk(host, tokens, num_prompt, source)
    walk.start(0, encoded_for=[0])
    while not walk.is_over:
        walk.advance(0)
    assert all(np.isfinite(np.frombuffer(bits, np.float32)).all() for bits in walk.logits)
    return walk.logits


def sequence_of(config: ModelConfig, number: int, num_prompt: int) -> tuple[list[int], list[int]]:
    """Random tokens, six more than the prompt, and a random source for an encoder-decoder."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, config.vocab_size - Walk.NUM_SLOTS, num_prompt + 6).tolist()
    if not config.is_encoder_decoder:
        return tokens, []
    return tokens, rng.integers(0, config.source_vocab_size, 1 + number * 13 % config.source_context).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_batch_invariance_for_rows_saved_restored_and_forked_at_any_time(variant: str, data: st.DataObject) -> None:
    """Preempted, moved, copied whole or in part, in mid-prompt or later: the bits as undisturbed."""
    host = served(variant)
    host.drop_saved()
    num_prompt = 1 if host.config.is_encoder_decoder else data.draw(st.sampled_from([1, 16, 33, 40]), "prompt")
    number = data.draw(st.integers(0, 2), "number")
    tokens, source = sequence_of(host.config, number, num_prompt)
    expected = walked_alone(variant, number, num_prompt)
    walk = Walk(host, tokens, num_prompt, source)
    walk.start(data.draw(st.integers(0, 3), "slot"), encoded_for=range(Walk.NUM_SLOTS))
    origin: tuple[int, int] | None = None
    while not walk.is_over:
        target = (walk.slot + data.draw(st.integers(1, 3), "to")) % Walk.NUM_SLOTS
        match data.draw(st.sampled_from(["stay", "swap", "fork", "return"]), "event"):
            case "swap":
                walk.swap_out_and_in(target)
                origin = None
            case "fork":
                origin = walk.slot, walk.num_computed
                walk.spoil(target)
                walk.fork(target)
            case "return" if origin:
                # As beams do: a common prefix is not copied.
                walk.fork(*origin)
                origin = None
        walk.advance(data.draw(st.integers(0, Walk.NUM_SLOTS), "rows"))
    assert walk.logits == expected


def num_cached(outputs: Sequence[StepOutput], request: GenerationRequest) -> int:
    return events_of(outputs, request.request_id)[-1].num_cached_tokens


def long_request(config: ModelConfig, number: int = 1, **changes: Any) -> GenerationRequest:
    """Several prompt chunks or a source, and a dozen sampled tokens with log-probabilities."""
    request = make_request(config, number, 61, temperature=0.9, top_p=0.95)
    prefix = (5, 6, 7, 8) if config.is_encoder_decoder else ()
    stopping = StoppingParams(max_tokens=12, ignore_eos=True)
    return dataclasses.replace(request, stopping=stopping, target_prefix_token_ids=prefix, logprobs=2, **changes)


def forks(config: ModelConfig, number: int = 1) -> list[GenerationRequest]:
    """One prompt three ways: one output, three outputs, beam search."""
    request = long_request(config, number)
    return [
        request,
        dataclasses.replace(request, request_id="n", sampling=dataclasses.replace(request.sampling, n=3)),
        dataclasses.replace(request, request_id="beams", beam_search=BeamSearchParams(beam_size=3, num_hypotheses=2)),
    ]


# Each family in fp32 and quantized, and a quantized cache.
LIVES = ("rotary", "sinusoidal", "learned-int8", "encoder-rotary-int8", "rotary-int4", "learned-int8-kv-int8")


@pytest.mark.parametrize("variant", [*LIVES, "windowed", "encoder-additive"])
def test_batch_invariance_for_cache_hits(variant: str) -> None:
    """On chunks and sources of an earlier request, also for several outputs and beams: the bits of a cold cache."""
    host = served(variant)
    chunk = host.limits.prefill_chunk
    for request in forks(host.config):
        cold = ask(host, request)
        logits = dict(host.recorder.logits)
        assert num_cached(cold, request) == 0
        prompt, others = request.prompt_token_ids, make_request(host.config, 2, 61).prompt_token_ids
        shares = (len(prompt),) if host.config.is_encoder_decoder else (len(prompt), 2 * chunk + 3, chunk)
        for shared in shares:
            engine = host.engine()
            before = dataclasses.replace(
                request, request_id="before", prompt_token_ids=prompt[:shared] + others[shared:]
            )
            engine.add_request(before)
            drain(engine)
            engine.add_request(request)
            warm = drain(engine)
            assert answer_of(warm, request) == answer_of(cold, request)
            assert all(host.recorder.logits[key] == bits for key, bits in logits.items())
            # The chunk of the last token is always computed, for its logits.
            expected = shared if host.config.is_encoder_decoder else min(shared, len(prompt) - 1) // chunk * chunk
            assert num_cached(warm, request) == expected


@pytest.mark.parametrize("variant", LIVES)
def test_batch_invariance_for_preempted_requests(variant: str) -> None:
    """After any number of steps, in mid-prompt and in mid-output."""
    host = served(variant, max_batch_size=4, max_prefill_tokens=16)
    for request in forks(host.config):
        undisturbed = ask(host, request)
        logits = dict(host.recorder.logits)
        urgent = dataclasses.replace(long_request(host.config, 3), request_id="urgent", priority=1)
        # It needs all rows, so that every running request is preempted.
        urgent = dataclasses.replace(urgent, sampling=dataclasses.replace(urgent.sampling, n=4))
        expected = ask(host, urgent)
        for num_steps in (1, 2, 4, 5, 9, 15):
            engine = host.engine(KVBudget(num_bytes=1 << 20))
            engine.add_request(request)
            outputs = [engine.step() for _ in range(num_steps)]
            was_running = engine.has_work
            engine.add_request(urgent)
            outputs += drain(engine)
            engine.add_request(dataclasses.replace(make_request(host.config, 4, 9), request_id="later"))
            outputs += drain(engine)
            assert sum(output.stats.num_preemptions for output in outputs) == was_running
            assert answer_of(outputs, request) == answer_of(undisturbed, request)
            assert answer_of(outputs, urgent) == answer_of(expected, urgent)
            assert all(host.recorder.logits[key] == bits for key, bits in logits.items())
            assert num_cached(outputs, request) == 0


@pytest.mark.parametrize("variant", LIVES)
def test_batch_invariance_for_each_output_in_any_number(variant: str) -> None:
    """Output i is the same among any number of outputs."""
    host = served(variant)
    request = long_request(host.config)
    single = ask(host, request)
    expected = dict(enumerate([tokens_of(single, request.request_id)]))
    logits = dict(host.recorder.logits)
    for num_outputs in (2, 3, 4):
        several = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, n=num_outputs))
        for others in ((), pool(host.config)):
            outputs = ask(host, *others, dataclasses.replace(several, request_id="several"))
            for index in range(num_outputs):
                tokens = tokens_of(outputs, "several", index)
                assert tokens == expected.setdefault(index, tokens)
            if not others:
                assert host.recorder.logits.keys() >= logits.keys()
    assert len(set(map(tuple, expected.values()))) == 4


@pytest.mark.parametrize("variant", LIVES)
def test_batch_invariance_for_beams(variant: str) -> None:
    """Tokens, log-probabilities and scores are the same alone and crowded, first and last."""
    host = served(variant)
    searches = [
        dataclasses.replace(
            long_request(host.config, number),
            request_id=f"beams{number}",
            beam_search=BeamSearchParams(beam_size=beam_size, num_hypotheses=2, no_repeat_ngram_size=number),
        )
        for number, beam_size in enumerate((2, 3, 5))
    ]
    expected = [answer_of(ask(host, search), search) for search in searches]
    for requests in ((*pool(host.config), *searches), (*searches, *pool(host.config))):
        outputs = ask(host, *requests)
        assert [answer_of(outputs, search) for search in searches] == expected


@pytest.mark.parametrize("variant", LIVES)
def test_batch_invariance_under_a_tight_budget(variant: str) -> None:
    """Requests wait, cached chunks are evicted, and preempted rows are saved: the same bits in little memory."""
    host = served(variant)
    config = host.config
    tokens, _ = alone(variant)
    # Pages of one token, as rows this short would all take one page.
    by_token = dataclasses.replace(plan_kv_memory(host.manifest, 1, None), page_tokens=1, source_page_tokens=1)
    tight = dataclasses.replace(by_token, num_bytes=5 * by_token.row_bytes(config.context, config.source_context))
    extra = [
        dataclasses.replace(each, request_id=f"{each.request_id}-{number}", priority=priority)
        for number in range(20, 23)
        for priority, each in enumerate(forks(config, number))
    ]
    expected = [answer_of(ask(host, each), each) for each in extra]
    engine = host.engine(tight)
    arrivals = [
        *pool(config),
        *extra,
        *(dataclasses.replace(each, request_id=f"{each.request_id}-again") for each in pool(config)),
    ]
    outputs: list[StepOutput] = []
    for each in arrivals:
        engine.add_request(each)
        outputs += [engine.step() for _ in range(3)]
        assert host.kv.stored_bytes <= tight.num_bytes
    outputs += drain(engine)
    for name, wanted in tokens.items():
        assert tokens_of(outputs, name) == tokens_of(outputs, f"{name}-again") == wanted
    assert [answer_of(outputs, each) for each in extra] == expected
    assert sum(output.stats.num_preemptions for output in outputs) > 0
    restored = {operation.handle for operation in host.recorder.operations if isinstance(operation, KVRestore)}
    dropped = {operation.handle for operation in host.recorder.operations if isinstance(operation, KVDrop)}
    assert dropped - restored, "no cached chunk was evicted"


@pytest.mark.parametrize("family", ["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize("kind", ["kernels", "standard-operators", "blocks"])
@pytest.mark.parametrize("num_rows", [3, 32])
@pytest.mark.sampled(6)
def test_batch_invariance_is_found_by_the_check_at_start(family: str, kind: str, num_rows: int) -> None:
    folder = paged_artifact(family) if kind == "blocks" else tiny_artifact(family)
    manifest, cases = artifact.load(folder), golden.load(folder / artifact.GOLDEN)
    options = dataclasses.replace(THREADS, own_kernels=kind == "kernels")
    # Memory for two rows of full length holds more of the check's rows.
    kv = plan_kv_memory(manifest, 2, None).num_bytes if num_rows == 32 else None
    limits = EngineLimits(max_batch_size=num_rows, kv_memory_bytes=kv)
    engine = build_engine(folder, manifest, str, limits, options, LastRun())
    tolerance = golden.tolerance_of(manifest.precision, manifest.kv_cache.precision)
    for _ in range(2):
        assert all(result.passed for result in engine.verify_golden(cases, tolerance))
        assert engine.check_batch_invariance(cases) is True
