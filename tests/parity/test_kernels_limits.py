"""The project's own operators at their limits: what an artifact may say, the ends of each range, threads and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.operators import ADD_LAYER_NORM, ADD_RMS_NORM, ATTENTION, DOMAIN, INT4_LINEAR, INT8_LINEAR, LINEAR, SWIGLU
from export.panels import PANEL_COLUMNS, pack_panels
from export.quantize import quantize
from model.spec.artifact import Precision
from tests.own_operators import (
    NEEDS_KERNELS,
    Array,
    AttentionCase,
    Float32,
    int8_linear,
    model_of,
    open_session,
    plain_product,
    register_kernels,
)

pytestmark = NEEDS_KERNELS

FP32, INT8, INT4 = Precision.FP32, Precision.INT8, Precision.INT4
_NAN, _INF = float("nan"), float("inf")
_MOST_ROWS = 1 << 16  # of a matrix of bytes
_RESIDENT = 1 << 16  # bytes from which on a stored matrix is copied


def _changed(model: onnx.ModelProto, **attributes: float) -> onnx.ModelProto:
    """The model with other attributes of its operator."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    (node,) = changed.graph.node
    for attribute in node.attribute:
        if attribute.name in attributes:
            attribute.CopyFrom(helper.make_attribute(attribute.name, attributes[attribute.name]))
    return changed


def _one(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without the node that only reads what its operator writes."""
    own = onnx.ModelProto()
    own.CopyFrom(model)
    (node,) = (node for node in own.graph.node if node.domain == DOMAIN)
    node.output[:] = ["y"]
    del own.graph.node[:]
    own.graph.node.append(node)
    del own.graph.value_info[:]
    return own


def _norm_model(kind: str = ADD_RMS_NORM, width: int = 8) -> onnx.ModelProto:
    x, weight = np.zeros((1, width), np.float32), np.ones(width, np.float32)
    stored: dict[str, Array] = {"weight": weight} | ({"bias": weight} if kind == ADD_LAYER_NORM else {})
    node = helper.make_node(kind, ["left", "right", *stored], ["sum", "y"], domain=DOMAIN, epsilon=1e-5)
    return model_of([node], {"left": x, "right": x}, ["sum", "y"], stored)


def _product_model(kind: str, inner: int = 64, outer: int = 40) -> onnx.ModelProto:
    weight = np.random.default_rng(outer).standard_normal((inner, outer)).astype(np.float32)
    return _one(quantize(plain_product(weight), {LINEAR: FP32, INT8_LINEAR: INT8, INT4_LINEAR: INT4}[kind]))


def _attention_model() -> onnx.ModelProto:
    return AttentionCase(4, 2, 64, rotary=False).own_model


_ATTRIBUTES: list[tuple[Callable[[], onnx.ModelProto], dict[str, float], str]] = [
    # 2^58 heads of 64 are 2^64 numbers wide: none, in 64 bits.
    (_attention_model, {"num_heads": 1 << 58}, "num_heads is 288230376151711744, must be from 1 to 65536"),
    (_attention_model, {"num_heads": 1 << 58, "kv_num_heads": 1 << 58}, "num_heads is 288230376151711744"),
    (_attention_model, {"num_heads": 0}, "num_heads is 0, must be from 1"),
    (_attention_model, {"num_heads": -4}, "num_heads is -4, must be from 1"),
    (_attention_model, {"kv_num_heads": 0}, "kv_num_heads is 0, must be from 1 to 4"),
    (_attention_model, {"kv_num_heads": 8}, "kv_num_heads is 8, must be from 1 to 4"),
    (_attention_model, {"kv_num_heads": 3}, "kv_num_heads must divide num_heads"),
    (_attention_model, {"do_rotary": 2}, "do_rotary is 2, must be from 0 to 1"),
    (_attention_model, {"local_window_size": -2}, "local_window_size is -2, must be from -1 to 2147483647"),
    (_attention_model, {"local_window_size": 1 << 40}, "local_window_size is 1099511627776, must be"),
    *[
        (lambda: _product_model(INT8_LINEAR), {"step": step}, rf"step is {shown}, must be from 1.52588e-05 to 1")
        for step, shown in ((0.0, "0"), (-0.5, "-0.5"), (1e-30, "1e-30"), (2.0, "2"), (_NAN, "nan"), (_INF, "inf"))
    ],
    *[
        (lambda: _product_model(INT8_LINEAR), {"zero": zero}, f"zero is {zero}, must be from 0 to 255")
        for zero in (-1, 256, (1 << 32) + 128)  # in 32 bits, the last is 128
    ],
    *[
        (lambda: _product_model(INT8_LINEAR), {"K": inner}, f"K is {inner}, must be from 1 to 65536")
        for inner in (0, -64, _MOST_ROWS + 1, (1 << 63) - 1)
    ],
    (lambda: _product_model(INT8_LINEAR), {"K": 68}, r"panels must be \[ceil\(N / 32\), ceil\(K / 4\), 32, 4\]"),
    (lambda: _product_model(INT8_LINEAR), {"K": 63}, "panels must be zero past K"),
    *[
        (lambda: _product_model(INT4_LINEAR), {"K": inner}, f"K is {inner}, must be from 32 to 2147483647")
        for inner in (0, -64, 1 << 40)
    ],
    (lambda: _product_model(INT4_LINEAR), {"K": 33}, "K must be a multiple of 32"),
    *[
        (lambda: _product_model(INT4_LINEAR), {"N": outer}, f"N is {outer}, must be from 1 to 2147483647")
        for outer in (0, -40, (1 << 63) - 1)
    ],
    *[
        (lambda kind=kind: _norm_model(kind), {"epsilon": epsilon}, rf"epsilon is {epsilon:g}, must be from 0 to")
        for kind in (ADD_RMS_NORM, ADD_LAYER_NORM)
        for epsilon in (-1.0, _NAN, _INF)
    ],
]


@pytest.mark.parametrize(("make", "attributes", "message"), _ATTRIBUTES, ids=[each[2] for each in _ATTRIBUTES])
def test_attributes_out_of_range_are_refused_when_a_session_is_created(
    make: Callable[[], onnx.ModelProto], attributes: Mapping[str, float], message: str
) -> None:
    model = make()
    open_session(model, by_kernels=True)
    with pytest.raises(Exception, match=message):
        open_session(_changed(model, **attributes), by_kernels=True)


@pytest.mark.parametrize(
    ("change", "message"), [({"K": 32}, "rows must be K numbers wide"), ({"N": 41 + 16}, r"panels must be \[ceil")]
)
def test_int4_attributes_that_do_not_fit_the_panels_are_refused(change: Mapping[str, int], message: str) -> None:
    session = open_session(_changed(_product_model(INT4_LINEAR), **change), by_kernels=True)
    with pytest.raises(Exception, match=message):
        session.run(None, {"x": np.ones((2, 64), np.float32)})


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("count", "last", "message"),
    [
        (1, [-2, 3], "seqlens_k must be within the cache"),
        (1, [3, -(1 << 31)], "seqlens_k must be within the cache"),
        (1, [16, 3], "seqlens_k must be within the cache"),
        (0, [3, 16], "seqlens_k must be within the cache"),
        (0, [(1 << 31) - 2, 3], "seqlens_k must be within the cache"),
    ],
)
def test_lengths_past_a_cache_are_refused_of_a_source_too(
    int8: bool, count: int, last: Sequence[int], message: str
) -> None:
    """`count` 0: nothing is appended, as of a source."""
    attention = AttentionCase(4, 2, 64, rotary=False, packed=False, int8=int8)
    query, *_ = attention.new_tokens(2, 1)
    keys = np.zeros((2, count, 128), np.float32)
    with pytest.raises(Exception, match=message):
        attention.run(attention.own, (query, keys, keys), attention.cache(2, 16), last)


def test_keys_without_values_are_refused() -> None:
    attention = AttentionCase(4, 2, 64, rotary=False, packed=False)
    model = onnx.ModelProto()
    model.CopyFrom(attention.own_model)
    model.graph.node[0].input[2] = ""
    with pytest.raises(Exception, match="key and value must both be given or neither"):
        attention.run(open_session(model, by_kernels=True), attention.new_tokens(1, 1), attention.cache(1, 16), [3])


@pytest.mark.parametrize("leaves_weights", [False, True])
def test_weights_that_are_not_aligned_to_their_numbers_are_refused(leaves_weights: bool, tmp_path: Path) -> None:
    weight = np.ones((256, 256), np.float32)
    assert weight.nbytes >= _RESIDENT
    x = np.ones((2, 256), np.float32)
    node = helper.make_node(LINEAR, ["x", "weight"], ["y"], domain=DOMAIN)
    for offset, message in ((4096, None), (4097, "tensors must be aligned to their numbers")):
        model = model_of([node], {"x": x}, ["y"], {"weight": weight})
        (tensor,) = model.graph.initializer
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "weights", "offset": offset, "length": weight.nbytes}.items():
            tensor.external_data.add(key=key, value=str(value))
        (tmp_path / "weights").write_bytes(bytes(offset) + weight.tobytes())
        path = tmp_path / "linear.onnx"
        path.write_bytes(model.SerializeToString())
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry("session.disable_prepacking", str(int(leaves_weights)))
        register_kernels(options, model)
        if message is None:
            session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            assert (session.run(None, {"x": x})[0] == weight.sum(axis=1)).all()
        else:
            with pytest.raises(Exception, match=message):
                ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("zero", [0, 128, 255])
@pytest.mark.parametrize("weight", [-128, 127])
@pytest.mark.parametrize("sign", [-1, 1])
def test_int8_sums_are_exact_at_the_ends_of_all_ranges(zero: int, weight: int, sign: int) -> None:
    """65,536 products of the largest byte and the largest weight are what 32 bits hold."""
    model = int8_linear(_MOST_ROWS, PANEL_COLUMNS, np.random.default_rng(0))
    weights = np.full((_MOST_ROWS, PANEL_COLUMNS), weight, np.int8)
    weights[:, 1] = np.random.default_rng(1).integers(-128, 128, _MOST_ROWS)
    for tensor in model.graph.initializer:
        value = pack_panels(weights) if tensor.name == "panels" else np.ones(PANEL_COLUMNS, np.float32)
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    step = np.float32(1) / np.float32(255)
    model = _changed(model, zero=zero, step=float(step))
    x = np.full((3, _MOST_ROWS), sign, np.float32)
    (found,) = open_session(model, by_kernels=True).run(None, {"x": x})
    byte = min(max(255 * sign + zero, 0), 255)
    sums = (byte - zero) * weights.astype(np.int64).sum(axis=0)
    assert abs(sums[0]) < 1 << 31
    assert (found == sums.astype(np.float32) * step).all()
    (standard,) = open_session(model, by_kernels=False).run(None, {"x": x})
    assert found.tobytes() == standard.tobytes()


def _products_of(x: Float32, inner: int, kind: str) -> tuple[Float32, Float32]:
    """What kernels and standard operators give."""
    model = _product_model(kind, inner)
    found, standard = (open_session(model, by_kernels=each).run(None, {"x": x})[0] for each in (True, False))
    return found, standard


@pytest.mark.parametrize("kind", [LINEAR, INT8_LINEAR, INT4_LINEAR])
@pytest.mark.parametrize("inner", [64, 2048])
def test_rows_of_zeros_and_of_subnormal_numbers_are_what_functions_say(kind: str, inner: int) -> None:
    rng = np.random.default_rng(inner)
    x = np.zeros((4, inner), np.float32)
    x[1] = 1e-40
    x[2] = rng.choice([1e-45, -1e-45, 1.1e-38, 0], inner)
    x[3] = rng.standard_normal(inner) * rng.choice([1, 1e-42], inner)
    assert 0 < x[1, 0] < np.finfo(np.float32).tiny
    found, standard = _products_of(x, inner, kind)
    if kind == INT8_LINEAR:
        assert found.tobytes() == standard.tobytes()
    room = {LINEAR: 1e-6, INT8_LINEAR: 0, INT4_LINEAR: 2e-2}[kind] * np.abs(standard).max(axis=1, keepdims=True)
    # Rounded bytes lose what is 1e30 times smaller than one.
    assert (np.abs(found - standard) <= room + (1e-44 * inner if kind == LINEAR else 1e-36)).all()
    assert (found[0] == 0).all()


@pytest.mark.parametrize("kind", [LINEAR, INT8_LINEAR, INT4_LINEAR])
@pytest.mark.parametrize("infinities", [(_INF,), (-_INF,), (_INF, -_INF), (_INF, _NAN), (_NAN,)])
def test_rows_with_infinities_are_no_finite_number_and_no_others_affair(kind: str, infinities: Sequence[float]) -> None:
    """Rounded rows become NaN; a function of standard operators may give infinities, whose signs say nothing."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    alone, _ = _products_of(x, 64, kind)
    for row in (1, 3):
        x[row, rng.choice(64, len(infinities), replace=False)] = infinities
    found, standard = _products_of(x, 64, kind)
    assert not np.isfinite(found[[1, 3]]).any()
    # A function's largest number may pass over NaN.
    assert _NAN in infinities or not np.isfinite(standard[[1, 3]]).any()
    if kind != LINEAR:
        assert np.isnan(found[[1, 3]]).all()
    else:
        np.testing.assert_array_equal(np.sign(found[[1, 3]]), np.sign(standard[[1, 3]]))
    assert found[[0, 2, 4]].tobytes() == alone[[0, 2, 4]].tobytes()


@pytest.mark.parametrize("kind", [SWIGLU, ADD_RMS_NORM, ADD_LAYER_NORM])
def test_gates_and_norms_of_zeros_subnormals_and_infinities_are_what_functions_say(kind: str) -> None:
    x = np.zeros((6, 64), np.float32)
    x[1], x[2] = 1e-40, 1e-45
    x[3:] = np.random.default_rng(0).standard_normal((3, 64))
    x[3, 5], x[4, 40], x[5, 7] = _INF, -_INF, _NAN
    if kind == SWIGLU:
        node = helper.make_node(SWIGLU, ["x"], ["y"], domain=DOMAIN)
        model, feeds = model_of([node], {"x": x}, ["y"], {}), {"x": x}
    else:
        model, feeds = _norm_model(kind, 64), {"left": x, "right": np.zeros_like(x)}
    found, standard = (open_session(model, by_kernels=each).run(["y"], feeds)[0] for each in (True, False))
    np.testing.assert_allclose(found, standard, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(
    ("kv_heads", "dim", "count", "past", "window"),
    [(2, 64, 40, 8000, -1), (8, 128, 33, 8200, -1), (2, 64, 3, 16000, -1), (2, 64, 70, 5000, 700)],
)
@pytest.mark.parametrize("int8", [False, True])
def test_attention_to_long_contexts_is_onnx_runtimes_and_the_same_bits_decoded(
    kv_heads: int, dim: int, count: int, past: int, window: int, int8: bool
) -> None:
    """In several rounds where all heads' packed K is more than is held at a time."""
    length = past + count
    attention = AttentionCase(2 * kv_heads, kv_heads, dim, rotary=True, window=window, int8=int8, positions=length)
    (new,), cache = attention.new_tokens(1, count), attention.cache(1, length)
    found = attention.run(attention.own, [new], cache, [length - 1])
    expected = attention.run(attention.standard, [new], cache, [length - 1])
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5, atol=2e-5)
    # Turned by products and a sum, which round once or twice: what is halfway between two bytes may become either.
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1 if int8 else 1e-6)
    alone = attention.run(attention.own, [new[:, -1:]], (found[1], found[2]), [length - 1])
    assert alone[0].tobytes() == found[0][:, -1:].tobytes()


@pytest.mark.parametrize("int8", [False, True])
def test_attention_to_infinite_keys_and_by_infinite_queries_is_their_own_rows_affair(int8: bool) -> None:
    attention = AttentionCase(4, 2, 64, rotary=False, int8=int8)
    new, cache = attention.new_tokens(3, 20)[0], attention.cache(3, 40)
    expected, *_ = attention.run(attention.own, [new], cache, [39, 19, 30])
    new[1, 4] = _INF
    found, *_ = attention.run(attention.own, [new], cache, [39, 19, 30])
    assert found[[0, 2]].tobytes() == expected[[0, 2]].tobytes()
    assert found[1, :4].tobytes() == expected[1, :4].tobytes()
    assert not np.isfinite(found[1, 4]).any()


def _runs() -> list[tuple[str, onnx.ModelProto, dict[str, Array]]]:
    """A model of each kind with inputs that several threads share."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((150, 767)).astype(np.float32)
    runs: list[tuple[str, onnx.ModelProto, dict[str, Array]]] = [
        (kind, _product_model(kind, width, 701), {"x": np.ascontiguousarray(x[:, :width])})
        for kind, width in ((LINEAR, 767), (INT8_LINEAR, 767), (INT4_LINEAR, 736))
    ]
    sums: dict[str, Array] = {"left": x, "right": x[::-1].copy()}
    runs += [(kind, _norm_model(kind, 767), sums) for kind in (ADD_RMS_NORM, ADD_LAYER_NORM)]
    gate = helper.make_node(SWIGLU, ["x"], ["y"], domain=DOMAIN)
    runs.append((SWIGLU, model_of([gate], {"x": x}, ["y"], {}), {"x": np.concatenate([x, x[::-1]], axis=1)}))
    for int8 in (False, True):
        for batch, count, length in ((5, 1, 300), (2, 90, 400)):
            attention = AttentionCase(6, 2, 64, rotary=True, int8=int8, seed=batch)
            (new,), cache = attention.new_tokens(batch, count), attention.cache(batch, length)
            feeds: dict[str, Array] = {"query": new, "past_key": cache[0], "past_value": cache[1]}
            last = np.array([length - 1 - 7 * row for row in range(batch)], np.int32)
            feeds |= {"last": last, "total": np.array(length, np.int32)}
            runs.append((f"{ATTENTION} {int8} {count}", attention.own_model, feeds))
    return runs


def _bits(session: ort.InferenceSession, feeds: Mapping[str, Array]) -> list[bytes]:
    return [output.tobytes() for output in session.run(None, dict(feeds))]


def test_every_operator_gives_the_same_bits_by_any_number_of_threads() -> None:
    for name, model, feeds in _runs():
        alone = _bits(open_session(model, by_kernels=True, threads=1), feeds)
        for threads in (3, 4, 8):
            assert _bits(open_session(model, by_kernels=True, threads=threads), feeds) == alone, f"{name}, {threads}"


def test_sessions_that_compute_at_once_give_the_bits_of_each_alone() -> None:
    """Four callers, of which two share each session; what a kernel keeps between calls is its caller's."""
    runs = _runs()
    expected = [_bits(open_session(model, by_kernels=True), feeds) for _, model, feeds in runs]
    sessions = [[open_session(model, by_kernels=True, threads=4) for _, model, _ in runs] for _ in range(2)]
    together = Barrier(4)

    def call(caller: int) -> list[str]:
        together.wait(timeout=60)
        order = np.random.default_rng(caller).permutation(len(runs))
        return [runs[i][0] for i in order if _bits(sessions[caller % 2][i], runs[i][2]) != expected[i]]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(4))) == [[]] * 4


def test_packed_keys_of_a_long_context_take_bounded_memory() -> None:
    """16 heads of 8,192 keys are 64 MiB of packed K; 32 MiB are held at a time."""
    attention = AttentionCase(16, 16, 128, rotary=False, int8=True)
    length = 8192
    cache = attention.cache(1, length)
    one, some = attention.new_tokens(1, 1), attention.new_tokens(1, 16)
    with ThreadPoolExecutor(1) as pool:  # a thread that has packed nothing yet

        def resident(new: Sequence[Float32]) -> int:
            pool.submit(attention.run, attention.own, new, cache, [length - 1]).result()
            return _resident_bytes()

        before = resident(one)
        assert resident(some) - before < 48 << 20


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
