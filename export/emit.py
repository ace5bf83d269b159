"""A graph module written as an ONNX file: traced, named, stripped, and read back to be checked.

PyTorch's exporter calls folded weights `val_17` and nodes `node_linear_3`, and attaches a stack trace of the exporting
machine to every node. Here weights and nodes are named after their modules, and the traces are removed.
"""

from __future__ import annotations

import ast
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

from export.backend import Graph
from export.graphs import OPSET
from model.spec.artifact import GraphSpec, TensorSpec

_DTYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_NAME_SCOPES = "pkg.torch.onnx.name_scopes"
_MODEL_PREFIX = "model."


class EmitError(Exception):
    """The written graph differs from its signature; `problems` lists every difference."""

    def __init__(self, file: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{file}: " + "; ".join(problems))


def emit(graph: Graph, path: Path) -> GraphSpec:
    """Writes `graph` to `path` and its weights to the same name with `.data` added, and returns the file's signature.

    Raises:
        EmitError: when the file's inputs or outputs differ from the signature.
    """
    with _quiet_exporter(), torch.no_grad():
        program = torch.onnx.export(
            graph.eval(),
            _example_inputs(graph.inputs),
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=[spec.name for spec in graph.inputs],
            output_names=[spec.name for spec in graph.outputs],
            dynamic_shapes=(_dynamic_axes(graph.inputs),),
        )
    if program is None:
        raise EmitError(path.name, ["PyTorch's exporter returned no program"])
    program.save(path, external_data=True)
    model = onnx.load(path, load_external_data=False)
    _name_by_module(model.graph)
    _strip_metadata(model)
    onnx.save(model, path)
    onnx.checker.check_model(path, full_check=True)
    spec = read_signature(path)
    problems = [*_compare("inputs", graph.inputs, spec.inputs), *_compare("outputs", graph.outputs, spec.outputs)]
    if problems:
        raise EmitError(path.name, problems)
    return spec


def share_weights(path: Path, *others: Path) -> None:
    """Points the weights of the graph in `path` at the data files of `others` in its folder, and deletes its own file.

    Raises:
        EmitError: naming the first weight that differs from its namesake in every one of `others`.
    """
    graph, values = onnx.load(path, load_external_data=False), onnx.load(path)
    places = [_initializers(onnx.load(other, load_external_data=False)) for other in others]
    tensors = [_initializers(onnx.load(other)) for other in others]
    for tensor, value in zip(graph.graph.initializer, values.graph.initializer, strict=True):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        there = (
            place[tensor.name]
            for place, known in zip(places, tensors, strict=True)
            if value == known.get(tensor.name) and place[tensor.name].data_location == onnx.TensorProto.EXTERNAL
        )
        found = next(there, None)
        if found is None:
            names = " or ".join(other.name for other in others)
            raise EmitError(path.name, [f"{tensor.name} is not the same in {names}"])
        tensor.CopyFrom(found)
    path.with_name(f"{path.name}.data").unlink()
    onnx.save(graph, path)
    onnx.checker.check_model(path, full_check=True)


def _initializers(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def read_signature(path: Path) -> GraphSpec:
    """The inputs and outputs that an ONNX file declares; reads no weights."""
    graph = onnx.load(path, load_external_data=False).graph
    return GraphSpec(path.name, tuple(map(_spec, graph.input)), tuple(map(_spec, graph.output)))


def _example_inputs(specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """Tensors to trace with: each symbol has its own size above 1, so that no axis is specialized to a constant."""
    symbols = dict.fromkeys(axis for spec in specs for axis in spec.shape if isinstance(axis, str))
    sizes = {symbol: size for size, symbol in enumerate(symbols, start=2)}
    return tuple(
        torch.ones([sizes[axis] if isinstance(axis, str) else axis for axis in spec.shape], dtype=_DTYPES[spec.dtype])
        for spec in specs
    )


def _dynamic_axes(specs: Sequence[TensorSpec]) -> tuple[dict[int, torch.export.Dim], ...]:
    dims = {axis: torch.export.Dim(axis) for spec in specs for axis in spec.shape if isinstance(axis, str)}
    return tuple(
        {index: dims[axis] for index, axis in enumerate(spec.shape) if isinstance(axis, str)} for spec in specs
    )


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silences three known messages of torch 2.13's exporter by their text; any other warning still shows.

    They are about missing torchvision operators, a deprecated class that torch itself pickles, and inputs that share a
    named axis.
    """
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")

    def is_not_about_torchvision(record: logging.LogRecord) -> bool:
        return "torchvision is not installed" not in record.getMessage()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
        warnings.filterwarnings("ignore", message=r"# The axis name: \w+ will not be used", category=UserWarning)
        registration.addFilter(is_not_about_torchvision)
        try:
            yield
        finally:
            registration.removeFilter(is_not_about_torchvision)


def _name_by_module(graph: onnx.GraphProto) -> None:
    """Names nodes, and the weights that constant folding reshaped for them, after the modules they come from."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    used: Counter[str] = Counter()
    renamed: dict[str, str] = {}
    for node in graph.node:
        scope = _scope(node)
        node.name = f"{scope}/{node.op_type}" if scope else node.op_type
        used[node.name] += 1
        if used[node.name] > 1:
            node.name += f"_{used[node.name]}"
        if node.op_type == "MatMul" and node.input[1] in stored:
            renamed.setdefault(node.input[1], f"{scope}.weight_transposed")
        elif node.op_type == "MatMul" and node.input[0] in stored:  # only additive scores multiply from the left
            renamed.setdefault(node.input[0], f"{scope}.score_vector")
    for old in stored.keys() - renamed.keys():
        renamed[old] = old.removeprefix(_MODEL_PREFIX)
    for old, new in renamed.items():
        if old in stored:
            stored[old].name = new
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)


def _scope(node: onnx.NodeProto) -> str:
    """The path of the module that a node was traced in; empty outside the model."""
    scopes = next((entry.value for entry in node.metadata_props if entry.key == _NAME_SCOPES), "[]")
    modules: list[str] = ast.literal_eval(scopes)[:-1]
    return modules[-1].removeprefix(_MODEL_PREFIX) if modules and modules[-1].startswith(_MODEL_PREFIX) else ""


def _strip_metadata(model: onnx.ModelProto) -> None:
    """Removes stack traces and doc strings, which hold this machine's paths and most of the file's size."""
    graph = model.graph
    described: tuple[Any, ...] = (model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output)
    for item in described:
        del item.metadata_props[:]
        item.doc_string = ""
    # Intermediate shapes can be inferred again; the traced ones contain generated axis names.
    del graph.value_info[:]


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return TensorSpec(value.name, dtype, tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim))


def _compare(kind: str, wanted: Sequence[TensorSpec], found: Sequence[TensorSpec]) -> list[str]:
    if len(wanted) != len(found):
        return [f"{len(found)} {kind}, must be {len(wanted)}"]
    return [f"{kind} has {have}, must have {want}" for want, have in zip(wanted, found, strict=True) if want != have]
