"""The project's own operators, domain `onward`: each is defined by a function of standard operators in the graph.

Where a kernel exists (`model.kernels`), it computes the node. Elsewhere ONNX Runtime expands the node to the function's
nodes, and computes what depends on weights alone once, at load time. One file thus runs everywhere.

    Linear(rows [..., K], weight [N, K]) → [..., N]
        Rows times a float32 matrix in PyTorch's layout.

    Int8Linear(rows [..., K], panels, scales [N]) → [..., N]
        Rows times an int8 matrix. Each row is quantized to bytes with a scale of its own:

            scale = max(max |x|, tiny) · step        byte = round(x / scale) + zero
            y = Σ (byte - zero) · weight · column scale · scale

        `panels` `[⌈N / 32⌉, ⌈K / 4⌉, 32, 4] int8` is the matrix `[K, N]` in panels of 32 columns, four rows of K
        adjacent, padded with zeros. Kernel and function give the same bits.

    Int4Linear(rows [..., K], panels, scales) → [..., N]
        Rows times a matrix of four bits per weight, in blocks of 32 along K. Its function is `MatMulNBits`,
        which quantizes rows block by block; the kernel quantizes whole rows, to signed bytes:

            y = Σ over blocks (Σ byte · (code - 8) · block scale) · scale

        `panels` `[⌈N / 16⌉, K / 32, 4, 16, 4] uint8` has column n's code of k = 32 b + 8 i + j at
        `[n / 16, b, i, n % 16, j]` in the low bits, that of k + 4 in the high ones; `scales`, in float16, are
        `[⌈N / 16⌉, K / 32, 16]`. Columns past N are zeros.

    BiasedLinear, BiasedInt8Linear, BiasedInt4Linear
        The same with one more input, a bias `[N]`, which is added last.

    LinearGelu, BiasedLinearGelu, Int8LinearGelu and so on
        Any of these six followed by GELU in its tanh approximation.

    SwiGLU(rows [..., 2 F]) → [..., F]
        silu(gate) · up of each row's first and second half (Shazeer, 2020).

    Int8LinearSwiGLU, BiasedInt8LinearSwiGLU, Int4LinearSwiGLU, BiasedInt4LinearSwiGLU
        Any of these four followed by SwiGLU; half of N is a whole number of panels.

    AddRMSNorm(left, right, weight), AddLayerNorm(left, right, weight, bias) → left + right, and its norm
        The end of one residual block and the norm that begins the next.

    GroupQueryAttention(query, key?, value?, past_key, past_value, last, total, cosines?, sines?)
            → output, present_key, present_value
        The operator of this name of `com.microsoft` with float32 K/V; that is also its function.

    Int8CacheAttention(query, key?, value?, past_key, past_value, last, total, cosines?, sines?, sinks?,
                       key_scales [1, Hkv, 1, D], value_scales) → output, present_key, present_value
        The same over int8 K/V with a scale per channel. Kernel and function quantize new K/V alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

DOMAIN = "onward"
CONTRIB = "com.microsoft"
LINEAR = "Linear"
INT8_LINEAR = "Int8Linear"
INT4_LINEAR = "Int4Linear"
BIASED = "Biased"
"""Prefix of an operator's name with a bias."""
GELU = "Gelu"
"""Suffix of an operator's name followed by GELU."""
ATTENTION = "GroupQueryAttention"
INT8_ATTENTION = "Int8CacheAttention"
SWIGLU = "SwiGLU"
ADD_RMS_NORM = "AddRMSNorm"
ADD_LAYER_NORM = "AddLayerNorm"

PANEL_COLUMNS = 32
GROUP_ROWS = 4
INT4_PANEL_COLUMNS = 16
INT4_BLOCK = 32
HEAD_DIM_MULTIPLE = 16
"""Head widths of attention by the project's own operator are multiples of this."""
LEAST_PEAK = np.float32(1e-30)
"""Lower bound of a row's largest magnitude: a row of zeros stays zero without a division by zero."""

_VERSION = 1
# The end of an unbounded slice.
_END = np.iinfo(np.int64).max
# Inputs of the contrib operator, by its own names.
ATTENTION_INPUTS = (
    "query",
    "key",
    "value",
    "past_key",
    "past_value",
    "seqlens_k",
    "total_sequence_length",
    "cos_cache",
    "sin_cache",
)
UNUSED_INPUTS = ("position_ids", "attention_bias")
INT8_INPUTS = ("head_sink", "k_scale", "v_scale")
ATTENTION_OUTPUTS = ("output", "present_key", "present_value")
ATTENTION_ATTRIBUTES = ("num_heads", "kv_num_heads", "do_rotary", "local_window_size")
_EIGHT_BIT_ROWS = 4  # accuracy level
INT8_ATTRIBUTES: dict[str, Any] = {
    "k_quant_type": b"PER_CHANNEL",
    "v_quant_type": b"PER_CHANNEL",
    "kv_cache_bit_width": 8,
}
LINEARS = frozenset(f"{bias}{kind}" for bias in ("", BIASED) for kind in (LINEAR, INT8_LINEAR, INT4_LINEAR))
GATED_COLUMNS = {
    f"{bias}{kind}": 2 * columns
    for bias in ("", BIASED)
    for kind, columns in ((INT8_LINEAR, PANEL_COLUMNS), (INT4_LINEAR, INT4_PANEL_COLUMNS))
}
"""The products that take SwiGLU in, and what their columns must be a multiple of."""


def pack_panels(weight: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """A matrix `[K, N]` as the panels of `Int8Linear`, `[⌈N / 32⌉, ⌈K / 4⌉, 32, 4]`."""
    inner, outer = weight.shape
    padded = np.pad(weight, [(0, -inner % GROUP_ROWS), (0, -outer % PANEL_COLUMNS)])
    groups = padded.reshape(-1, GROUP_ROWS, padded.shape[1] // PANEL_COLUMNS, PANEL_COLUMNS)
    return np.ascontiguousarray(groups.transpose(2, 0, 3, 1))


def pack_int4_panels(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes `[N, K / 32, 32]` of 0 to 15 as the panels of `Int4Linear`, `[⌈N / 16⌉, K / 32, 4, 16, 4]`."""
    outer, num_blocks, _ = codes.shape
    padded = np.pad(codes, [(0, -outer % INT4_PANEL_COLUMNS), (0, 0), (0, 0)])
    pairs = padded.reshape(-1, INT4_PANEL_COLUMNS, num_blocks, 4, 2, 4)
    both: npt.NDArray[np.uint8] = pairs[..., 0, :] | np.left_shift(pairs[..., 1, :], np.uint8(4))
    return np.ascontiguousarray(both.transpose(0, 2, 3, 1, 4))


def pack_int4_scales(scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """Scales `[N, K / 32]` as those of `Int4Linear`, `[⌈N / 16⌉, K / 32, 16]`."""
    outer, num_blocks = scales.shape
    padded = np.pad(scales, [(0, -outer % INT4_PANEL_COLUMNS), (0, 0)])
    panels = padded.reshape(-1, INT4_PANEL_COLUMNS, num_blocks).transpose(0, 2, 1)
    return np.ascontiguousarray(panels).astype(np.float16)


def add_functions(model: onnx.ModelProto) -> None:
    """Adds the functions of the operators of `DOMAIN` that a model uses and lacks."""
    used = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    known = {function.name for function in model.functions if function.domain == DOMAIN}
    for name in sorted(used - known):
        function = _function_of(name)
        function.opset_import.extend(opset for opset in model.opset_import if not opset.domain)
        model.functions.append(function)
    domains = {opset.domain for opset in model.opset_import}
    wanted = {DOMAIN: _VERSION, CONTRIB: 1} if used else {}
    model.opset_import.extend(
        helper.make_opsetid(domain, version) for domain, version in wanted.items() if domain not in domains
    )
    # ONNX infers no types of `CONTRIB`'s outputs, and checks no function with untyped inputs.
    typed = {value.name for value in (*model.graph.output, *model.graph.value_info)}
    model.graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.INT8 if is_cache else TensorProto.FLOAT, None)
        for node in model.graph.node
        if used and node.domain in (DOMAIN, CONTRIB)
        for index, name in enumerate(node.output)
        for is_cache in [node.op_type == INT8_ATTENTION and index > 0]
        if name and name not in typed
    )


def _function_of(name: str) -> onnx.FunctionProto:
    for suffix, make_follower in _FOLLOWERS.items():
        if (kind := name.removesuffix(suffix)) in LINEARS and kind != name:
            return _followed(_FUNCTIONS[kind](), suffix, make_follower())
    return _FUNCTIONS[name]()


def _int8_linear(*, is_biased: bool) -> onnx.FunctionProto:
    constants = {
        "one": np.float32(1),
        "least_peak": LEAST_PEAK,
        "first": np.array([0], np.int64),
        "second": np.array([1], np.int64),
        "last": np.array([-1], np.int64),
        "end": np.array([_END], np.int64),
    }
    body = [
        *(_constant(name, value) for name, value in constants.items()),
        _attribute("step", "float"),
        _attribute("zero", "int"),
        _attribute("K", "int"),
        # Rows to bytes.
        helper.make_node("Flatten", ["rows"], ["flat"], axis=-1),
        helper.make_node("Abs", ["flat"], ["magnitudes"]),
        helper.make_node("ReduceMax", ["magnitudes", "second"], ["peaks"], keepdims=0),
        helper.make_node("Max", ["peaks", "least_peak"], ["positive_peaks"]),
        helper.make_node("Mul", ["positive_peaks", "step"], ["row_scales"]),
        helper.make_node("Cast", ["zero"], ["zero_byte"], to=TensorProto.UINT8),
        helper.make_node("Shape", ["row_scales"], ["num_rows"]),
        helper.make_node("Expand", ["zero_byte", "num_rows"], ["zeros"]),
        helper.make_node("QuantizeLinear", ["flat", "row_scales", "zeros"], ["bytes"], axis=0),
        # Panels to a matrix.
        helper.make_node("Transpose", ["panels"], ["groups"], perm=[1, 3, 0, 2]),
        helper.make_node("Flatten", ["groups"], ["padded"], axis=2),
        helper.make_node("Shape", ["scales"], ["num_columns"]),
        helper.make_node("Unsqueeze", ["K", "first"], ["height"]),
        helper.make_node("Concat", ["height", "num_columns"], ["ends"], axis=0),
        helper.make_node("Concat", ["first", "first"], ["starts"], axis=0),
        helper.make_node("Slice", ["padded", "starts", "ends"], ["weight"]),
        # The operator takes a single scale for all rows; multiply by theirs afterwards.
        helper.make_node(
            "MatMulIntegerToFloat", ["bytes", "weight", "one", "scales", "zero_byte"], ["sums"], domain=CONTRIB
        ),
        helper.make_node("Unsqueeze", ["row_scales", "second"], ["column_of_scales"]),
        helper.make_node("Mul", ["sums", "column_of_scales"], ["products"]),
        helper.make_node("Shape", ["rows"], ["shape"]),
        helper.make_node("Slice", ["shape", "first", "last"], ["leading"]),
        helper.make_node("Concat", ["leading", "num_columns"], ["new_shape"], axis=0),
        # There may be no row, as after the last attention of a step without requested logits.
        helper.make_node("Reshape", ["products", "new_shape"], [_product(is_biased)], allowzero=1),
    ]
    return _product_function(
        INT8_LINEAR, ["rows", "panels", "scales"], body, ["step", "zero", "K"], is_biased=is_biased
    )


def _linear(*, is_biased: bool) -> onnx.FunctionProto:
    body = [
        helper.make_node("Transpose", ["weight"], ["matrix"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "matrix"], [_product(is_biased)]),
    ]
    return _product_function(LINEAR, ["rows", "weight"], body, [], is_biased=is_biased)


def _int4_linear(*, is_biased: bool) -> onnx.FunctionProto:
    constants = {
        "low_bits": np.uint8(15),
        "four": np.uint8(4),
        "first": np.array([0], np.int64),
        "even": np.array(0, np.int64),
        "odd": np.array(1, np.int64),
        "high_axis": np.array([4], np.int64),
        "minus_one": np.array([-1], np.int64),
        "pairs_of_codes": np.array([INT4_BLOCK // 2, 2], np.int64),
    }
    body = [
        *(_constant(name, value) for name, value in constants.items()),
        _attribute("N", "int"),
        # Panels to bytes of neighbors along K, as `MatMulNBits` has them: [N, K / 32, 16].
        helper.make_node("BitwiseAnd", ["panels", "low_bits"], ["low"]),
        helper.make_node("BitShift", ["panels", "four"], ["high"], direction="RIGHT"),
        helper.make_node("Unsqueeze", ["low", "high_axis"], ["low_half"]),
        helper.make_node("Unsqueeze", ["high", "high_axis"], ["high_half"]),
        helper.make_node("Concat", ["low_half", "high_half"], ["halves"], axis=4),
        helper.make_node("Transpose", ["halves"], ["columns"], perm=[0, 3, 1, 2, 4, 5]),
        helper.make_node("Flatten", ["columns"], ["flat_columns"], axis=2),
        helper.make_node("Shape", ["scales"], ["scales_shape"], start=1, end=2),
        helper.make_node("Concat", ["minus_one", "scales_shape", "pairs_of_codes"], ["codes_shape"], axis=0),
        helper.make_node("Reshape", ["flat_columns", "codes_shape"], ["codes"]),
        helper.make_node("Gather", ["codes", "even"], ["even_codes"], axis=3),
        helper.make_node("Gather", ["codes", "odd"], ["odd_codes"], axis=3),
        helper.make_node("BitShift", ["odd_codes", "four"], ["raised_codes"], direction="LEFT"),
        helper.make_node("BitwiseOr", ["even_codes", "raised_codes"], ["all_bytes"]),
        helper.make_node("Unsqueeze", ["N", "first"], ["num_columns"]),
        helper.make_node("Slice", ["all_bytes", "first", "num_columns"], ["bytes"]),
        # And the scales: [N, K / 32].
        helper.make_node("Cast", ["scales"], ["float_scales"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["float_scales"], ["scale_columns"], perm=[0, 2, 1]),
        helper.make_node("Concat", ["minus_one", "scales_shape"], ["all_scales_shape"], axis=0),
        helper.make_node("Reshape", ["scale_columns", "all_scales_shape"], ["all_scales"]),
        helper.make_node("Slice", ["all_scales", "first", "num_columns"], ["block_scales"]),
    ]
    inputs, output = ["rows", "bytes", "block_scales"], _product(is_biased)
    product = helper.make_node("MatMulNBits", inputs, [output], domain=CONTRIB)
    fixed = {"bits": 4, "block_size": INT4_BLOCK, "accuracy_level": _EIGHT_BIT_ROWS}
    product.attribute.extend(helper.make_attribute(name, value) for name, value in fixed.items())
    product.attribute.extend(_reference(name, name, onnx.AttributeProto.INT) for name in ("K", "N"))
    return _product_function(
        INT4_LINEAR, ["rows", "panels", "scales"], [*body, product], ["K", "N"], is_biased=is_biased
    )


def _product(is_biased: bool) -> str:  # noqa: FBT001 (it has no other argument)
    """The tensor that a bias is added to, in a product's function."""
    return "unbiased" if is_biased else "output"


def _product_function(
    name: str, inputs: Sequence[str], body: Sequence[onnx.NodeProto], attributes: Sequence[str], *, is_biased: bool
) -> onnx.FunctionProto:
    if not is_biased:
        return _function(name, inputs, ["output"], body, attributes)
    add = helper.make_node("Add", ["unbiased", "bias"], ["output"])
    return _function(f"{BIASED}{name}", [*inputs, "bias"], ["output"], [*body, add], attributes)


def _followed(product: onnx.FunctionProto, suffix: str, follower: Sequence[onnx.NodeProto]) -> onnx.FunctionProto:
    """The function of a product followed by nodes from `linear` to `output`."""
    for node in product.node:
        node.output[:] = ["linear" if name == "output" else name for name in node.output]
    product.node.extend(follower)
    product.name += suffix
    return product


def _gelu() -> list[onnx.NodeProto]:
    return [helper.make_node(GELU, ["linear"], ["output"], approximate="tanh")]


def _swiglu(rows: str = "linear") -> list[onnx.NodeProto]:
    return [
        helper.make_node("Split", [rows], ["gate", "up"], axis=-1, num_outputs=2),
        helper.make_node("Sigmoid", ["gate"], ["opening"]),
        helper.make_node("Mul", ["gate", "opening"], ["silu"]),
        helper.make_node("Mul", ["silu", "up"], ["output"]),
    ]


def _swiglu_function() -> onnx.FunctionProto:
    return _function(SWIGLU, ["rows"], ["output"], _swiglu("rows"), [])


def _add_norm_function(kind: str, norm: str, weights: Sequence[str]) -> onnx.FunctionProto:
    node = helper.make_node(norm, ["sum", *weights], ["normed"], axis=-1)
    node.attribute.append(_reference("epsilon", "epsilon", onnx.AttributeProto.FLOAT))
    body = [helper.make_node("Add", ["left", "right"], ["sum"]), node]
    return _function(kind, ["left", "right", *weights], ["sum", "normed"], body, ["epsilon"])


def _attention() -> onnx.FunctionProto:
    return _attention_function(ATTENTION, ATTENTION_INPUTS, ATTENTION_INPUTS, {})


def _int8_attention() -> onnx.FunctionProto:
    inputs = [*ATTENTION_INPUTS, *INT8_INPUTS]
    given = [*ATTENTION_INPUTS, *[""] * len(UNUSED_INPUTS), *INT8_INPUTS]
    return _attention_function(INT8_ATTENTION, inputs, given, INT8_ATTRIBUTES)


def _attention_function(
    name: str, inputs: Sequence[str], given: Sequence[str], constants: Mapping[str, Any]
) -> onnx.FunctionProto:
    node = helper.make_node(ATTENTION, list(given), list(ATTENTION_OUTPUTS), domain=CONTRIB, **constants)
    node.attribute.extend(_reference(each, each, onnx.AttributeProto.INT) for each in ATTENTION_ATTRIBUTES)
    return _function(name, inputs, ATTENTION_OUTPUTS, [node], ATTENTION_ATTRIBUTES)


_FOLLOWERS: Mapping[str, Callable[[], list[onnx.NodeProto]]] = {GELU: _gelu, SWIGLU: _swiglu}
_FUNCTIONS: Mapping[str, Callable[[], onnx.FunctionProto]] = {
    LINEAR: partial(_linear, is_biased=False),
    INT8_LINEAR: partial(_int8_linear, is_biased=False),
    INT4_LINEAR: partial(_int4_linear, is_biased=False),
    f"{BIASED}{LINEAR}": partial(_linear, is_biased=True),
    f"{BIASED}{INT8_LINEAR}": partial(_int8_linear, is_biased=True),
    f"{BIASED}{INT4_LINEAR}": partial(_int4_linear, is_biased=True),
    ATTENTION: _attention,
    INT8_ATTENTION: _int8_attention,
    SWIGLU: _swiglu_function,
    ADD_RMS_NORM: partial(_add_norm_function, ADD_RMS_NORM, "RMSNormalization", ["weight"]),
    ADD_LAYER_NORM: partial(_add_norm_function, ADD_LAYER_NORM, "LayerNormalization", ["weight", "bias"]),
}


def _function(
    name: str, inputs: Sequence[str], outputs: Sequence[str], body: Iterable[onnx.NodeProto], attributes: Sequence[str]
) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid(CONTRIB, 1)]  # the opset of standard operators is the model's
    return helper.make_function(DOMAIN, name, list(inputs), list(outputs), list(body), opsets, list(attributes))


def _constant(name: str, value: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value)))


def _attribute(name: str, kind: str) -> onnx.NodeProto:
    """The function's attribute of this name as a tensor of this name."""
    node = helper.make_node("Constant", [], [name])
    types: dict[str, Any] = {"float": onnx.AttributeProto.FLOAT, "int": onnx.AttributeProto.INT}
    node.attribute.append(_reference(f"value_{kind}", name, types[kind]))
    return node


def _reference(name: str, attribute: str, kind: Any) -> onnx.AttributeProto:
    return onnx.AttributeProto(name=name, ref_attr_name=attribute, type=kind)
