"""The project's own operators: kernels say what the standard operators behind them say, and to each row alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from export.functions import add_functions
from export.fusion import fuse
from export.operators import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    BIASED,
    CONTRIB,
    DOMAIN,
    GELU,
    INT4_LINEAR,
    INT8_LINEAR,
    LINEAR,
    SWIGLU,
)
from export.panels import INT4_BLOCK
from export.quantize import quantize
from model.spec.artifact import Precision
from tests.own_operators import (
    NEEDS_KERNELS,
    AttentionCase,
    Float32,
    int4_linear,
    int8_linear,
    linear,
    model_of,
    name_of,
    open_session,
    plain_product,
    register_kernels,
)

FP32, INT8, INT4 = Precision.FP32, Precision.INT8, Precision.INT4
Float64 = npt.NDArray[np.float64]

pytestmark = NEEDS_KERNELS


def _after(product: Float64, *, gelu: bool) -> Float64:
    """What a product of this result goes on with: GELU by its approximation with tanh, or just that."""
    if not gelu:
        return product
    return 0.5 * product * (1 + np.tanh(math.sqrt(2 / math.pi) * (product + 0.044715 * product**3)))


@given(
    inner=st.integers(1, 130),
    outer=st.integers(1, 100),
    num_rows=st.integers(0, 40),
    positive=st.booleans(),
    biased=st.booleans(),
    gelu=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=40)
def test_int8_linear_has_the_bits_of_its_function(
    inner: int, outer: int, num_rows: int, positive: bool, biased: bool, gelu: bool, seed: int
) -> None:
    """But for GELU, which both compute to within a few units in the last place."""
    rng = np.random.default_rng(seed)
    model = int8_linear(inner, outer, rng, positive=positive, biased=biased, gelu=gelu)
    x = rng.standard_normal((num_rows, inner)).astype(np.float32) * rng.choice([1e-3, 1, 1e3], (num_rows, 1))
    x = np.maximum(x, 0) if positive else x
    x[: num_rows // 8] = 0
    x = x.astype(np.float32)
    session = open_session(model, by_kernels=True)
    found = session.run(None, {"x": x})[0]
    expected = open_session(model, by_kernels=False).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5 if gelu else 0, atol=1e-6 if gelu else 0)
    for row in range(min(num_rows, 3)):
        assert session.run(None, {"x": x[row : row + 1]})[0].tobytes() == found[row : row + 1].tobytes()


@pytest.mark.parametrize("peak", [1e-31, 3e-29, 1e-26, 0.3, 7.0, 3e38])
def test_int8_rows_are_rounded_as_by_a_division(peak: float) -> None:
    """Numbers beside every half step: a quotient that is off in its last place would be rounded to the other side."""
    largest = np.float32(peak)
    scale = np.maximum(largest, np.float32(1e-30)) * (np.float32(1) / np.float32(127))
    halves = [half for each in range(-126, 126) if abs(half := np.float32(each + 0.5) * scale) < largest]
    beside = [np.nextafter(halves, np.float32(way * np.inf)) for way in (-1, 1)]
    x = np.concatenate([halves, *beside, [largest]]).astype(np.float32)
    # Each number by itself: their errors cannot cancel.
    rows = np.stack([x, np.full_like(x, largest)], axis=1)
    model = int8_linear(2, 5, np.random.default_rng(0), positive=False, biased=False, gelu=False)
    found, expected = (open_session(model, by_kernels=each).run(None, {"x": rows})[0] for each in (True, False))
    assert found.tobytes() == expected.tobytes()


@given(
    inner=st.integers(1, 130),
    outer=st.integers(1, 100),
    num_rows=st.integers(0, 40),
    biased=st.booleans(),
    gelu=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=40)
def test_linear_is_the_product_and_each_rows_own(
    inner: int, outer: int, num_rows: int, biased: bool, gelu: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((outer, inner)).astype(np.float32)
    bias = rng.standard_normal(outer).astype(np.float32) * biased
    x = rng.standard_normal((num_rows, inner)).astype(np.float32)
    model = linear(LINEAR, weight, bias if biased else None, gelu=gelu)
    session = open_session(model, by_kernels=True)
    (found,) = session.run(None, {"x": x})
    room = (2e-6 if gelu else 1e-6) * (np.abs(x).astype(np.float64) @ np.abs(weight).T + 1)
    expected = _after(x.astype(np.float64) @ weight.T + bias, gelu=gelu)
    assert (np.abs(found - expected) <= room).all()
    (standard,) = open_session(model, by_kernels=False).run(None, {"x": x})
    assert (np.abs(found - standard) <= 2 * room).all()
    for row in range(min(num_rows, 3)):
        assert session.run(None, {"x": x[row : row + 1]})[0].tobytes() == found[row : row + 1].tobytes()


@given(
    num_blocks=st.integers(1, 5),
    outer=st.integers(1, 60),
    num_rows=st.integers(0, 40),
    biased=st.booleans(),
    gelu=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=40)
def test_int4_linear_is_its_definition_and_each_rows_own(
    num_blocks: int, outer: int, num_rows: int, biased: bool, gelu: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    inner = num_blocks * INT4_BLOCK
    codes = rng.integers(0, 16, (outer, num_blocks, INT4_BLOCK)).astype(np.uint8)
    scales = rng.uniform(-0.1, 0.1, (outer, num_blocks)).astype(np.float16).astype(np.float32)
    bias = rng.standard_normal(outer).astype(np.float32) * biased
    x = rng.standard_normal((num_rows, inner)).astype(np.float32) * rng.choice([1e-3, 1, 1e3], (num_rows, 1))
    x = x.astype(np.float32)
    model = int4_linear(codes, scales, bias if biased else None, gelu=gelu)
    session = open_session(model, by_kernels=True)
    (found,) = session.run(None, {"x": x})
    weight = ((codes.astype(np.float64) - 8) * scales[..., None]).reshape(outer, inner)
    row_scales = np.abs(x).max(axis=-1, keepdims=True) * (np.float32(1) / np.float32(127))
    rounded = np.rint(x / row_scales) * row_scales.astype(np.float64)
    room = (2e-6 if gelu else 1e-6) * (np.abs(x) @ np.abs(weight).T + 1)
    assert (np.abs(found - _after(rounded @ weight.T + bias, gelu=gelu)) <= room).all()
    # The function rounds rows block by block: by less, if anything.
    (standard,) = open_session(model, by_kernels=False).run(None, {"x": x})
    # GELU is nowhere steeper than 1.13.
    step = (1.13 if gelu else 1) * 0.51 * row_scales * np.abs(weight).sum(axis=-1)
    assert (np.abs(standard - _after(x.astype(np.float64) @ weight.T + bias, gelu=gelu)) <= step + room).all()
    for row in range(min(num_rows, 3)):
        assert session.run(None, {"x": x[row : row + 1]})[0].tobytes() == found[row : row + 1].tobytes()


def test_a_session_with_kernels_has_them_in_its_graph_and_one_without_has_standard_operators(tmp_path: Path) -> None:
    model = int8_linear(64, 64, np.random.default_rng(0))
    found = []
    for is_registered in (True, False):
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        if is_registered:
            register_kernels(options, model)
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found.append({(node.domain, node.op_type) for node in onnx.load(tmp_path / "optimised.onnx").graph.node})
    assert found[0] == {(DOMAIN, INT8_LINEAR)}
    assert (CONTRIB, "MatMulIntegerToFloat") in found[1]
    assert DOMAIN not in {domain for domain, _ in found[1]}


@pytest.mark.parametrize(("num_rows", "width"), [(0, 8), (1, 1), (3, 17), (40, 96), (130, 768)])
def test_gates_and_norms_are_what_their_functions_say_and_each_rows_own(num_rows: int, width: int) -> None:
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((num_rows, 2 * width)) * rng.choice([1e-3, 1, 30], (num_rows, 1))).astype(np.float32)
    delta = rng.standard_normal((num_rows, 2 * width)).astype(np.float32)
    weight, bias = (rng.standard_normal(2 * width).astype(np.float32) for _ in range(2))
    gate = helper.make_node(SWIGLU, ["x"], ["gated"], domain=DOMAIN)
    norm = helper.make_node(ADD_RMS_NORM, ["x", "delta", "weight"], ["sum", "normed"], domain=DOMAIN, epsilon=1e-5)
    names = ["x", "delta", "weight", "bias"]
    centred = helper.make_node(ADD_LAYER_NORM, names, ["sum_again", "centred"], domain=DOMAIN, epsilon=1e-5)
    feeds, outputs = {"x": x, "delta": delta}, ["gated", "sum", "normed", "sum_again", "centred"]
    model = model_of([gate, norm, centred], feeds, outputs, {"weight": weight, "bias": bias})
    by_kernels, standard = (open_session(model, by_kernels=each) for each in (True, False))
    found = by_kernels.run(None, feeds)
    gates, ups = x[:, :width].astype(np.float64), x[:, width:].astype(np.float64)
    total = x.astype(np.float64) + delta
    root = np.sqrt(np.square(total).mean(axis=-1, keepdims=True) + 1e-5)
    deviations = total - total.mean(axis=-1, keepdims=True)
    spread = np.sqrt(np.square(deviations).mean(axis=-1, keepdims=True) + 1e-5)
    silu = gates / (1 + np.exp(-gates))
    exact = (silu * ups, total, total / root * weight, total, deviations / spread * weight + bias)
    for ours, theirs, truth in zip(found, standard.run(None, feeds), exact, strict=True):
        np.testing.assert_allclose(ours, truth, rtol=2e-6, atol=2e-6)
        # ONNX Runtime's own sigmoid is shut from -18 on.
        np.testing.assert_allclose(theirs, truth, rtol=1e-5, atol=2e-4)
    for row in range(min(num_rows, 5)):
        alone = by_kernels.run(None, {name: values[row : row + 1] for name, values in feeds.items()})
        assert [each.tobytes() for each in alone] == [each[row : row + 1].tobytes() for each in found]


def test_a_gates_exponential_is_good_to_the_last_places() -> None:
    """Each, and on average wherever between whole powers of two: roundings cancel out there, wrong numbers do not."""
    gates = np.linspace(-12, 1, 100_000, dtype=np.float32)
    x = np.concatenate([gates, np.ones_like(gates)])[None]
    node = helper.make_node(SWIGLU, ["x"], ["y"], domain=DOMAIN)
    found = open_session(model_of([node], {"x": x}, ["y"], {}), by_kernels=True).run(None, {"x": x})[0][0]
    powers = (gates * np.float32(-np.log2(np.e))).astype(np.float64)
    errors = found / (gates / (1 + np.exp2(powers))) - 1
    assert np.abs(errors).max() < 4e-7
    fractions = np.rint((powers - np.rint(powers)) * 16).astype(int) + 8
    means = np.bincount(fractions, errors) / np.bincount(fractions)
    assert np.abs(means).max() < 2e-8


def test_a_gate_is_open_or_shut_at_numbers_that_are_too_large_for_an_exponential() -> None:
    node = helper.make_node(SWIGLU, ["x"], ["y"], domain=DOMAIN)
    gates = np.array([-3e38, -1e4, -90, 0, 90, 1e4, 3e38], np.float32)
    x = np.concatenate([gates, np.ones_like(gates)])[None]
    found = open_session(model_of([node], {"x": x}, ["y"], {}), by_kernels=True).run(None, {"x": x})[0][0]
    np.testing.assert_array_equal(found, [0, 0, found[2], 0, 90, 1e4, np.float32(3e38)])
    assert -1e-36 < found[2] <= 0


def _gelu_of(x: Float32) -> Float32:
    """By a product with a matrix of one number, 1."""
    node = helper.make_node(f"{LINEAR}{GELU}", ["x", "weight"], ["y"], domain=DOMAIN)
    model = model_of([node], {"x": x[:, None]}, ["y"], {"weight": np.ones((1, 1), np.float32)})
    (y,) = open_session(model, by_kernels=True).run(None, {"x": x[:, None]})
    found: Float32 = y[:, 0]
    return found


def test_gelu_is_good_to_the_last_places() -> None:
    x = np.linspace(-5, 20, 100_000, dtype=np.float32)
    found, truth = _gelu_of(x), _after(x.astype(np.float64), gelu=True)
    # Of what is far below zero the exponent is rounded, ten times as coarsely as a number near one.
    np.testing.assert_allclose(found, truth, rtol=3e-6, atol=1e-9)
    np.testing.assert_allclose(found[x > 0], truth[x > 0], rtol=4e-7)


def test_gelu_is_nothing_or_all_of_numbers_that_are_too_large_for_an_exponential() -> None:
    x = np.array([-3e38, -1e20, -1e4, -30, 0, 30, 1e4, 1e20, 3e38], np.float32)
    np.testing.assert_array_equal(_gelu_of(x), np.maximum(x, 0))
    assert np.isnan(_gelu_of(np.array([np.nan], np.float32)))[0]


@pytest.mark.parametrize("kind", [LINEAR, INT8_LINEAR, INT4_LINEAR])
@pytest.mark.parametrize("biased", [False, True])
def test_gelu_of_a_product_is_one_operator_with_it(kind: str, biased: bool) -> None:
    before = _gelu_graph(kind, biased=biased)
    after = onnx.ModelProto()
    after.CopyFrom(before)
    fuse(after)
    add_functions(after)
    assert [node.op_type for node in after.graph.node] == [name_of(kind, biased=biased, gelu=True)]
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    sessions = [open_session(model, by_kernels=True) for model in (before, after)]
    apart, together = (session.run(None, {"x": x})[0] for session in sessions)
    np.testing.assert_allclose(together, apart, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reason", ["exact", "read twice", "an output", "no product"])
def test_gelu_stays_by_itself_where_it_must(reason: str) -> None:
    model = _gelu_graph(LINEAR, biased=True, approximate="none" if reason == "exact" else "tanh")
    product, gelu = model.graph.node
    if reason == "read twice":
        model.graph.node.append(helper.make_node("Neg", ["product"], ["z"]))
        model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    if reason == "an output":
        model.graph.output.append(helper.make_tensor_value_info("product", TensorProto.FLOAT, None))
    if reason == "no product":
        product.CopyFrom(helper.make_node("Neg", ["x"], ["product"]))
    fuse(model)
    assert [node.op_type for node in model.graph.node][:2] == [product.op_type, gelu.op_type] == [product.op_type, GELU]


def _gelu_graph(kind: str, *, biased: bool, approximate: str = "tanh") -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 40)).astype(np.float32)
    model = quantize(plain_product(weight), {LINEAR: FP32, INT8_LINEAR: INT8, INT4_LINEAR: INT4}[kind])
    (product,) = (node for node in model.graph.node if node.domain == DOMAIN)
    if biased:
        product.op_type = f"{BIASED}{product.op_type}"
        product.input.append("bias")
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(40).astype(np.float32), "bias"))
    product.output[:] = ["product"]
    # In the place of the node that reads a plain product.
    model.graph.node[-1].CopyFrom(helper.make_node(GELU, ["product"], ["y"], approximate=approximate))
    add_functions(model)
    return model


_HEADS = [(12, 4, 64, True), (4, 4, 32, False), (6, 1, 16, True), (2, 2, 80, False), (3, 3, 128, True)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), _HEADS)
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("int8", [False, True])
def test_attention_is_onnx_runtimes_in_decoding_ragged_rows_and_in_chunks(
    heads: int, kv_heads: int, dim: int, rotary: bool, window: int, int8: bool
) -> None:
    attention = AttentionCase(heads, kv_heads, dim, rotary=rotary, window=window, int8=int8)
    for batch, count, last in ((5, 1, (0, 16, 33, 150, 97)), (1, 40, (39,)), (1, 48, (147,)), (3, 12, (11, 4, 0))):
        new, cache = attention.new_tokens(batch, count), attention.cache(batch, 160)
        found = attention.run(attention.own, new, cache, last)
        expected = attention.run(attention.standard, new, cache, last)
        for row, end in enumerate(last):
            past = 0 if max(last) + 1 == count else end + 1 - count
            tokens = min(count, end + 1 - past)
            np.testing.assert_allclose(found[0][row, :tokens], expected[0][row, :tokens], rtol=2e-5, atol=2e-5)
            for ours, theirs in zip(found[1:], expected[1:], strict=True):
                np.testing.assert_allclose(ours[row, :, : end + 1], theirs[row, :, : end + 1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [1, 50])
def test_new_keys_and_values_are_rounded_to_eight_bits_as_by_onnx_runtime_to_the_bit(count: int) -> None:
    """Halves, what lies beyond the ends, infinities and what is no number among them."""
    attention = AttentionCase(4, 4, 64, rotary=False, packed=False, int8=True)
    rng = np.random.default_rng(count)
    steps = rng.integers(-140, 141, (2, 20, count, 4, 64)) + rng.choice([0, 0.5, 0.5, 0.25, 0.4999999], (64,))
    steps[:, 0, 0, 0, :6] = [np.nan, np.inf, -np.inf, 1e30, -1e30, -0.0]
    query = np.ones((20, count, 256), np.float32)
    scales = [np.swapaxes(scale, 1, 2) for scale in attention.scales]  # [1, 1, Hkv, D]
    key, value = ((part * scale).astype(np.float32) for part, scale in zip(steps, scales, strict=True))
    new = (query, key.reshape(query.shape), value.reshape(query.shape))
    cache, last = attention.cache(20, count), [count - 1] * 20
    found, expected = (attention.run(each, new, cache, last) for each in (attention.own, attention.standard))
    assert found[1].tobytes() == expected[1].tobytes()
    assert found[2].tobytes() == expected[2].tobytes()
    assert {-128, 127} <= set(found[1].ravel().tolist())


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), _HEADS)
def test_sinks_take_their_part_of_the_weights(heads: int, kv_heads: int, dim: int, rotary: bool) -> None:
    found = []
    for sinks in (0.5, -1e30, None):
        attention = AttentionCase(heads, kv_heads, dim, rotary=rotary, int8=True, sinks=sinks)
        attention.rng = np.random.default_rng(1)
        for batch, count, last in ((3, 1, (0, 40, 17)), (1, 30, (29,)), (1, 560, (559,))):
            new, cache = attention.new_tokens(batch, count), attention.cache(batch, 560)
            ours, theirs = (attention.run(each, new, cache, last)[0] for each in (attention.own, attention.standard))
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
            found.append(ours)
    for with_part, without, absent in zip(found[:3], found[3:6], found[6:], strict=True):
        assert without.tobytes() == absent.tobytes()
        assert np.abs(with_part - absent).max() > 0.01


@pytest.mark.parametrize("int8", [False, True])
def test_attention_to_a_source_is_onnx_runtimes(int8: bool) -> None:
    attention = AttentionCase(8, 8, 64, rotary=False, packed=False, int8=int8)
    cache, last = attention.cache(4, 90), (0, 30, 89, 63)
    query = attention.new_tokens(4, 1)[0]
    nothing = np.zeros((4, 0, 512), np.float32)
    found = attention.run(attention.own, (query, nothing, nothing), cache, last)
    expected = attention.run(attention.standard, (query, nothing, nothing), cache, last)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5, atol=2e-5)
    assert found[1].tobytes() == cache[0].tobytes()
    assert found[2].tobytes() == cache[1].tobytes()


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), _HEADS)
@pytest.mark.parametrize("int8", [False, True])
def test_a_tokens_attention_has_the_same_bits_alone_batched_in_chunks_and_decoded(
    heads: int, kv_heads: int, dim: int, rotary: bool, int8: bool
) -> None:
    """K/V beyond a row's end, NaN here, have no effect."""
    attention = AttentionCase(heads, kv_heads, dim, rotary=rotary, int8=int8)
    one_thread = open_session(attention.own_model, by_kernels=True, threads=1)
    length, (packed,) = 90, attention.new_tokens(1, 90)  # longer chunks: test_kernel_tiles.py
    empty = attention.cache(1, 200)
    for part in empty:
        part[:] = attention.nothing
    whole, key, value = attention.run(attention.own, [packed], empty, [length - 1])
    for chunk in (64, 17, 1):
        cache, parts = empty, []
        for begin in range(0, length, chunk):
            part = packed[:, begin : begin + chunk]
            y, *caches = attention.run(one_thread, [part], cache, [begin + part.shape[1] - 1])
            cache = (caches[0], caches[1])
            parts.append(y)
        assert np.concatenate(parts, axis=1).tobytes() == whole.tobytes(), f"chunks of {chunk}"
        assert [part[:, :, :length].tobytes() for part in cache] == [
            part[:, :, :length].tobytes() for part in (key, value)
        ]
    # The last token decoded among others that are longer and shorter.
    others = attention.cache(4, 200)
    for part, ours in zip(others, (key, value), strict=True):
        part[2] = ours[0]
        part[2, :, length - 1 :] = attention.nothing
        part[0, :, 10:] = attention.nothing
    rows = attention.new_tokens(4, 1)[0]
    rows[2] = packed[0, -1:]
    together, *_ = attention.run(attention.own, [rows], others, [9, 199, length - 1, 0])
    assert together[2].tobytes() == whole[0, -1:].tobytes()
    assert np.isfinite(together).all()


def test_attention_refuses_what_it_cannot_compute_and_says_what() -> None:
    attention = AttentionCase(4, 2, 32, rotary=True)
    new, cache = attention.new_tokens(2, 1), attention.cache(2, 16)
    cases: list[tuple[Sequence[Float32], tuple[Float32, Float32], Sequence[int], str]] = [
        (new, cache, (3, 16), "seqlens_k must be within the cache"),
        (new, (cache[0][:1], cache[1][:1]), (3, 3), "as many rows as query"),
        (new, (cache[0][:, :1], cache[1][:, :1]), (3, 3), "kv_num_heads heads"),
        ([new[0][..., :-1]], cache, (3, 3), "as wide as its heads"),
        (new, attention.cache(2, 700), (3, 650), "reach total_sequence_length"),
    ]
    for tokens, buffers, last, message in cases:
        with pytest.raises(Exception, match=message):
            attention.run(attention.own, tokens, buffers, last)
    feeds = {"query": new[0], "past_key": cache[0], "past_value": cache[1], "last": np.array([9, 3], np.int32)}
    for total, message in (([4], "within total_sequence_length"), ([], "must be one number")):
        with pytest.raises(Exception, match=message):
            attention.own.run(None, feeds | {"total": np.array(total, np.int32)})
    int8 = AttentionCase(4, 2, 32, rotary=False, int8=True, sinks=0.0)
    for name, shape, message in (("key_scale", (1, 1, 1, 32), "head_dim"), ("sinks", (2,), "one of each head")):
        model = onnx.ModelProto()
        model.CopyFrom(int8.own_model)
        (tensor,) = (each for each in model.graph.initializer if each.name == name)
        tensor.CopyFrom(numpy_helper.from_array(np.ones(shape, np.float32), name))
        with pytest.raises(Exception, match=message):
            int8.run(open_session(model, by_kernels=True), int8.new_tokens(2, 1), int8.cache(2, 16), (3, 3))


def test_panels_of_fewer_columns_than_there_are_scales_are_refused() -> None:
    product = int8_linear(40, 40, np.random.default_rng(0))
    del product.graph.initializer[0]
    product.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 10, 32, 4), np.int8), "panels"))
    with pytest.raises(Exception, match=r"panels must be \[ceil\(N / 32\), ceil\(K / 4\), 32, 4\]"):
        open_session(product, by_kernels=True)


def test_weights_that_are_computed_are_read_in_each_run_and_stored_ones_stay_where_they_are() -> None:
    rng = np.random.default_rng(3)
    x, weights = rng.standard_normal((3, 64)).astype(np.float32), rng.standard_normal((2, 64, 64)).astype(np.float32)
    node = helper.make_node(LINEAR, ["x", "weight"], ["y"], domain=DOMAIN)
    norm = helper.make_node(ADD_RMS_NORM, ["x", "x", "scale"], ["sums", "z"], domain=DOMAIN, epsilon=0.0)
    # ONNX Runtime lays out anew what its own product reads: not in the place of what ours reads.
    product = helper.make_node("MatMul", ["x", "weight"], ["p"])
    scales = weights[:, 0]
    feeds = {"x": x, "weight": weights[0], "scale": scales[0]}
    outputs = ("y", "sums", "z", "p")
    given = open_session(model_of([node, norm, product], feeds, outputs, {}), by_kernels=True)
    stored = model_of([node, norm, product], {"x": x}, outputs, {"weight": weights[0], "scale": scales[0]})
    # Stored, and yet an input: what is given in a run takes its place.
    default = onnx.ModelProto()
    default.CopyFrom(stored)
    default.graph.input.append(helper.make_tensor_value_info("weight", TensorProto.FLOAT, [64, 64]))
    both = open_session(default, by_kernels=True)
    own = open_session(stored, by_kernels=True)
    for weight, scale in zip(weights, scales, strict=True):
        y, sums, z, p = given.run(None, {"x": x, "weight": weight, "scale": scale})
        np.testing.assert_allclose(y, x @ weight.T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(p, x @ weight, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(z, sums / np.sqrt(np.mean(sums**2, -1, keepdims=True)) * scale, rtol=1e-4, atol=1e-4)
        assert both.run(["y"], {"x": x, "weight": weight})[0].tobytes() == y.tobytes()
    y, _, z, p = given.run(None, feeds)
    for session in (own, both, own):
        found = session.run(None, {"x": x})
        assert [found[index].tobytes() for index in (0, 2)] == [y.tobytes(), z.tobytes()]
        np.testing.assert_allclose(found[3], p, rtol=1e-4, atol=1e-4)


def test_eight_bits_must_be_stored() -> None:
    product = int8_linear(40, 40, np.random.default_rng(0))
    (panels,) = (each for each in product.graph.initializer if each.name == "panels")
    product.graph.initializer.remove(panels)
    product.graph.input.append(helper.make_tensor_value_info("panels", TensorProto.INT8, [2, 10, 32, 4]))
    with pytest.raises(Exception, match="panels and scales must be stored in the graph"):
        open_session(product, by_kernels=True)


def test_rows_have_up_to_eight_dimensions() -> None:
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((5, 32)).astype(np.float32)
    node = helper.make_node(LINEAR, ["x", "weight"], ["y"], domain=DOMAIN)
    x = rng.standard_normal((2, 1, 3, 1, 1, 1, 2, 32)).astype(np.float32)
    for rows in (x[0, 0, 0, 0, 0, 0, 0], x):
        (y,) = open_session(model_of([node], {"x": rows}, ["y"], {"weight": weight}), by_kernels=True).run(
            None, {"x": rows}
        )
        np.testing.assert_allclose(y, rows @ weight.T, rtol=1e-4, atol=1e-4)
    for rows, message in ((x[np.newaxis], "8 dimensions at most"), (x[0, 0, 0, 0, 0, 0, 0, 0], "K numbers wide")):
        session = open_session(model_of([node], {"x": rows}, ["y"], {"weight": weight}), by_kernels=True)
        with pytest.raises(Exception, match=message):
            session.run(None, {"x": np.asarray(rows)})


_OF_MODELS = [(25, 2048, 70, 2), (200, 1536, 300, 2), (64, 768, 700, 2)]
_BESIDE_THEM = [(9, 2047, 701, 3), (65, 767, 331, 3), (130, 1533, 97, 3)]
"""Odd sizes, which no block of 32 divides; the last number is of threads."""


@pytest.mark.parametrize(
    ("kind", "num_rows", "inner", "outer", "threads"),
    [
        *((kind, *sizes) for kind in (LINEAR, INT8_LINEAR, INT4_LINEAR) for sizes in _OF_MODELS),
        *((kind, *sizes) for kind in (LINEAR, INT8_LINEAR) for sizes in _BESIDE_THEM),
    ],
)
def test_products_of_the_sizes_of_models_are_their_functions_and_each_rows_own(
    kind: str, num_rows: int, inner: int, outer: int, threads: int
) -> None:
    """Several parts of K, blocks of rows, panels a piece, and rows that threads share the rounding of."""
    rng = np.random.default_rng(outer)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((num_rows, inner), (inner, outer)))
    low = quantize(plain_product(weight), {LINEAR: FP32, INT8_LINEAR: INT8, INT4_LINEAR: INT4}[kind])
    assert [node.op_type for node in low.graph.node if node.domain == DOMAIN] == [kind]
    session = open_session(low, by_kernels=True, threads=threads)
    (found,) = session.run(None, {"x": x})
    (standard,) = open_session(low, by_kernels=False).run(None, {"x": x})
    room = {LINEAR: 1e-5, INT8_LINEAR: 0, INT4_LINEAR: 2e-2}[kind]
    assert np.abs(found - standard).max() <= room * np.abs(standard).max()
    assert (
        np.abs(found - x @ weight).max()
        <= {LINEAR: 1e-5, INT8_LINEAR: 2e-2, INT4_LINEAR: 0.15}[kind] * np.abs(standard).max()
    )
    for row in (0, 1, 2, num_rows - 1):
        assert session.run(None, {"x": x[row : row + 1]})[0].tobytes() == found[row : row + 1].tobytes()


def test_a_square_matrix_is_not_taken_for_its_transpose() -> None:
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((8, 8)).astype(np.float32) for _ in range(2))
    model = quantize(plain_product(weight), FP32)
    for by_kernels in (True, False):
        found = open_session(model, by_kernels=by_kernels).run(None, {"x": x})[0]
        np.testing.assert_allclose(found, x @ weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("batch", "count", "past"), [(1, 128, 2900), (1, 600, 0), (40, 1, 300), (2, 70, 0)])
def test_attention_to_many_keys_is_onnx_runtimes_and_each_rows_own(batch: int, count: int, past: int) -> None:
    attention = AttentionCase(6, 2, 64, rotary=False)
    new, cache = attention.new_tokens(batch, count), attention.cache(batch, past + count)
    last = [past + count - 1] * batch
    found = attention.run(attention.own, new, cache, last)
    expected = attention.run(attention.standard, new, cache, last)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    row = batch - 1
    alone = attention.run(attention.own, [new[0][row:]], (cache[0][row:], cache[1][row:]), last[row:])
    assert alone[0].tobytes() == found[0][row:].tobytes()


@pytest.mark.parametrize("stays", [False, True])
def test_weights_are_read_from_pages_of_their_own_unless_they_are_to_stay_in_the_file(
    stays: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    weight, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((2048, 1024), (2, 1024)))
    node = helper.make_node(LINEAR, ["x", "weight"], ["y"], domain=DOMAIN)
    path = tmp_path / "linear.onnx"
    model = model_of([node], {"x": x}, ["y"], {"weight": weight})
    onnx.save(model, path, save_as_external_data=True, location="weights")
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", str(int(stays)))
    register_kernels(options, model)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": x})[0]
    np.testing.assert_allclose(found, x.astype(np.float64) @ weight.T, rtol=1e-5, atol=1e-3)
    resident, share = _resident_bytes(tmp_path / "weights"), 0.9
    assert resident >= share * weight.nbytes if stays else resident <= (1 - share) * weight.nbytes
    # In the copy, columns of a length like this one's lie further apart than in the file.
    whole = model_of(
        [node], {"x": x}, ["y"], {"weight": weight}
    )  # what is saved beside a file is not in the model any more
    alike = open_session(whole, by_kernels=True, leaves_weights=not stays).run(None, {"x": x})[0]
    assert alike.tobytes() == found.tobytes()


def _resident_bytes(path: Path) -> int:
    """How much of a file is in this process's memory by being mapped."""
    found, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "Rss" and is_of_file:
            found += int(value.split()[0]) * 1024
        elif "-" in line.split(maxsplit=1)[0]:
            is_of_file = line.endswith(str(path))
    return found
