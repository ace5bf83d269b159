"""Rewrites a graph's products with weights to fewer bits, or to the project's own operator: functions on ONNX models.

    fp32    unchanged in value, by the operator `onward.Linear` (see `export.operators`)
    int8    one scale per output channel for weights, one per row (token) for activations; products of bytes add up
            exactly in int32 (`onward.Int8Linear`)
    int4    one scale per block of 32 inputs for weights; for activations one per row or, by standard operators, per
            block of a row (`onward.Int4Linear`; `MatMulNBits` where an input is not a multiple of 32 or scales exceed
            float16)

Every product of activations with a stored matrix is rewritten: projections around attention, feed-forward networks, the
output head. Attention itself with its scores and K/V, norms, biases and embedding lookups stay float32. A head tied to
the embedding table gets a quantized copy of it.

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
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from export.operators import (
    BIASED,
    CONTRIB,
    DOMAIN,
    INT4_BLOCK,
    INT4_LINEAR,
    INT8_LINEAR,
    LINEAR,
    add_functions,
    pack_int4_panels,
    pack_int4_scales,
    pack_panels,
)
from model.spec.artifact import Precision
from model.spec.config import ModelConfig

Float32 = npt.NDArray[np.float32]
Int8 = npt.NDArray[np.int8]
UInt8 = npt.NDArray[np.uint8]

BLOCK_SIZES = (32, 16)
"""Block sizes along a weight's input in int4: the first that divides it is used."""

ROW_LIMIT = np.float32(127.0)
"""The largest magnitude of a quantized activation, and of an int8 weight."""
ROW_ZERO = 128
"""The byte for zero in a row."""
POSITIVE_ROW_LIMIT = np.float32(255.0)
"""The largest quantized activation of a row after a ReLU, whose byte for zero is 0."""
_BYTES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
_INT4_ZERO = 8
# Candidates for the share of a block's largest magnitude that its scale covers; the least squared error decides.
_INT4_REACHES = np.linspace(1.0, 0.7, 7, dtype=np.float32)
# The range of normal float16 numbers.
_LEAST_FLOAT16, _LARGEST_FLOAT16 = np.finfo(np.float16).tiny, np.finfo(np.float16).max
# Quantized at once.
_COLUMNS = 8192
_ACCURACY_LEVEL = 4  # activations in eight bits


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
        if _block_size(width) is None
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
    """The model with its products with stored matrices in `precision`; everything else unchanged.

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
        product = graph.product(node)
        if product is not None:
            taken.add(product.output)
            graph.new_nodes += rewrite(product)
        elif node.output[0] not in taken:  # not a bias that became part of its product
            graph.new_nodes.append(node)
    graph.write(quantized.graph)
    add_functions(quantized)
    if CONTRIB not in {opset.domain for opset in quantized.opset_import}:
        quantized.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return quantized


def quantize_columns(weight: Float32) -> tuple[Int8, Float32]:
    """A weight `[K, N]` as bytes `[K, N]` in ±127 and one scale per column `[N]`, its largest magnitude / 127."""
    codes, scales = np.empty(weight.shape, np.int8), np.empty(weight.shape[1], np.float32)
    for columns in _parts(weight.shape[1]):
        part = weight[:, columns]
        peaks = np.abs(part).max(axis=0)
        scales[columns] = np.where(peaks > 0, peaks, 1) / ROW_LIMIT
        codes[:, columns] = np.clip(np.rint(part / scales[columns]), -ROW_LIMIT, ROW_LIMIT)
    return codes, scales


def quantize_blocks(weight: Float32, block_size: int, least: np.floating[Any] | float = 0) -> tuple[UInt8, Float32]:
    """A weight `[K, N]` as nibbles `[N, K/block, block/2]`, low one first, and scales `[N, K/block]`; zero is 8.

    A block's extreme maps to about -8, since four bits reach one step further below zero than above. Several scales are
    tried: clipping the extremes a little gives the other weights a finer scale. None is below `least` in magnitude.
    """
    inner, outer = weight.shape
    packed = np.empty((outer, inner // block_size, block_size // 2), np.uint8)
    scales = np.empty((outer, inner // block_size), np.float32)
    for columns in _parts(outer):
        packed[columns], scales[columns] = _quantize_some_blocks(weight[:, columns], block_size, least)
    return packed, scales


def _quantize_some_blocks(weight: Float32, block_size: int, least: np.floating[Any] | float) -> tuple[UInt8, Float32]:
    inner, outer = weight.shape
    blocks = np.ascontiguousarray(weight.T).reshape(outer, inner // block_size, block_size)
    extremes = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
    extremes = np.where(extremes == 0, np.float32(1), extremes)
    best_scales = np.empty_like(extremes)
    best_errors = np.full_like(extremes, np.inf)
    for reach in _INT4_REACHES:
        scales = (extremes * (-reach / _INT4_ZERO)).astype(np.float32)
        errors = np.square(_nibbles(blocks, scales) * scales - blocks).sum(axis=-1, keepdims=True)
        is_better = errors < best_errors
        best_scales, best_errors = np.where(is_better, scales, best_scales), np.where(is_better, errors, best_errors)
    best_scales = np.copysign(np.maximum(np.abs(best_scales), np.float32(least)), best_scales)
    codes: UInt8 = (_nibbles(blocks, best_scales) + _INT4_ZERO).astype(np.uint8)
    packed: UInt8 = codes[..., ::2] | np.left_shift(codes[..., 1::2], np.uint8(4))
    return packed, best_scales[..., 0]


def _parts(num_columns: int) -> Iterator[slice]:
    """Columns that are quantized together: intermediate results of a large vocabulary's head are large, too."""
    for start in range(0, num_columns, _COLUMNS):
        yield slice(start, start + _COLUMNS)


def _nibbles(blocks: Float32, scales: Float32) -> Float32:
    nibbles: Float32 = np.clip(np.rint(blocks / scales), -_INT4_ZERO, _INT4_ZERO - 1)
    return nibbles


def _block_size(inner: int) -> int | None:
    return next((size for size in BLOCK_SIZES if inner % size == 0), None)


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
        # Bytes go last: a file packs tensors in order, and floats should stay aligned.
        kept = [tensor for name, tensor in self.stored.items() if name in read]
        graph.initializer.extend(sorted(kept, key=lambda tensor: tensor.data_type in _BYTES))


@dataclass(slots=True)
class _Float:
    """Rewrites products to the project's own operator, which takes matrices in PyTorch's layout."""

    graph: _Graph

    def __call__(self, product: _Product) -> Iterator[onnx.NodeProto]:
        name = product.name
        if name in self.graph.stored and not np.array_equal(self.graph.values(name), product.weight.T):
            name = f"{name}_rows"
        yield _own_node(product, LINEAR, [product.rows, self.graph.store(name, product.weight.T)])


@dataclass(slots=True)
class _Int8:
    """Rewrites products to int8; rows after a ReLU use all bytes for positive numbers."""

    graph: _Graph

    def __call__(self, product: _Product) -> Iterator[onnx.NodeProto]:
        weight, column_scales = quantize_columns(product.weight)
        inputs = [
            product.rows,
            self.graph.store(f"{product.name}_int8", pack_panels(weight)),
            self.graph.store(f"{product.name}_scale", column_scales),
        ]
        is_positive = product.rows in self.graph.positives
        rounding = {
            "step": float(np.float32(1) / (POSITIVE_ROW_LIMIT if is_positive else ROW_LIMIT)),
            "zero": 0 if is_positive else ROW_ZERO,
            "K": len(weight),
        }
        yield _own_node(product, INT8_LINEAR, inputs, **rounding)


@dataclass(slots=True)
class _Int4:
    """Rewrites products to int4."""

    graph: _Graph

    def __call__(self, product: _Product) -> Iterator[onnx.NodeProto]:
        inner, outer = product.weight.shape
        block_size = _block_size(inner)
        if block_size is None:
            raise ValueError(f"{product.name} has {inner} inputs, int4 needs a multiple of {BLOCK_SIZES[-1]}")
        weight, scales = quantize_blocks(product.weight, block_size)
        if np.abs(scales).min() < _LEAST_FLOAT16 <= np.median(np.abs(scales)):
            # A few faint blocks: their step becomes no larger than that of half the others.
            weight, scales = quantize_blocks(product.weight, block_size, _LEAST_FLOAT16)
        if (
            block_size == INT4_BLOCK
            and np.abs(scales).min() >= _LEAST_FLOAT16
            and np.abs(scales).max() <= _LARGEST_FLOAT16
        ):
            codes = np.stack([weight & 15, weight >> 4], axis=-1).reshape(outer, -1, INT4_BLOCK)
            inputs = [
                product.rows,
                self.graph.store(f"{product.name}_int4", pack_int4_panels(codes)),
                self.graph.store(f"{product.name}_scale", pack_int4_scales(scales)),
            ]
            yield _own_node(product, INT4_LINEAR, inputs, K=inner, N=outer)
            return
        inputs = [
            product.rows,
            self.graph.store(f"{product.name}_int4", weight),
            self.graph.store(f"{product.name}_scale", scales),
        ]
        output = product.output if product.bias is None else f"{product.output}.unbiased"
        attributes = {"K": inner, "N": outer, "bits": 4, "block_size": block_size, "accuracy_level": _ACCURACY_LEVEL}
        yield _node(product, "MatMulNBits", inputs, output, domain=CONTRIB, **attributes)
        if product.bias is not None:
            yield _node(product, "Add", [output, product.bias], product.output)


_REWRITES: Mapping[Precision, Callable[[_Graph], Callable[[_Product], Iterator[onnx.NodeProto]]]] = {
    Precision.FP32: _Float,
    Precision.INT8: _Int8,
    Precision.INT4: _Int4,
}


def _own_node(product: _Product, kind: str, inputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    """The product by one of the project's own operators, with its bias if it has one."""
    if product.bias is not None:
        kind, inputs = f"{BIASED}{kind}", [*inputs, product.bias]
    return _node(product, kind, inputs, product.output, domain=DOMAIN, **attributes)


def _node(product: _Product, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    """A node named after the module of its product."""
    name = "/".join(part for part in (product.scope, kind) if part)
    return helper.make_node(kind, list(inputs), [output], name=name, **attributes)
