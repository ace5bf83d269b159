"""The engine on real graphs: what it serves is the reference's, bit for bit the same in any company."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.nn import reference
from model.nn.transformer import Transformer
from model.spec import artifact, golden
from model.spec.artifact import KVPrecision, Precision
from model.spec.config import Architecture, ModelConfig
from model.spec.tokenizer import Tokenizer
from service.engine.batch import (
    DecodeRow,
    EncodeRow,
    KVCopy,
    KVDrop,
    KVFree,
    KVOperation,
    KVRestore,
    KVRetain,
    KVSave,
    PrefillChunk,
    PrefillGroup,
    PrefillRow,
    ScheduledBatch,
)
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine, build_runner, model_shape
from service.engine.kv.budget import plan_kv_memory
from service.engine.kv.reservations import KVBudget
from service.engine.runner import Runner
from service.engine.sampling.sampler import Sampler
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.sessions.session import GraphSession, SessionOptions
from service.engine.types import (
    BeamSearchParams,
    FinishReason,
    GenerationRequest,
    PromptScoring,
    SamplingParams,
    StepOutput,
    StoppingParams,
    TokenLogprobs,
)
from service.errors import EngineFailed, StartupError
from tests.artifacts import ADDITIVE, LEARNED, random_model, tiny_artifact, tiny_config
from tests.fakes import drain, events_of, tokens_of

Float32 = npt.NDArray[np.float32]
Logits = dict[tuple[int, int, int], bytes]

TOLERANCE = golden.TOLERANCES[Precision.FP32]
THREADS = SessionOptions(intra_op_threads=2, allow_spinning=False)
DECODER_ONLY, ENCODER_DECODER = Architecture.DECODER_ONLY, Architecture.ENCODER_DECODER
FAMILIES = pytest.mark.parametrize("family", [DECODER_ONLY, ENCODER_DECODER])

# The second of each family differs from the first in all that chooses kernels: positions, norm, heads, odd widths. The
# third has no fused attention at all. The rest round: products in fewer bits must not know a row's company either.
_ENCODER_ROTARY: Mapping[str, Any] = {
    "positions": "rotary",
    "d_model": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 499,
    "d_ff": 200,
}
_WINDOWED: Mapping[str, Any] = {
    "sliding_window": 19,
    "layer_types": ("sliding", "full"),
    "query_key_norm": True,
    "rope_scaling": "yarn",
    "rope_factor": 2.0,
    "rope_original_context": 48,
    "rope_attention_factor": 1.1,
    "num_heads": 3,
    "num_kv_heads": 1,
    "head_dim": 16,
}
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "rotary": (DECODER_ONLY, {}),
    "learned": (DECODER_ONLY, LEARNED),
    "sinusoidal": (ENCODER_DECODER, {}),
    "encoder-rotary": (ENCODER_DECODER, _ENCODER_ROTARY),
    "windowed": (DECODER_ONLY, _WINDOWED),
    "additive": (DECODER_ONLY, ADDITIVE[DECODER_ONLY]),
    "encoder-additive": (ENCODER_DECODER, ADDITIVE[ENCODER_DECODER]),
    "learned-int8": (DECODER_ONLY, {**LEARNED, "precision": Precision.INT8}),
    "encoder-rotary-int8": (ENCODER_DECODER, {**_ENCODER_ROTARY, "precision": Precision.INT8}),
    "rotary-int4": (DECODER_ONLY, {"precision": Precision.INT4}),
    "rotary-kv-int8": (DECODER_ONLY, {"kv_precision": KVPrecision.INT8}),
    "encoder-rotary-int8-kv-int8": (
        ENCODER_DECODER,
        {**_ENCODER_ROTARY, "precision": Precision.INT8, "kv_precision": KVPrecision.INT8},
    ),
    "learned-int8-kv-int8": (DECODER_ONLY, {**LEARNED, "precision": Precision.INT8, "kv_precision": KVPrecision.INT8}),
}
ANSWERING = pytest.mark.parametrize("variant", ["rotary", "sinusoidal"])
"""Variants with the weights of `random_model(tiny_config(family))`."""


class Recorder:
    """A runner that remembers the bits of every row that is sampled, by (seed, output, position), and what it did."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.logits: Logits = {}
        self.operations: list[KVOperation] = []
        self.max_rows = 0
        self.num_padding_rows = 0

    def own_weights(self) -> None:
        self._runner.own_weights()

    def run(self, batch: ScheduledBatch) -> Float32:
        logits = self._runner.run(batch)
        self.operations += batch.kv_operations
        self.max_rows = max(self.max_rows, len(batch.decode))
        self.num_padding_rows += sum(row.is_padding for row in batch.decode)
        for sample in batch.samples:
            self.logits[sample.seed, sample.output_index, sample.position] = logits[sample.slot].tobytes()
        return logits


class Served:
    """An engine over an artifact, with its logits on record; the same K/V buffers serve every test that shares it."""

    def __init__(self, family: str, overrides: Mapping[str, Any], limits: EngineLimits) -> None:
        self.folder = tiny_artifact(family, **overrides)
        self.manifest = artifact.load(self.folder)
        self.limits = limits
        self.decode = Tokenizer.load(self.folder / artifact.TOKENIZER).decode
        runner = build_runner(self.folder, self.manifest, limits, THREADS)
        self.kv = runner.kv
        self.recorder = Recorder(runner)

    @property
    def config(self) -> ModelConfig:
        return self.manifest.config

    def engine(self, kv_budget: KVBudget | None = None) -> Engine:
        """Fresh sequences over stale K/V, as after other requests."""
        self.recorder.logits, self.recorder.operations = {}, []
        scheduler = Scheduler(self.limits, model_shape(self.manifest), self.decode, kv_budget)
        return Engine(scheduler, self.recorder, Sampler(), LastRun())

    def forget_kept(self) -> None:
        """Drops what engines before kept, as a new engine does: handles are free again."""
        self.kv.apply(KVRetain(frozenset()))


@cache
def served(variant: str, max_batch_size: int = 8, max_prefill_tokens: int = 32) -> Served:
    family, overrides = VARIANTS[variant]
    limits = EngineLimits(max_batch_size=max_batch_size, prefill_chunk=16, max_prefill_tokens=max_prefill_tokens)
    return Served(family, overrides, limits)


def crowd(variant: str) -> Served:
    """As many rows as the default, all of which can start at once."""
    return served(variant, max_batch_size=32, max_prefill_tokens=4096)


@pytest.fixture(scope="module", autouse=True)
def engines_are_released() -> Iterator[None]:
    yield
    served.cache_clear()
    alone.cache_clear()
    walked_alone.cache_clear()


def make_request(config: ModelConfig, number: int, length: int, **sampling: float) -> GenerationRequest:
    """Request `number` of a pool: random prompt, greedy unless told; its seed is its number."""
    longest = config.source_context if config.is_encoder_decoder else config.context - 1
    vocab_size = config.source_vocab_size if config.is_encoder_decoder else config.vocab_size
    prompt = np.random.default_rng(number).integers(0, vocab_size, min(length, longest))
    params = SamplingParams(seed=number, **(sampling or {"temperature": 0.0}))  # type: ignore[arg-type]
    return GenerationRequest(
        request_id=f"r{number}",
        model="tiny",
        prompt_token_ids=tuple(prompt.tolist()),
        sampling=params,
        stopping=StoppingParams(max_tokens=5 + number % 9, ignore_eos=number % 2 == 0),
    )


def len_of_prompt(request: GenerationRequest) -> int:
    return len(request.prompt_token_ids)


# Chunks are 16 long: prompts of one token, within a chunk, at its end, over several, with a remainder of one.
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 40, 48, 61, 64)
KINDS: tuple[dict[str, float], ...] = ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40})


def pool(config: ModelConfig) -> list[GenerationRequest]:
    return [make_request(config, number, length, **KINDS[number % len(KINDS)]) for number, length in enumerate(LENGTHS)]


@cache
def alone(variant: str) -> tuple[dict[str, list[int]], Logits]:
    """Every request of the pool by itself: its tokens, and the bits of all its logits."""
    host = served(variant)
    tokens: dict[str, list[int]] = {}
    logits: Logits = {}
    for request in pool(host.config):
        engine = host.engine()
        engine.add_request(request)
        tokens[request.request_id] = tokens_of(drain(engine), request.request_id)
        logits |= host.recorder.logits
    return tokens, logits


def run(
    engine: Engine, arrivals: Sequence[tuple[int, GenerationRequest]], aborts: Mapping[str, int]
) -> list[StepOutput]:
    """Requests join after so many steps each; those in `aborts` are cancelled that many steps later."""
    outputs: list[StepOutput] = []
    for delay, request in arrivals:
        outputs += [engine.step() for _ in range(delay)]
        engine.add_request(request)
        if request.request_id in aborts:
            outputs += [engine.step() for _ in range(aborts[request.request_id])]
            engine.abort(request.request_id)
    return outputs + drain(engine)


def tiny_engine(folder: Path, max_batch_size: int) -> Engine:
    decode = Tokenizer.load(folder / artifact.TOKENIZER).decode
    limits = EngineLimits(max_batch_size=max_batch_size)
    return build_engine(folder, artifact.load(folder), decode, limits, THREADS, LastRun())


@pytest.mark.parametrize(
    ("max_batch_size", "precision"),
    [(1, Precision.FP32), (3, Precision.FP32), (16, Precision.FP32), (3, Precision.INT8), (3, Precision.INT4)],
)
@FAMILIES
def test_engine_replays_every_golden_case(family: str, max_batch_size: int, precision: Precision) -> None:
    folder = tiny_artifact(family, precision)
    engine = tiny_engine(folder, max_batch_size)
    results = engine.verify_golden(golden.load(folder / artifact.GOLDEN), golden.TOLERANCES[precision])
    assert len(results) >= 8
    assert [result for result in results if not result.passed] == []
    assert not engine.has_work


@FAMILIES
def test_engine_over_int8_kv_replays_every_golden_case(family: str) -> None:
    folder = tiny_artifact(family, kv_precision=KVPrecision.INT8)
    tolerance = golden.tolerance_of(Precision.FP32, KVPrecision.INT8)
    results = tiny_engine(folder, 3).verify_golden(golden.load(folder / artifact.GOLDEN), tolerance)
    assert len(results) >= 8
    assert [result for result in results if not result.passed] == []
    kv = build_runner(folder, artifact.load(folder), EngineLimits(), THREADS).kv
    assert {buffer.dtype for buffer in (*kv.own, *kv.cross)} == {np.dtype(np.int8)}


@FAMILIES
def test_engine_golden_replay_notices_a_wrong_answer(family: str) -> None:
    folder = tiny_artifact(family)
    engine = tiny_engine(folder, 4)
    case = golden.load(folder / artifact.GOLDEN)[-1]
    wrong = case.logits.copy()
    wrong[-1, -1] += 10 * TOLERANCE.absolute
    (result,) = engine.verify_golden([dataclasses.replace(case, logits=wrong)], TOLERANCE)
    assert not result.passed


@ANSWERING
def test_engine_scores_given_text_as_the_reference_does_in_any_company(variant: str) -> None:
    """With and without a continuation, over chunk boundaries, among requests that come and go."""
    config = tiny_config(VARIANTS[variant][0])
    host = served(variant)
    model = random_model(config)
    requests = []
    for number, length in enumerate((*LENGTHS[1:], config.context)):
        request = make_request(config, number, length)
        text = tuple(np.random.default_rng(number).integers(0, config.vocab_size, length).tolist())
        prompt, prefix = (request.prompt_token_ids, text[1:]) if config.is_encoder_decoder else (text, ())
        max_tokens = 0 if length == config.context else number % 3
        requests.append(
            dataclasses.replace(
                request,
                prompt_token_ids=prompt,
                target_prefix_token_ids=prefix,
                stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=True),
                scoring=PromptScoring(num_top=3, start=1 + number % 2 * (length - 2)),
            )
        )
    alone = {}
    for request in requests:
        engine = host.engine()
        engine.add_request(request)
        alone[request.request_id] = drain(engine)
    engine = host.engine()
    outputs: list[StepOutput] = []
    for request in requests:
        engine.add_request(request)
        engine.add_request(dataclasses.replace(make_request(config, 90, 5), request_id=f"with-{request.request_id}"))
        outputs.append(engine.step())
    outputs += drain(engine)
    for request in requests:
        scores = scores_of(outputs, request.request_id)
        assert scores == scores_of(alone[request.request_id], request.request_id)
        assert tokens_of(outputs, request.request_id) == tokens_of(alone[request.request_id], request.request_id)
        prompt, prefix = request.prompt_token_ids, request.target_prefix_token_ids
        tokens, source = ([config.bos_id, *prefix], prompt) if config.is_encoder_decoder else (list(prompt), None)
        expected = reference.logits(model, tokens, source).log_softmax(-1).numpy()
        assert request.scoring is not None
        positions = range(request.scoring.start, len(tokens))
        wanted = [expected[at - 1, tokens[at]] for at in positions]
        np.testing.assert_allclose([score.logprob for score in scores], wanted, rtol=0, atol=2 * TOLERANCE.absolute)
        for score, at in zip(scores, positions, strict=True):
            best = np.sort(expected[at - 1])[:-4:-1]
            np.testing.assert_allclose(score.top_logprobs, best, rtol=0, atol=2 * TOLERANCE.absolute)


def scores_of(outputs: Sequence[StepOutput], request_id: str) -> list[TokenLogprobs]:
    return [each for event in events_of(outputs, request_id) for each in event.prompt_logprobs]


@ANSWERING
def test_engine_serves_the_references_greedy_tokens_to_ragged_joining_and_leaving_requests(variant: str) -> None:
    """10,000 positions: each served token is the arg-max of one teacher-forced, cache-less forward over its output."""
    config = tiny_config(VARIANTS[variant][0])
    host = served(variant)
    model = random_model(config)
    engine = host.engine()
    rng = np.random.default_rng(0)
    requests: list[GenerationRequest] = []
    outputs: list[StepOutput] = []
    num_asked = 0
    while num_asked < 10_000:
        number = len(requests)
        request = make_request(config, number, int(rng.integers(1, 60)))
        prefix: tuple[int, ...] = ()
        if config.is_encoder_decoder:
            prefix = tuple(rng.integers(0, config.vocab_size, number % 4).tolist())
        room = config.context - (1 + len(prefix) if config.is_encoder_decoder else len(request.prompt_token_ids))
        count = int(rng.integers(1, room + 1))
        num_asked += count
        stopping = StoppingParams(max_tokens=count, ignore_eos=True)
        requests.append(dataclasses.replace(request, stopping=stopping, target_prefix_token_ids=prefix))
        engine.add_request(requests[-1])
        outputs += [engine.step() for _ in range(int(rng.integers(0, 12)))]
    outputs += drain(engine, max_steps=10_000)
    num_equal = 0
    max_error = 0.0
    for request in requests:
        output = tokens_of(outputs, request.request_id)
        assert len(output) == request.stopping.max_tokens
        prompt, prefix = request.prompt_token_ids, request.target_prefix_token_ids
        given, source = ([config.bos_id, *prefix], prompt) if config.is_encoder_decoder else (list(prompt), None)
        expected = reference.logits(model, [*given, *output[:-1]], source).numpy()[len(given) - 1 :]
        num_equal += int((expected.argmax(-1) == output).sum())
        seed = request.sampling.seed
        assert seed is not None
        positions = range(len(given), len(given) + len(output))
        actual = np.stack([np.frombuffer(host.recorder.logits[seed, 0, at], np.float32) for at in positions])
        max_error = max(max_error, float(np.abs(actual - expected).max()))
    assert num_equal / num_asked >= 0.999
    assert max_error <= TOLERANCE.absolute


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_law_of_company_the_bits_of_logits_and_tokens_depend_on_the_request_alone(
    variant: str, data: st.DataObject
) -> None:
    """Any order, any arrival, any neighbours that may be cancelled at any time: as alone, greedy and sampled."""
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
def test_law_of_company_holds_among_thirty_two(variant: str) -> None:
    """A batch as large as the default, everyone at once, first and last: the same bits as alone in eight slots."""
    tokens, logits = alone(variant)
    host = crowd(variant)
    wanted = pool(host.config)
    company = [make_request(host.config, 100 + i, 1 + i * 5 % 50, temperature=1.0) for i in range(20)]
    for requests in (wanted + company, company + wanted):
        outputs = run(host.engine(), [(0, request) for request in requests], {})
        assert host.recorder.max_rows == 32
        for name, expected in tokens.items():
            assert tokens_of(outputs, name) == expected
        assert all(host.recorder.logits[key] == bits for key, bits in logits.items())


@pytest.mark.parametrize("variant", ["rotary", "learned", "additive"])
def test_law_of_company_holds_for_rows_that_pad_while_they_are_in_the_middle_of_their_prompt(variant: str) -> None:
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
def test_law_of_company_holds_over_whatever_was_in_the_slots_before(variant: str) -> None:
    """Even NaN, as a sequence that failed leaves it: no kernel touches what lies beyond a row's own length.

    Eight bits know no NaN, only the loudest there is.
    """
    tokens, logits = alone(variant)
    host = served(variant)
    for buffer in (*host.kv.own, *host.kv.cross):
        buffer[:] = np.nan if buffer.dtype == np.float32 else -128
    outputs = run(host.engine(), [(0, request) for request in pool(host.config)], {})
    assert {name: tokens_of(outputs, name) for name in tokens} == tokens
    assert host.recorder.logits == logits


class Walk:
    """One row taken through the runner by hand, piece by piece, from slot to slot; the other slots decode beside it.

    Whatever a row leaves behind is NaN. Nobody promises its company anything: it may well be NaN itself.
    """

    NUM_SLOTS = 4

    def __init__(self, host: Served, tokens: Sequence[int], num_prompt: int, source: Sequence[int]) -> None:
        self._host = host
        self._tokens = tuple(tokens)
        self._num_prompt = num_prompt
        self._source = tuple(source)
        self._pieces = Scheduler(host.limits, model_shape(host.manifest), host.decode).pieces
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
        """Takes a slot over stale K/V; `encoded_for` are slots that its source is encoded for at once."""
        self.slot = slot
        for stale in range(self.NUM_SLOTS):
            self.spoil(stale)
        if self._source and encoded_for:
            rows = [EncodeRow(tuple(encoded_for), self._source)]
            self.apply(encodes=rows)

    def apply(self, *operations: KVOperation, encodes: Sequence[EncodeRow] = ()) -> None:
        self._host.recorder.run(ScheduledBatch(kv_operations=operations, encodes=self._pieces.group_sources(encodes)))

    def spoil(self, slot: int, start: int = 0) -> None:
        # What has no NaN gets as loud a value as it has.
        loudest = np.nan if self._host.kv.own[0].dtype.kind == "f" else -127
        for buffer in self._host.kv.own:
            buffer[slot, :, start:] = loudest
        for buffer in self._host.kv.cross:
            buffer[slot] = loudest
        self._positions[slot] = start

    def swap_out_and_in(self, target: int) -> None:
        """Preempted: saved, its slot given away, and restored into another."""
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        length = self.num_computed
        self.apply(KVSave(self.slot, handle, length, len(self._source)), KVFree(self.slot))
        self.spoil(self.slot)
        self.spoil(target)
        self.apply(KVRestore(handle, target), KVDrop(handle))
        self.slot, self._positions[target] = target, length

    def fork(self, target: int, start: int = 0) -> None:
        """Goes on in a copy; the original becomes company, and goes another way. `start` are tokens shared already."""
        length = self.num_computed
        self.apply(KVCopy(self.slot, target, length, 0 if start else len(self._source), start))
        self.slot, self._positions[target] = target, length

    def restore(self, handles: Sequence[int], length: int) -> None:
        """Begins with what others have computed and kept."""
        self.apply(*(KVRestore(handle, self.slot) for handle in handles))
        self._positions[self.slot] = length

    def advance(self, num_rows: int) -> None:
        """Feeds the next piece as a scheduler would, beside as many rows as fit."""
        start = self.num_computed
        stop = min(start + 1, len(self._tokens))
        if start < self._num_prompt:
            stop = min((start // self._pieces.chunk + 1) * self._pieces.chunk, self._num_prompt)
        piece = self._tokens[start:stop]
        rows = [
            DecodeRow(self._tokens[0] + slot, min(position, len(self._tokens)), len(self._source), slot == self.slot)
            for slot, position in enumerate(self._positions[: max(num_rows, self.slot + 1)])
        ]
        beginnings: list[PrefillRow] = []
        prefills: tuple[PrefillChunk, ...] = ()
        if len(piece) > 1:
            rows = [] if num_rows == 0 else rows
            rows = [dataclasses.replace(row, token_id=piece[0]) if row.is_padding else row for row in rows]
            if self._pieces.is_short(start, len(piece)):
                beginnings.append(PrefillRow(self.slot, piece))
                # Where nobody decodes, neighbours begin with it, as many as fit into a step.
                others = [slot for slot in range(num_rows, self.NUM_SLOTS) if slot != self.slot]
                room = self._host.limits.max_prefill_tokens // self._pieces.padded_prompt_length(len(piece))
                others = others[: room - 1]
                beginnings += [PrefillRow(slot, piece[::-1][slot % 2 :]) for slot in others]
            else:
                prefills = (PrefillChunk(self.slot, start, piece),)
        else:
            rows[self.slot] = DecodeRow(piece[0], start, len(self._source), is_padding=False)
        groups = self._pieces.group_prompts(sorted(beginnings, key=lambda row: (-len(row.token_ids), row.slot)))
        output = self._host.recorder.run(ScheduledBatch(decode=tuple(rows), prefill_groups=groups, prefills=prefills))
        for row in beginnings:
            self._positions[row.slot] = len(row.token_ids)
        for slot in range(len(rows)):
            self._positions[slot] = min(self._positions[slot] + 1, self._host.config.context - 1)
        self._positions[self.slot] = stop
        self.logits.append(output[self.slot].tobytes())


@cache
def walked_alone(variant: str, number: int, num_prompt: int) -> list[bytes]:
    """The bits of a row's logits after each of its pieces, by itself in the first slot."""
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
def test_law_of_company_holds_for_rows_that_are_saved_restored_and_forked_at_any_time(
    variant: str, data: st.DataObject
) -> None:
    """Preempted, moved, copied whole or in part, in the middle of the prompt or later: the same bits as undisturbed."""
    host = served(variant)
    host.forget_kept()
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
                # As beams do: what both have in common need not be copied.
                walk.fork(*origin)
                origin = None
        walk.advance(data.draw(st.integers(0, Walk.NUM_SLOTS), "rows"))
    assert walk.logits == expected


@pytest.mark.parametrize("variant", [name for name, (family, _) in VARIANTS.items() if family == DECODER_ONLY])
def test_law_of_company_holds_for_prefixes_that_another_request_computed(variant: str) -> None:
    """Whole chunks, each kept by itself, from a row in another slot, of another length and in company."""
    host = served(variant)
    host.forget_kept()
    chunk = host.limits.prefill_chunk
    tokens, _ = sequence_of(host.config, 1, 61)
    others, _ = sequence_of(host.config, 2, 61)
    first = Walk(host, tokens[: 3 * chunk] + others[: chunk // 2], 3 * chunk + chunk // 2, ())
    first.start(2)
    while not first.is_over:
        first.advance(4)
    keeping = [KVSave(2, handle, chunk * (handle + 1), 0, chunk * handle) for handle in range(3)]
    first.apply(*keeping)
    expected = walked_alone(variant, 1, 61)
    for num_chunks in (1, 2, 3):
        for slot in range(Walk.NUM_SLOTS):
            walk = Walk(host, tokens, 61, ())
            walk.start(slot)
            walk.restore(range(num_chunks), num_chunks * chunk)
            while not walk.is_over:
                walk.advance(slot)
            assert walk.logits == expected[num_chunks:]
    first.apply(*(KVDrop(save.handle) for save in keeping))
    assert host.kv.stored_bytes == 0


@pytest.mark.parametrize("variant", [name for name, (family, _) in VARIANTS.items() if family == ENCODER_DECODER])
def test_law_of_company_holds_for_sources_that_another_request_encoded(variant: str) -> None:
    """Encoded for several rows at once, or kept from an earlier one: the same bits as a source of one's own."""
    host = served(variant)
    host.forget_kept()
    for number in range(3):
        tokens, source = sequence_of(host.config, number, 1)
        expected = walked_alone(variant, number, 1)
        for slot in range(Walk.NUM_SLOTS):
            walk = Walk(host, tokens, 1, source)
            walk.start(slot, encoded_for=range(Walk.NUM_SLOTS))
            while not walk.is_over:
                walk.advance(4)
            assert walk.logits == expected
            walk = Walk(host, tokens, 1, source)
            walk.start(slot, encoded_for=[(slot + 1) % Walk.NUM_SLOTS])
            walk.apply(KVSave((slot + 1) % Walk.NUM_SLOTS, 0, 0, len(source)))
            walk.spoil((slot + 1) % Walk.NUM_SLOTS)
            walk.restore([0], 0)
            while not walk.is_over:
                walk.advance(4)
            assert walk.logits == expected
            walk.apply(KVDrop(0))


@pytest.mark.parametrize("variant", [name for name, (family, _) in VARIANTS.items() if family == DECODER_ONLY])
def test_law_of_company_holds_for_short_prompts_that_are_computed_together(variant: str) -> None:
    """Ragged lengths in one padded one, slots in any order, over loud K/V: the bits of logits and K/V as alone.

    What lies behind a prompt in its slot is left as it was.
    """
    host = served(variant)
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(0, host.config.vocab_size, length).tolist()) for length in (5, 8, 6, 7)]

    def prefill(rows: Mapping[int, tuple[int, ...]]) -> dict[int, bytes]:
        for buffer in host.kv.own:
            buffer[:] = np.nan if buffer.dtype == np.float32 else -128
        before = [buffer.copy() for buffer in host.kv.own]
        group = PrefillGroup(8, tuple(PrefillRow(slot, token_ids) for slot, token_ids in rows.items()))
        logits = host.recorder.run(ScheduledBatch(prefill_groups=(group,)))
        assert all(np.isfinite(logits[slot]).all() for slot in rows)
        for buffer, old in zip(host.kv.own, before, strict=True):
            for slot in range(host.kv.num_slots):
                length = len(rows.get(slot, ()))
                assert buffer[slot, :, length:].tobytes() == old[slot, :, length:].tobytes()
        return {
            slot: logits[slot].tobytes()
            + b"".join(buffer[slot, :, : len(token_ids)].tobytes() for buffer in host.kv.own)
            for slot, token_ids in rows.items()
        }

    alone = [prefill({0: token_ids})[0] for token_ids in prompts]
    for slots in ((0, 1, 2, 3), (6, 1, 7, 3), (7, 6), (2, 5, 0)):
        together = prefill(dict(zip(slots, prompts, strict=False)))
        assert [together[slot] for slot in slots] == alone[: len(slots)]


def ask(host: Served, *requests: GenerationRequest) -> list[StepOutput]:
    """What a cold engine makes of these at once."""
    engine = host.engine()
    for request in requests:
        engine.add_request(request)
    return drain(engine)


def answer_of(outputs: Sequence[StepOutput], request: GenerationRequest) -> list[tuple[object, ...]]:
    """All that a client is told of its outputs, to the last bit; in what order outputs take turns is not promised."""
    events = sorted(events_of(outputs, request.request_id), key=lambda event: event.output_index)
    return [(event.output_index, event.token_id, event.logprobs, event.finish_reason, event.score) for event in events]


def num_cached(outputs: Sequence[StepOutput], request: GenerationRequest) -> int:
    return events_of(outputs, request.request_id)[-1].num_cached_tokens


def long_request(config: ModelConfig, number: int = 1, **changes: Any) -> GenerationRequest:
    """Of several chunks or a source, and a dozen sampled tokens with their log-probabilities."""
    request = make_request(config, number, 61, temperature=0.9, top_p=0.95)
    prefix = (5, 6, 7, 8) if config.is_encoder_decoder else ()
    stopping = StoppingParams(max_tokens=12, ignore_eos=True)
    return dataclasses.replace(request, stopping=stopping, target_prefix_token_ids=prefix, logprobs=2, **changes)


def forks(config: ModelConfig, number: int = 1) -> list[GenerationRequest]:
    """One prompt three ways: by itself, with three outputs, as a beam search."""
    request = long_request(config, number)
    return [
        request,
        dataclasses.replace(request, request_id="n", sampling=dataclasses.replace(request.sampling, n=3)),
        dataclasses.replace(request, request_id="beams", beam_search=BeamSearchParams(beam_size=3, num_hypotheses=2)),
    ]


# Each family in full precision, with rounded weights, and where there is one over a rounded cache.
LIVES = pytest.mark.parametrize(
    "variant",
    ["rotary", "sinusoidal", "learned-int8", "encoder-rotary-int8", "rotary-int4", "learned-int8-kv-int8"],
)


@LIVES
def test_law_of_company_holds_for_requests_that_find_their_prompt_or_source_computed(variant: str) -> None:
    """By another request, of other tokens behind the shared ones or of the same, also for several outputs and beams."""
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
            # The last token's logits are wanted, so that its chunk is computed in any case.
            expected = shared if host.config.is_encoder_decoder else min(shared, len(prompt) - 1) // chunk * chunk
            assert num_cached(warm, request) == expected


@LIVES
def test_law_of_company_holds_for_requests_that_more_urgent_ones_interrupt(variant: str) -> None:
    """After any number of steps, in mid-prompt and in mid-output: their rows are saved and come back."""
    host = served(variant, max_batch_size=4, max_prefill_tokens=16)
    for request in forks(host.config):
        undisturbed = ask(host, request)
        logits = dict(host.recorder.logits)
        urgent = dataclasses.replace(long_request(host.config, 3), request_id="urgent", priority=1)
        # It takes all rows, so that whoever runs must go.
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


@LIVES
def test_law_of_company_holds_for_each_output_whatever_their_number(variant: str) -> None:
    """Output 0 is that of a request for one, and the others are the same among two and among four."""
    host = served(variant)
    request = long_request(host.config)
    single = ask(host, request)
    expected = dict(enumerate([tokens_of(single, request.request_id)]))
    logits = dict(host.recorder.logits)
    for num_outputs in (2, 3, 4):
        several = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, n=num_outputs))
        for company in ((), pool(host.config)):
            outputs = ask(host, *company, dataclasses.replace(several, request_id="several"))
            for index in range(num_outputs):
                tokens = tokens_of(outputs, "several", index)
                assert tokens == expected.setdefault(index, tokens)
            if not company:
                assert host.recorder.logits.keys() >= logits.keys()
    assert len(set(map(tuple, expected.values()))) == 4


@LIVES
def test_law_of_company_holds_for_beams(variant: str) -> None:
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


@LIVES
def test_law_of_company_holds_under_a_tight_budget(variant: str) -> None:
    """Requests wait, what is kept is given up, and what is interrupted is saved: the same bits, in little memory."""
    host = served(variant)
    config = host.config
    tokens, _ = alone(variant)
    # Counted by the token: rows as short as these would all take one page.
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
    assert dropped - restored, "nothing that was kept had to make room"


def search_slowly(
    given: Sequence[int],
    source: Sequence[int] | None,
    request: GenerationRequest,
    model: Transformer,
    end_ids: frozenset[int],
) -> list[tuple[float, list[int]]]:
    """Beam search by the book: every continuation of every beam, each from a whole forward; score and tokens."""
    params = request.beam_search
    assert params is not None
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, request.stopping.max_tokens + 1):
        candidates: list[tuple[float, list[int]]] = []
        for total, tokens in beams:
            logprobs = reference.logits(model, [*given, *tokens], source)[-1].double().log_softmax(-1)
            candidates += [(total + each, [*tokens, token]) for token, each in enumerate(logprobs.tolist())]
        candidates.sort(key=lambda candidate: -candidate[0])
        is_last = length == request.stopping.max_tokens
        for total, tokens in candidates[: params.beam_size]:
            if is_last or tokens[-1] in end_ids:
                finished.append((total / length**params.length_penalty, tokens))
        beams = [candidate for candidate in candidates if candidate[1][-1] not in end_ids][: params.beam_size]
        if len(finished) >= max(params.beam_size * params.patience, params.num_hypotheses):
            break
    finished.sort(key=lambda hypothesis: -hypothesis[0])
    return finished[: params.num_hypotheses]


@FAMILIES
def test_engine_beam_search_is_that_of_the_book_on_the_reference(family: str) -> None:
    config = tiny_config(family)
    host = served("rotary" if family == DECODER_ONLY else "sinusoidal")
    model = random_model(config)
    ends = []
    for number, (beam_size, penalty, patience) in enumerate(
        [(1, 1.0, 1.0), (2, 0.0, 1.0), (3, 1.0, 1.0), (4, 2.0, 2.0), (5, 0.5, 0.4), (8, 1.0, 1.0)]
    ):
        # Many tokens stop it, so that ends are among the best continuations.
        stops = frozenset(np.random.default_rng(number).choice(config.vocab_size, 60, replace=False).tolist())
        request = dataclasses.replace(
            make_request(config, number, 5 + 9 * number),
            stopping=StoppingParams(max_tokens=7, stop_token_ids=stops),
            beam_search=BeamSearchParams(
                beam_size=beam_size,
                num_hypotheses=(beam_size + 1) // 2,
                length_penalty=penalty,
                patience=patience,
            ),
        )
        prompt = request.prompt_token_ids
        given, source = ([config.bos_id], prompt) if config.is_encoder_decoder else (prompt, None)
        expected = search_slowly(given, source, request, model, stops | set(host.manifest.eos_ids))
        outputs = ask(host, request)
        for index, (score, tokens) in enumerate(expected):
            last = next(
                e for e in events_of(outputs, request.request_id) if e.output_index == index and e.finish_reason
            )
            assert last.score == pytest.approx(score, abs=1e-5)
            assert tokens_of(outputs, request.request_id, index) == tokens
            ends.append(last.finish_reason)
    assert set(ends) == {FinishReason.STOP, FinishReason.LENGTH}


@FAMILIES
def test_engine_cancelling_half_frees_their_slots_in_one_step_and_changes_nobody(family: str) -> None:
    host = crowd("rotary" if family == DECODER_ONLY else "sinusoidal")
    requests = [
        dataclasses.replace(
            make_request(host.config, number, 1 + number * 7 % 40),
            stopping=StoppingParams(max_tokens=20, ignore_eos=True),
        )
        for number in range(64)
    ]
    undisturbed = run(host.engine(), [(0, request) for request in requests], {})
    engine = host.engine()
    for request in requests:
        engine.add_request(request)
    outputs = [engine.step(), engine.step()]
    assert (engine.num_running, engine.num_waiting) == (32, 32)
    cancelled = {request.request_id for request in requests[::2]}
    for name in cancelled:
        engine.abort(name)
    outputs.append(engine.step())
    ended = [event.request_id for event in outputs[-1].events if event.finish_reason is FinishReason.CANCELLED]
    assert sorted(ended) == sorted(cancelled)
    # The sixteen that were running made room for the sixteen that still waited.
    assert (engine.num_running, engine.num_waiting) == (32, 0)
    outputs += drain(engine)
    for request in requests[1::2]:
        assert tokens_of(outputs, request.request_id) == tokens_of(undisturbed, request.request_id)


def test_engine_stop_strings_are_found_in_the_artifacts_own_text() -> None:
    host = served("rotary")
    request = dataclasses.replace(make_request(host.config, 4, 20), stopping=StoppingParams(max_tokens=40))
    engine = host.engine()
    engine.add_request(request)
    text = host.decode(tokens_of(drain(engine), request.request_id))
    stop = text[len(text) // 2 :][:2]
    engine = host.engine()
    engine.add_request(dataclasses.replace(request, stopping=StoppingParams(max_tokens=40, stop=(stop,))))
    events = events_of(drain(engine), request.request_id)
    assert "".join(event.text or "" for event in events) == text[: text.index(stop)]
    assert (events[-1].finish_reason, events[-1].matched_stop) == (FinishReason.STOP, stop)


def test_engine_outlives_a_graph_that_refuses_a_batch() -> None:
    """An id outside the vocabulary, which the layers above never let through, fails those that ran and nobody later."""
    host = served("rotary")
    tokens, logits = alone("rotary")
    bad = dataclasses.replace(make_request(host.config, 50, 9), prompt_token_ids=(host.config.vocab_size,) * 9)
    engine = host.engine()
    engine.add_request(bad)
    (event,) = engine.step().events
    assert isinstance(event.error, EngineFailed)
    host.recorder.logits = {}
    for request in pool(host.config):
        engine.add_request(request)
    outputs = drain(engine)
    assert {name: tokens_of(outputs, name) for name in tokens} == tokens
    assert host.recorder.logits == logits


def test_session_refuses_a_graph_that_is_not_the_manifests(tmp_path: Path) -> None:
    folder = tiny_artifact(DECODER_ONLY)
    spec = artifact.load(folder).graphs[artifact.DECODER]
    foreign = dataclasses.replace(spec, inputs=spec.inputs[1:], outputs=(*spec.outputs, spec.inputs[0]))
    with pytest.raises(StartupError) as caught:
        GraphSession(folder, foreign, THREADS)
    assert len(caught.value.problems) == 2
    shutil.copy(folder / spec.file, tmp_path)
    (tmp_path / spec.file).write_bytes((folder / spec.file).read_bytes()[:100])
    with pytest.raises(StartupError):
        GraphSession(tmp_path, spec, THREADS)


def test_runner_refuses_logits_that_no_machine_could_hold() -> None:
    """Rows for scores are touched only when a client asks: too late to find out that there is no memory for them."""
    folder = tiny_artifact(DECODER_ONLY)
    limits = EngineLimits(max_batch_size=2, prefill_chunk=1 << 40, max_prefill_tokens=1 << 40)
    with pytest.raises(StartupError, match=rf"prefill_chunk {1 << 40}: {(1 << 40) + 2} rows of logits need"):
        build_runner(folder, artifact.load(folder), limits, THREADS)
    source = tiny_artifact(ENCODER_DECODER)
    assert build_runner(source, artifact.load(source), limits, THREADS).kv.num_slots == 2
