"""Rewrites a graph's products with weights and its token embeddings to fewer bits, or to the project's own operators.

    fp32    unchanged in value, by the operator `onward.Linear` (see `export.operators`)
    bf16    weights in bfloat16; activations and sums stay float32 (`onward.Bf16Linear`)
    int8    one scale per output channel for weights, one per row (token) for activations; products of bytes add up
            exactly in int32 (`onward.Int8Linear`)
    int4    one scale per block of 32 inputs for weights; for activations one per row or, by standard operators, per
            block of a row (`onward.Int4Linear`; `MatMulNBits` where an input is not a multiple of 32 or scales exceed
            float16)

Every product of activations with a stored matrix is rewritten: projections around attention, feed-forward networks, the
output head. So is every table of token embeddings, which a head that is tied to it shares; but for int4 where
`MatMulNBits` has the head. Attention itself with its scores and K/V, norms, biases and positions stay float32.

A token's result depends on its own row alone, which keeps batch invariance. Ordinary dynamic quantization, one scale
per tensor, would break it; so would int4 in blocks of 64 or more, where ONNX Runtime 1.31 adds a single row in another
order than two rows together.

Rows are quantized to unsigned bytes, for which ONNX Runtime's u8 × s8 kernels are fastest. Without VNNI these may
saturate where two neighboring products are large; replaying the golden cases detects that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from export.functions import add_functions
from export.operators import (
    BF16_GATHER,
    BF16_LINEAR,
    BIASED,
    CONTRIB,
    DOMAIN,
    GATHER,
    INT4_GATHER,
    INT4_LINEAR,
    INT8_GATHER,
    INT8_LINEAR,
    LINEAR,
)
from export.panels import BFLOAT16, INT4_BLOCK, pack_int4_panels, pack_int4_scales, pack_panels
from export.weight_quantization import BLOCK_SIZES, ROW_LIMIT, block_size_of, quantize_blocks, quantize_columns
from model.spec.artifact import Precision
from model.spec.config import ModelConfig

Float32 = npt.NDArray[np.float32]
Int8 = npt.NDArray[np.int8]
UInt8 = npt.NDArray[np.uint8]

ROW_ZERO = 128
"""The byte for zero in a row."""
POSITIVE_ROW_LIMIT = np.float32(255.0)
"""The largest quantized activation of a row after a ReLU, whose byte for zero is 0."""
_TOKENS = "tokens.weight"
# The range of normal float16 numbers.
_LEAST_FLOAT16, _LARGEST_FLOAT16 = np.finfo(np.float16).tiny, np.finfo(np.float16).max
_ACCURACY_LEVEL = 4  # activations in eight bits
_PANEL_DIMENSIONS = 5  # of int4


def unsupported(config: ModelConfig, precision: Precision) -> list[str]:
    """Why a precision's blocks do not divide a model's widths; empty if they do."""
    if precision is not Precision.INT4:
        return []
    widths = {
        "d_model": config.d_model,
        "num_heads * head_dim": config.num_heads * config.head_dim,
        "d_ff": config.d_ff,
    }
    return [
        f"{name} is {width}, {precision} needs a multiple of {BLOCK_SIZES[-1]}"
        for name, width in widths.items()
        if block_size_of(width) is None
    ]


def quantize_file(path: Path, precision: Precision) -> None:
    """Rewrites an ONNX file and the external data beside it, which is the same name with `.data` added.

    In memory at once: one float matrix of a product, and all that is written.
    """
    quantized = quantize(onnx.load(path, load_external_data=False), precision, path.parent)
    onnx.load_external_data_for_model(quantized, str(path.parent))
    save(path, quantized)


def save(path: Path, model: onnx.ModelProto) -> None:
    """Replaces an ONNX file and its external data, and checks it."""
    data = path.with_name(f"{path.name}.data")
    data.unlink()  # onnx.save would append to it
    onnx.save(model, path, save_as_external_data=True, location=data.name)
    onnx.checker.check_model(path, full_check=True)


def quantize(model: onnx.ModelProto, precision: Precision, folder: Path = Path()) -> onnx.ModelProto:
    """The model with its stored matrices, of products and of token embeddings, in `precision`; all else unchanged.

    Args:
        model: it is not modified. Weights that are not loaded are read one by one; others stay where they are.
        precision: float32 rewrites products to the project's own operator.
        folder: of the model's external data.

    Raises:
        ValueError: when a weight's input is not a multiple of any block (int4), or there is no rewrite to the
            precision.
    """
    if precision not in _REWRITES:
        raise ValueError(f"no graph is rewritten to {precision}")
    quantized = onnx.ModelProto()
    quantized.CopyFrom(model)
    graph = _Graph.of(quantized.graph, folder)
    rewrite = _REWRITES[precision](graph)
    taken: set[str] = set()
    for node in graph.nodes:
        if (product := graph.product(node)) is not None:
            taken.add(product.output)
            graph.new_nodes += rewrite.multiply(product)
        elif (lookup := graph.lookup(node)) is not None:
            graph.new_nodes += rewrite.look_up(lookup)
        elif node.output[0] not in taken:  # not a bias that became part of its product
            graph.new_nodes.append(node)
    graph.write(quantized.graph)
    add_functions(quantized)
    if CONTRIB not in {opset.domain for opset in quantized.opset_import}:
        quantized.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return quantized


@dataclass(frozen=True, slots=True)
class _Product:
    """One product to rewrite: `output` = `rows` `[..., K]` · `weight` `[K, N]` (+ `bias` `[N]`).

    `scope` is the path of the module that it was traced in, `name` the weight's.
    """

    scope: str
    name: str
    rows: str
    weight: Float32
    bias: str | None
    output: str


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Token embeddings to rewrite: `output` = rows `ids` of the stored table `name` `[N, K]`, by `node`."""

    scope: str
    name: str
    ids: str
    output: str
    node: onnx.NodeProto


class _Rewrite(Protocol):
    """Rewrites products and lookups to one precision."""

    def multiply(self, product: _Product) -> Iterator[onnx.NodeProto]: ...

    def look_up(self, lookup: _Lookup) -> Iterator[onnx.NodeProto]: ...


@dataclass(slots=True)
class _Graph:
    """A graph being rewritten: its original nodes and weights, and the nodes that replace them.

    `positives` are tensors without negative numbers; `readers` are the nodes that read each tensor; `folder` has the
    weights that are not loaded.
    """

    nodes: Sequence[onnx.NodeProto]
    outputs: frozenset[str]
    positives: frozenset[str]
    readers: Mapping[str, Sequence[onnx.NodeProto]]
    stored: dict[str, onnx.TensorProto]
    folder: Path
    new_nodes: list[onnx.NodeProto] = field(default_factory=list)

    @classmethod
    def of(cls, graph: onnx.GraphProto, folder: Path) -> _Graph:
        outputs = frozenset(output.name for output in graph.output)
        positives = frozenset(node.output[0] for node in graph.node if node.op_type == "Relu")
        readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                readers[name].append(node)
        stored = {tensor.name: tensor for tensor in graph.initializer}
        return cls(list(graph.node), outputs, positives, readers, stored, folder)

    def product(self, node: onnx.NodeProto) -> _Product | None:
        """The product of activations with a stored matrix that a node computes; None for other nodes."""
        is_own = node.domain == DOMAIN and node.op_type in (LINEAR, f"{BIASED}{LINEAR}")
        if not is_own and (node.op_type not in ("MatMul", "Gemm") or node.domain):
            return None
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        rows, name, *rest = node.input
        if rows in self.stored or name not in self.stored or len(self.stored[name].dims) != 2:
            return None
        if attributes.get("transA", 0) or attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
            return None
        weight = self.values(name)
        bias, output = (rest[0] if rest and rest[0] else None), node.output[0]
        outer = weight.shape[0 if is_own or attributes.get("transB", 0) else 1]
        if bias is not None and not self._is_row(bias, outer):
            return None
        if bias is None and (add := self._bias_of(output, outer)) is not None:
            bias = next(name for name in add.input if name != output)
            output = add.output[0]
        return _Product(
            scope=node.name.rpartition("/")[0] or name.rpartition(".")[0],
            name=name.removesuffix("_transposed"),
            rows=rows,
            weight=weight.T if is_own or attributes.get("transB", 0) else weight,
            bias=bias,
            output=output,
        )

    def lookup(self, node: onnx.NodeProto) -> _Lookup | None:
        """The token embeddings that a node looks up; None for other nodes."""
        table, ids = (node.input[:2] if not node.domain else node.input[1::-1]) if node.op_type == GATHER else ("", "")
        is_table = table.endswith(_TOKENS) and table in self.stored and len(self.stored[table].dims) == 2
        if not is_table or any(helper.get_attribute_value(entry) for entry in node.attribute):  # another axis
            return None
        return _Lookup(node.name.rpartition("/")[0], table, ids, node.output[0], node)

    def _is_row(self, name: str, length: int) -> bool:
        return name in self.stored and list(self.stored[name].dims) == [length]

    def values(self, name: str) -> npt.NDArray[Any]:
        """The values of a stored tensor."""
        return numpy_helper.to_array(self.stored[name], base_dir=str(self.folder))

    def _bias_of(self, product: str, outer: int) -> onnx.NodeProto | None:
        """The node that adds a stored row to a product, if it is the product's only reader."""
        readers = self.readers.get(product, [])
        if len(readers) != 1 or readers[0].op_type != "Add" or product in self.outputs:
            return None
        others = [name for name in readers[0].input if name != product]
        return readers[0] if len(others) == 1 and self._is_row(others[0], outer) else None

    def store(self, name: str, values: npt.ArrayLike) -> str:
        """Adds a tensor once per name; returns the name."""
        if name not in self.stored:
            self.stored[name] = numpy_helper.from_array(np.array(values, order="C"), name)
        return name

    def write(self, graph: onnx.GraphProto) -> None:
        """Replaces the graph's nodes, and keeps the tensors that are still read."""
        read = {name for node in self.new_nodes for name in node.input}
        del graph.node[:]
        graph.node.extend(self.new_nodes)
        del graph.initializer[:]
        # The widest numbers go first: a file packs tensors in order, and all should stay aligned.
        kept = [tensor for name, tensor in self.stored.items() if name in read]
        graph.initializer.extend(sorted(kept, key=_item_bytes, reverse=True))


def _item_bytes(tensor: onnx.TensorProto) -> int:
    return helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


@dataclass(slots=True)
class _Float:
    """Rewrites products to the project's own operator, which takes matrices in PyTorch's layout; lookups stay."""

    graph: _Graph

    def multiply(self, product: _Product) -> Iterator[onnx.NodeProto]:
        name = product.name
        if name in self.graph.stored and not np.array_equal(self.graph.values(name), product.weight.T):
            name = f"{name}_rows"
        yield _own_node(product, LINEAR, [product.rows, self.graph.store(name, product.weight.T)])

    def look_up(self, lookup: _Lookup) -> Iterator[onnx.NodeProto]:
        yield _node(lookup, GATHER, [lookup.ids, lookup.name], lookup.output, domain=DOMAIN)


@dataclass(slots=True)
class _Bf16:
    """Rewrites both to bfloat16, in PyTorch's layout."""

    graph: _Graph

    def multiply(self, product: _Product) -> Iterator[onnx.NodeProto]:
        yield _own_node(product, BF16_LINEAR, [product.rows, self._store(product.name, product.weight.T)])

    def look_up(self, lookup: _Lookup) -> Iterator[onnx.NodeProto]:
        table = self._store(lookup.name, self.graph.values(lookup.name))
        yield _node(lookup, BF16_GATHER, [lookup.ids, table], lookup.output, domain=DOMAIN)

    def _store(self, name: str, weight: Float32) -> str:
        return self.graph.store(f"{name}_bf16", weight.astype(BFLOAT16))


@dataclass(slots=True)
class _Int8:
    """Rewrites both to int8; rows after a ReLU use all bytes for positive numbers."""

    graph: _Graph

    def multiply(self, product: _Product) -> Iterator[onnx.NodeProto]:
        is_positive = product.rows in self.graph.positives
        rounding = {
            "step": float(np.float32(1) / (POSITIVE_ROW_LIMIT if is_positive else ROW_LIMIT)),
            "zero": 0 if is_positive else ROW_ZERO,
            "K": len(product.weight),
        }
        inputs = [product.rows, *self._store(product.name, product.weight)]
        yield _own_node(product, INT8_LINEAR, inputs, **rounding)

    def look_up(self, lookup: _Lookup) -> Iterator[onnx.NodeProto]:
        table = self.graph.values(lookup.name)
        inputs = [lookup.ids, *self._store(lookup.name, table.T)]
        yield _node(lookup, INT8_GATHER, inputs, lookup.output, domain=DOMAIN, K=table.shape[1])

    def _store(self, name: str, weight: Float32) -> tuple[str, str]:
        """The names of panels and scales of a weight `[K, N]`."""
        names = f"{name}_int8", f"{name}_scale"
        if names[0] not in self.graph.stored:
            codes, scales = quantize_columns(weight)
            self.graph.store(names[0], pack_panels(codes))
            self.graph.store(names[1], scales)
        return names


@dataclass(slots=True)
class _Int4:
    """Rewrites both to int4."""

    graph: _Graph

    def multiply(self, product: _Product) -> Iterator[onnx.NodeProto]:
        inner, outer = product.weight.shape
        block_size = block_size_of(inner)
        if block_size is None:
            raise ValueError(f"{product.name} has {inner} inputs, int4 needs a multiple of {BLOCK_SIZES[-1]}")
        names = self._store(product.name, product.weight, block_size)
        inputs = [product.rows, *names]
        if self._has_panels(names[0]):
            yield _own_node(product, INT4_LINEAR, inputs, K=inner, N=outer)
            return
        output = product.output if product.bias is None else f"{product.output}.unbiased"
        attributes = {"K": inner, "N": outer, "bits": 4, "block_size": block_size, "accuracy_level": _ACCURACY_LEVEL}
        yield _node(product, "MatMulNBits", inputs, output, domain=CONTRIB, **attributes)
        if product.bias is not None:
            yield _node(product, "Add", [output, product.bias], product.output)

    def look_up(self, lookup: _Lookup) -> Iterator[onnx.NodeProto]:
        outer, inner = self.graph.stored[lookup.name].dims
        if inner % INT4_BLOCK == 0:
            names = self._store(lookup.name, self.graph.values(lookup.name).T, INT4_BLOCK)
            if self._has_panels(names[0]):
                yield _node(lookup, INT4_GATHER, [lookup.ids, *names], lookup.output, domain=DOMAIN, K=inner, N=outer)
                return
        yield lookup.node

    def _has_panels(self, name: str) -> bool:
        """Whether a stored weight has the layout of the project's own operators, not of `MatMulNBits`."""
        return len(self.graph.stored[name].dims) == _PANEL_DIMENSIONS

    def _store(self, name: str, weight: Float32, block_size: int) -> tuple[str, str]:
        """The names of codes and scales of a weight `[K, N]`; panels if the own operators can compute with it."""
        names = f"{name}_int4", f"{name}_scale"
        if names[0] in self.graph.stored:
            return names
        codes, scales = quantize_blocks(weight, block_size)
        if np.abs(scales).min() < _LEAST_FLOAT16 <= np.median(np.abs(scales)):
            # A few faint blocks: their step becomes no larger than that of half the others.
            codes, scales = quantize_blocks(weight, block_size, _LEAST_FLOAT16)
        steps = np.abs(scales)
        if block_size == INT4_BLOCK and steps.min() >= _LEAST_FLOAT16 and steps.max() <= _LARGEST_FLOAT16:
            nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(weight.shape[1], -1, INT4_BLOCK)
            self.graph.store(names[0], pack_int4_panels(nibbles))
            self.graph.store(names[1], pack_int4_scales(scales))
        else:
            self.graph.store(names[0], codes)
            self.graph.store(names[1], scales)
        return names


_REWRITES: Mapping[Precision, Callable[[_Graph], _Rewrite]] = {
    Precision.FP32: _Float,
    Precision.BF16: _Bf16,
    Precision.INT8: _Int8,
    Precision.INT4: _Int4,
}


def _own_node(product: _Product, kind: str, inputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    """The product by one of the project's own operators, with its bias if it has one."""
    if product.bias is not None:
        kind, inputs = f"{BIASED}{kind}", [*inputs, product.bias]
    return _node(product, kind, inputs, product.output, domain=DOMAIN, **attributes)


def _node(site: _Product | _Lookup, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    """A node named after the module of what it replaces."""
    name = "/".join(part for part in (site.scope, kind) if part)
    return helper.make_node(kind, list(inputs), [output], name=name, **attributes)
