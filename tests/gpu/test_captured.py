"""Captured decode steps have the bits of eager ones.

One script is played twice by the runner that serves: by a decoder graph that runs eagerly, and by one whose runs are
captured and replayed. Each step reads what the steps before it wrote. In the script

* some of the rows decode, so that padding rows fill up the run; now and then all, or one alone;
* the longest row passes the length from which on the operator splits a row's keys, half-way through;
* between decode steps rows begin anew, their prompts, or sources, computed beside others that decode;
* about every other step is read by the highest logits that the graph selects, the rest by whole rows.

On a CPU nothing is captured: there the script and the comparison are tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from model.spec.artifact import DECODER, ENCODER, MOVE, Device, Precision
from model.spec.config import ModelConfig
from service.engine.batch import DecodeRow, EncodeGroup, EncodeRow, KVFree, PrefillChunk, SampleRow, ScheduledBatch
from service.engine.paged_backend.device_blocks import DeviceBlocks
from service.engine.paged_backend.paged_kv import PagedKV
from service.engine.paged_backend.paged_runner import PagedRunner
from service.engine.sampling.top_logits import TopLogits
from service.engine.sessions.session import Array, Bindable, Binding, GraphSession
from service.engine.types import SamplingParams
from tests.gpu.subjects import EagerSession, Subject, configs, load_session

DIVIDED_FROM = 512
"""Rows up to here are one class of runs; the operator splits the keys of longer ones."""
_LONGEST_PROMPT = 70
_LONGEST_SOURCE = 24
_GREEDY = SamplingParams(temperature=0.0)
# How often all rows decode, one alone, and one begins anew: pairwise coprime.
_ALL, _ALONE, _ANEW = 7, 8, 5


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the script: a batch, the rows whose results count, and the longest row that decodes."""

    batch: ScheduledBatch
    slots: tuple[int, ...]
    longest: int

    @property
    def size(self) -> tuple[int, int] | None:
        """Rows and length of its run, rounded up; None where prompts are computed."""
        if self.batch.prefills or not self.batch.num_decode_rows:
            return None
        rows, length = (1 << (number - 1).bit_length() for number in (self.batch.num_decode_rows, self.longest))
        return rows, max(length, DIVIDED_FROM)


def write_script(config: ModelConfig, num_rows: int, num_steps: int) -> list[Step]:
    """So many decode steps after one that computes prompts or sources."""
    return list(_Author(config, num_rows, num_steps).write())


def script_of(subject: Subject) -> list[Step]:
    return write_script(subject.config, subject.rows, 20 if subject.is_tiny else 50)


def play(subject: Subject, script: Sequence[Step], kind: type[GraphSession]) -> tuple[list[dict[str, Array]], int]:
    """Outputs of the steps, and the number of sizes of runs."""
    config, kv, top = subject.config, subject.manifest.kv_cache, TopLogits()
    decoder = load_session(subject, DECODER, records=True, kind=kind)
    encoder = load_session(subject, ENCODER, records=False) if config.is_encoder_decoder else None
    move = load_session(subject, MOVE, records=False)
    longest = max(step.longest for step in script)
    num_blocks = subject.rows * (-(-longest // kv.block_size) + -(-_LONGEST_SOURCE // kv.block_size))
    device = str(subject.device)
    memory = DeviceBlocks(config, num_blocks, kv.block_size, kv.precision.dtype, device, move)
    runner = PagedRunner(config, PagedKV(memory, subject.rows), memory, decoder, encoder, device=device, top=top)
    return [_read(step, runner.run(step.batch), top) for step in script], runner.num_buckets


def differing(first: Sequence[Mapping[str, Array]], second: Sequence[Mapping[str, Array]]) -> list[int]:
    """Steps whose outputs differ in a bit, or are not finite."""
    return [
        index
        for index, (mine, theirs) in enumerate(zip(first, second, strict=True))
        if mine.keys() != theirs.keys()
        or any(values.tobytes() != theirs[name].tobytes() for name, values in mine.items())
        or not all(np.isfinite(values).all() for values in mine.values())
    ]


def _read(step: Step, logits: Array, top: TopLogits) -> dict[str, Array]:
    """Copies of each row's highest logits where the runner has those alone, else of all."""
    found: dict[str, Array] = {}
    for slot in step.slots:
        if slot in top:
            row = top.row(slot)
            found[f"highest {slot}"], found[f"ids {slot}"] = row.values, row.token_ids
        else:
            found[f"logits {slot}"] = logits[slot].copy()
    return found


class _Author:
    """Writes the script; keeps each row's length."""

    def __init__(self, config: ModelConfig, num_rows: int, num_steps: int) -> None:
        self._config = config
        self._num_rows, self._num_steps = num_rows, num_steps
        self._draw = np.random.default_rng(23)
        self._lengths = [0] * num_rows
        self._sources = [0] * num_rows

    def write(self) -> Iterator[Step]:
        """The first row is the longest one and decodes in every step."""
        # As far below the bound as it passes above it, where the context allows.
        first = DIVIDED_FROM - self._num_steps // 2 - 1
        if self._config.is_encoder_decoder:
            yield self._step(range(0), begins=range(self._num_rows))
        else:
            prompts = [min(first, self._config.context - self._num_steps), *map(self._length, range(1, self._num_rows))]
            yield self._step(range(0), begins=range(self._num_rows), prompts=prompts)
        some = self._num_rows // 2 + 1
        for number in range(self._num_steps):
            others = [1 + (number + index) % (self._num_rows - 1) for index in range(some - 1)]
            if number % _ALL == _ALL - 1:
                yield self._step(range(self._num_rows))
            elif number % _ALONE == _ALONE - 1:
                yield self._step((0,))
            elif number % _ANEW == _ANEW - 1:
                idle = next(slot for slot in range(1, self._num_rows) if slot not in others)
                yield self._step(sorted((0, *others)), begins=(idle,), prompts=(self._length(number),))
            else:
                yield self._step(sorted((0, *others)))

    def _length(self, number: int) -> int:
        """From two tokens on, in no order."""
        return 2 + (37 * number) % (_LONGEST_PROMPT - 1)

    def _step(self, decoding: Sequence[int], begins: Sequence[int] = (), prompts: Sequence[int] = ()) -> Step:
        """Some rows decode while others begin with prompts of these lengths, or with sources."""
        decode = tuple(self._decode_row(slot, is_padding=slot not in decoding) for slot in range(self._num_rows))
        lengths = [self._lengths[slot] + 1 for slot in decoding]
        for slot in decoding:
            self._lengths[slot] += 1
        frees = tuple(map(KVFree, begins))
        encodes: tuple[EncodeGroup, ...] = ()
        prefills: tuple[PrefillChunk, ...] = ()
        if self._config.is_encoder_decoder:
            encodes = self._encode(begins) if begins else ()
            slots = tuple(decoding)
        else:
            fed = zip(begins, map(self._tokens, prompts), strict=True)
            prefills = tuple(PrefillChunk(slot, 0, tokens) for slot, tokens in fed)
            lengths += prompts
            slots = (*decoding, *begins)
        for chunk in prefills:
            self._lengths[chunk.slot] = len(chunk.token_ids)
        batch = ScheduledBatch(
            kv_operations=frees,
            encodes=encodes,
            decode=decode if decoding else (),
            prefills=prefills,
            samples=tuple(SampleRow(slot, 0, self._lengths[slot], _GREEDY, 0, None) for slot in slots),
            wants_all_logits=bool(self._draw.integers(2)),
        )
        return Step(batch, slots, max(lengths, default=1))

    def _decode_row(self, slot: int, *, is_padding: bool) -> DecodeRow:
        (token,) = self._tokens(1)
        return DecodeRow(token, self._lengths[slot], self._sources[slot], is_padding)

    def _encode(self, slots: Sequence[int]) -> tuple[EncodeGroup, ...]:
        rows = []
        for slot in slots:
            num = int(self._draw.integers(1, _LONGEST_SOURCE + 1))
            ids = tuple(self._draw.integers(3, self._config.source_vocab_size, num).tolist())
            rows.append(EncodeRow((slot,), ids))
            self._lengths[slot], self._sources[slot] = 0, num
        return (EncodeGroup(_LONGEST_SOURCE, tuple(rows)),)

    def _tokens(self, num: int) -> tuple[int, ...]:
        return tuple(self._draw.integers(0, self._config.vocab_size, num).tolist())


def test_eager_steps_have_the_same_bits_again(subject: Subject) -> None:
    script = script_of(subject)
    (first, _), (second, _) = play(subject, script, EagerSession), play(subject, script, EagerSession)
    assert differing(first, second) == []


def test_captured_steps_have_the_bits_of_eager_ones(subject: Subject) -> None:
    script = script_of(subject)
    eager, num_eager = play(subject, script, EagerSession)
    captured, num_captured = play(subject, script, GraphSession)
    assert differing(eager, captured) == []
    assert num_eager == num_captured == len({step.size for step in script if step.size})
    assert {name.split()[0] for output in eager for name in output} == {"logits", "highest", "ids"}


# What this check refuses, and what its script has.


class Forgetful(GraphSession):
    """Replays a run by doing nothing: its earlier outputs remain."""

    def bind(self, inputs: Mapping[str, Bindable], outputs: Mapping[str, Bindable]) -> Binding:
        binding = super().bind(inputs, outputs)
        run, seen = binding.run, set[int]()

        def repeat(number: int | None = None) -> None:
            if number is None or number not in seen:
                run(number)
            seen.add(-1 if number is None else number)

        binding.run = repeat  # type: ignore[method-assign]
        return binding


@pytest.mark.parametrize("subject", [("tiny", Device.CPU, Precision.FP32)], indirect=True)
def test_runs_that_are_replayed_wrongly_are_found(subject: Subject) -> None:
    script = script_of(subject)
    (eager, _), (wrong, _) = play(subject, script, EagerSession), play(subject, script, Forgetful)
    decoding = [number for number, step in enumerate(script) if step.size]
    assert set(decoding[6:]) <= set(differing(eager, wrong))


def test_a_single_bit_that_differs_and_what_is_no_number_are_found() -> None:
    rng = np.random.default_rng(0)
    first = [{"logits": rng.standard_normal((2, 8), np.float32)} for _ in range(4)]
    second = [{"logits": step["logits"].copy()} for step in first]
    assert differing(first, second) == []
    second[2]["logits"].view(np.int32)[1, 5] ^= 1
    assert differing(first, second) == [2]
    first[0]["logits"][0, 0] = second[0]["logits"][0, 0] = np.nan
    assert differing(first, second) == [0, 2]


def test_the_script_has_everything_that_a_capture_may_break() -> None:
    script = write_script(configs()["llama-110m"], 8, 50)
    assert {step.size for step in script} == {None, (8, 512), (8, 1024), (1, 512), (1, 1024)}
    fives = [step for step in script if step.size and step.batch.num_decode_rows == 5]
    # Up to the last key of a class, and the first of the next one right after it.
    assert {512, 513} <= {step.longest for step in fives}
    mixed = [number for number, step in enumerate(script) if step.batch.prefills and step.batch.num_decode_rows]
    assert len(mixed) >= 5
    assert script[mixed[0] - 1].size == script[mixed[0] + 1].size == (8, 512)
    assert script[mixed[-2] - 1].size == script[mixed[-2] + 1].size == (8, 1024)
    assert 15 <= sum(step.batch.wants_all_logits for step in script) <= 35
    # No row has a gap, and a row that begins anew begins at position 0.
    computed = [0] * 8
    for step in script:
        for slot, row in enumerate(step.batch.decode):
            if not row.is_padding:
                assert row.position == computed[slot]
                computed[slot] += 1
        for chunk in step.batch.prefills:
            assert chunk.start == 0
            computed[chunk.slot] = len(chunk.token_ids)
    encoding = write_script(configs()["en-de-25m"], 8, 50)
    assert sum(bool(step.batch.encodes) and step.batch.num_decode_rows > 1 for step in encoding) >= 5
    assert all(row.source_length for step in encoding for row in step.batch.decode)
