"""AMX's tile registers and vectors give the same bits, on any processor: by a double of the tile registers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.quantize import quantize
from model import kernels
from model.spec.artifact import Precision
from tests.faults.sanitized import build, sources_with_tiles
from tests.own_operators import NEEDS_KERNELS, int8_linear, open_session, plain_product

pytestmark = NEEDS_KERNELS


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that multiply many rows by the double."""
    return build("tiles.so", ("-shared", "-O1"), sources_with_tiles(tmp_path_factory.mktemp("sources")))


@given(
    inner=st.integers(1, 9).map(lambda count: 32 * count) | st.integers(1, 300),
    outer=st.integers(1, 70),
    num_rows=st.integers(8, 80),
    gelu=st.booleans(),
    precision=st.sampled_from([Precision.INT8, Precision.INT4]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=40)
def test_products_by_tiles_have_the_bits_of_those_by_vectors(
    library: Path, inner: int, outer: int, num_rows: int, gelu: bool, precision: Precision, seed: int
) -> None:
    """Each row's alone, which vectors multiply on every processor."""
    rng = np.random.default_rng(seed)
    if precision is Precision.INT8:
        model = int8_linear(inner, outer, rng, positive=bool(seed % 2), biased=bool(seed % 3), gelu=gelu)
    else:
        inner = (inner + 31) // 32 * 32
        model = quantize(plain_product(rng.standard_normal((inner, outer)).astype(np.float32)), precision)
    x = rng.standard_normal((num_rows, inner)).astype(np.float32)
    x[num_rows // 2, 0] = np.nan
    shipped = open_session(model, by_kernels=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "library", lambda: library)
        by_tiles = open_session(model, by_kernels=True)
    (found,) = by_tiles.run(None, {"x": x})
    assert found.tobytes() == shipped.run(None, {"x": x})[0].tobytes()
    alone = [shipped.run(None, {"x": x[row : row + 1]})[0] for row in range(num_rows)]
    assert found.tobytes() == np.concatenate(alone).tobytes()
