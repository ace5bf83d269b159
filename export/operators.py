"""The project's own operators, domain `onward`: each with its meaning in standard ones, as a function in the graph.

A processor that a kernel exists for computes a node by it (`model.kernels`). Everywhere else, and in any program that
reads ONNX, the node is what its function says: ONNX Runtime puts the function's nodes in its place and computes what
depends on weights alone once, when it loads. So one file is as fast as the machine allows and runs on all.

    Linear(rows [..., K], weight [N, K]) → [..., N]
        Rows times a matrix in float32, which lies as PyTorch has it.

    Int8Linear(rows [..., K], panels, scales [N]) → [..., N]
        Rows times a matrix of bytes. Rows are rounded to bytes, each with a scale of its own:

            scale = max(max |x|, tiny) · step        byte = round(x / scale) + zero
            y = Σ (byte - zero) · weight · column scale · scale

        `panels` `[⌈N / 32⌉, ⌈K / 4⌉, 32, 4] int8` is the matrix `[K, N]` as a processor reads it: 32 columns together,
        of which four rows lie together, zeros where the matrix ends. Kernel and function give the same bits.

    Int4Linear(rows [..., K], panels, scales) → [..., N]
        Rows times a matrix of four bits a weight, in blocks of 32 along K. Its function is `MatMulNBits`,
        which rounds rows block by block; the kernel rounds them as a whole, to signed bytes:

            y = Σ over blocks (Σ byte · (code - 8) · block scale) · scale

        `panels` `[⌈N / 16⌉, K / 32, 4, 16, 4] uint8` has column n's code of k = 32 b + 8 i + j at
        `[n / 16, b, i, n % 16, j]` in the low bits, that of k + 4 in the high ones; `scales`, in float16, are
        `[⌈N / 16⌉, K / 32, 16]`. Columns past N are zeros.

    BiasedLinear, BiasedInt8Linear, BiasedInt4Linear
        The same with one more input, a bias `[N]`, which is added last.

    LinearGelu, BiasedLinearGelu, Int8LinearGelu and so on
        Any of these six, and then GELU of what comes out, by its approximation with tanh.

    SwiGLU(rows [..., 2 F]) → [..., F]
        silu(gate) · up of each row's first and second half (Shazeer, 2020).

    AddRMSNorm(left, right, weight), AddLayerNorm(left, right, weight, bias) → left + right, and the norm of that
        The end of one residual block and the norm that opens the next.

    GroupQueryAttention(query, key?, value?, past_key, past_value, last, total, cosines?, sines?)
            → output, present_key, present_value
        The operator of this name of `com.microsoft`, with float32 K/V, and that is its function.

    Int8CacheAttention(query, key?, value?, past_key, past_value, last, total, cosines?, sines?, sinks?,
                       key_scales [1, Hkv, 1, D], value_scales) → output, present_key, present_value
        The same over K/V in int8, each channel with a scale. Kernel and function round new K/V alike.

Knows ONNX and no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
"""What begins the name of each of these where a bias is added."""
GELU = "Gelu"
"""What ends the name where GELU follows, with a bias or without."""
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
"""How wide heads must be a multiple of for attention by the project's own operator."""
LEAST_PEAK = np.float32(1e-30)
"""What a row's largest magnitude counts as at least: a row of zeros stays one, and nothing divides by zero."""

_VERSION = 1
# Past every length: where a slice has no end.
_END = np.iinfo(np.int64).max
# Inputs of the contrib operator, by its own names.
_ATTENTION_INPUTS = (
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
_UNUSED_INPUTS = ("position_ids", "attention_bias")
_INT8_INPUTS = ("head_sink", "k_scale", "v_scale")
_ATTENTION_OUTPUTS = ("output", "present_key", "present_value")
_ATTENTION_ATTRIBUTES = ("num_heads", "kv_num_heads", "do_rotary", "local_window_size")
_EIGHT_BIT_ROWS = 4  # an accuracy level
_INT8_ATTRIBUTES: dict[str, Any] = {
    "k_quant_type": b"PER_CHANNEL",
    "v_quant_type": b"PER_CHANNEL",
    "kv_cache_bit_width": 8,
}
_EVERYTHING = -1  # a window without an end
# By what is fused with the sum before it: its own operator, and how many weights it has.
_NORMS = {"RMSNormalization": (ADD_RMS_NORM, 1), "LayerNormalization": (ADD_LAYER_NORM, 2)}
_LINEARS = frozenset(f"{bias}{kind}" for bias in ("", BIASED) for kind in (LINEAR, INT8_LINEAR, INT4_LINEAR))
# Of `[B, S, width]`, which is what everything between embedding and head is.
_LAST_AXES = (-1, 2)
_PRODUCTS = frozenset({"MatMul", "Gemm", "MatMulNBits"}) | _LINEARS


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


def use_own_file(path: Path) -> None:
    """`use_own` on an ONNX file, with the functions; the weights beside it stay as they are."""
    model = onnx.load(path, load_external_data=False)
    use_own(model)
    add_functions(model)
    onnx.save(model, path)
    onnx.checker.check_model(path, full_check=True)


def use_own(model: onnx.ModelProto) -> None:
    """Rewrites a model's graph to operators of `DOMAIN` wherever it says what one of them means.

    But for products, which `export.quantize` rewrites before: they take along the GELU that follows.
    """
    graph = model.graph
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.input}
    for node in graph.node:
        if node.op_type == ATTENTION and node.domain == CONTRIB:
            head_dim = shapes.get(node.input[3], [0])[-1]
            if head_dim > 0 and head_dim % HEAD_DIM_MULTIPLE == 0:
                _use_own_attention(node)
    outputs = {output.name for output in graph.output}
    stored = {tensor.name for tensor in graph.initializer}
    writers = {name: node for node in graph.node for name in node.output}
    readers = Counter(name for node in graph.node for name in node.input)
    places: dict[str, onnx.NodeProto] = {}
    gone: set[str] = set()
    for node in graph.node:
        fused = _swiglu(node, writers) or _add_norm(node, writers, stored) or _gelu(node, writers)
        if fused is None or fused.place in places:  # a sum goes with one norm
            continue
        # What is written in between must be nobody else's.
        if all(readers[name] == count and name not in outputs for name, count in fused.reads.items()):
            places[fused.place] = fused.node
            gone.update(each.output[0] for each in fused.replaced)
    kept = [places.get(node.output[0], node) for node in graph.node if node.output[0] not in gone - places.keys()]
    del graph.node[:]
    graph.node.extend(kept)
    written = {name for node in kept for name in node.output}
    typed = [value for value in graph.value_info if value.name in written]
    del graph.value_info[:]
    graph.value_info.extend(typed)


@dataclass(frozen=True, slots=True)
class _Fused:
    """One operator in the place of several.

    `node` goes where the node stood that wrote `place`, the others of `replaced` go; `reads` says how often each tensor
    that is written in between is read by them.
    """

    node: onnx.NodeProto
    place: str
    replaced: Sequence[onnx.NodeProto]
    reads: Mapping[str, int]


def _use_own_attention(node: onnx.NodeProto) -> None:
    """Makes a node of `CONTRIB` one of `DOMAIN`, if one of those computes the same."""
    attributes = _attributes(node)
    inputs, kind = list(node.input), ATTENTION
    if attributes.keys() & _INT8_ATTRIBUTES.keys():
        if any(attributes.pop(name, None) != value for name, value in _INT8_ATTRIBUTES.items()):
            return
        unused = slice(len(_ATTENTION_INPUTS), len(_ATTENTION_INPUTS) + len(_UNUSED_INPUTS))
        if any(inputs[unused]) or len(inputs) != unused.stop + len(_INT8_INPUTS):
            return
        del inputs[unused]
        kind = INT8_ATTENTION
    elif len(inputs) > len(_ATTENTION_INPUTS):
        return
    if not attributes.keys() <= set(_ATTENTION_ATTRIBUTES) or len(node.output) > len(_ATTENTION_OUTPUTS):
        return
    own = helper.make_node(kind, inputs, list(node.output), name=node.name, domain=DOMAIN)
    attributes.setdefault("local_window_size", _EVERYTHING)
    attributes.setdefault("do_rotary", 0)
    own.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    node.CopyFrom(own)


def _swiglu(node: onnx.NodeProto, writers: Mapping[str, onnx.NodeProto]) -> _Fused | None:
    """`silu(gate) · up` of the halves of one tensor, as PyTorch's exporter writes it."""
    if node.op_type != "Mul":
        return None
    silu = writers.get(node.input[0])
    if silu is None or silu.op_type != "Mul":
        return None
    sigmoid, split = writers.get(silu.input[1]), writers.get(silu.input[0])
    if sigmoid is None or sigmoid.op_type != "Sigmoid" or split is None or split.op_type != "Split":
        return None
    if len(split.output) != 2 or len(split.input) != 1:  # with a second input, not halves
        return None
    if _attributes(split).get("axis", 0) not in _LAST_AXES:
        return None
    gate, up = split.output
    if (sigmoid.input[0], silu.input[0], node.input[1]) != (gate, gate, up):
        return None
    fused = helper.make_node(SWIGLU, list(split.input), list(node.output), name=_named(node, SWIGLU), domain=DOMAIN)
    reads = {gate: 2, up: 1, sigmoid.output[0]: 1, silu.output[0]: 1}
    return _Fused(fused, node.output[0], (split, sigmoid, silu, node), reads)


def _add_norm(node: onnx.NodeProto, writers: Mapping[str, onnx.NodeProto], stored: set[str]) -> _Fused | None:
    """The norm of a residual stream with what a block adds: both of one shape, as no product is a mere row."""
    kind, num_weights = _NORMS.get(node.op_type, ("", 0))
    weights = node.input[1:]
    if not kind or len(weights) != num_weights or not set(weights) <= stored or len(node.output) != 1:
        return None
    attributes, add = _attributes(node), writers.get(node.input[0])
    if attributes.get("axis", -1) != -1 or add is None or add.op_type != "Add" or set(add.input) & stored:
        return None
    if not any(_is_product(name, writers, stored) for name in add.input) or not set(add.input) <= writers.keys():
        return None
    inputs, outputs = [*add.input, *weights], [add.output[0], node.output[0]]
    fused = helper.make_node(kind, inputs, outputs, name=_named(node, kind), domain=DOMAIN)
    fused.attribute.append(helper.make_attribute("epsilon", attributes.get("epsilon", 1e-5)))
    return _Fused(fused, add.output[0], (add, node), {})


def _gelu(node: onnx.NodeProto, writers: Mapping[str, onnx.NodeProto]) -> _Fused | None:
    """GELU of one of our own products, by the approximation with tanh."""
    product = writers.get(node.input[0]) if node.op_type == GELU and not node.domain else None
    if product is None or product.domain != DOMAIN or product.op_type not in _LINEARS:
        return None
    if _attributes(node).get("approximate") != b"tanh":
        return None
    fused = onnx.NodeProto()
    fused.CopyFrom(product)
    fused.op_type += GELU
    fused.output[:] = node.output
    return _Fused(fused, node.output[0], (product, node), {product.output[0]: 1})


def _is_product(name: str, writers: Mapping[str, onnx.NodeProto], stored: set[str]) -> bool:
    """Whether a tensor is rows times a stored matrix, with a bias or without."""
    writer = writers.get(name)
    if writer is not None and writer.op_type == "Add" and set(writer.input) & stored:
        writer = next((writers[each] for each in writer.input if each in writers), None)
    return writer is not None and writer.op_type in _PRODUCTS and bool(set(writer.input) & stored)


def add_functions(model: onnx.ModelProto) -> None:
    """Gives a model the functions of those operators of `DOMAIN` that it uses and has none for yet."""
    used = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    known = {function.name for function in model.functions if function.domain == DOMAIN}
    for name in sorted(used - known):
        kind = name.removesuffix(GELU)
        function = _FUNCTIONS[kind]() if kind == name else _gelu_function(_FUNCTIONS[kind]())
        function.opset_import.extend(opset for opset in model.opset_import if not opset.domain)
        model.functions.append(function)
    domains = {opset.domain for opset in model.opset_import}
    wanted = {DOMAIN: _VERSION, CONTRIB: 1} if used else {}
    model.opset_import.extend(
        helper.make_opsetid(domain, version) for domain, version in wanted.items() if domain not in domains
    )
    # ONNX knows nothing of what `CONTRIB` computes, and checks no function whose inputs have no type.
    typed = {value.name for value in (*model.graph.output, *model.graph.value_info)}
    model.graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.INT8 if is_cache else TensorProto.FLOAT, None)
        for node in model.graph.node
        if used and node.domain in (DOMAIN, CONTRIB)
        for index, name in enumerate(node.output)
        for is_cache in [node.op_type == INT8_ATTENTION and index > 0]
        if name and name not in typed
    )


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
        # The operator has room for one scale of rows only: theirs follow.
        helper.make_node(
            "MatMulIntegerToFloat", ["bytes", "weight", "one", "scales", "zero_byte"], ["sums"], domain=CONTRIB
        ),
        helper.make_node("Unsqueeze", ["row_scales", "second"], ["column_of_scales"]),
        helper.make_node("Mul", ["sums", "column_of_scales"], ["products"]),
        helper.make_node("Shape", ["rows"], ["shape"]),
        helper.make_node("Slice", ["shape", "first", "last"], ["leading"]),
        helper.make_node("Concat", ["leading", "num_columns"], ["new_shape"], axis=0),
        # There may be no row, as behind the last attention where nobody wants logits.
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
        # Panels to bytes of neighbours along K, as `MatMulNBits` has them: [N, K / 32, 16].
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
    """What a product's function calls what its bias is to be added to."""
    return "unbiased" if is_biased else "output"


def _product_function(
    name: str, inputs: Sequence[str], body: Sequence[onnx.NodeProto], attributes: Sequence[str], *, is_biased: bool
) -> onnx.FunctionProto:
    if not is_biased:
        return _function(name, inputs, ["output"], body, attributes)
    add = helper.make_node("Add", ["unbiased", "bias"], ["output"])
    return _function(f"{BIASED}{name}", [*inputs, "bias"], ["output"], [*body, add], attributes)


def _gelu_function(product: onnx.FunctionProto) -> onnx.FunctionProto:
    """A product's, and then GELU."""
    (output,) = product.output
    for node in product.node:
        node.output[:] = ["linear" if name == output else name for name in node.output]
    product.node.append(helper.make_node(GELU, ["linear"], [output], approximate="tanh"))
    product.name += GELU
    return product


def _swiglu_function() -> onnx.FunctionProto:
    body = [
        helper.make_node("Split", ["rows"], ["gate", "up"], axis=-1, num_outputs=2),
        helper.make_node("Sigmoid", ["gate"], ["opening"]),
        helper.make_node("Mul", ["gate", "opening"], ["silu"]),
        helper.make_node("Mul", ["silu", "up"], ["output"]),
    ]
    return _function(SWIGLU, ["rows"], ["output"], body, [])


def _add_norm_function(kind: str, norm: str, weights: Sequence[str]) -> onnx.FunctionProto:
    node = helper.make_node(norm, ["sum", *weights], ["normed"], axis=-1)
    node.attribute.append(_reference("epsilon", "epsilon", onnx.AttributeProto.FLOAT))
    body = [helper.make_node("Add", ["left", "right"], ["sum"]), node]
    return _function(kind, ["left", "right", *weights], ["sum", "normed"], body, ["epsilon"])


def _attention() -> onnx.FunctionProto:
    return _attention_function(ATTENTION, _ATTENTION_INPUTS, _ATTENTION_INPUTS, {})


def _int8_attention() -> onnx.FunctionProto:
    inputs = [*_ATTENTION_INPUTS, *_INT8_INPUTS]
    given = [*_ATTENTION_INPUTS, *[""] * len(_UNUSED_INPUTS), *_INT8_INPUTS]
    return _attention_function(INT8_ATTENTION, inputs, given, _INT8_ATTRIBUTES)


def _attention_function(
    name: str, inputs: Sequence[str], given: Sequence[str], constants: Mapping[str, Any]
) -> onnx.FunctionProto:
    node = helper.make_node(ATTENTION, list(given), list(_ATTENTION_OUTPUTS), domain=CONTRIB, **constants)
    node.attribute.extend(_reference(each, each, onnx.AttributeProto.INT) for each in _ATTENTION_ATTRIBUTES)
    return _function(name, inputs, _ATTENTION_OUTPUTS, [node], _ATTENTION_ATTRIBUTES)


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


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}


def _named(node: onnx.NodeProto, kind: str) -> str:
    """A name in the scope of the node that this one replaces."""
    return "/".join(part for part in (node.name.rpartition("/")[0], kind) if part)


def _function(
    name: str, inputs: Sequence[str], outputs: Sequence[str], body: Iterable[onnx.NodeProto], attributes: Sequence[str]
) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid(CONTRIB, 1)]  # standard operators' is the model's
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
