"""Products with matrices in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from export.operators import BF16_LINEAR, LINEAR
from export.panels import BFLOAT16
from export.quantize import quantize
from model.spec.artifact import Precision
from tests.own_operators import NEEDS_KERNELS, linear, open_session, plain_product

pytestmark = NEEDS_KERNELS


@given(
    inner=st.integers(1, 130),
    outer=st.integers(1, 100),
    num_rows=st.integers(0, 40),
    biased=st.booleans(),
    gelu=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=40)
def test_a_matrix_in_bfloat16_has_the_bits_of_the_same_numbers_in_float32(
    inner: int, outer: int, num_rows: int, biased: bool, gelu: bool, seed: int
) -> None:
    _compare(inner, outer, num_rows, np.random.default_rng(seed), biased=biased, gelu=gelu)


@pytest.mark.parametrize(("num_rows", "inner", "outer"), [(1, 4096, 70), (25, 2048, 70), (200, 1537, 301)])
def test_a_matrix_in_bfloat16_of_the_size_of_models(num_rows: int, inner: int, outer: int) -> None:
    """Copied, with columns further apart where their length is a power of two; several parts of K, blocks of rows."""
    _compare(inner, outer, num_rows, np.random.default_rng(outer), biased=True, gelu=False)


def _compare(inner: int, outer: int, num_rows: int, rng: np.random.Generator, *, biased: bool, gelu: bool) -> None:
    weight = rng.standard_normal((outer, inner)).astype(BFLOAT16)
    bias = rng.standard_normal(outer).astype(np.float32) if biased else None
    x = rng.standard_normal((num_rows, inner)).astype(np.float32)
    model = linear(BF16_LINEAR, weight, bias, gelu=gelu)
    wide = open_session(linear(LINEAR, weight.astype(np.float32), bias, gelu=gelu), by_kernels=True)
    (expected,) = wide.run(None, {"x": x})
    for threads, leaves_weights in ((1, True), (2, False)):
        session = open_session(model, by_kernels=True, threads=threads, leaves_weights=leaves_weights)
        assert session.run(None, {"x": x})[0].tobytes() == expected.tobytes()
        for row in range(min(num_rows, 3)):
            alone = session.run(None, {"x": x[row : row + 1]})[0]
            assert alone.tobytes() == expected[row : row + 1].tobytes()
    (standard,) = open_session(model, by_kernels=False).run(None, {"x": x})
    np.testing.assert_allclose(expected, standard, rtol=1e-4, atol=1e-4 * inner**0.5)


def test_weights_in_bfloat16_are_stored_in_pytorchs_layout() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 40)).astype(np.float32)
    (stored,) = quantize(plain_product(weight), Precision.BF16).graph.initializer
    assert stored.data_type == TensorProto.BFLOAT16
    assert list(stored.dims) == [40, 64]
