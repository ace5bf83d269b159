"""Token embeddings in the precision of the weights, out of the matrix that a tied head multiplies by."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from export.operators import (
    BF16_GATHER,
    BF16_LINEAR,
    DOMAIN,
    GATHER,
    INT4_GATHER,
    INT4_LINEAR,
    INT8_GATHER,
    INT8_LINEAR,
)
from export.panels import BFLOAT16, INT4_BLOCK, pack_int4_panels, pack_int4_scales, pack_panels
from export.quantize import quantize
from model.spec.artifact import Precision
from tests.own_operators import NEEDS_KERNELS, Array, Float32, model_of, open_session

pytestmark = NEEDS_KERNELS


def _int8_table(outer: int, inner: int, rng: np.random.Generator) -> tuple[dict[str, Array], Float32]:
    """Stored panels and scales, and the table that they are."""
    codes = rng.integers(-127, 128, (outer, inner)).astype(np.int8)
    scales = rng.uniform(0.001, 0.1, outer).astype(np.float32)
    stored: dict[str, Array] = {"panels": pack_panels(codes.T), "scales": scales}
    return stored, codes.astype(np.float32) * scales[:, None]


def _int4_table(outer: int, inner: int, rng: np.random.Generator) -> tuple[dict[str, Array], Float32]:
    codes = rng.integers(0, 16, (outer, inner // INT4_BLOCK, INT4_BLOCK)).astype(np.uint8)
    scales = rng.uniform(-1, 1, codes.shape[:2]).astype(np.float16).astype(np.float32)
    stored: dict[str, Array] = {"panels": pack_int4_panels(codes), "scales": pack_int4_scales(scales)}
    table = (codes.astype(np.float32) - 8) * scales[..., None]
    return stored, table.reshape(outer, inner)


def _float_table(outer: int, inner: int, rng: np.random.Generator) -> tuple[dict[str, Array], Float32]:
    table = rng.standard_normal((outer, inner)).astype(np.float32)
    return {"weight": table}, table


def _bf16_table(outer: int, inner: int, rng: np.random.Generator) -> tuple[dict[str, Array], Float32]:
    table = rng.standard_normal((outer, inner)).astype(BFLOAT16)
    return {"weight": table}, table.astype(np.float32)


_TABLES = {GATHER: _float_table, BF16_GATHER: _bf16_table, INT8_GATHER: _int8_table, INT4_GATHER: _int4_table}
_ATTRIBUTES = {INT8_GATHER: ("K",), INT4_GATHER: ("K", "N")}


def _gather(kind: str, stored: dict[str, Array], inner: int, outer: int, ids: Array) -> onnx.ModelProto:
    attributes = {name: value for name, value in (("K", inner), ("N", outer)) if name in _ATTRIBUTES.get(kind, ())}
    node = helper.make_node(kind, ["ids", *stored], ["y"], domain=DOMAIN, **attributes)
    return model_of([node], {"ids": ids}, ["y"], stored)


@given(
    kind=st.sampled_from(list(_TABLES)),
    inner=st.sampled_from([1, 31, 64, 130, 2048]),
    outer=st.integers(1, 100),
    leading=st.lists(st.integers(0, 7), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=40)
def test_embeddings_are_the_tables_rows_by_kernels_and_by_standard_operators(
    kind: str, inner: int, outer: int, leading: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    inner = -(-inner // INT4_BLOCK) * INT4_BLOCK if kind == INT4_GATHER else inner
    stored, table = _TABLES[kind](outer, inner, rng)
    ids = rng.integers(0, outer, leading)
    model = _gather(kind, stored, inner, outer, np.asarray(ids))
    for by_kernels in (True, False):
        (found,) = open_session(model, by_kernels=by_kernels).run(None, {"ids": np.asarray(ids)})
        assert found.shape == (*leading, inner)
        assert found.tobytes() == table[ids].tobytes()


@pytest.mark.parametrize("kind", list(_TABLES))
@pytest.mark.parametrize("wrong", [-1, 40])
def test_a_token_outside_of_the_table_is_refused(kind: str, wrong: int) -> None:
    stored, _ = _TABLES[kind](40, 64, np.random.default_rng(0))
    ids = np.array([[0, 39], [wrong, 1]])
    session = open_session(_gather(kind, stored, 64, 40, ids), by_kernels=True)
    with pytest.raises(Exception, match="ids must be from 0 to N - 1"):
        session.run(None, {"ids": ids})


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8, Precision.INT4])
def test_a_tied_head_shares_the_table_and_both_are_computed(precision: Precision) -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((900, 128)).astype(np.float32)
    name = "embedding.tokens.weight"
    nodes = [
        helper.make_node("Gather", [name, "ids"], ["x"], name="model.embedding/Gather", axis=0),
        helper.make_node("Gemm", ["x", name], ["y"], transB=1),
    ]
    ids = rng.integers(0, 900, 30)
    model = quantize(model_of(nodes, {"ids": ids}, ["x", "y"], {name: table}), precision)
    kinds = {"bf16": BF16_LINEAR, "int8": INT8_LINEAR, "int4": INT4_LINEAR}
    assert kinds[precision] in {node.op_type for node in model.graph.node}
    assert name not in {tensor.name for tensor in model.graph.initializer}
    assert len([tensor for tensor in model.graph.initializer if tensor.name.endswith(f"_{precision}")]) == 1
    x, y = open_session(model, by_kernels=True).run(None, {"ids": ids})
    tolerance = {"bf16": 0.01, "int8": 0.03, "int4": 0.4}[precision]
    np.testing.assert_allclose(x, table[ids], rtol=tolerance, atol=tolerance)
    assert np.abs(y - x @ table.T).max() <= tolerance * np.abs(y).max()
    alike = open_session(model, by_kernels=False).run(["x"], {"ids": ids})[0]
    assert alike.tobytes() == x.tobytes()
