"""`model.spec.golden`: cases survive the disk, comparison cannot be fooled, schedules are ones a runner may meet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.spec import golden
from model.spec.artifact import CPU_PRECISIONS, CUDA_PRECISIONS, KVPrecision, Precision
from model.spec.config import ModelConfig
from model.spec.golden import KV_TOLERANCES, TOLERANCES, Feed, GoldenCase, Tolerance, tolerance_of

RNG = np.random.default_rng(0)
FP32 = TOLERANCES[Precision.FP32]


def make_case(steps: tuple[golden.Step, ...], lengths: tuple[int, ...], *, with_sources: bool = False) -> GoldenCase:
    rows = tuple(np.arange(length, dtype=np.int64) + 3 for length in lengths)
    num_feeds = sum(len(step) for step in steps)
    logits = RNG.standard_normal((num_feeds, 7)).astype(np.float32)
    return GoldenCase("case", rows, tuple(row[::-1].copy() for row in rows) if with_sources else (), steps, logits)


PREFILL_THEN_DECODE = make_case(
    ((Feed(0, 0, 4),), (Feed(1, 0, 2),), (Feed(0, 4, 1), Feed(1, 2, 1)), (Feed(1, 3, 2),)), (5, 5)
)


def assert_same(left: GoldenCase, right: GoldenCase) -> None:
    assert (left.name, left.steps) == (right.name, right.steps)
    for rows, others in ((left.sequences, right.sequences), (left.sources, right.sources)):
        assert [row.tolist() for row in rows] == [row.tolist() for row in others]
    assert left.logits.dtype == right.logits.dtype == np.float32
    np.testing.assert_array_equal(left.logits, right.logits)
    assert (left.arithmetic, left.compared) == (right.arithmetic, right.compared)
    np.testing.assert_array_equal(left.exported, right.exported)


def test_cases_survive_the_disk(tmp_path: Path) -> None:
    cases = (
        PREFILL_THEN_DECODE,
        make_case(golden.staggered((3, 1, 2)), (3, 1, 2), with_sources=True),
        replace(PREFILL_THEN_DECODE, logits=PREFILL_THEN_DECODE.logits[[1, 4]], compared=(1, 4)),
        replace(PREFILL_THEN_DECODE, exported=PREFILL_THEN_DECODE.logits + np.float32(0.5), arithmetic="kernels here"),
    )
    golden.save(tmp_path / "golden.npz", cases)
    loaded = golden.load(tmp_path / "golden.npz")
    assert len(loaded) == len(cases)
    for left, right in zip(loaded, cases, strict=True):
        assert_same(left, right)


def test_saving_the_same_cases_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        golden.save(tmp_path / name, [PREFILL_THEN_DECODE])
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_one_logit_over_tolerance_fails() -> None:
    logits = PREFILL_THEN_DECODE.logits.copy()
    logits[1, 2] += 0.5
    result = golden.compare(PREFILL_THEN_DECODE, logits, Tolerance(absolute=0.49))
    assert not result.passed
    assert result.max_abs_error == pytest.approx(0.5, abs=1e-6)
    assert result.max_relative_error == pytest.approx(0.5 / PREFILL_THEN_DECODE.logits.std(), rel=1e-5)
    assert golden.compare(PREFILL_THEN_DECODE, logits, Tolerance(absolute=0.51)).passed


def test_the_same_arithmetic_must_answer_as_at_export_and_another_nearly_so() -> None:
    exported = PREFILL_THEN_DECODE.logits + np.float32(0.2)
    case = replace(PREFILL_THEN_DECODE, exported=exported, arithmetic="here")
    spread, loose = float(case.logits.std()), Tolerance(absolute=1.0)
    moved = exported.copy()
    moved[2, 3] += 1.5 * golden.MAX_DRIFT * spread
    far = exported.copy()
    far[2, 3] += 1.1 * golden.MAX_OTHER_DRIFT * spread
    for logits, arithmetic, passed, drift in [
        (exported, "here", True, 0.0),
        (moved, "here", False, 1.5 * golden.MAX_DRIFT),
        (moved, "elsewhere", True, 1.5 * golden.MAX_DRIFT),
        (moved, "", True, 1.5 * golden.MAX_DRIFT),
        (far, "elsewhere", False, 1.1 * golden.MAX_OTHER_DRIFT),
    ]:
        result = golden.compare(case, logits, loose, arithmetic)
        assert (result.passed, result.drift) == (passed, pytest.approx(drift, rel=0.01))
        assert result.max_drift == (golden.MAX_DRIFT if arithmetic == "here" else golden.MAX_OTHER_DRIFT)
        assert golden.compare(replace(case, exported=None), logits, loose, arithmetic).drift is None
    assert golden.compare(replace(case, arithmetic=""), moved, loose, "").passed
    assert not golden.compare(replace(case, exported=np.full_like(exported, np.nan)), exported, loose, "here").passed
    assert not golden.compare(case, exported, Tolerance(absolute=0.1), "here").passed, "PyTorch's answers count, too"


@pytest.mark.parametrize("compared", [(), (0, 0), (1, 0), (-1, 2), (2, 5)])
def test_compared_feeds_that_are_not_numbers_of_feeds_are_refused(compared: tuple[int, ...], tmp_path: Path) -> None:
    case = replace(PREFILL_THEN_DECODE, logits=PREFILL_THEN_DECODE.logits[: len(compared)], compared=compared)
    problem = "compared feeds must be numbers below 5" if compared else "0 feeds, logits"
    with pytest.raises(ValueError, match=problem):
        golden.save(tmp_path / "golden.npz", [case])


def test_exported_logits_of_another_shape_are_refused(tmp_path: Path) -> None:
    case = replace(PREFILL_THEN_DECODE, exported=PREFILL_THEN_DECODE.logits[:, 1:], arithmetic="here")
    with pytest.raises(ValueError, match="exported logits of shape"):
        golden.save(tmp_path / "golden.npz", [case])
    right = replace(case, exported=PREFILL_THEN_DECODE.logits)
    golden.save(tmp_path / "golden.npz", [right])
    with np.load(tmp_path / "golden.npz") as file:
        arrays = dict(file)
    arrays["0/exported"] = arrays["0/exported"][:, 1:]
    np.savez(tmp_path / "golden.npz", **arrays)
    with pytest.raises(ValueError, match="exported logits of another shape"):
        golden.load(tmp_path / "golden.npz")


def test_a_relative_tolerance_is_of_the_spread_of_the_golden_logits() -> None:
    for scale in (1.0, 30.0):
        case = replace(PREFILL_THEN_DECODE, logits=PREFILL_THEN_DECODE.logits * np.float32(scale))
        off = case.logits.copy()
        off[2, 3] += 0.3 * case.logits.std()
        assert golden.compare(case, off, Tolerance(relative=0.31)).passed
        assert not golden.compare(case, off, Tolerance(relative=0.29)).passed
        assert golden.compare(case, off, Tolerance(absolute=0.1, relative=0.3)).tolerance == pytest.approx(
            0.1 + 0.3 * case.logits.std()
        )


def test_every_precision_that_is_served_has_a_tolerance_and_no_other_has() -> None:
    assert TOLERANCES.keys() == {*CPU_PRECISIONS, *CUDA_PRECISIONS}
    assert all(tolerance.absolute + tolerance.relative > 0 for tolerance in TOLERANCES.values())


def test_tolerance_of_kv_comes_on_top_of_the_precisions_and_float32_adds_nothing() -> None:
    assert KV_TOLERANCES.keys() == set(KVPrecision)
    for precision, own in TOLERANCES.items():
        assert tolerance_of(precision, KVPrecision.FP32) == own
        both = tolerance_of(precision, KVPrecision.INT8)
        assert both.absolute == own.absolute + KV_TOLERANCES[KVPrecision.INT8].absolute
        assert both.relative == own.relative + KV_TOLERANCES[KVPrecision.INT8].relative > own.relative


def test_one_loud_token_does_not_loosen_its_neighbours() -> None:
    logits = PREFILL_THEN_DECODE.logits.copy()
    logits[:, 0] *= 200
    case = replace(PREFILL_THEN_DECODE, logits=logits)
    off = logits.copy()
    off[2, 3] += 2e-4
    assert not golden.compare(case, off, FP32).passed
    assert Tolerance(absolute=1e-4) == FP32


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([1e-5, 1e-4, 1e-3]))
def test_a_case_that_passes_changes_the_arg_max_at_ties_alone(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((5, 7)) * spread).astype(np.float32)
    case = replace(PREFILL_THEN_DECODE, logits=logits)
    off = logits + rng.uniform(-1.2e-4, 1.2e-4, logits.shape).astype(np.float32)
    result = golden.compare(case, off, FP32)
    rows = np.arange(len(logits))
    lead = logits.max(-1) - logits[rows, off.argmax(-1)]
    assert not result.passed or lead.max() <= 2 * FP32.absolute
    assert result.agreement == pytest.approx((lead == 0).mean())


def test_logits_that_are_no_numbers_or_of_another_shape_fail_at_any_tolerance() -> None:
    case = PREFILL_THEN_DECODE
    spoiled = [case.logits.copy() for _ in range(3)]
    for logits, value in zip(spoiled, (np.nan, np.inf, -np.inf), strict=True):
        logits[0, 0] = value
    for logits in (*spoiled, case.logits[:-1], case.logits[:, :-1]):
        result = golden.compare(case, logits, Tolerance(absolute=np.inf))
        assert (result.passed, result.agreement) == (False, 0.0)
    assert not golden.compare(replace(case, logits=spoiled[0]), case.logits, Tolerance(absolute=1e9)).passed


def test_logits_that_are_all_the_same_compare_without_dividing_by_zero() -> None:
    case = replace(PREFILL_THEN_DECODE, logits=np.zeros_like(PREFILL_THEN_DECODE.logits))
    equal = golden.compare(case, case.logits, Tolerance())
    assert (equal.passed, equal.max_abs_error, equal.agreement) == (True, 0.0, 1.0)
    assert golden.compare(case, case.logits + 0.25, Tolerance(absolute=1.0)).max_relative_error == 0.25


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_staggered_schedule_is_valid_and_feeds_every_token_once(lengths: list[int]) -> None:
    steps = golden.staggered(lengths)
    golden.check_steps(make_case(steps, tuple(lengths)))
    fed = [(feed.row, feed.start) for step in steps for feed in step]
    assert sorted(fed) == [(row, start) for row, length in enumerate(lengths) for start in range(length)]


def test_a_staggered_schedule_joins_one_row_a_step_and_lets_each_leave_when_done() -> None:
    rows = [[feed.row for feed in step] for step in golden.staggered((1, 3, 2))]
    assert rows == [[0], [1], [1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (((Feed(0, 0, 2), Feed(1, 0, 1)),), "batches rows of several tokens"),
        (((Feed(0, 1, 1),),), "row 0 out of order"),
        (((Feed(0, 0, 2),), (Feed(0, 1, 1),)), "row 0 out of order"),
        (((Feed(0, 0, 6),),), "row 0 out of order"),
        (((Feed(0, 0, 0),),), "row 0 out of order"),
        (((Feed(0, 0, 1), Feed(0, 1, 1)),), r"feeds rows \[0, 0\] of 2"),
        (((Feed(2, 0, 1),),), r"feeds rows \[2\] of 2"),
        (((Feed(-1, 0, 1),),), r"feeds rows \[-1\] of 2"),
        (((Feed(0, 0, 1),), ()), r"feeds rows \[\] of 2"),
        ((), "0 feeds"),
    ],
)
def test_a_schedule_no_runner_may_meet_is_refused(steps: tuple[golden.Step, ...], problem: str, tmp_path: Path) -> None:
    case = make_case(steps, (5, 5))
    with pytest.raises(ValueError, match=problem):
        golden.check_steps(case)
    with pytest.raises(ValueError, match=problem):
        golden.save(tmp_path / "golden.npz", [case])


def test_checking_steps_looks_at_the_rows_that_they_feed_and_not_at_all_rows_each_time() -> None:
    class Rows(tuple[np.ndarray, ...]):
        num_looks = 0

        def __len__(self) -> int:
            self.num_looks += 1
            return super().__len__()

    num_looks = set()
    for length in (1, 50):
        case = make_case(golden.staggered((length, length)), (length, length))
        rows = Rows(case.sequences)
        golden.check_steps(replace(case, sequences=rows))
        num_looks.add(rows.num_looks)
    assert len(num_looks) == 1


def test_more_steps_than_a_file_may_have_are_refused_before_they_are_looked_at(tmp_path: Path) -> None:
    path, half = tmp_path / "golden.npz", golden.MAX_STEPS // 2
    cases = [make_case(golden.staggered((length,)), (length,)) for length in (half, half, 1)]
    golden.save(path, cases[:2])
    assert [len(case.steps) for case in golden.load(path)] == [half, half]
    golden.save(path, cases)
    with pytest.raises(ValueError, match=rf"has {2 * half + 1} steps, must have at most {golden.MAX_STEPS}$"):
        golden.load(path)


def test_a_case_needs_logits_for_every_feed_and_a_source_for_every_row_or_none() -> None:
    with pytest.raises(ValueError, match=r"5 feeds, logits of shape \[4, 7\]"):
        golden.check_steps(replace(PREFILL_THEN_DECODE, logits=PREFILL_THEN_DECODE.logits[1:]))
    with pytest.raises(ValueError, match="1 sources for 2 sequences"):
        golden.check_steps(replace(PREFILL_THEN_DECODE, sources=PREFILL_THEN_DECODE.sequences[:1]))


def test_a_file_that_holds_no_cases_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "golden.npz"
    golden.save(path, [PREFILL_THEN_DECODE])
    whole = path.read_bytes()
    spoiled = whole[:200] + b"\xff" * 40 + whole[240:]
    for data in (b"", b"not an archive", whole[: len(whole) // 2], spoiled):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r".+"):
            golden.load(path)
    np.savez(path, other=np.zeros(3))
    with pytest.raises(ValueError, match="not a set of golden cases"):
        golden.load(path)
    with pytest.raises(ValueError, match="not a set of golden cases"):
        golden.load(tmp_path / "missing.npz")


@pytest.mark.parametrize(
    "arrays",
    [
        {"index": np.frombuffer(b"[" * 100_000, np.uint8)},
        {"0/sequence/0": np.zeros(5)},
        {"0/sequence/0": np.zeros((5, 1), np.int64)},
    ],
    ids=["deep index", "fractional ids", "ids in a matrix"],
)
def test_arrays_of_the_wrong_kind_are_refused(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    path = tmp_path / "golden.npz"
    golden.save(path, [PREFILL_THEN_DECODE])
    with np.load(path) as found:
        np.savez(path, **{**found, **arrays})
    with pytest.raises(ValueError, match="not a set of golden cases"):
        golden.load(path)


@pytest.mark.parametrize("count", [-1, -(2**70), 1.5, "1"])
def test_a_count_of_sources_that_is_none_is_refused(count: object, tmp_path: Path) -> None:
    """Such a case would be replayed without its sources, and prove an encoder that never ran."""
    path = tmp_path / "golden.npz"
    golden.save(path, [PAIR])
    with np.load(path) as found:
        arrays = dict(found)
    (entry,) = json.loads(arrays["index"].tobytes())
    arrays["index"] = np.frombuffer(json.dumps([entry | {"sources": count}]).encode(), np.uint8)
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="not a set of golden cases"):
        golden.load(path, ENCODER)


SIZES = {"context": 4, "d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 8}
DECODER = ModelConfig(architecture="decoder-only", vocab_size=7, **SIZES)
ENCODER = ModelConfig(
    architecture="encoder-decoder", vocab_size=7, source_vocab_size=8, num_encoder_layers=1, source_context=2, **SIZES
)
PREFILL, PAIR = make_case(((Feed(0, 0, 4),),), (4,)), make_case(golden.staggered((2,)), (2,), with_sources=True)


@pytest.mark.parametrize(
    ("config", "case", "problem"),
    [
        (DECODER, PREFILL_THEN_DECODE, "sequence 0 has 5 tokens, must have 1 to 4"),
        (DECODER, replace(PREFILL, logits=PREFILL.logits[:, :6]), "has logits of 6 tokens, the model has 7"),
        (replace(DECODER, vocab_size=6), replace(PREFILL, logits=PREFILL.logits[:, :6]), r"ids outside \[0, 6\)"),
        (DECODER, PAIR, "has 1 sources, the model is decoder-only"),
        (ENCODER, PREFILL, "has 0 sources, the model is encoder-decoder"),
        (ENCODER, replace(PREFILL, sources=PREFILL.sequences), "several tokens at once"),
        (ENCODER, replace(PAIR, sources=(np.arange(3),)), "source 0 has 3 tokens, must have 1 to 2"),
        (ENCODER, replace(PAIR, sources=(np.arange(0),)), "source 0 has 0 tokens, must have 1 to 2"),
        (ENCODER, replace(PAIR, sources=(np.array([0, 8]),)), r"source 0 has ids outside \[0, 8\)"),
        (ENCODER, replace(PAIR, sources=(np.array([-1]),)), r"source 0 has ids outside \[0, 8\)"),
    ],
)
def test_a_case_that_does_not_fit_the_model_is_refused(
    config: ModelConfig, case: GoldenCase, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "golden.npz"
    golden.save(path, [PREFILL, case] if config is DECODER else [case])
    assert_same(golden.load(path)[-1], case)
    with pytest.raises(ValueError, match=problem):
        golden.load(path, config)
