"""Whether captured decoding steps are the steps that they were captured from: the same bits in all that they put out.

One script is played twice by the runner that serves (`service.engine.paged_backend.paged_runner`), with its sizes of
runs (`service.engine.paged_backend.decode_buckets`): by a graph that runs as any other, and by one whose runs are
captured and repeated. Each step reads what the steps before it wrote. In the script

* some of the rows decode, so that rows of nobody fill up the run; now and then all, or one alone;
* the longest row passes the length from which on the operator divides a row's keys, half-way through;
* between decoding steps rows begin anew, their prompts, or sources, computed beside others that decode;
* about every other step is read by the highest logits that the graph singles out, the rest by whole rows.

On a CPU nothing is captured.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines import EagerSession, load_session
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.results import Scribe
from benchmarks.gpu.workshop import Graphs
from model.spec.artifact import DECODER, ENCODER, MOVE, Precision
from model.spec.config import ModelConfig
from service.engine.batch import (
    DecodeRow,
    EncodeGroup,
    EncodeRow,
    KVFree,
    PrefillChunk,
    SampleRow,
    ScheduledBatch,
)
from service.engine.paged_backend.device_blocks import DeviceBlocks
from service.engine.paged_backend.paged_kv import PagedKV
from service.engine.paged_backend.paged_runner import PagedRunner
from service.engine.sampling.top_logits import TopLogits
from service.engine.sessions.device_memory import Array
from service.engine.sessions.session import GraphSession
from service.engine.types import SamplingParams

NAME = "captured"
DIVIDED_FROM = 512
"""Rows up to here are one class of runs; from the next token on the operator is told of more keys, and divides them."""

_LONGEST_PROMPT = 70
_LONGEST_SOURCE = 24
_GREEDY = SamplingParams(temperature=0.0)
# How often all rows decode, one alone, and one begins anew: no two of these numbers have a divisor in common.
_ALL, _ALONE, _ANEW = 7, 8, 5


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the script: what the runner is given, which rows' results count, and the longest of what decodes."""

    batch: ScheduledBatch
    slots: tuple[int, ...]
    longest: int

    @property
    def size(self) -> tuple[int, int] | None:
        """Rows and lengths of the run that it takes, as they are rounded up; None where prompts are computed."""
        if self.batch.prefills or not self.batch.num_decode_rows:
            return None
        rows, length = (1 << (number - 1).bit_length() for number in (self.batch.num_decode_rows, self.longest))
        return rows, max(length, DIVIDED_FROM)


@dataclass(frozen=True, slots=True)
class Played:
    """What the steps put out, the seconds of each, and how many sizes of runs there were."""

    outputs: list[dict[str, Array]]
    seconds: list[float]
    num_sizes: int


def run(bench: Bench, scribe: Scribe) -> None:
    """The model in every precision."""
    plan, name, config = bench.plan, bench.stage.model, bench.proven
    script = write_script(config, plan)
    sizes = sorted({step.size for step in script if step.size})
    for precision in plan.precisions:
        graphs = bench.workshop.graphs(name, config, precision)
        eager = play(graphs, plan, script, EagerSession)
        captured = play(graphs, plan, script, GraphSession)
        different = differing(eager.outputs, captured.outputs)
        decoding = [index for index, step in enumerate(script) if step.size]
        scribe.add(
            "steps",
            {
                "model": name,
                "precision": precision,
                "num_steps": len(script),
                "num_with_prompts": len(script) - len(decoding),
                "sizes": sizes,
                "different_steps": different,
                "eager_step_seconds": statistics.median(eager.seconds[index] for index in decoding),
                "captured_step_seconds": statistics.median(captured.seconds[index] for index in decoding),
            },
        )
        _claim(scribe, name, precision, script, different, (eager.num_sizes, captured.num_sizes, len(sizes)))


def _claim(
    scribe: Scribe,
    name: str,
    precision: Precision,
    script: Sequence[Step],
    different: Sequence[int],
    num_sizes: tuple[int, int, int],
) -> None:
    """The same bits, in runs of the sizes that the script is about."""
    found = f"{len(different)} of {len(script)} steps differ: {list(different)[:8]}" if different else "all the same"
    eager, captured, wanted = num_sizes
    if not eager == captured == wanted:
        found += f"; but {eager} and {captured} sizes of runs were made, wanted are {wanted}"
    what = f"{name} {precision}: {len(script)} steps in {wanted} sizes, captured, have the bits of eager ones"
    scribe.claim(what, found, holds=not different and eager == captured == wanted)


def write_script(config: ModelConfig, plan: Plan) -> list[Step]:
    """So many decoding steps as the plan says, after one that computes prompts or sources, and others between them."""
    return list(_Author(config, plan).write())


def play(graphs: Graphs, plan: Plan, script: Sequence[Step], kind: type[GraphSession]) -> Played:
    """What a runner makes of the script whose decoder is a session of this kind."""
    top = TopLogits()
    runner = _make_runner(graphs, plan, script, kind, top)
    outputs, seconds = [], []
    for step in script:
        began = time.perf_counter()
        logits = runner.run(step.batch)
        seconds.append(time.perf_counter() - began)
        outputs.append(_read(step, logits, top))
    played = Played(outputs, seconds, runner.num_buckets)
    del runner, logits
    gc.collect()
    return played


def differing(first: Sequence[Mapping[str, Array]], second: Sequence[Mapping[str, Array]]) -> list[int]:
    """Steps in which anything that was put out has other bits, or is no number."""
    return [
        index
        for index, (mine, theirs) in enumerate(zip(first, second, strict=True))
        if mine.keys() != theirs.keys()
        or any(values.tobytes() != theirs[name].tobytes() for name, values in mine.items())
        or not all(np.isfinite(values).all() for values in mine.values())
    ]


def _read(step: Step, logits: Array, top: TopLogits) -> dict[str, Array]:
    """Copies of what there is of each row: its highest logits where the runner has those alone, else all of them."""
    found: dict[str, Array] = {}
    for slot in step.slots:
        if slot in top:
            row = top.row(slot)
            found[f"highest {slot}"], found[f"ids {slot}"] = row.values, row.token_ids
        else:
            found[f"logits {slot}"] = logits[slot].copy()
    return found


def _make_runner(
    graphs: Graphs, plan: Plan, script: Sequence[Step], kind: type[GraphSession], top: TopLogits
) -> PagedRunner:
    """As a server's, but for the kind of the decoder's session, and with as much memory as the script takes."""
    config, kv = graphs.config, graphs.manifest.kv_cache
    decoder = load_session(graphs, DECODER, records=True, kind=kind)
    encoder = load_session(graphs, ENCODER, records=False) if config.is_encoder_decoder else None
    move = load_session(graphs, MOVE, records=False)
    longest = max(step.longest for step in script)
    num_blocks = plan.rows * (-(-longest // kv.block_size) + -(-_LONGEST_SOURCE // kv.block_size))
    device = str(graphs.manifest.device)
    memory = DeviceBlocks(config, num_blocks, kv.block_size, kv.precision.dtype, device, move)
    return PagedRunner(config, PagedKV(memory, plan.rows), memory, decoder, encoder, device=device, top=top)


class _Author:
    """Writes the script; keeps where each row is."""

    def __init__(self, config: ModelConfig, plan: Plan) -> None:
        self._config = config
        self._num_rows, self._num_steps = plan.rows, plan.captured_steps
        self._draw = np.random.default_rng(23)
        self._lengths = [0] * plan.rows
        self._sources = [0] * plan.rows

    def write(self) -> Iterator[Step]:
        """The first row is the longest one and decodes in every step."""
        # As far below the bound as it passes above it, where the model has room for that; it is met in two steps that
        # are taken by some of the rows.
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
        """From two tokens over several lengths, in no order."""
        return 2 + (37 * number) % (_LONGEST_PROMPT - 1)

    def _step(self, decoding: Sequence[int], begins: Sequence[int] = (), prompts: Sequence[int] = ()) -> Step:
        """Some rows decode while others, whatever they were, begin with prompts of these lengths, or with sources."""
        # What begins does so before anything decodes, and with a source it may decode in the next step.
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
