"""Every weight in an artifact's files is the checkpoint's: each one that is not is named, whatever is wrong with it."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from export.exporter import export
from export.graphs import OPSET
from export.quantize import quantize
from export.stored_weights import StoredWeightsError, compare
from model import checkpoint
from model.nn.transformer import Transformer
from model.spec.artifact import CPU_PRECISIONS, TOKENIZER, Device, KVPrecision, Precision, read_manifest
from model.spec.config import Architecture
from tests.artifacts import (
    ADDITIVE,
    LEARNED,
    paged_artifact,
    random_model,
    tiny_artifact,
    tiny_config,
    tiny_tokenizer,
)

DECODER_ONLY, ENCODER_DECODER = Architecture.DECODER_ONLY, Architecture.ENCODER_DECODER
NARROW = {"d_model": 48, "num_heads": 3, "d_ff": 80}
"""Blocks of 16, which `MatMulNBits` takes."""
SAMPLE = 15
"""Wrong tensors of each artifact that are tried without `--whole`."""
Values = npt.NDArray[Any]

SLOTS = [
    pytest.param(family, precision, kv, overrides, id=f"{family}-{precision}-{kv}-{number}")
    for number, (family, precision, kv, overrides) in enumerate(
        [
            *(
                (family, precision, KVPrecision.FP32, {})
                for family in Architecture
                for precision in ("bf16", "int8", "int4")
            ),
            *((family, "int4", KVPrecision.INT8, {}) for family in Architecture),
            (DECODER_ONLY, "int4", KVPrecision.FP32, NARROW),
            (DECODER_ONLY, "int4", KVPrecision.FP32, LEARNED),
            (DECODER_ONLY, "fp32", KVPrecision.FP32, {}),
            (ENCODER_DECODER, "int8", KVPrecision.FP32, ADDITIVE[ENCODER_DECODER]),
        ]
    )
]


def files_of(folder: Path) -> list[str]:
    return [graph.file for graph in read_manifest(folder).graphs.values()]


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], dict[Path, onnx.ModelProto]]:
    """Graphs of an artifact by a path of their own, weights inside."""

    def copy(folder: Path) -> dict[Path, onnx.ModelProto]:
        graphs = {tmp_path / file: onnx.load(folder / file) for file in files_of(folder)}
        for path, graph in graphs.items():
            onnx.save(graph, path)
        return graphs

    return copy


def mutants(tensors: dict[str, Values], name: str) -> Iterator[tuple[str, Values]]:
    """Wrong values of a tensor."""
    values = tensors[name]
    wrong = {"zero": np.zeros_like(values), "rolled by one": np.roll(values.reshape(-1), 1).reshape(values.shape)}
    if values.dtype not in (np.int8, np.uint8):
        wrong["times 1.1"] = (values * np.asarray(1.1, values.dtype)).astype(values.dtype)
    neighbor = name.replace("layers.0.", "layers.1.")
    if neighbor != name and neighbor in tensors:
        wrong["its neighbor layer's"] = tensors[neighbor]
    # Some change nothing: a constant row that is rolled, an infinity times 1.1.
    yield from ((what, each) for what, each in wrong.items() if not np.array_equal(each, values))


def problems_of(folder: Path, files: list[str], model: Transformer) -> str:
    try:
        compare(folder, files, model)
    except StoredWeightsError as error:
        return str(error)
    return ""


def is_compared(name: str, model: Transformer) -> bool:
    """Scales of K/V and constants of the graph's arithmetic are not."""
    modules = {each.partition(".")[0] for each, _ in model.named_modules() if each}
    return name.partition(".")[0] in modules


@pytest.mark.parametrize(("family", "precision", "kv", "overrides"), SLOTS)
@pytest.mark.sampled(6)
def test_every_wrong_tensor_is_named(
    family: Architecture,
    precision: str,
    kv: KVPrecision,
    overrides: dict[str, Any],
    copied: Callable[[Path], dict[Path, onnx.ModelProto]],
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    folder = tiny_artifact(family, Precision(precision), kv, **overrides)
    model, files = random_model(tiny_config(family, **overrides)), files_of(folder)
    graphs = copied(folder)
    assert compare(tmp_path, files, model) == compare(folder, files, model)
    all_wrong = [
        (path, tensor, what, wrong)
        for path, graph in graphs.items()
        for tensors in [{each.name: numpy_helper.to_array(each) for each in graph.graph.initializer}]
        for tensor in graph.graph.initializer
        if is_compared(tensor.name, model)
        for what, wrong in mutants(tensors, tensor.name)
    ]
    assert len(all_wrong) > 3 * len(list(model.parameters()))
    if not pytestconfig.getoption("--whole"):
        all_wrong = random.Random(f"{pytestconfig.getoption('randomly_seed', 0)}").sample(all_wrong, SAMPLE)
    passed = []
    for path, tensor, what, wrong in all_wrong:
        right = tensor.SerializeToString()
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(wrong), tensor.name))
        onnx.save(graphs[path], path)
        # Problems name the module; a tied or rearranged weight has other endings.
        module = tensor.name.partition("_residual")[0].partition(".weight")[0]
        if module not in problems_of(tmp_path, files, model):
            passed.append(f"{tensor.name} {what}")
        tensor.ParseFromString(right)
        onnx.save(graphs[path], path)
    assert passed == []


@pytest.mark.parametrize("family", list(Architecture))
@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
@pytest.mark.sampled(1)
def test_graphs_for_a_device_store_the_rounded_weights(family: Architecture, precision: Precision) -> None:
    folder = paged_artifact(family, Device.CUDA, precision, block_size=256)
    model, files = random_model(tiny_config(family)), files_of(folder)
    dtype = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}[precision]
    found = compare(folder, files, model, dtype)
    assert (found.num_tensors >= len(list(model.parameters())), found.max_relative_rms) == (True, 0.0)
    with pytest.raises(StoredWeightsError, match=r"values are not the checkpoint's"):
        compare(folder, files, model)
    with pytest.raises(StoredWeightsError, match=r"values are not the checkpoint's"):
        compare(folder, files, random_model(tiny_config(family), seed=1), dtype)


def test_a_weight_that_is_missing_or_read_with_anothers_scales_is_named(
    copied: Callable[[Path], dict[Path, onnx.ModelProto]], tmp_path: Path
) -> None:
    folder = tiny_artifact(DECODER_ONLY, Precision.INT8)
    model, files = random_model(tiny_config(DECODER_ONLY)), files_of(folder)
    ((path, graph),) = copied(folder).items()
    node = next(node for node in graph.graph.node if node.input[1:2] == ["layers.0.self_attention.qkv.weight_int8"])
    node.input[1] = "layers.1.self_attention.qkv.weight_int8"
    onnx.save(graph, path)
    with pytest.raises(StoredWeightsError, match=r"layers\.1\.self_attention\.qkv\.weight: a node reads it"):
        compare(tmp_path, files, model)
    shutil.copyfile(folder / files[0], path)
    shutil.copyfile(folder / f"{files[0]}.data", path.with_name(f"{files[0]}.data"))
    graph = onnx.load(path)
    norm = next(each for each in graph.graph.initializer if each.name == "final_norm.weight")
    graph.graph.initializer.remove(norm)
    onnx.save(graph, path)
    with pytest.raises(StoredWeightsError, match=r"final_norm\.weight is in no graph"):
        compare(tmp_path, files, model)
    norm.name = "anothers_norm.weight"
    graph.graph.initializer.append(norm)
    onnx.save(graph, path)
    with pytest.raises(StoredWeightsError, match=r"anothers_norm\.weight: the checkpoint has no weight of this name"):
        compare(tmp_path, files, model)


@pytest.mark.parametrize("precision", CPU_PRECISIONS[1:])
def test_a_matrix_or_table_that_stays_in_float32_is_named(precision: Precision) -> None:
    folder = tiny_artifact(DECODER_ONLY)
    with pytest.raises(StoredWeightsError) as refused:
        compare(folder, files_of(folder), random_model(tiny_config(DECODER_ONLY)), precision=precision)
    named = {problem.split(": ")[1] for problem in refused.value.problems}
    assert {"embedding.tokens.weight", "layers.1.feed_forward.down.weight"} <= named
    assert not any("norm" in name for name in named)


@pytest.mark.parametrize("precision", CPU_PRECISIONS)
@pytest.mark.sampled(1)
def test_a_bias_of_zeros_is_in_no_graph_and_need_not_be(precision: Precision, tmp_path: Path) -> None:
    """As published translation models have: the exporter leaves a sum with zeros out."""
    config = tiny_config(ENCODER_DECODER, logits_bias=True)
    model = random_model(config)
    assert model.logits_bias is not None
    model.logits_bias.data.zero_()
    tokenizer = tiny_tokenizer(config.vocab_size, ends_with_eos=True)
    checkpoint.save(tmp_path / "zero", model, config, {TOKENIZER: tokenizer.to_str()}, {})
    export(checkpoint.load(tmp_path / "zero"), tmp_path / "out", Device.CPU, precision, lambda _: None)
    model.logits_bias.data[3] = 1e-3
    assert problems_of(tmp_path / "out", files_of(tmp_path / "out"), model) == "logits_bias is in no graph"


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_weights_that_vanish_are_no_ones_fault(precision: Precision) -> None:
    """Rows of 1e-26 have no float16 scale, of 1e-41 hardly a float32 one, of 1e-43 none; zeros have any."""
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((1100, 64)).astype(np.float32)
    for row, factor in ((3, 1e-26), (1050, 1e-41), (9, 1e-43), (70, 0.0)):
        weight[row] *= np.float32(factor)
    linear = helper.make_node("MatMul", ["rows", "w.weight_transposed"], ["out"], name="w/MatMul")
    graph = helper.make_graph(
        [linear],
        "one",
        [helper.make_tensor_value_info("rows", onnx.TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, ["n", 1100])],
        [numpy_helper.from_array(np.ascontiguousarray(weight.T), "w.weight_transposed")],
    )
    quantized = quantize(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)]), precision)
    module = torch.nn.Module()
    module.w = torch.nn.Linear(64, 1100, bias=False)
    module.w.weight.data = torch.from_numpy(weight)

    def problems(model: onnx.ModelProto) -> str:
        with tempfile.TemporaryDirectory() as folder:
            onnx.save(model, Path(folder) / "one.onnx")
            return problems_of(Path(folder), ["one.onnx"], module)  # type: ignore[arg-type]

    assert problems(quantized) == ""
    weight[1099, 63] += 0.5  # shares its memory with the module
    assert "1 of 70400 values" in problems(quantized)
