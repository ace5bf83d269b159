"""The graphs over blocks: the stand-in answers as PyTorch does, and the CUDA graphs are the same but for one operator.

No kernel of that operator runs here. What surrounds it does: its documented meaning, written out in NumPy, takes its
place in the very graph that is shipped, and ONNX Runtime reads that graph and finds nothing wrong with it but that this
build has no kernel.
"""

from __future__ import annotations

import atexit
import dataclasses
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from export.emit import emit
from export.exporter import Refused, export
from export.paged import CONTRIB, STAND_IN, MoveGraph, PagedDecoderGraph, PagedEncoderGraph, in_precision
from export.replay import PagedReplayer
from export.verify import Verdict, verify
from model import checkpoint
from model.nn.transformer import EncoderDecoder
from model.spec import artifact, golden
from model.spec.artifact import (
    BLOCK_SIZE,
    DECODER,
    ENCODER,
    GOLDEN,
    MAX_CANDIDATES,
    MOVE,
    Device,
    KVFormat,
    KVLayout,
    KVPrecision,
    Manifest,
    Precision,
)
from model.spec.config import Architecture
from service.engine.sessions.cuda_provider import SHAPE_OPERATORS
from tests.artifacts import ADDITIVE, paged_artifact, random_model, tiny_checkpoint, tiny_config
from tests.parity.paged_reference import OPERANDS, Interpreter

Array = npt.NDArray[Any]

DECODER_ONLY, ENCODER_DECODER = Architecture.DECODER_ONLY, Architecture.ENCODER_DECODER
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "rotary": (DECODER_ONLY, {}),
    "windowed": (
        DECODER_ONLY,
        {"sliding_window": 19, "layer_types": ("sliding",), "query_key_norm": True, "head_dim": 16, "num_layers": 1},
    ),
    "sinusoidal": (ENCODER_DECODER, {}),
    "encoder-rotary": (
        ENCODER_DECODER,
        {
            "positions": "rotary",
            "num_heads": 4,
            "d_model": 64,
            "num_kv_heads": 2,
            "num_layers": 1,
            "num_encoder_layers": 1,
        },
    ),
}
# The second number format is written by the same code: once will do.
CUDA_GRAPHS = pytest.mark.parametrize(
    ("variant", "precision"),
    [*((variant, Precision.FP16) for variant in VARIANTS), ("rotary", Precision.BF16)],
)


def stand_in(variant: str) -> Path:
    family, overrides = VARIANTS[variant]
    return paged_artifact(family, **overrides)


@cache
def root() -> str:
    folder = tempfile.TemporaryDirectory(prefix="onward-paged-")
    atexit.register(folder.cleanup)
    return folder.name


@cache
def cuda_graphs(variant: str, precision: Precision = Precision.FP16) -> tuple[Path, Manifest]:
    """The graphs that the exporter writes for CUDA, with the stand-in's weights, and what a manifest says of them."""
    manifest = artifact.load(stand_in(variant))
    kv = KVFormat(KVPrecision(precision), layout=KVLayout.PAGED, block_size=BLOCK_SIZE)
    model = in_precision(random_model(manifest.config), kv.precision)
    folder = Path(tempfile.mkdtemp(dir=root()))
    graphs = {DECODER: emit(PagedDecoderGraph(model, CONTRIB, kv.precision, BLOCK_SIZE), folder / "decoder.onnx")}
    if isinstance(model, EncoderDecoder):
        graphs[ENCODER] = emit(PagedEncoderGraph(model, kv.precision, BLOCK_SIZE), folder / "encoder.onnx")
    graphs[MOVE] = emit(MoveGraph(model.config, kv.precision, BLOCK_SIZE), folder / "move.onnx")
    return folder, dataclasses.replace(
        manifest, device=Device.CUDA, precision=precision, kv_cache=kv, graphs=graphs, files={}
    )


# What the stand-in computes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled(1)
def test_stand_in_answers_as_pytorch_does(variant: str) -> None:
    """Over blocks of sixteen, so that rows have several, and NaN wherever nothing was written."""
    report = verify(stand_in(variant), lambda _: None)
    assert report.verdict is Verdict.PASSED
    assert report.max_abs_error < 2e-5
    assert all(case.agreement == 1.0 for case in report.cases)


@pytest.mark.parametrize("variant", ["rotary", "sinusoidal"])
@pytest.mark.sampled(1)
def test_stand_in_has_standard_operators_alone_and_the_signature_of_the_cuda_graphs(variant: str) -> None:
    cpu, (_, cuda) = artifact.load(stand_in(variant)), cuda_graphs(variant)
    for name in cuda.graphs:
        graph = onnx.load(stand_in(variant) / cpu.graphs[name].file, load_external_data=False).graph
        assert {node.domain for node in graph.node} == {""}
        for mine, theirs in zip(cpu.graphs[name].inputs, cuda.graphs[name].inputs, strict=True):
            assert mine.name == theirs.name
            assert mine.dtype == theirs.dtype or (mine.dtype, theirs.dtype) == ("float32", "float16")
            assert len(mine.shape) == len(theirs.shape)


class Step:
    """One run of a decoder graph over two rows: a chunk behind what one has, a token behind what the other has."""

    def __init__(self, folder: Path) -> None:
        manifest = artifact.load(folder)
        self.config, self.size = manifest.config, manifest.kv_cache.block_size
        self.session = ort.InferenceSession(str(folder / manifest.graphs[DECODER].file))
        shape = (6, self.size, self.config.num_kv_heads, self.config.head_dim)
        draw = np.random.default_rng(7)
        self.caches = {
            value.name: draw.standard_normal(shape, np.float32)
            for value in self.session.get_inputs()
            if "_cache_" in value.name
        }
        self.table = np.array([[5, 2, 0], [3, 1, 4]], np.int32)
        self.past = np.array([13, 33], np.int32)
        self.counts = (5, 1)
        places = [self.place(row, self.past[row] + i) for row in (0, 1) for i in range(self.counts[row])]
        self.inputs: dict[str, Array] = {
            "input_ids": draw.integers(0, self.config.vocab_size, 6),
            "cumulative_sequence_length": np.array([0, 5, 6], np.int32),
            "past_seqlens": self.past,
            "block_table": self.table,
            "slot_mapping": np.array(places, np.int32),
            "attention_metadata": np.array([5, 34, 34], np.int32),
            "logits_indices": np.arange(6),
        }

    def place(self, row: int, position: int) -> int:
        return int(self.table[row, position // self.size]) * self.size + position % self.size

    def run(self, **changes: Array) -> dict[str, Array]:
        names = [value.name for value in self.session.get_outputs()]
        outputs = self.session.run(names, self.inputs | self.caches | changes)
        return dict(zip(names, outputs, strict=True))


def test_stand_in_names_the_candidates_that_the_logits_have() -> None:
    found = Step(stand_in("rotary")).run()
    logits = found["logits"].astype(np.float64)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :MAX_CANDIDATES]
    assert (found["candidate_ids"] == order).all()
    assert (found["candidate_logits"] == np.take_along_axis(found["logits"], order, 1)).all()
    np.testing.assert_allclose(found["log_normalizer"], np.log(np.exp(logits).sum(1)), rtol=1e-6)
    assert found["candidate_ids"].shape[1] == MAX_CANDIDATES


def test_stand_in_writes_to_the_places_it_is_given_and_to_no_other() -> None:
    step = Step(stand_in("rotary"))
    found = step.run()
    written = step.inputs["slot_mapping"].tolist()
    for name, before in step.caches.items():
        after = found[name.replace("_cache_", "_cache_out_")]
        is_changed = (before != after).reshape(-1, before[0, 0].size).all(axis=1)
        assert np.flatnonzero(is_changed).tolist() == sorted(written)
    # With nowhere to go, all but the block that is nobody's stays as it is.
    found = step.run(slot_mapping=np.full(6, -1, np.int32))
    for name, before in step.caches.items():
        np.testing.assert_array_equal(found[name.replace("_cache_", "_cache_out_")][1:], before[1:])


def test_stand_in_rows_do_not_meet() -> None:
    """What a row has, and what lies behind its end, is nothing to another row."""
    step = Step(stand_in("rotary"))
    logits = step.run()["logits"]
    spoiled = {name: values.copy() for name, values in step.caches.items()}
    for values in spoiled.values():
        values[5], values[2, 8:], values[4, 2:], values[0] = 9.0, np.nan, np.nan, np.nan
    others = step.run(**spoiled)["logits"]
    np.testing.assert_array_equal(others[5], logits[5])
    assert np.isfinite(others).all()
    assert (others[:5] != logits[:5]).any(axis=1).all()


def test_stand_in_in_sixteen_bits_is_as_near_as_their_tolerance(tmp_path: Path) -> None:
    """The rounding of weights, activations and K/V that the CUDA graph has, on kernels that are here."""
    model = random_model(tiny_config(DECODER_ONLY))
    precision = KVPrecision.FP16
    spec = emit(PagedDecoderGraph(in_precision(model, precision), STAND_IN, precision, 16), tmp_path / "decoder.onnx")
    kv = KVFormat(precision, layout=KVLayout.PAGED, block_size=16)
    manifest = artifact.load(stand_in("rotary"))
    halved = PagedReplayer(tmp_path, dataclasses.replace(manifest, graphs={DECODER: spec}, kv_cache=kv))
    tolerance = golden.tolerance_of(Precision.FP16, precision)
    errors = []
    for case in golden.load(stand_in("rotary") / GOLDEN):
        result = golden.compare(case, halved.run(case), tolerance)
        assert result.passed, f"{case.name}: {result.max_relative_error}"
        errors.append(result.max_abs_error)
    assert max(errors) > 1e-5, "that was float32"


# What the CUDA graphs ask of ONNX Runtime

# Either it has no kernel for a node, or it has turned float16 into float32 for want of one.
NO_KERNEL = r"NOT_IMPLEMENTED|InsertedPrecisionFreeCast_\w+\) of operator \(PagedAttention\)"
DTYPES = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}


def schema() -> Any:
    """The operator as this ONNX Runtime declares it."""
    (found,) = [each for each in ort_state.get_all_operator_schema() if each.name == "PagedAttention"]
    return found


def test_onnx_runtime_declares_the_operator_as_the_graphs_use_it() -> None:
    declared = schema()
    assert declared.domain == "com.microsoft"
    assert [parameter.name for parameter in declared.inputs] == [name for name, _, _ in OPERANDS]
    assert [parameter.name for parameter in declared.outputs] == ["output", "key_cache_out", "value_cache_out"]
    parameters = (*declared.inputs, *declared.outputs)
    optional = {parameter.name for parameter in parameters if "Optional" in str(parameter.option)}
    assert {"key", "value", "cos_cache", "sin_cache", "slot_mapping", "attention_metadata"} <= optional
    assert {"key_cache_out", "value_cache_out"} <= optional, "cross-attention asks for no caches"
    assert {"num_heads", "kv_num_heads", "do_rotary", "is_causal", "local_window_size"} <= declared.attributes.keys()


@CUDA_GRAPHS
@pytest.mark.sampled(1)
def test_cuda_graphs_give_the_operator_all_it_demands(variant: str, precision: Precision) -> None:
    folder, manifest = cuda_graphs(variant, precision)
    config = manifest.config
    model = onnx.load(folder / "decoder.onnx")
    types = {value.name: value.type.tensor_type for value in (*model.graph.input, *model.graph.output)}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    computed = {name for node in model.graph.node for name in node.output}
    nodes = [node for node in model.graph.node if node.op_type == "PagedAttention"]
    kinds = ("self", "cross") if config.is_encoder_decoder else ("self",)
    assert len(nodes) == config.num_layers * len(kinds)
    for number, node in enumerate(nodes):
        layer, kind = number // len(kinds), kinds[number % len(kinds)]
        assert node.domain == "com.microsoft"
        assert len(node.input) == len(OPERANDS)
        for (name, own, cross), given in zip(OPERANDS, node.input, strict=True):
            wanted = (own if kind == "self" else cross).format(layer=layer)
            if wanted == "rotary":
                wanted = "weight" if config.positions == "rotary" else ""
            if kind == "self" and config.query_key_norm and name in ("key", "value"):
                wanted = "computed"
            if wanted == "weight":
                assert weights[given].data_type == DTYPES[precision], name
                assert list(weights[given].dims) == [config.context, config.head_dim // 2], name
            elif wanted == "computed":
                assert given in computed, name
            else:
                assert given == wanted, name
        if kind == "self":
            assert list(node.output[1:]) == [f"key_cache_out_{layer}", f"value_cache_out_{layer}"]
        else:
            assert len(node.output) == 1
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        window = config.window(layer) if kind == "self" else 0
        assert attributes == {
            "num_heads": config.num_heads,
            "kv_num_heads": config.num_kv_heads,
            **({"do_rotary": int(config.positions == "rotary")} if kind == "self" else {"is_causal": 0}),
            **({"local_window_size": window} if window else {}),
        }
    for name in ("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping", "attention_metadata"):
        assert types[name].elem_type == onnx.TensorProto.INT32
        assert len(types[name].shape.dim) == (2 if name == "block_table" else 1)
    for name, kind_of in types.items():
        if "_cache_" in name:
            assert kind_of.elem_type == DTYPES[precision]
            sizes = [dim.dim_value for dim in kind_of.shape.dim]
            assert sizes == [0, BLOCK_SIZE, config.num_kv_heads, config.head_dim]
    floats = {tensor.data_type for tensor in weights.values()} - {onnx.TensorProto.INT64, onnx.TensorProto.INT32}
    assert floats <= {DTYPES[precision], onnx.TensorProto.FLOAT}
    for tensor in weights.values():
        assert tensor.data_type != onnx.TensorProto.FLOAT or np.prod(tensor.dims) <= 1, f"{tensor.name} is not rounded"


@CUDA_GRAPHS
@pytest.mark.sampled(1)
def test_cuda_graphs_pass_the_checker_and_onnx_runtime_lacks_but_the_kernel(variant: str, precision: Precision) -> None:
    """It reads the graph whole, and only then finds that a CPU computes none of it in this precision."""
    folder, _ = cuda_graphs(variant, precision)
    for path in sorted(folder.glob("*.onnx")):
        onnx.checker.check_model(path, full_check=True)
        onnx.shape_inference.infer_shapes(onnx.load(path), check_type=True, strict_mode=True)
    with pytest.raises(Exception, match=NO_KERNEL):
        ort.InferenceSession(str(folder / "decoder.onnx"), providers=["CPUExecutionProvider"])


# CUDA's kernels for the operators that the graphs are made of, by the version of the operator, and the types that they
# take as their first operand. Versions: as `libonnxruntime_providers_cuda.so` of onnxruntime-gpu 1.31.1 registers
# them; a kernel without a last version takes its first alone (`VerifyVersion` in ONNX Runtime's kernel_registry.cc), so
# that a version more is a kernel less. Types: docs/OperatorKernels.md of ONNX Runtime, CUDAExecutionProvider.
_HALVES = frozenset({"FLOAT16", "BFLOAT16"})
_FLOATS = _HALVES | {"FLOAT"}
_NUMBERS = _FLOATS | {"INT32", "INT64"}
CUDA_KERNELS: Mapping[tuple[str, range], frozenset[str]] = {
    ("Add", range(14, 15)): _NUMBERS,
    ("Attention", range(24, 25)): _FLOATS,
    ("Cast", range(23, 25)): _NUMBERS | {"BOOL"},
    ("Clip", range(13, 14)): frozenset({"FLOAT", "FLOAT16", "INT64"}),
    ("Concat", range(13, 14)): _NUMBERS,
    ("Div", range(14, 15)): _NUMBERS,
    ("Exp", range(13, 14)): _FLOATS,
    ("Gather", range(13, 14)): _NUMBERS,
    ("Gelu", range(20, 21)): _FLOATS,
    ("Gemm", range(13, 14)): _FLOATS,
    ("Greater", range(13, 14)): _NUMBERS - {"BFLOAT16"},
    ("LayerNormalization", range(17, 18)): _FLOATS,
    ("Log", range(13, 14)): _FLOATS - {"BFLOAT16"},
    ("MatMul", range(13, 14)): _FLOATS,
    ("Mul", range(14, 15)): _NUMBERS,
    ("RMSNormalization", range(23, 24)): _FLOATS,
    ("Range", range(11, 27)): frozenset({"FLOAT", "INT32", "INT64"}),
    ("ReduceMin", range(20, 21)): _NUMBERS - {"BFLOAT16"},
    ("ReduceSum", range(13, 14)): _NUMBERS,
    ("Relu", range(14, 15)): _FLOATS,
    ("Reshape", range(23, 25)): _NUMBERS,
    ("ScatterND", range(18, 19)): _NUMBERS,
    ("Shape", range(23, 25)): _NUMBERS,
    ("Sigmoid", range(13, 14)): _FLOATS,
    ("Slice", range(13, 14)): _NUMBERS,
    ("Split", range(18, 19)): _NUMBERS,
    ("Squeeze", range(24, 25)): _NUMBERS,
    ("Sub", range(14, 15)): _NUMBERS,
    ("TopK", range(24, 25)): frozenset({"FLOAT", "FLOAT16", "INT32", "INT64"}),
    ("Transpose", range(23, 25)): _NUMBERS,
    ("Unsqueeze", range(24, 25)): _NUMBERS,
    ("Where", range(16, 17)): _NUMBERS,
    ("com.microsoft.PagedAttention", range(1, 2)): _HALVES,
    ("com.microsoft.RotaryEmbedding", range(1, 2)): _FLOATS,
}


def operators(path: Path, precision: Precision) -> set[tuple[str, int, str]]:
    """What nodes a graph has: domain and operator, the version of its declaration, and the type that it computes in."""
    model = onnx.load(path)
    graph = model.graph
    versions = {opset.domain: opset.version for opset in model.opset_import}
    declared = {value.name for value in (*graph.input, *graph.output)}
    for node in graph.node:
        # Nobody but ONNX Runtime could infer these.
        for name in (name for name in node.output if node.domain and name not in declared):
            graph.value_info.append(onnx.helper.make_tensor_value_info(name, DTYPES[precision], None))
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = (*graph.input, *graph.output, *graph.value_info)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    found = set()
    for node in graph.node:
        version = 1 if node.domain else onnx.defs.get_schema(node.op_type, versions[""]).since_version
        computed = node.input[1 if node.op_type == "Where" else 0]
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        found.add((name, version, onnx.TensorProto.DataType.Name(types[computed])))
    return found


@CUDA_GRAPHS
@pytest.mark.sampled(1)
def test_cuda_has_a_kernel_for_every_node_of_the_graphs(variant: str, precision: Precision) -> None:
    """A session that records refuses a graph with a single node for which there is none."""
    folder, _ = cuda_graphs(variant, precision)
    lacking = {
        (path.name, *found)
        for path in sorted(folder.glob("*.onnx"))
        for found in operators(path, precision)
        if not any(
            found[0] == name and found[1] in versions and found[2] in types
            for (name, versions), types in CUDA_KERNELS.items()
        )
    }
    assert not lacking


@pytest.mark.parametrize("variant", ["sinusoidal", "encoder-rotary"])
@pytest.mark.sampled(1)
def test_an_encoder_computes_on_whole_numbers_alone_where_it_may_run_on_the_processor(variant: str) -> None:
    """ONNX Runtime leaves there what follows from shapes; a session takes nothing else."""
    folder, _ = cuda_graphs(variant)
    found = {each for each in operators(folder / "encoder.onnx", Precision.FP16) if each[0] in SHAPE_OPERATORS}
    assert {name for name, _, _ in found} >= {"Shape", "Concat"}
    assert {dtype for _, _, dtype in found} <= {"INT32", "INT64"}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled(1)
def test_cuda_graphs_answer_as_pytorch_does_where_the_operator_does_as_documented(variant: str) -> None:
    """The very files that are shipped; only the operator is interpreted."""
    folder, manifest = cuda_graphs(variant)
    graphs = {name: Interpreter(folder / graph.file) for name, graph in manifest.graphs.items()}

    def run(name: str, inputs: Mapping[str, Array], caches: Mapping[str, Array]) -> dict[str, Array]:
        found = graphs[name].run({**inputs, **caches})
        for each, values in caches.items():
            values[:] = found.pop(each.replace("_cache_", "_cache_out_"))
        return found

    replayer = PagedReplayer(folder, manifest, run)
    tolerance = golden.tolerance_of(manifest.precision, manifest.kv_cache.precision)
    cases = [case for case in golden.load(stand_in(variant) / GOLDEN) if len(case.steps) <= 30]
    assert max(len(step) for case in cases for step in case.steps) > 2, "rows beside each other"
    for case in cases:
        result = golden.compare(case, replayer.run(case), tolerance)
        assert result.passed, f"{case.name}: {result.max_relative_error}"


# What the exporter says and refuses

BLOCKS = KVFormat(layout=KVLayout.PAGED)
INT8_BLOCKS = KVFormat(KVPrecision.INT8, layout=KVLayout.PAGED)


def test_export_over_blocks_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    sources = {
        name: checkpoint.load(
            tiny_checkpoint(tmp_path / name, tiny_config(DECODER_ONLY, **{"num_layers": 1, **values}))
        )
        for name, values in (("dot", {}), ("additive", ADDITIVE[DECODER_ONLY]))
    }
    cases: list[tuple[str, Device, Precision, dict[str, Any], str]] = [
        ("dot", Device.CUDA, Precision.FP32, {}, "K/V in blocks are for fp16 or bf16 on cuda, asked for is fp32"),
        ("dot", Device.CPU, Precision.INT8, {}, "K/V in blocks are for fp32 on cpu, asked for is int8"),
        ("dot", Device.CPU, Precision.FP32, {"kv_cache": INT8_BLOCKS}, "the precision of the graph"),
        ("dot", Device.CUDA, Precision.FP16, {"explain_graph": True}, "explain graphs go with K/V in slots"),
        ("additive", Device.CUDA, Precision.BF16, {}, "dot-product attention"),
    ]
    for name, device, precision, wishes, problem in cases:
        with pytest.raises(Refused, match=problem):
            export(sources[name], tmp_path / "out", device, precision, lambda _: None, **{"kv_cache": BLOCKS, **wishes})


def test_an_artifact_over_blocks_of_another_size_than_its_graphs_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in stand_in("rotary").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    kv = KVFormat(layout=KVLayout.PAGED, block_size=32)
    manifest = dataclasses.replace(artifact.read_manifest(folder), kv_cache=kv)
    (folder / artifact.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    with pytest.raises(artifact.ArtifactError) as caught:
        artifact.load(folder)
    problem = "decoder inputs lacks key_cache_0 float32[num_blocks, 32"
    assert any(problem in found for found in caught.value.problems), caught.value.problems
