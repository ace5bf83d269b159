"""Batches of token sequences, padded or packed, in an order that a seed fixes.

A language model reads windows cut from one long stream. An encoder-decoder reads pairs, batched with others of similar
length to save padding. Both sequences of batches are endless and shuffled anew in every pass, and no batch spans two
passes. Batch i is a function of the arguments and i alone: a resumed run continues from a number, and processes share
out the numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model.spec.tokenizer import BOS_ID, EOS_ID, PAD_ID

Int64 = npt.NDArray[np.int64]
IGNORED = -100
"""Label of positions without a prediction; torch's cross-entropy ignores it by default."""

_LENGTH_MULTIPLE = 4
_MIN_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input, padded on the right.

    `input_ids` `[B, T]` go into the decoder; `labels` `[B, T]` are the tokens that follow each. An encoder-decoder also
    has `source_ids` `[B, S]` and `source_lengths` `[B]`.
    """

    input_ids: Int64
    labels: Int64
    source_ids: Int64 | None = None
    source_lengths: Int64 | None = None

    @property
    def num_targets(self) -> int:
        """Predicted tokens, without padding."""
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True, slots=True)
class Pair:
    """A source with its own control tokens, and a target without any."""

    source: Sequence[int]
    target: Sequence[int]


def pack(documents: Iterable[Sequence[int] | Int64]) -> Int64:
    """One stream of all documents, each between bos and eos, `[N] int64`."""
    parts: list[Int64] = []
    for document in documents:
        parts += (np.array([BOS_ID]), np.asarray(document, dtype=np.int64), np.array([EOS_ID]))
    return np.concatenate(parts)


class Windows:
    """Batches of windows over a stream; no token occurs twice in a pass.

    Every pass starts at another offset, so that windows are cut at different places, and has the same number of
    batches. Windows that do not fill a batch are left out of the pass.

    Args:
        stream: `[N] int64`.
        row_tokens: tokens in a window; it predicts as many, the last being the first token after it.
        batch_tokens: tokens in a batch, rounded down to whole windows; at least one window, at most all.
        seed: of order and offsets.

    Raises:
        ValueError: when the stream is shorter than one window and its last label.
    """

    def __init__(self, stream: Int64, row_tokens: int, batch_tokens: int, seed: int) -> None:
        if len(stream) <= row_tokens:
            raise ValueError(f"{len(stream)} tokens are too few for windows of {row_tokens}")
        self._stream = stream
        self._row_tokens = row_tokens
        self._seed = seed
        self._num_windows = max(1, (len(stream) - row_tokens) // row_tokens)
        self._rows = min(self._num_windows, max(1, batch_tokens // row_tokens))
        self._plan: tuple[int, Int64] | None = None

    @property
    def batches_per_pass(self) -> int:
        """Batches in one pass over the stream."""
        return self._num_windows // self._rows

    def batch(self, index: int) -> Batch:
        """The batch of an index from 0 on, `[rows, row_tokens]`; independent of earlier calls."""
        number, position = divmod(index, self.batches_per_pass)
        starts = self._starts(number)[position * self._rows : (position + 1) * self._rows]
        tokens = self._stream[starts[:, None] + np.arange(self._row_tokens + 1)]
        return Batch(tokens[:, :-1], tokens[:, 1:])

    def _starts(self, number: int) -> Int64:
        """Starts of a pass's windows in its order; cached for the next batch."""
        if self._plan is None or self._plan[0] != number:
            generator = np.random.default_rng((self._seed, number))
            slack = len(self._stream) - 1 - self._num_windows * self._row_tokens
            first = int(generator.integers(slack + 1))
            starts = first + self._row_tokens * generator.permutation(self._num_windows)
            self._plan = number, starts
        return self._plan[1]


class LengthBuckets:
    """Batches of pairs of similar length; every pair occurs at least once in a pass.

    All batches of a bucket have the same shape, because matrix libraries prepare a kernel for each shape they meet. The
    last batch of a bucket in a pass is filled with pairs from the start of the pass. To keep such repeats few, a bucket
    has about four batches or more if there are enough pairs, and rare lengths share a bucket with shorter ones.

    Args:
        pairs: at least one.
        batch_tokens: bound on the padded tokens of source and target together; a longer pair is a batch by itself.
        seed: of the order.
        limits: the model's maximum tokens of source and target, at least those of the longest pair; padding stays
            within them. None is no limit.

    Raises:
        ValueError: when there are no pairs.
    """

    def __init__(
        self, pairs: Sequence[Pair], batch_tokens: int, seed: int, limits: tuple[int, int] | None = None
    ) -> None:
        if not pairs:
            raise ValueError("no pairs to batch")
        self._pairs = pairs
        self._seed = seed
        self._buckets = _make_buckets(pairs, batch_tokens, limits)
        self._turns = np.array(
            [
                (number, turn)
                for number, bucket in enumerate(self._buckets)
                for turn in range(math.ceil(len(bucket.members) / bucket.rows))
            ],
            dtype=np.int64,
        )
        self._plan: tuple[int, Int64, list[Int64]] | None = None

    @property
    def batches_per_pass(self) -> int:
        """Batches in one pass over the pairs."""
        return len(self._turns)

    def batch(self, index: int) -> Batch:
        """The batch of an index from 0 on; independent of earlier calls."""
        number, position = divmod(index, self.batches_per_pass)
        turns, orders = self._order(number)
        chosen, turn = turns[position].tolist()
        bucket = self._buckets[chosen]
        members = np.take(orders[chosen], np.arange(turn * bucket.rows, (turn + 1) * bucket.rows), mode="wrap")
        return pad([self._pairs[member] for member in members.tolist()], bucket.shape)

    def _order(self, number: int) -> tuple[Int64, list[Int64]]:
        """A pass's order of batches and of each bucket's members; cached for the next batch."""
        if self._plan is None or self._plan[0] != number:
            generator = np.random.default_rng((self._seed, number))
            turns = generator.permutation(self._turns)
            self._plan = number, turns, [generator.permutation(bucket.members) for bucket in self._buckets]
        return self._plan[1:]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Pairs by index, their padded source and target length, and the rows of a batch."""

    members: Int64
    shape: tuple[int, int]
    rows: int


def _make_buckets(pairs: Sequence[Pair], batch_tokens: int, limits: tuple[int, int] | None) -> list[_Bucket]:
    """Groups pairs by padded shape; neighboring shapes share a bucket until they fill `_MIN_BATCHES` batches.

    Shapes are visited by source length, then by target length. The remainder of a source length, its longest targets,
    joins the longest targets of the next source length, where it costs the least padding.
    """
    cells: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, pair in enumerate(pairs):
        source, target = padded_shape([pair])
        cells[_grid(source)][_grid(target)].append(index)

    def bucket_of(members: list[int]) -> _Bucket:
        source, target = padded_shape([pairs[member] for member in members])
        if limits is not None:
            source, target = min(source, limits[0]), min(target, limits[1])
        return _Bucket(np.array(members, dtype=np.int64), (source, target), max(1, batch_tokens // (source + target)))

    buckets: list[_Bucket] = []
    waiting: list[int] = []
    for _, columns in sorted(cells.items()):
        gathered: list[int] = []
        for target in sorted(columns):
            if target == max(columns):
                gathered += waiting
            gathered += columns[target]
            bucket = bucket_of(gathered)
            if len(gathered) >= _MIN_BATCHES * bucket.rows:
                buckets.append(bucket)
                gathered = []
        waiting = gathered
    if waiting:
        buckets.append(bucket_of(waiting))
    return buckets


def _grid(length: int) -> int:
    """A length rounded up by an eighth at most: to a multiple of 4 up to 64, of 8 up to 128, and so on."""
    step = max(_LENGTH_MULTIPLE, 1 << max(0, (length - 1).bit_length() - 4))
    return math.ceil(length / step) * step


def pad(pairs: Sequence[Pair], shape: tuple[int, int] | None = None) -> Batch:
    """One batch of at least one pair, padded to `shape`, by default to `padded_shape`.

    `shape` is in tokens of source and target, the target with its bos or eos; no pair may exceed it.
    """
    source_length, target_length = shape or padded_shape(pairs)
    sources = np.full((len(pairs), source_length), PAD_ID, dtype=np.int64)
    inputs = np.full((len(pairs), target_length), PAD_ID, dtype=np.int64)
    labels = np.full((len(pairs), target_length), IGNORED, dtype=np.int64)
    for row, pair in enumerate(pairs):
        sources[row, : len(pair.source)] = pair.source
        inputs[row, : len(pair.target) + 1] = [BOS_ID, *pair.target]
        labels[row, : len(pair.target) + 1] = [*pair.target, EOS_ID]
    return Batch(inputs, labels, sources, np.array([len(pair.source) for pair in pairs]))


def padded_shape(pairs: Sequence[Pair]) -> tuple[int, int]:
    """The longest source and target (with its bos or eos), rounded up to a multiple of four."""
    longest = max(len(pair.source) for pair in pairs), max(len(pair.target) + 1 for pair in pairs)
    source, target = (math.ceil(length / _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE for length in longest)
    return source, target
