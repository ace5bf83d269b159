"""Batches: every token where it belongs, every example its turn, and each batch a function of its index alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.data.batches import IGNORED, Batch, LengthBuckets, Pair, Windows, pack, pad
from model.spec.tokenizer import BOS_ID, EOS_ID, PAD_ID

STREAM = np.arange(1000)
PAIRS = [Pair([*range(10, 13 + index % 17), EOS_ID], [40 + index % 7] * (1 + index % 5)) for index in range(200)]

lengths = st.tuples(st.integers(1, 90), st.integers(0, 90))
many_pairs = st.lists(lengths, min_size=1, max_size=120).map(
    lambda shapes: [
        Pair([10 + index, *[5] * (source - 1)], [6] * target) for index, (source, target) in enumerate(shapes)
    ]
)


def assert_equal(first: Batch, second: Batch) -> None:
    for name in ("input_ids", "labels", "source_ids", "source_lengths"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def one_pass(batches: Windows | LengthBuckets, number: int = 0) -> list[Batch]:
    start = number * batches.batches_per_pass
    return [batches.batch(index) for index in range(start, start + batches.batches_per_pass)]


def pairs_of(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    assert batch.source_ids is not None
    assert batch.source_lengths is not None
    found = []
    for source, length, labels in zip(batch.source_ids, batch.source_lengths, batch.labels, strict=True):
        target = labels[labels != IGNORED].tolist()
        assert target.pop() == EOS_ID
        assert (source[length:] == PAD_ID).all()
        found.append((tuple(source[:length].tolist()), tuple(target)))
    return found


def test_packing_frames_each_document() -> None:
    stream = pack([[7, 8], [], np.array([9])])
    assert stream.tolist() == [BOS_ID, 7, 8, EOS_ID, BOS_ID, EOS_ID, BOS_ID, 9, EOS_ID]
    assert stream.dtype == np.int64


def test_a_windows_labels_are_the_tokens_that_follow() -> None:
    windows = Windows(STREAM, 16, 64, seed=0)
    for index in range(20):
        batch = windows.batch(index)
        assert batch.input_ids.shape == batch.labels.shape == (4, 16)
        np.testing.assert_array_equal(batch.labels, batch.input_ids + 1)
        assert batch.num_targets == 64


@given(st.integers(2, 400), st.integers(1, 60), st.integers(1, 300), st.integers(0, 2**32), st.integers(0, 3))
def test_a_pass_reads_no_token_twice_and_misses_less_than_a_batch_and_two_windows(
    num_tokens: int, row_tokens: int, batch_tokens: int, seed: int, number: int
) -> None:
    row_tokens = min(row_tokens, num_tokens - 1)
    windows = Windows(np.arange(num_tokens), row_tokens, batch_tokens, seed)
    batches = one_pass(windows, number)
    shape = batches[0].input_ids.shape
    assert all(batch.input_ids.shape == shape for batch in batches)
    assert shape[0] == 1 or shape[0] * shape[1] <= batch_tokens
    tokens = Counter(np.concatenate([batch.input_ids.ravel() for batch in batches]).tolist())
    assert max(tokens.values()) == 1
    assert len(tokens) > num_tokens - shape[0] * row_tokens - 2 * row_tokens


def test_every_token_is_read_in_some_pass() -> None:
    windows = Windows(STREAM, 16, 64, seed=0)
    seen = {token for number in range(40) for batch in one_pass(windows, number) for token in batch.labels.ravel()}
    assert set(range(20, 1000)) <= seen


def test_passes_cut_windows_at_different_places() -> None:
    windows = Windows(STREAM, 16, 16, seed=0)
    assert len({int(one_pass(windows, number)[0].input_ids[0, 0]) % 16 for number in range(8)}) > 2


def test_a_stream_of_exactly_one_window_is_enough_and_less_is_refused() -> None:
    assert Windows(np.arange(17), 16, 16, seed=0).batch(3).input_ids.tolist() == [list(range(16))]
    with pytest.raises(ValueError, match="16 tokens are too few for windows of 16"):
        Windows(np.arange(16), 16, 16, seed=0)


def test_padding_stands_on_the_right_and_predicts_nothing() -> None:
    batch = pad([Pair([5, 6, EOS_ID], [7]), Pair([5, EOS_ID], [8, 9, 8])])
    assert batch.source_ids is not None
    assert batch.source_lengths is not None
    assert batch.source_ids.tolist() == [[5, 6, EOS_ID, PAD_ID], [5, EOS_ID, PAD_ID, PAD_ID]]
    assert batch.source_lengths.tolist() == [3, 2]
    assert batch.input_ids.tolist() == [[BOS_ID, 7, PAD_ID, PAD_ID], [BOS_ID, 8, 9, 8]]
    assert batch.labels.tolist() == [[7, EOS_ID, IGNORED, IGNORED], [8, 9, 8, EOS_ID]]
    assert batch.num_targets == 6


@given(many_pairs, st.integers(1, 2000), st.integers(0, 2**32), st.integers(0, 3))
def test_every_pair_comes_in_every_pass_within_the_bound(
    pairs: Sequence[Pair], batch_tokens: int, seed: int, number: int
) -> None:
    batches = one_pass(LengthBuckets(pairs, batch_tokens, seed), number)
    counts = Counter(pair for batch in batches for pair in pairs_of(batch))
    assert counts.keys() == {(tuple(pair.source), tuple(pair.target)) for pair in pairs}
    for batch in batches:
        assert batch.source_ids is not None
        rows = len(batch.source_ids)
        assert rows == 1 or batch.source_ids.size + batch.input_ids.size <= batch_tokens


@given(many_pairs, st.integers(1, 2000))
def test_batches_of_a_bucket_have_one_shape_and_buckets_are_few(pairs: Sequence[Pair], batch_tokens: int) -> None:
    batches = one_pass(LengthBuckets(pairs, batch_tokens, seed=0))
    shapes: dict[tuple[int, int], int] = {}
    for batch in batches:
        assert batch.source_ids is not None
        widths = batch.source_ids.shape[1], batch.input_ids.shape[1]
        assert widths[0] % 4 == widths[1] % 4 == 0
        assert shapes.setdefault(widths, len(batch.labels)) == len(batch.labels)
    # All but the last bucket, where what is left over ends up, hold nearly four batches.
    assert len(shapes) <= len(batches) / 4 + 1


def test_pairs_come_twice_in_a_pass_only_to_fill_a_batch() -> None:
    pairs = [Pair([10 + index, *[5] * (index % 40)], [6] * (index % 35)) for index in range(4000)]
    batches = one_pass(LengthBuckets(pairs, 600, seed=0))
    num_drawn = sum(len(batch.labels) for batch in batches)
    assert len(pairs) <= num_drawn < 1.1 * len(pairs)


def test_padding_is_a_small_part_of_a_batch() -> None:
    generator = np.random.default_rng(0)
    sources = np.exp(generator.normal(2.9, 0.6, 8000)).astype(int) + 1
    targets = (sources * np.exp(generator.normal(0.0, 0.2, 8000))).astype(int)
    pairs = [
        Pair([5] * source, [6] * target) for source, target in zip(sources.tolist(), targets.tolist(), strict=True)
    ]
    used = total = 0
    for batch in one_pass(LengthBuckets(pairs, 1000, seed=0)):
        assert batch.source_ids is not None
        assert batch.source_lengths is not None
        used += int(batch.source_lengths.sum()) + batch.num_targets
        total += batch.source_ids.size + batch.labels.size
    assert used / total > 0.8


def test_padding_keeps_to_the_models_limits() -> None:
    batch = LengthBuckets([Pair([5] * 9, [6] * 9)] * 3, 100, seed=0, limits=(9, 10)).batch(0)
    assert batch.source_ids is not None
    assert (batch.source_ids.shape[1], batch.input_ids.shape[1]) == (9, 10)


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        LengthBuckets([], 100, seed=0)


@pytest.mark.parametrize(
    "make",
    [lambda seed: Windows(STREAM, 16, 64, seed), lambda seed: LengthBuckets(PAIRS, 120, seed)],
    ids=["windows", "buckets"],
)
def test_equal_seeds_give_equal_batches_and_others_do_not(make) -> None:
    for index in range(60):
        assert_equal(make(0).batch(index), make(0).batch(index))
    assert any(
        make(0).batch(index).input_ids.shape != make(1).batch(index).input_ids.shape
        or (make(0).batch(index).input_ids != make(1).batch(index).input_ids).any()
        for index in range(10)
    )


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.booleans())
def test_a_batch_does_not_depend_on_what_was_asked_for_before(indices: list[int], packed: bool) -> None:
    def make() -> Windows | LengthBuckets:
        return Windows(STREAM, 16, 64, seed=3) if packed else LengthBuckets(PAIRS, 120, seed=3)

    used = make()
    for index in indices:
        assert_equal(used.batch(index), make().batch(index))


def test_every_pass_has_its_own_order() -> None:
    buckets = LengthBuckets(PAIRS, 120, seed=0)
    first, second = ([pairs_of(batch) for batch in one_pass(buckets, number)] for number in (0, 1))
    assert first != second
