"""Check of batch invariance: a golden case's tokens have the same logits alone and in a batch of strangers.

Bits could depend on the batch where a kernel, or a build of ONNX Runtime for another processor, orders its sums by the
number of rows. Runs on the runner that serves, over slots or blocks, where batch invariance is promised: on the CPU. On
CUDA it is not promised (docs/operate/gpu.md).

Knows runners and golden cases' tokens, and no sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model.spec.golden import Feed, GoldenCase, Step
from service.engine.chunks import ChunkRules
from service.engine.interfaces import Runner
from service.engine.proof.replay import replay

MIN_CONTEXT = 8
"""Shorter contexts have no room for the check."""

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

_SHORT_PROMPT = 4
# Rows whose short prompts are computed together.
_MAX_GROUP = 4
_MAX_SOURCE = 16
_NO_LOGITS = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class _Batch:
    """A golden case's tokens in rows among other rows, and their schedule.

    `subjects` are the rows to compare, with tokens of the case `name`. The other rows have other tokens.
    """

    name: str
    sequences: tuple[Int64, ...]
    sources: tuple[Int64, ...]
    steps: tuple[Step, ...]
    subjects: tuple[int, ...]


def row_tokens(rules: ChunkRules) -> tuple[int, int]:
    """Tokens and source tokens of the check's longest row."""
    if rules.source_context:
        return _SHORT_PROMPT, min(_MAX_SOURCE, rules.source_context)
    return max(_SHORT_PROMPT + 3, _chunk(rules) + 2), 0


def find_dependence(
    runner: Runner, cases: Sequence[GoldenCase], rules: ChunkRules, *, num_slots: int, max_prefill_tokens: int
) -> str | None:
    """Describes where logits have other bits in a batch than alone; None where nowhere.

    The beginning of the longest sequence of the cases is computed alone in slot 0, and then among rows of other tokens:
    as a short prompt and as a chunk (an encoder-decoder: from its source), then token by token. The batch fills all
    slots, then some, then two; its rows join, leave and move between slots.

    Args:
        runner: idle, with empty rows; its K/V are overwritten.
        cases: at least one.
        rules: with a context of at least `MIN_CONTEXT`.
        num_slots: rows of the batch, at least 2.
        max_prefill_tokens: prompt tokens of a step, padding included.
    """
    make = _encoder_decoder if rules.source_context else _decoder_only
    batch = make(cases, rules, num_slots, max_prefill_tokens)
    alone: dict[Feed, Float32] = {}
    for subject in batch.subjects:
        alone |= _compute(runner, batch, rules, (subject,), only=True)
    together = _compute(runner, batch, rules, batch.subjects, only=False)
    for number, step in enumerate(batch.steps):
        for feed in step:
            if feed in alone and (together[feed].view(np.uint32) != alone[feed].view(np.uint32)).any():
                place = f"step {number}, row {feed.row}: position {feed.start + feed.count - 1}"
                rows = f"a batch of {len(step)} rows"
                return f"{place} of golden case {batch.name} has other bits in {rows} than alone"
    return None


def _compute(
    runner: Runner, batch: _Batch, rules: ChunkRules, rows: Collection[int], *, only: bool
) -> dict[Feed, Float32]:
    """The logits of `rows`, in the whole batch, or with `only` in a batch of these rows."""
    wanted = [tuple(feed for feed in step if feed.row in rows) for step in batch.steps]
    steps = tuple(step for step in wanted if step) if only else batch.steps
    case = GoldenCase(batch.name, batch.sequences, batch.sources, steps, _NO_LOGITS)
    logits = replay(runner, case, rules, len(batch.sequences), rows)
    return dict(zip((feed for step in wanted for feed in step), logits, strict=True))


def _decoder_only(cases: Sequence[GoldenCase], rules: ChunkRules, num_rows: int, max_prefill_tokens: int) -> _Batch:
    """The sequence is a short prompt, computed with others', and in the last row a chunk beside rows that decode."""
    name, sequence, _ = _longest(cases)
    prompt = min(_SHORT_PROMPT, rules.chunk)
    num_grouped = min(_MAX_GROUP, num_rows - 1, max_prefill_tokens // rules.padded_prompt_length(prompt))
    subjects = num_grouped - 1, num_rows - 1
    schedule = _Schedule()
    schedule.step((row, prompt) for row in range(num_grouped))
    schedule.step((row, _chunk(rules) if row == subjects[1] else 1) for row in range(num_rows))
    schedule.shrink(num_rows, subjects)
    return schedule.batch(cases, name, sequence, np.empty(0, np.int64), subjects)


def _encoder_decoder(cases: Sequence[GoldenCase], rules: ChunkRules, num_rows: int, _: int) -> _Batch:
    """The sequence is in the last row; the other rows have two other sources."""
    name, sequence, source = _longest(cases)
    subjects = (num_rows - 1,)
    schedule = _Schedule()
    schedule.step((row, 1) for row in range(num_rows))
    schedule.shrink(num_rows, subjects)
    return schedule.batch(cases, name, sequence, source[: row_tokens(rules)[1]], subjects)


def _longest(cases: Sequence[GoldenCase]) -> tuple[str, Int64, Int64]:
    """Case, tokens and source of the longest sequence."""
    rows = ((case, row) for case in cases for row in range(len(case.sequences)))
    case, row = max(rows, key=lambda found: len(found[0].sequences[found[1]]))
    return case.name, case.sequences[row], case.sources[row] if case.sources else np.empty(0, np.int64)


def _chunk(rules: ChunkRules) -> int:
    """Tokens of a chunk: too many to be computed with other prompts, where the rules allow such."""
    return min(rules.short_prompt + 1, rules.chunk, rules.context - 2)


class _Schedule:
    """Steps in the making; a row's first feed is at its beginning."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._lengths: dict[int, int] = {}

    def step(self, counts: Iterable[tuple[int, int]]) -> None:
        """Adds a step in which rows feed so many tokens; new rows join in this order."""
        feeds = tuple(Feed(row, self._lengths.get(row, 0), count) for row, count in counts)
        self._lengths |= {feed.row: feed.start + feed.count for feed in feeds}
        self._steps.append(feeds)

    def shrink(self, num_rows: int, subjects: tuple[int, ...]) -> None:
        """Adds two steps of one token each: of about a fourth of the rows, and of two."""
        others = [row for row in range(num_rows) if row not in subjects]
        # Three more than a multiple of four: kernels may compute rows in blocks, and the rest in another order.
        for count in (min(num_rows, num_rows // 4 | 3), 2):
            self.step((row, 1) for row in (*others[: count - len(subjects)], *subjects))

    def batch(
        self, cases: Sequence[GoldenCase], name: str, sequence: Int64, source: Int64, subjects: tuple[int, ...]
    ) -> _Batch:
        """The batch; rows other than `subjects` have tokens from everywhere in the cases."""
        tokens = [each for case in cases for each in case.sequences]
        sequences = tuple(
            np.resize(sequence, length) if row in subjects else _others(tokens, row, length)
            for row, length in sorted(self._lengths.items())
        )
        if not len(source):
            return _Batch(name, sequences, (), tuple(self._steps), subjects)
        # Two sources for all other rows: one as long as the subjects', and a shorter one.
        texts = [each for case in cases for each in case.sources]
        others = [_others(texts, 0, len(source)), _others(texts, 1, max(1, len(source) // 2))]
        sources = tuple(source if row in subjects else others[row % 2] for row in sorted(self._lengths))
        return _Batch(name, sequences, sources, tuple(self._steps), subjects)


def _others(given: Sequence[Int64], row: int, length: int) -> Int64:
    """Tokens for a row that is not compared: some of those given, where rows begin at different places."""
    return np.concatenate(given).take(range(7 * row + 1, 7 * row + 1 + length), mode="wrap")
