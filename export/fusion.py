"""Fuses several standard nodes of a graph into one of the project's own operators.

`export.quantize` rewrites products before; here they absorb the GELU or SwiGLU that follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from export.functions import add_functions
from export.operators import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    ATTENTION,
    ATTENTION_ATTRIBUTES,
    ATTENTION_INPUTS,
    ATTENTION_OUTPUTS,
    CONTRIB,
    DOMAIN,
    GATED_COLUMNS,
    GELU,
    HEAD_DIM_MULTIPLE,
    INT8_ATTENTION,
    INT8_ATTRIBUTES,
    INT8_INPUTS,
    LINEARS,
    SWIGLU,
    UNUSED_INPUTS,
)

_FULL_WINDOW = -1
# By the norm that is fused with the sum before it: the fused operator and its number of weights.
_NORMS = {"RMSNormalization": (ADD_RMS_NORM, 1), "LayerNormalization": (ADD_LAYER_NORM, 2)}
_PRODUCTS = frozenset({"MatMul", "Gemm", "MatMulNBits"}) | LINEARS
# Of `[B, S, width]`, the shape of everything between embedding and head.
_LAST_AXES = (-1, 2)


def fuse_file(path: Path) -> None:
    """`fuse` on an ONNX file, with the operators' functions; the weights beside it stay as they are."""
    model = onnx.load(path, load_external_data=False)
    fuse(model)
    add_functions(model)
    onnx.save(model, path)
    onnx.checker.check_model(path, full_check=True)


def fuse(model: onnx.ModelProto) -> None:
    """Rewrites a graph in place to operators of `DOMAIN`, except for products."""
    graph = model.graph
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.input}
    for node in graph.node:
        if node.op_type == ATTENTION and node.domain == CONTRIB:
            head_dim = shapes.get(node.input[3], [0])[-1]
            if head_dim > 0 and head_dim % HEAD_DIM_MULTIPLE == 0:
                _use_own_attention(node)
    outputs = {output.name for output in graph.output}
    lengths = {tensor.name: tensor.dims[0] for tensor in graph.initializer if tensor.dims}
    stored = {tensor.name for tensor in graph.initializer}
    writers = {name: node for node in graph.node for name in node.output}
    readers = Counter(name for node in graph.node for name in node.input)
    places: dict[str, onnx.NodeProto] = {}
    gone: set[str] = set()
    for node in graph.node:
        fused = _swiglu(node, writers, lengths) or _add_norm(node, writers, stored) or _gelu(node, writers)
        if fused is None or fused.place in places:  # a sum is fused with one norm only
            continue
        # No other node may read what the replaced nodes write in between.
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
    """One operator that replaces several.

    `node` takes the position of the node that wrote `place`; all `replaced` nodes are removed. `reads` counts, for each
    tensor written in between, how often the replaced nodes read it.
    """

    node: onnx.NodeProto
    place: str
    replaced: Sequence[onnx.NodeProto]
    reads: Mapping[str, int]


def _use_own_attention(node: onnx.NodeProto) -> None:
    """Turns an attention node of `CONTRIB` into one of `DOMAIN`, if that computes the same."""
    attributes = _attributes(node)
    inputs, kind = list(node.input), ATTENTION
    if attributes.keys() & INT8_ATTRIBUTES.keys():
        if any(attributes.pop(name, None) != value for name, value in INT8_ATTRIBUTES.items()):
            return
        unused = slice(len(ATTENTION_INPUTS), len(ATTENTION_INPUTS) + len(UNUSED_INPUTS))
        if any(inputs[unused]) or len(inputs) != unused.stop + len(INT8_INPUTS):
            return
        del inputs[unused]
        kind = INT8_ATTENTION
    elif len(inputs) > len(ATTENTION_INPUTS):
        return
    if not attributes.keys() <= set(ATTENTION_ATTRIBUTES) or len(node.output) > len(ATTENTION_OUTPUTS):
        return
    own = helper.make_node(kind, inputs, list(node.output), name=node.name, domain=DOMAIN)
    attributes.setdefault("local_window_size", _FULL_WINDOW)
    attributes.setdefault("do_rotary", 0)
    own.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    node.CopyFrom(own)


def _swiglu(node: onnx.NodeProto, writers: Mapping[str, onnx.NodeProto], lengths: Mapping[str, int]) -> _Fused | None:
    """`silu(gate) · up` of the halves of one tensor, as PyTorch's exporter writes it, and the product that wrote it."""
    if node.op_type != "Mul":
        return None
    silu = writers.get(node.input[0])
    if silu is None or silu.op_type != "Mul":
        return None
    sigmoid, split = writers.get(silu.input[1]), writers.get(silu.input[0])
    if sigmoid is None or sigmoid.op_type != "Sigmoid" or split is None or split.op_type != "Split":
        return None
    if len(split.output) != 2 or len(split.input) != 1:  # with a second input, the parts need not be halves
        return None
    if _attributes(split).get("axis", 0) not in _LAST_AXES:
        return None
    gate, up = split.output
    if (sigmoid.input[0], silu.input[0], node.input[1]) != (gate, gate, up):
        return None
    reads = {gate: 2, up: 1, sigmoid.output[0]: 1, silu.output[0]: 1}
    product = writers.get(split.input[0])
    if product is not None and product.domain == DOMAIN and product.op_type in GATED_COLUMNS:
        num_columns = _attributes(product).get("N", lengths.get(product.input[2], 0))
        if num_columns and num_columns % GATED_COLUMNS[product.op_type] == 0:
            replaced = (product, split, sigmoid, silu, node)
            return _Fused(_extended(product, SWIGLU, node), node.output[0], replaced, {**reads, split.input[0]: 1})
    fused = helper.make_node(SWIGLU, list(split.input), list(node.output), name=_named(node, SWIGLU), domain=DOMAIN)
    return _Fused(fused, node.output[0], (split, sigmoid, silu, node), reads)


def _add_norm(node: onnx.NodeProto, writers: Mapping[str, onnx.NodeProto], stored: set[str]) -> _Fused | None:
    """The sum of a residual stream and a block's output, and its norm; both summands have the same shape."""
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
    if product is None or product.domain != DOMAIN or product.op_type not in LINEARS:
        return None
    if _attributes(node).get("approximate") != b"tanh":
        return None
    return _Fused(_extended(product, GELU, node), node.output[0], (product, node), {product.output[0]: 1})


def _extended(product: onnx.NodeProto, suffix: str, last: onnx.NodeProto) -> onnx.NodeProto:
    """A product that goes on to what `last` writes."""
    fused = onnx.NodeProto()
    fused.CopyFrom(product)
    fused.op_type += suffix
    fused.output[:] = last.output
    return fused


def _is_product(name: str, writers: Mapping[str, onnx.NodeProto], stored: set[str]) -> bool:
    """Whether a tensor is rows times a stored matrix, with a bias or without."""
    writer = writers.get(name)
    if writer is not None and writer.op_type == "Add" and set(writer.input) & stored:
        writer = next((writers[each] for each in writer.input if each in writers), None)
    return writer is not None and writer.op_type in _PRODUCTS and bool(set(writer.input) & stored)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}


def _named(node: onnx.NodeProto, kind: str) -> str:
    """A name in the scope of the node that this one replaces."""
    return "/".join(part for part in (node.name.rpartition("/")[0], kind) if part)
