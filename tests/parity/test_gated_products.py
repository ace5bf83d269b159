"""Products that go on to SwiGLU in one operator: the bits of both, one after the other."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from export.functions import add_functions
from export.fusion import fuse
from export.operators import DOMAIN, GATED_COLUMNS, INT4_LINEAR, INT8_LINEAR, SWIGLU
from export.panels import INT4_BLOCK
from tests.own_operators import NEEDS_KERNELS, int4_linear, int8_linear, open_session

pytestmark = NEEDS_KERNELS


def apart(gated: onnx.ModelProto, *, by_standard_nodes: bool = True) -> onnx.ModelProto:
    """The product, and behind it the gate as nodes of its own."""
    model = onnx.ModelProto()
    model.CopyFrom(gated)
    (product,) = model.graph.node
    product.op_type = product.op_type.removesuffix(SWIGLU)
    product.output[:] = ["product"]
    standard = [
        helper.make_node("Split", ["product"], ["gate", "up"], axis=-1, num_outputs=2),
        helper.make_node("Sigmoid", ["gate"], ["opening"]),
        helper.make_node("Mul", ["gate", "opening"], ["silu"]),
        helper.make_node("Mul", ["silu", "up"], ["y"]),
    ]
    own = [helper.make_node(SWIGLU, ["product"], ["y"], domain=DOMAIN)]
    model.graph.node.extend(standard if by_standard_nodes else own)
    del model.functions[:]
    add_functions(model)
    return model


@given(
    kind=st.sampled_from([INT8_LINEAR, INT4_LINEAR]),
    num_blocks=st.integers(1, 5),
    num_panels=st.integers(1, 4),
    num_rows=st.integers(0, 150),
    biased=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=30)
def test_a_gated_product_has_the_bits_of_the_product_and_then_the_gate(
    kind: str, num_blocks: int, num_panels: int, num_rows: int, biased: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    inner, outer = num_blocks * INT4_BLOCK, num_panels * GATED_COLUMNS[kind]
    if kind == INT8_LINEAR:
        together = int8_linear(inner, outer, rng, biased=biased, swiglu=True)
    else:
        codes = rng.integers(0, 16, (outer, num_blocks, INT4_BLOCK)).astype(np.uint8)
        scales = rng.uniform(-0.1, 0.1, (outer, num_blocks)).astype(np.float32)
        bias = rng.standard_normal(outer).astype(np.float32) if biased else None
        together = int4_linear(codes, scales, bias, swiglu=True)
    unfused = apart(together)
    fuse(unfused)
    assert list(unfused.graph.node) == list(together.graph.node)
    x = rng.standard_normal((num_rows, inner)).astype(np.float32)
    session = open_session(together, by_kernels=True)
    (found,) = session.run(None, {"x": x})
    assert found.shape == (num_rows, outer // 2)
    (expected,) = open_session(apart(together, by_standard_nodes=False), by_kernels=True).run(None, {"x": x})
    assert found.tobytes() == expected.tobytes()
    for row in range(min(num_rows, 3)):
        assert session.run(None, {"x": x[row : row + 1]})[0].tobytes() == found[row : row + 1].tobytes()
    by_function, by_nodes = (open_session(model, by_kernels=False) for model in (together, apart(together)))
    assert by_function.run(None, {"x": x})[0].tobytes() == by_nodes.run(None, {"x": x})[0].tobytes()


@pytest.mark.parametrize("reason", ["half a panel", "read twice", "an output"])
def test_a_gate_is_an_operator_of_its_own_where_it_must(reason: str) -> None:
    outer = GATED_COLUMNS[INT8_LINEAR] // (2 if reason == "half a panel" else 1)
    model = apart(int8_linear(32, outer, np.random.default_rng(0), swiglu=True))
    if reason == "read twice":
        model.graph.node.append(helper.make_node("Neg", ["product"], ["z"]))
        model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    if reason == "an output":
        model.graph.output.append(helper.make_tensor_value_info("product", TensorProto.FLOAT, None))
    fuse(model)
    assert model.graph.node[0].op_type == INT8_LINEAR


@pytest.mark.parametrize("kind", [INT8_LINEAR, INT4_LINEAR])
def test_kernels_refuse_a_gate_of_a_part_of_a_panel(kind: str) -> None:
    outer = GATED_COLUMNS[kind] + 2
    codes = np.zeros((outer, 1, INT4_BLOCK), np.uint8)
    model = (
        int8_linear(32, outer, np.random.default_rng(0), swiglu=True)
        if kind == INT8_LINEAR
        else int4_linear(codes, np.ones((outer, 1), np.float32), swiglu=True)
    )
    with pytest.raises(Exception, match=f"N must be a multiple of {GATED_COLUMNS[kind]}"):
        open_session(model, by_kernels=True)
