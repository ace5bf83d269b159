"""`model.spec.golden_attention`: cases survive the disk, and only weights that are attention, and the golden, pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.spec import golden_attention
from model.spec.artifact import CPU_PRECISIONS, Precision
from model.spec.config import ModelConfig
from model.spec.golden_attention import ATTENTION_TOLERANCES, AttentionCase, AttentionTolerance, compare

Weights = Mapping[str, np.ndarray]
FP32 = ATTENTION_TOLERANCES[Precision.FP32]
LOOSE = AttentionTolerance(absolute=1.0, relative=1.0)
SIZES = {"vocab_size": 20, "context": 16, "d_model": 8, "num_layers": 2, "num_heads": 2, "d_ff": 16}
CONFIG = ModelConfig(architecture="encoder-decoder", num_encoder_layers=1, positions="sinusoidal", **SIZES)
DECODER_ONLY = ModelConfig(architecture="decoder-only", **SIZES)


def matrix(queries: int, keys: int, seed: int, *, causal: bool = False) -> np.ndarray:
    scores = np.random.default_rng(seed).standard_normal((2, queries, keys))
    weights = np.exp(scores) * (np.tri(queries, keys) if causal else 1.0)
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


CASE = AttentionCase(
    "case",
    np.array([1, 5, 6, 7], np.int64),
    np.array([8, 9, 2], np.int64),
    {
        "encoder_attention_0": matrix(3, 3, 0),
        "decoder_attention_0": matrix(4, 4, 1, causal=True),
        "decoder_attention_1": matrix(4, 4, 2, causal=True),
        "cross_attention_0": matrix(4, 3, 3),
        "cross_attention_1": matrix(4, 3, 4),
    },
)


def changed(name: str, change: Callable[[np.ndarray], object]) -> Weights:
    copies = {each: weights.copy() for each, weights in CASE.weights.items()}
    change(copies[name])
    return copies


def shift(weights: np.ndarray) -> None:
    """A tenth of one query's attention to another key."""
    weights[1, 2, 0] += 0.1
    weights[1, 2, 1] -= 0.1


def test_cases_survive_the_disk(tmp_path: Path) -> None:
    alone = replace(
        CASE, source=np.empty(0, np.int64), weights={k: v for k, v in CASE.weights.items() if "decoder" in k}
    )
    for config, case in ((CONFIG, CASE), (DECODER_ONLY, alone)):
        golden_attention.save(tmp_path / "attention.npz", [case, replace(case, name="again")])
        first, second = golden_attention.load(tmp_path / "attention.npz", config)
        assert (first.name, second.name) == ("case", "again")
        for name in ("sequence", "source"):
            np.testing.assert_array_equal(getattr(first, name), getattr(case, name))
        assert first.weights.keys() == case.weights.keys()
        for name, weights in case.weights.items():
            np.testing.assert_array_equal(first.weights[name], weights)
    assert set(CASE.inputs) == {"input_ids", "source_ids"}
    assert alone.inputs.keys() == {"input_ids"}
    assert alone.inputs["input_ids"].shape == (1, 4)


def test_equal_weights_pass() -> None:
    result = compare(CASE, CASE.weights, FP32)
    assert result.passed
    assert (result.max_abs_error, result.relative_distance, result.looks_ahead) == (0.0, 0.0, False)
    assert result.max_row_sum_error < 1e-6


def test_attention_elsewhere_counts_once_by_itself_and_once_among_all_rows() -> None:
    result = compare(CASE, changed("cross_attention_1", shift), LOOSE)
    assert result.passed
    assert result.max_abs_error == pytest.approx(0.1, abs=1e-6)
    num_rows = 2 * (3 + 4 + 4 + 4 + 4)
    of_all = 0.1 / num_rows / CASE.spread
    assert result.relative_distance == pytest.approx(of_all, rel=1e-4)
    for tolerance in (AttentionTolerance(0.09, 1.0), AttentionTolerance(1.0, 0.9 * of_all)):
        assert not compare(CASE, changed("cross_attention_1", shift), tolerance).passed
    assert compare(CASE, changed("cross_attention_1", shift), AttentionTolerance(0.11, 1.1 * of_all)).passed


def test_even_rows_are_as_far_off_as_there_is_to_tell() -> None:
    even = {
        name: weights * 0 + (np.tri(4) / np.arange(1, 5)[:, None] if "decoder" in name else 1 / 3)
        for name, weights in CASE.weights.items()
    }
    assert compare(CASE, even, LOOSE).relative_distance == pytest.approx(1.0)
    assert not any(compare(CASE, even, tolerance).passed for tolerance in ATTENTION_TOLERANCES.values())
    rows = [row for weights in CASE.weights.values() for head in weights for row in head]
    evens = [row for name in CASE.weights for head in even[name] for row in head]
    distances = [0.5 * abs(row - other).sum() for row, other in zip(rows, evens, strict=True)]
    assert CASE.spread == pytest.approx(np.mean(distances), rel=1e-5)


def test_one_token_has_but_itself_to_look_at() -> None:
    alone = {f"decoder_attention_{layer}": np.ones((2, 1, 1), np.float32) for layer in range(2)}
    case = AttentionCase("one", np.array([5]), np.empty(0, np.int64), alone)
    assert compare(case, alone, FP32).passed
    assert not compare(case, {name: weights * 0.99 for name, weights in alone.items()}, LOOSE).passed


def test_rows_that_do_not_sum_to_one_fail_whatever_the_tolerance() -> None:
    def scale(weights: np.ndarray) -> None:
        weights[0, 1] *= 1.0 + 3e-5

    result = compare(CASE, changed("encoder_attention_0", scale), LOOSE)
    assert result.max_row_sum_error == pytest.approx(3e-5, rel=0.1)
    assert not result.passed


def test_a_query_that_looks_ahead_by_anything_fails_whatever_the_tolerance() -> None:
    def peek(weights: np.ndarray) -> None:
        weights[0, 1, 2] = 1e-12

    result = compare(CASE, changed("decoder_attention_1", peek), LOOSE)
    assert result.looks_ahead
    assert not result.passed
    # Who reads a source looks where it likes.
    assert not compare(CASE, changed("cross_attention_1", peek), LOOSE).looks_ahead


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_fails(value: float) -> None:
    def spoil(weights: np.ndarray) -> None:
        weights[0, 0, 0] = value

    assert not compare(CASE, changed("cross_attention_0", spoil), LOOSE).passed


def test_a_missing_matrix_and_one_of_another_shape_fail() -> None:
    missing = {name: weights for name, weights in CASE.weights.items() if name != "cross_attention_0"}
    assert not compare(CASE, missing, LOOSE).passed
    assert not compare(CASE, {**CASE.weights, "cross_attention_0": matrix(4, 4, 3)}, LOOSE).passed


def test_every_precision_that_is_served_has_a_tolerance_and_rounding_has_more_room() -> None:
    assert ATTENTION_TOLERANCES.keys() == set(CPU_PRECISIONS)
    allowed = [ATTENTION_TOLERANCES[each].relative for each in CPU_PRECISIONS]
    assert 0 < allowed[0] < allowed[1] < allowed[2] < allowed[3] < 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sequence": np.array([1, 20], np.int64)}, "sequence has ids outside"),
        ({"sequence": np.empty(0, np.int64)}, "must have 1 to 16"),
        ({"source": np.full(17, 3)}, "must have 1 to 16"),
        ({"source": np.empty(0, np.int64)}, "source has 0 tokens"),
        ({"weights": {}}, "is not a set of golden attention"),
    ],
)
def test_cases_that_the_model_cannot_be_asked_are_refused(tmp_path: Path, change: dict, words: str) -> None:
    golden_attention.save(tmp_path / "attention.npz", [replace(CASE, **change)])
    with pytest.raises(ValueError, match=words):
        golden_attention.load(tmp_path / "attention.npz", CONFIG)


def test_a_file_without_cases_or_without_sense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "attention.npz"
    golden_attention.save(path, [])
    with pytest.raises(ValueError, match="holds no case"):
        golden_attention.load(path, CONFIG)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is not a set of golden attention"):
        golden_attention.load(path, CONFIG)
    golden_attention.save(path, [CASE])
    with pytest.raises(ValueError, match="has a source, the model is decoder-only"):
        golden_attention.load(path, DECODER_ONLY)
