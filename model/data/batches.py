"""From token sequences to padded or packed arrays, in an order that a seed fixes for good.

Two ways. A language model reads windows cut from one long stream. An encoder-decoder reads pairs, batched with others
of nearly the same length so that little is padding. Either iterator is endless, shuffles anew in every pass, and
depends on its arguments alone: skipping the first n batches puts a resumed run exactly where it stopped.

Knows the control tokens that our own tokenizers share, and nothing else of text or models.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from model.tokenizer import BOS_ID, EOS_ID, PAD_ID

Int64 = npt.NDArray[np.int64]
T = TypeVar("T")

IGNORED = -100
"""Stands in `labels` where nothing is predicted; what torch's cross-entropy leaves out unless told otherwise."""

_LENGTH_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input, padded on the right.

    `input_ids` `[B, T]` go into the decoder and `labels` `[B, T]` are the tokens that should follow each. `source_ids`
    `[B, S]` with their `source_lengths` `[B]` are there for an encoder-decoder only.
    """

    input_ids: Int64
    labels: Int64
    source_ids: Int64 | None = None
    source_lengths: Int64 | None = None

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted, padding not counted."""
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True, slots=True)
class Pair:
    """A source with its own control tokens, and a target without any."""

    source: Sequence[int]
    target: Sequence[int]


def pack(documents: Iterable[Sequence[int]]) -> Int64:
    """One stream of all documents, each between bos and eos, `[N] int64`."""
    return np.concatenate([np.asarray([BOS_ID, *document, EOS_ID], dtype=np.int64) for document in documents])


def windows(stream: Int64, row_tokens: int, batch_tokens: int, seed: int) -> Iterator[Batch]:
    """Endless batches of windows over a stream, each window once per pass.

    Every pass starts at another offset, so that windows are not cut at the same places twice.

    Args:
        stream: `[N] int64`.
        row_tokens: tokens in a window; it predicts as many, the last being the first one after it.
        batch_tokens: tokens in a batch, rounded down to whole windows but at least one.
        seed: fixes order and offsets.

    Raises:
        ValueError: when the stream is shorter than one window and its last label.
    """
    if len(stream) <= row_tokens:
        raise ValueError(f"{len(stream)} tokens are too few for windows of {row_tokens}")
    rows = max(1, batch_tokens // row_tokens)
    offsets = np.arange(row_tokens + 1)
    starts = _endless_starts(len(stream), row_tokens, seed)
    while True:
        chosen = np.fromiter(itertools.islice(starts, rows), dtype=np.int64, count=rows)
        tokens = stream[chosen[:, None] + offsets]
        yield Batch(tokens[:, :-1], tokens[:, 1:])


def length_buckets(pairs: Sequence[Pair], batch_tokens: int, seed: int) -> Iterator[Batch]:
    """Endless batches of pairs of like lengths; in every pass each bucket is drawn in proportion to its size.

    Lengths are rounded up to a multiple of four and all batches of a bucket have the same shape. That is worth the
    padding: matrix libraries prepare a kernel for each shape they meet, which for a batch this small costs more than
    using it.

    Args:
        pairs: at least one.
        batch_tokens: bound on the padded tokens of source and target together; a longer pair is a batch by itself.
        seed: fixes the order.

    Raises:
        ValueError: when there are no pairs.
    """
    if not pairs:
        raise ValueError("no pairs to batch")
    buckets = defaultdict(list)
    for pair in pairs:
        buckets[_padded_shape([pair])].append(pair)
    shapes = sorted(buckets)
    rows = [max(1, batch_tokens // sum(shape)) for shape in shapes]
    streams = [_endless(buckets[shape], (seed, index)) for index, shape in enumerate(shapes)]
    turns = [index for index, shape in enumerate(shapes) for _ in range(math.ceil(len(buckets[shape]) / rows[index]))]
    for index in _endless(turns, (seed, len(shapes))):
        yield pad(list(itertools.islice(streams[index], rows[index])))


def pad(pairs: Sequence[Pair]) -> Batch:
    """One batch of at least one pair, padded to the longest source and target, rounded up to a multiple of four."""
    source_length, target_length = _padded_shape(pairs)
    sources = np.full((len(pairs), source_length), PAD_ID, dtype=np.int64)
    inputs = np.full((len(pairs), target_length), PAD_ID, dtype=np.int64)
    labels = np.full((len(pairs), target_length), IGNORED, dtype=np.int64)
    for row, pair in enumerate(pairs):
        sources[row, : len(pair.source)] = pair.source
        inputs[row, : len(pair.target) + 1] = [BOS_ID, *pair.target]
        labels[row, : len(pair.target) + 1] = [*pair.target, EOS_ID]
    return Batch(inputs, labels, sources, np.array([len(pair.source) for pair in pairs]))


def _padded_shape(pairs: Sequence[Pair]) -> tuple[int, int]:
    """Padded lengths of source and target, the target with its bos or eos."""
    longest = max(len(pair.source) for pair in pairs), max(len(pair.target) + 1 for pair in pairs)
    source, target = (math.ceil(length / _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE for length in longest)
    return source, target


def _endless_starts(num_tokens: int, row_tokens: int, seed: int) -> Iterator[int]:
    last = num_tokens - row_tokens - 1
    for epoch in itertools.count():
        generator = np.random.default_rng((seed, epoch))
        first = int(generator.integers(min(row_tokens, last + 1)))
        yield from generator.permutation(np.arange(first, last + 1, row_tokens)).tolist()


def _endless(items: Sequence[T], key: tuple[int, ...]) -> Iterator[T]:
    """The items over and over, in another order each time."""
    for epoch in itertools.count():
        for index in np.random.default_rng((*key, epoch)).permutation(len(items)).tolist():
            yield items[index]
