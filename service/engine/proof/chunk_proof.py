"""Proof that speculation changes no bit: a token's logits are the same in any chunk as computed by itself.

Draft tokens are verified as one chunk; without speculation the same tokens are computed one by one. If the two differed
in a bit, outputs would depend on how many drafts were accepted. Our own kernels promise that they do not differ
(docs/learn/kernels.md); most standard operators differ. So two things are required: our kernels compute the graph's
products and attention, and a test on the runner that serves, on this machine with these weights, finds no difference.

Knows runners and golden cases' tokens, and no sequences.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model import kernels
from model.spec.artifact import KVLayout, Manifest
from model.spec.golden import GoldenCase
from service.engine.batch import DecodeRow, PrefillChunk, ScheduledBatch
from service.engine.interfaces import Runner
from service.engine.sessions.session import SessionOptions
from service.engine.speculation.drafting import MOST_FED

Float32 = npt.NDArray[np.float32]

# Tokens at a sequence's beginning that are computed in chunks of every length.
_BEGINNING = 64
# Rows that are computed together, up to as many as leave room for a draft token each.
_ROWS = (2, 4, 8, MOST_FED // 2)
# ONNX Runtime's: the order of their sums depends on the number of rows.
_PRODUCTS_AND_ATTENTION = frozenset(
    {
        "Attention",
        "Gemm",
        "MatMul",
        "com.microsoft.FusedGemm",
        "com.microsoft.FusedMatMul",
        "com.microsoft.GroupQueryAttention",
        "com.microsoft.MatMulNBits",
        "com.microsoft.MultiHeadAttention",
        "MatMulInteger",
    }
)
_OWN = "onward."


def find_obstacles(manifest: Manifest, options: SessionOptions) -> list[str]:
    """Why a model cannot have draft tokens, as far as that is known before its graphs are loaded."""
    problems = []
    if manifest.kv_cache.layout is not KVLayout.SLOTS:
        problems.append("keys and values lie in blocks, and the graphs over blocks are not computed by our kernels")
    if not options.own_kernels:
        problems.append("the kernels are not to be used, and standard operators give a chunk other bits")
    elif (reason := kernels.why_not()) is not None:
        problems.append(f"there are no kernels, and standard operators give a chunk other bits: {reason}")
    return problems


def describe_foreign(operators: Collection[str]) -> list[str]:
    """Why a loaded decoder cannot verify draft tokens: products and attention that our kernels do not compute.

    Args:
        operators: of the graph, as `service.engine.sessions.session.GraphSession.operators` names them.
    """
    foreign = sorted(set(operators) & _PRODUCTS_AND_ATTENTION)
    if not foreign and any(name.startswith(_OWN) for name in operators):
        return []
    names = ", ".join(foreign) or "all operators"
    return [f"the decoder has standard operators for {names}, and they give a chunk other bits"]


@dataclass(frozen=True, slots=True)
class _Window:
    """Tokens `[start, stop)` of a case's sequence."""

    name: str
    token_ids: tuple[int, ...]
    start: int
    stop: int


def find_difference(
    runner: Runner, cases: Sequence[GoldenCase], *, num_slots: int, longest_chunk: int, max_tokens: int, context: int
) -> str | None:
    """Describes where a token's logits have other bits in a chunk than by itself; None where nowhere.

    Of the longest sequence of the cases, the beginning and the last `longest_chunk` tokens are computed one by one, and
    in chunks of every length up to `longest_chunk`, each time over the K/V of other tokens; the beginning also as one
    chunk, and in chunks of several rows. Wrong K/V of a chunk show in the logits behind it.

    Args:
        runner: idle; its slots are written to.
        cases: of a decoder-only model, at least one.
        num_slots: rows of logits before those of chunks.
        longest_chunk: tokens of a row with drafts, at least 2.
        max_tokens: rows of logits behind the slots', at least `longest_chunk`.
        context: tokens of a row at most. A sequence shorter than the longest chunk is repeated within that.
    """

    def feed(token_ids: Sequence[int], start: int, stop: int) -> Float32:
        """Computes the tokens `[start, stop)` at once in slot 0; returns the logits after each."""
        fed = tuple(token_ids[start:stop])
        if len(fed) == 1:
            return runner.run(ScheduledBatch(decode=(_alone(fed[0], start),), wants_all_logits=True))[:1].copy()
        chunk = PrefillChunk(0, start, fed, num_scored=len(fed))
        output = runner.run(ScheduledBatch(prefills=(chunk,), wants_all_logits=True))
        return output[num_slots : num_slots + len(fed)].copy()

    def fill(token_ids: Sequence[int], start: int, stop: int, slot: int = 0) -> None:
        """Writes the K/V of the tokens `[start, stop)` to a slot; a single one to slot 0 alone."""
        for first in range(start, stop, max_tokens):
            fed = tuple(token_ids[first : min(first + max_tokens, stop)])
            if len(fed) == 1:
                runner.run(ScheduledBatch(decode=(_alone(fed[0], first),)))
            else:
                runner.run(ScheduledBatch(prefills=(PrefillChunk(slot, first, fed, wants_logits=False),)))

    def find_in_rows(window: _Window, alone: Float32, num_rows: int) -> str | None:
        """The same for rows of different lengths in one run, each with another number of new tokens."""
        length = min(longest_chunk, min(MOST_FED, max_tokens) // num_rows)
        ends = [2 * length - row % length for row in range(num_rows)]
        for slot, end in enumerate(ends):
            fill(window.token_ids, 0, end - 1, slot)
        chunks = tuple(
            PrefillChunk(slot, end - length, window.token_ids[end - length : end], num_scored=1 + slot % length)
            for slot, end in enumerate(ends)
        )
        output = runner.run(ScheduledBatch(drafted=chunks))[num_slots:]
        for chunk in chunks:
            own, output = output[: chunk.num_scored], output[chunk.num_scored :]
            if own.tobytes() != alone[chunk.end - chunk.num_scored : chunk.end].tobytes():
                return f"golden case {window.name} has other bits among {num_rows} rows with drafts than by itself"
        return None

    least = min(longest_chunk, context)
    for window in _windows(cases, min(_BEGINNING, max_tokens), longest_chunk, least):
        count = window.stop - window.start
        fill(window.token_ids, 0, window.start)
        alone = np.concatenate([feed(window.token_ids, at, at + 1) for at in range(window.start, window.stop)])
        others = window.token_ids[: window.start] + window.token_ids[window.start : window.stop][::-1]
        for way in _ways(count, longest_chunk):
            fill(others, window.start, window.stop)
            start = window.start
            for length in way:
                together = feed(window.token_ids, start, start + length)
                known = alone[start - window.start :][:length]
                differs = (together.view(np.uint32) != known.view(np.uint32)).any(axis=1)
                if differs.any():
                    place = f"position {start + int(differs.argmax())} of golden case {window.name}"
                    return f"{place} has other bits in a chunk of {length} tokens than by itself"
                start += length
        if window.start == 0 and count >= 2 * longest_chunk:
            for num_rows in _ROWS:
                if num_rows > min(num_slots, max_tokens // 2):
                    break
                if (problem := find_in_rows(window, alone, num_rows)) is not None:
                    return problem
    return None


def find_merged_difference(
    runner: Runner, cases: Sequence[GoldenCase], *, chunk: int, num_chunks: int, context: int
) -> str | None:
    """Describes where chunks of a prompt have other bits in one run than one by one; None where nowhere.

    The longest sequence of the cases, repeated to `num_chunks` chunks and one token within the context, is computed
    both ways in slot 0, over the K/V of other tokens. Logits are compared at the last chunk's end and at the token
    behind it, which attends to the K/V of all.

    Args:
        runner: idle; its slot 0 is written to.
        cases: of a decoder-only model, at least one.
        chunk: tokens of a chunk. A row has room for at least two, and a token.
        num_chunks: of a run, at most.
        context: tokens of a row at most.
    """
    given, name = _longest(cases)
    last = min(num_chunks, (context - 1) // chunk) * chunk
    token_ids = tuple(itertools.islice(itertools.cycle(given), last + 1))

    def feed(token_ids: Sequence[int], step: int) -> bytes:
        """Computes tokens in runs of `step`, a divisor of `last`, then one by itself; the last two's logits."""
        found = []
        for start in range(0, last, step):
            fed = tuple(token_ids[start : start + step])
            if len(fed) == 1:
                batch = ScheduledBatch(decode=(_alone(fed[0], start),), wants_all_logits=True)
            else:
                is_end = start + step == last
                batch = ScheduledBatch(prefills=(PrefillChunk(0, start, fed, wants_logits=is_end),))
            found = [runner.run(batch)[0].tobytes()]
        batch = ScheduledBatch(decode=(_alone(token_ids[last], last),), wants_all_logits=True)
        return b"".join((*found, runner.run(batch)[0].tobytes()))

    one_by_one = feed(token_ids, chunk)
    feed(token_ids[::-1], chunk)
    if feed(token_ids, last) != one_by_one:
        return f"golden case {name} has other bits in one run of {last} tokens than in chunks of {chunk}"
    return None


def _alone(token_id: int, position: int) -> DecodeRow:
    """A token computed by itself, in slot 0."""
    return DecodeRow(token_id, position, source_length=0, is_padding=False)


def _windows(cases: Sequence[GoldenCase], beginning: int, end: int, least: int) -> Iterator[_Window]:
    """Yields the first `beginning` tokens of the longest sequence and, if it has more, its last `end`.

    A sequence of fewer than `least` tokens is repeated to that length.
    """
    given, name = _longest(cases)
    token_ids = tuple(itertools.islice(itertools.cycle(given), max(len(given), least)))
    yield _Window(name, token_ids, 0, min(beginning, len(token_ids)))
    if len(token_ids) > beginning:
        yield _Window(name, token_ids, max(0, len(token_ids) - end), len(token_ids))


def _longest(cases: Sequence[GoldenCase]) -> tuple[list[int], str]:
    """The longest sequence, and its case's name."""
    found = max(((sequence, case.name) for case in cases for sequence in case.sequences), key=lambda one: len(one[0]))
    return found[0].tolist(), found[1]


def _ways(count: int, longest: int) -> Iterator[list[int]]:
    """Yields ways to cut `count` tokens: as one chunk, then so that every length from 2 to the longest occurs."""
    if count > longest:
        yield [count]
    wanted = deque(range(2, min(longest, count) + 1))
    while wanted:
        way: list[int] = []
        left = count
        while left:
            length = wanted.popleft() if wanted and wanted[0] <= left else min(longest, left)
            way.append(length)
            left -= length
        yield way
