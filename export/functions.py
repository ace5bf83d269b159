"""The functions of standard operators that define the project's own operators (`export.operators`) in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.operators import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    ATTENTION,
    ATTENTION_ATTRIBUTES,
    ATTENTION_INPUTS,
    ATTENTION_OUTPUTS,
    BF16_GATHER,
    BF16_LINEAR,
    BIASED,
    CONTRIB,
    DOMAIN,
    GATHER,
    GELU,
    INT4_GATHER,
    INT4_LINEAR,
    INT8_ATTENTION,
    INT8_ATTRIBUTES,
    INT8_GATHER,
    INT8_INPUTS,
    INT8_LINEAR,
    LEAST_PEAK,
    LINEAR,
    LINEARS,
    PRODUCTS,
    SWIGLU,
    UNUSED_INPUTS,
)
from export.panels import GROUP_ROWS, INT4_BLOCK, INT4_PANEL_COLUMNS, INT4_ZERO, PANEL_COLUMNS

_VERSION = 1
# The end of an unbounded slice.
_END = np.iinfo(np.int64).max
_EIGHT_BIT_ROWS = 4  # accuracy level


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


def _bf16_linear(*, is_biased: bool) -> onnx.FunctionProto:
    body = [
        helper.make_node("Cast", ["weight"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["wide"], ["matrix"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "matrix"], [_product(is_biased)]),
    ]
    return _product_function(BF16_LINEAR, ["rows", "weight"], body, [], is_biased=is_biased)


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


def _gather(kind: str) -> onnx.FunctionProto:
    wide = [helper.make_node("Cast", ["numbers"], ["output"], to=TensorProto.FLOAT)] if kind == BF16_GATHER else []
    body = [helper.make_node("Gather", ["weight", "ids"], ["numbers" if wide else "output"], axis=0), *wide]
    return _function(kind, ["ids", "weight"], ["output"], body, [])


def _gather_codes(panel_columns: int, axis: int, groups: Sequence[int], codes: str) -> list[onnx.NodeProto]:
    """Nodes that find the `codes` of each id in `panels`, whose columns are along `axis`; nothing of them is folded.

    `groups` are the dimensions of a panel's columns and what follows them, with 1 for the columns.
    """
    constants = {
        "first": np.array([0], np.int64),
        "second": np.array([1], np.int64),
        "minus_one": np.array([-1], np.int64),
        "panel_columns": np.array(panel_columns, np.int64),
        "beside_panels": np.array([-1, *[1] * axis, *[1] * (len(groups) - 1)], np.int64),
        "groups": np.array(groups, np.int64),
    }
    return [
        *(_constant(name, value) for name, value in constants.items()),
        _attribute("K", "int"),
        helper.make_node("Unsqueeze", ["K", "first"], ["width"]),
        helper.make_node("Shape", ["ids"], ["shape"]),
        helper.make_node("Concat", ["shape", "width"], ["new_shape"], axis=0),
        helper.make_node("Reshape", ["ids", "minus_one"], ["columns"]),
        helper.make_node("Div", ["columns", "panel_columns"], ["numbers_of_panels"]),
        helper.make_node("Mod", ["columns", "panel_columns"], ["places"]),
        helper.make_node("Gather", ["panels", "numbers_of_panels"], ["some"], axis=0),
        helper.make_node("Reshape", ["places", "beside_panels"], ["place"]),
        helper.make_node("Shape", ["some"], ["leading"], start=0, end=axis),
        helper.make_node("Concat", ["leading", "groups"], ["places_shape"], axis=0),
        helper.make_node("Expand", ["place", "places_shape"], ["all_places"]),
        helper.make_node("GatherElements", ["some", "all_places"], [codes], axis=axis),
    ]


def _int8_gather() -> onnx.FunctionProto:
    body = [
        *_gather_codes(PANEL_COLUMNS, 2, (1, GROUP_ROWS), "codes"),
        helper.make_node("Flatten", ["codes"], ["padded"], axis=1),
        helper.make_node("Slice", ["padded", "first", "width", "second"], ["bytes"]),
        helper.make_node("Cast", ["bytes"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Gather", ["scales", "columns"], ["steps"], axis=0),
        helper.make_node("Unsqueeze", ["steps", "second"], ["step"]),
        helper.make_node("Mul", ["numbers", "step"], ["products"]),
        helper.make_node("Reshape", ["products", "new_shape"], ["output"], allowzero=1),
    ]
    return _function(INT8_GATHER, ["ids", "panels", "scales"], ["output"], body, ["K"])


def _int4_gather() -> onnx.FunctionProto:
    constants = {
        "low_bits": np.uint8(15),
        "four": np.uint8(4),
        "zero_point": np.float32(INT4_ZERO),
        "behind": np.array([1, 2], np.int64),
    }
    body = [
        *(_constant(name, value) for name, value in constants.items()),
        *_gather_codes(INT4_PANEL_COLUMNS, 3, (1, 4), "bytes"),
        helper.make_node("BitwiseAnd", ["bytes", "low_bits"], ["low"]),
        helper.make_node("BitShift", ["bytes", "four"], ["high"], direction="RIGHT"),
        helper.make_node("Concat", ["low", "high"], ["halves"], axis=3),
        helper.make_node("Flatten", ["halves"], ["codes"], axis=2),
        helper.make_node("Cast", ["codes"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["numbers", "zero_point"], ["steps"]),
        # Scales `[⌈N / 16⌉, K / 32, 16]`.
        helper.make_node("Gather", ["scales", "numbers_of_panels"], ["some_scales"], axis=0),
        helper.make_node("Shape", ["some_scales"], ["blocks"], start=0, end=2),
        helper.make_node("Concat", ["blocks", "second"], ["scales_shape"], axis=0),
        helper.make_node("Unsqueeze", ["places", "behind"], ["place_of_scale"]),
        helper.make_node("Expand", ["place_of_scale", "scales_shape"], ["scale_places"]),
        helper.make_node("GatherElements", ["some_scales", "scale_places"], ["halves_of_scales"], axis=2),
        helper.make_node("Cast", ["halves_of_scales"], ["float_scales"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["float_scales"], ["step"], axis=2),
        helper.make_node("Mul", ["steps", "step"], ["products"]),
        helper.make_node("Reshape", ["products", "new_shape"], ["output"], allowzero=1),
    ]
    return _function(INT4_GATHER, ["ids", "panels", "scales"], ["output"], body, ["K", "N"])


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
_PRODUCTS = dict(zip(PRODUCTS, (_linear, _bf16_linear, _int8_linear, _int4_linear), strict=True))
_FUNCTIONS: Mapping[str, Callable[[], onnx.FunctionProto]] = {
    **{
        f"{prefix}{kind}": partial(function, is_biased=bool(prefix))
        for prefix in ("", BIASED)
        for kind, function in _PRODUCTS.items()
    },
    GATHER: partial(_gather, GATHER),
    BF16_GATHER: partial(_gather, BF16_GATHER),
    INT8_GATHER: _int8_gather,
    INT4_GATHER: _int4_gather,
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
