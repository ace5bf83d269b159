"""Batches: every token where it belongs, every example its turn, and the same order for the same seed."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from model.data.batches import IGNORED, Batch, Pair, length_buckets, pack, pad, windows
from model.tokenizer import BOS_ID, EOS_ID, PAD_ID

STREAM = np.arange(1000)
PAIRS = [Pair([*range(10, 13 + index % 17), EOS_ID], [40 + index % 7] * (1 + index % 5)) for index in range(200)]


def assert_equal(first: Batch, second: Batch) -> None:
    for name in ("input_ids", "labels", "source_ids", "source_lengths"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_packing_frames_each_document() -> None:
    stream = pack([[7, 8], [], [9]])
    assert stream.tolist() == [BOS_ID, 7, 8, EOS_ID, BOS_ID, EOS_ID, BOS_ID, 9, EOS_ID]
    assert stream.dtype == np.int64


def test_a_windows_labels_are_the_tokens_that_follow() -> None:
    for batch in itertools.islice(windows(STREAM, 16, 64, seed=0), 20):
        assert batch.input_ids.shape == batch.labels.shape == (4, 16)
        np.testing.assert_array_equal(batch.labels, batch.input_ids + 1)
        assert batch.num_targets == 64


def test_a_pass_reads_no_token_twice_and_misses_few() -> None:
    rows_in_a_pass = 61  # At worst: (1000 - 1 - 15) // 16.
    batches = itertools.islice(windows(STREAM, 16, 16, seed=0), rows_in_a_pass)
    tokens = Counter(np.concatenate([batch.input_ids.ravel() for batch in batches]).tolist())
    assert max(tokens.values()) == 1
    assert len(tokens) == 16 * rows_in_a_pass


def test_passes_cut_windows_at_different_places() -> None:
    starts = [int(batch.input_ids[0, 0]) % 16 for batch in itertools.islice(windows(STREAM, 16, 16, seed=0), 62 * 8)]
    assert len(set(starts)) > 2


def test_a_stream_of_exactly_one_window_is_enough_and_less_is_refused() -> None:
    batch = next(windows(np.arange(17), 16, 16, seed=0))
    assert batch.input_ids.tolist() == [list(range(16))]
    with pytest.raises(ValueError, match="16 tokens are too few for windows of 16"):
        next(windows(np.arange(16), 16, 16, seed=0))


def test_a_batch_holds_a_window_even_where_it_exceeds_the_bound() -> None:
    assert next(windows(STREAM, 64, 10, seed=0)).input_ids.shape == (1, 64)


def test_padding_stands_on_the_right_and_predicts_nothing() -> None:
    batch = pad([Pair([5, 6, EOS_ID], [7]), Pair([5, EOS_ID], [8, 9, 8])])
    assert batch.source_ids is not None
    assert batch.source_lengths is not None
    assert batch.source_ids.tolist() == [[5, 6, EOS_ID, PAD_ID], [5, EOS_ID, PAD_ID, PAD_ID]]
    assert batch.source_lengths.tolist() == [3, 2]
    assert batch.input_ids.tolist() == [[BOS_ID, 7, PAD_ID, PAD_ID], [BOS_ID, 8, 9, 8]]
    assert batch.labels.tolist() == [[7, EOS_ID, IGNORED, IGNORED], [8, 9, 8, EOS_ID]]
    assert batch.num_targets == 6


def test_buckets_keep_the_bound_on_padded_tokens() -> None:
    for batch in itertools.islice(length_buckets(PAIRS, 120, seed=0), 100):
        assert batch.source_ids is not None
        assert batch.source_ids.size + batch.input_ids.size <= 120


def test_buckets_have_few_shapes() -> None:
    shapes = set()
    for batch in itertools.islice(length_buckets(PAIRS, 120, seed=0), 300):
        assert batch.source_ids is not None
        shapes.add((batch.source_ids.shape, batch.input_ids.shape))
    lengths = {(-(-len(pair.source) // 4), -(-(len(pair.target) + 1) // 4)) for pair in PAIRS}
    assert len(shapes) == len(lengths)


def test_buckets_give_every_pair_its_turn() -> None:
    wanted = {(tuple(pair.source), tuple(pair.target)) for pair in PAIRS}
    seen = set()
    for batch in itertools.islice(length_buckets(PAIRS, 120, seed=0), 200):
        assert batch.source_ids is not None
        assert batch.source_lengths is not None
        for source, length, labels in zip(batch.source_ids, batch.source_lengths, batch.labels, strict=True):
            target = labels[labels != IGNORED].tolist()
            assert target.pop() == EOS_ID
            seen.add((tuple(source[:length].tolist()), tuple(target)))
    assert seen == wanted


def test_a_pair_longer_than_the_bound_is_a_batch_by_itself() -> None:
    batch = next(length_buckets([Pair([5] * 50, [6] * 50)], 10, seed=0))
    assert batch.input_ids.shape == (1, 52)


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        next(length_buckets([], 100, seed=0))


def test_equal_seeds_give_equal_batches_and_others_do_not() -> None:
    for make in (lambda seed: windows(STREAM, 16, 64, seed), lambda seed: length_buckets(PAIRS, 120, seed)):
        for first, second in zip(itertools.islice(make(0), 60), make(0), strict=False):
            assert_equal(first, second)
        assert any(
            first.input_ids.shape != other.input_ids.shape or (first.input_ids != other.input_ids).any()
            for first, other in zip(itertools.islice(make(0), 10), make(1), strict=False)
        )
