"""The engine with no model: a runner whose logits are a pure function of the tokens in a row's cache.

`FakeRunner` keeps, for each slot, the tokens whose K/V a real runner would hold, and obeys the same rules: operations
copy what they name and nothing else, a write at a position cuts off what was behind it. So a batch that is scheduled
wrongly gives other tokens or fails. `expected_tokens` computes a row's tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from model.spec.config import Architecture, ModelConfig
from model.spec.generation import NO_RULES, GenerationRules
from service.engine.batch import (
    KVCopy,
    KVDrop,
    KVFree,
    KVOperation,
    KVRestore,
    KVRetain,
    KVSave,
    ScheduledBatch,
)
from service.engine.chunks import ChunkRules
from service.engine.engine import Engine, LastRun
from service.engine.kv.reservations import KVBudget
from service.engine.queueing.intake import ModelShape
from service.engine.sampling.sampler import Sampler
from service.engine.sampling.text import Decode
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.types import (
    BeamSearchParams,
    GenerationRequest,
    PromptScoring,
    SamplingParams,
    StepOutput,
    StoppingParams,
    TokenEvent,
)
from service.forecasting.costing import CostModel

Float32 = npt.NDArray[np.float32]
NextToken = Callable[[Sequence[int], Sequence[int]], int]

PAD, BOS, EOS = 0, 1, 2
NUM_SPECIAL = 3
VOCAB_SIZE = 32
CONTEXT = 64
GREEDY = SamplingParams(temperature=0.0)


def noise(source: Sequence[int], tokens: Sequence[int], vocab_size: int = VOCAB_SIZE) -> Float32:
    """Logits `[V]` that depend on every token of the row and on nothing else; special tokens are out of reach."""
    key = zlib.crc32(repr((tuple(source), tuple(tokens))).encode())
    logits = np.random.Generator(np.random.Philox(key)).standard_normal(vocab_size, dtype=np.float32)
    logits[:NUM_SPECIAL] = -100.0
    return logits


def letters(token_ids: Sequence[int]) -> str:
    """A decoder for fake tokens: the first after the special ones is "a"; special ones have no text."""
    return "".join(chr(ord("a") + (i - NUM_SPECIAL) % 26) for i in token_ids if i >= NUM_SPECIAL)


def spell(text: str) -> tuple[int, ...]:
    """The tokens that `letters` turns into `text`."""
    return tuple(ord(letter) - ord("a") + NUM_SPECIAL for letter in text)


def script(text: str, *, prompt_length: int = 1) -> NextToken:
    """A model that writes `text` after a decoder prompt of the given length, then ends the sequence."""
    output = (*spell(text), EOS)
    return lambda source, tokens: output[min(len(tokens) - prompt_length, len(output) - 1)]


class Gate:
    """A `before_run` that holds steps back while it is closed; `entered` is set once it holds one."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()

    def __call__(self, batch: ScheduledBatch) -> None:
        if not self.open.is_set():
            self.entered.set()
            self.open.wait()

    async def until_entered(self) -> None:
        await asyncio.to_thread(self.entered.wait)

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.entered.clear()
        self.open.clear()
        try:
            yield
        finally:
            self.open.set()


class Death(BaseException):
    """An error that no engine survives."""


class FakeRunner:
    """A `Runner` for both families.

    Args:
        next_token: (source, decoder tokens) to the token that greedy decoding must choose; None leaves it to `noise`.
        before_run: called with every batch; may raise, to fail the step, or block.
        memory: the number of a row's last tokens that `noise` depends on, so that texts recur; None is all of them.
    """

    def __init__(
        self,
        num_slots: int = 4,
        vocab_size: int = VOCAB_SIZE,
        next_token: NextToken | None = None,
        before_run: Callable[[ScheduledBatch], None] | None = None,
        memory: int | None = None,
    ) -> None:
        self._num_remembered = memory or 0
        self.batches: list[ScheduledBatch] = []
        self.poisoned_tokens: set[int] = set()
        self._next_token = next_token
        self._before_run = before_run
        self._tokens: list[list[int]] = [[] for _ in range(num_slots)]
        self._sources: list[tuple[int, ...]] = [() for _ in range(num_slots)]
        self._touched: list[tuple[int, int]] = [(0, 0)] * num_slots
        # What is kept: where it starts, its tokens, its source.
        self.kept: dict[int, tuple[int, list[int], tuple[int, ...]]] = {}
        self._logits = np.full((num_slots, vocab_size), np.nan, np.float32)

    def own_weights(self) -> None:
        """It has no weights."""

    def run(self, batch: ScheduledBatch) -> Float32:
        """Logits by slot, then those that chunks want besides; rows that hold one of `poisoned_tokens` get NaN."""
        self.batches.append(batch)
        if self._before_run is not None:
            self._before_run(batch)
        self._logits[:] = np.nan
        for operation in batch.kv_operations:
            self._apply(operation)
            self._touch()
        for group in batch.encodes:
            for encoded in group.rows:
                assert 0 < len(encoded.token_ids) <= group.padded_length
                self._encode(encoded.slots, encoded.token_ids, group.padded_length)
        for slot, row in enumerate(batch.decode):
            assert row.source_length == 0 or row.source_length == len(self._sources[slot])
            self._feed(slot, row.position, (row.token_id,), row.source_length)
        wanted: list[Float32] = []
        self._touch()
        for prompts in batch.prefill_groups:
            for prompt in prompts.rows:
                assert 1 < len(prompt.token_ids) <= prompts.padded_length
                self._feed(prompt.slot, 0, prompt.token_ids, 0)
        self._touch()
        for chunk in (*batch.prefills, *batch.drafted):
            assert len(chunk.token_ids) > (chunk not in batch.drafted)
            assert 0 <= chunk.num_scored <= len(chunk.token_ids)
            first_scored = len(chunk.token_ids) - chunk.num_scored
            if first_scored:
                self._feed(chunk.slot, chunk.start, chunk.token_ids[:first_scored], 0)
            for index in range(first_scored, len(chunk.token_ids)):
                self._feed(chunk.slot, chunk.start + index, chunk.token_ids[index : index + 1], 0)
                wanted.append(self._logits[chunk.slot].copy())
            if not chunk.wants_logits:
                self._logits[chunk.slot] = np.nan
        self._touch()
        return np.concatenate([self._logits, wanted]) if wanted else self._logits

    def num_held_bytes(self, budget: KVBudget) -> int:
        """Bytes that a real runner would hold: whatever was written to a row since it was freed, and the copies."""
        kept = [(len(tokens), len(source)) for _, tokens, source in self.kept.values()]
        return sum(budget.row_bytes(*lengths) for lengths in (*self._touched, *kept))

    def _encode(self, slots: tuple[int, ...], token_ids: tuple[int, ...], padded_length: int) -> None:
        for slot in slots:
            self._sources[slot] = token_ids
            num_tokens, num_source_tokens = self._touched[slot]
            self._touched[slot] = num_tokens, max(num_source_tokens, padded_length)

    def _touch(self) -> None:
        for slot, (tokens, source) in enumerate(zip(self._tokens, self._sources, strict=True)):
            num_tokens, num_source_tokens = self._touched[slot]
            self._touched[slot] = max(num_tokens, len(tokens)), max(num_source_tokens, len(source))

    def _apply(self, operation: KVOperation) -> None:
        match operation:
            case KVCopy(source, target, num_tokens, num_source_tokens, start):
                self._write(target, start, self._read(source, start, num_tokens))
                if num_source_tokens:
                    self._sources[target] = self._sources[source][:num_source_tokens]
            case KVSave(slot, handle, num_tokens, num_source_tokens, start):
                assert handle not in self.kept
                assert len(self._sources[slot]) >= num_source_tokens
                self.kept[handle] = (
                    start,
                    self._read(slot, start, num_tokens),
                    self._sources[slot][:num_source_tokens],
                )
            case KVRestore(handle, slot):
                start, tokens, source = self.kept[handle]
                self._write(slot, start, tokens)
                if source:
                    self._sources[slot] = source
            case KVDrop(handle):
                del self.kept[handle]
            case KVFree(slot, num_tokens, num_source_tokens):
                left = min(self._touched[slot][0], num_tokens), min(self._touched[slot][1], num_source_tokens)
                self._tokens[slot], self._sources[slot], self._touched[slot] = [], (), left
            case KVRetain(handles):
                self.kept = {handle: kept for handle, kept in self.kept.items() if handle in handles}

    def _read(self, slot: int, start: int, stop: int) -> list[int]:
        assert len(self._tokens[slot]) >= stop, f"slot {slot}: {len(self._tokens[slot])} tokens, {stop} are wanted"
        return self._tokens[slot][start:stop]

    def _write(self, slot: int, start: int, tokens: list[int]) -> None:
        assert len(self._tokens[slot]) >= start, f"slot {slot}: {len(self._tokens[slot])} tokens, written at {start}"
        self._tokens[slot][start:] = tokens

    def _feed(self, slot: int, start: int, token_ids: tuple[int, ...], source_length: int) -> None:
        tokens = self._tokens[slot]
        assert len(tokens) >= start, f"slot {slot}: {len(tokens)} tokens cached, fed at {start}"
        tokens[start:] = token_ids
        source = self._sources[slot][:source_length]
        row = noise(source, tokens[-self._num_remembered :], self._logits.shape[1])
        if self._next_token is not None:
            row[self._next_token(source, tuple(tokens))] = 100.0
        if self.poisoned_tokens & set(tokens):
            row[:] = np.nan
        self._logits[slot] = row


def fake_engine(
    runner: FakeRunner | None = None,
    *,
    encoder_decoder: bool = False,
    limits: EngineLimits | None = None,
    context: int = CONTEXT,
    decode: Decode = letters,
    last_run: LastRun | None = None,
    kv_budget: KVBudget | None = None,
    clock: Callable[[], float] = time.monotonic,
    generation: GenerationRules = NO_RULES,
) -> Engine:
    """A whole engine over a `FakeRunner`; `limits` default to 4 slots, chunks of 8 and 16 prefill tokens a step."""
    limits = limits or EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=16)
    model = replace(fake_model(encoder_decoder=encoder_decoder, context=context), generation=generation)
    return Engine(
        Scheduler(limits, model, decode, kv_budget),
        runner or FakeRunner(limits.max_batch_size),
        Sampler(),
        last_run or LastRun(),
        clock,
    )


def fake_costs(rules: ChunkRules, *, encoder_decoder: bool = False) -> CostModel:
    """The cost model of an engine with these rules, over a small model."""
    encoder = {"num_encoder_layers": 1, "source_context": rules.source_context} if encoder_decoder else {}
    config = ModelConfig(
        architecture=Architecture.ENCODER_DECODER if encoder_decoder else Architecture.DECODER_ONLY,
        vocab_size=VOCAB_SIZE,
        context=rules.context,
        d_model=8,
        num_layers=1,
        num_heads=1,
        d_ff=8,
        **encoder,
    )
    return CostModel(config, rules)


def fake_model(*, encoder_decoder: bool = False, context: int = CONTEXT) -> ModelShape:
    """The shape of a fake model; an encoder-decoder's sources are as long as its outputs."""
    source_context = context if encoder_decoder else None
    return ModelShape(context=context, eos_ids=frozenset({EOS}), source_context=source_context, decoder_start_id=BOS)


def request(
    request_id: str = "r",
    prompt: Sequence[int] = (5,),
    *,
    max_tokens: int = 4,
    sampling: SamplingParams = GREEDY,
    stopping: StoppingParams | None = None,
    target_prefix: Sequence[int] = (),
    scoring: PromptScoring | None = None,
    logprobs: int | None = None,
    deadline: float | None = None,
    beam_search: BeamSearchParams | None = None,
    priority: int = 0,
    **timing: Any,
) -> GenerationRequest:
    """A greedy request; `timing` is its arrival, tenant, and moments that a deadline sets."""
    return GenerationRequest(
        request_id=request_id,
        model="fake",
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        stopping=stopping or StoppingParams(max_tokens=max_tokens),
        target_prefix_token_ids=tuple(target_prefix),
        logprobs=logprobs,
        scoring=scoring,
        deadline=deadline,
        beam_search=beam_search,
        priority=priority,
        **timing,
    )


def expected_tokens(
    prompt: Sequence[int], count: int, *, encoder_decoder: bool = False, target_prefix: Sequence[int] = ()
) -> list[int]:
    """Greedy tokens of `noise` after a prompt, one by one."""
    source, tokens = (tuple(prompt), [BOS, *target_prefix]) if encoder_decoder else ((), list(prompt))
    for _ in range(count):
        tokens.append(int(noise(source, tokens).argmax()))
    return tokens[-count:]


def drain(engine: Engine, max_steps: int = 1000) -> list[StepOutput]:
    """Steps until nothing is left."""
    outputs = []
    while engine.has_work:
        assert len(outputs) < max_steps, "the engine does not come to an end"
        outputs.append(engine.step())
    return outputs


def events_of(outputs: Sequence[StepOutput], request_id: str) -> list[TokenEvent]:
    """One request's events, in order."""
    return [event for output in outputs for event in output.events if event.request_id == request_id]


def tokens_of(outputs: Sequence[StepOutput], request_id: str, index: int = 0) -> list[int]:
    """One output's generated tokens, in order."""
    return [
        event.token_id
        for event in events_of(outputs, request_id)
        if event.token_id is not None and event.output_index == index
    ]
