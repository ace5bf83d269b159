"""Fewer bits: each product is its definition, the rest of a graph is as it was, and proofs can still fail."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.frame.scenario import Run
from benchmarks.scenarios import graphs, quality
from export import slots
from export.__main__ import main
from export.exporter import export
from export.job import ParityError
from export.operators import (
    ATTENTION,
    BIASED,
    DOMAIN,
    GATHER,
    INT4_GATHER,
    INT4_LINEAR,
    INT8_ATTENTION,
    INT8_GATHER,
    INT8_LINEAR,
    LEAST_PEAK,
    LINEAR,
    SWIGLU,
)
from export.panels import GROUP_ROWS, INT4_BLOCK, INT4_PANEL_COLUMNS, PANEL_COLUMNS
from export.quantize import quantize, quantize_file
from export.quantize_kv import calibrate, quantize_kv, quantize_sources
from export.verify import Verdict, replay, verify
from export.weight_quantization import quantize_blocks, quantize_columns
from model import checkpoint
from model.nn import reference
from model.spec import artifact, golden
from model.spec.artifact import DECODER, ENCODER, Device, KVPrecision, Precision
from model.spec.golden import Tolerance
from model.spec.tokenizer import Tokenizer
from tests.artifacts import ADDITIVE, change_tensor, tiny_artifact, tiny_checkpoint, tiny_config
from tests.environment import ROOT

Float32 = npt.NDArray[np.float32]

FAMILIES = ("decoder-only", "encoder-decoder")
LOW = (Precision.INT8, Precision.INT4)
RNG = np.random.default_rng(7)


def _linear(weight: Float32, bias: Float32 | None, rank: int) -> onnx.ModelProto:
    """What a linear layer in the middle is exported as: MatMul and Add on `[B, S, K]`, Gemm on `[N, K]`."""
    leading = ["batch", "sequence"][: rank - 1]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*leading, weight.shape[0]])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*leading, weight.shape[1]])]
    stored = [numpy_helper.from_array(np.ascontiguousarray(weight if rank == 3 else weight.T), "layer.weight")]
    stored += [] if bias is None else [numpy_helper.from_array(bias, "layer.bias")]
    if rank == 2:
        names = ["x", "layer.weight", *(["layer.bias"] if bias is not None else [])]
        nodes = [helper.make_node("Gemm", names, ["z"], name="layer/Gemm", transB=1)]
    else:
        nodes = [helper.make_node("MatMul", ["x", "layer.weight"], ["z" if bias is None else "p"], name="layer/MatMul")]
        nodes += [] if bias is None else [helper.make_node("Add", ["p", "layer.bias"], ["z"], name="layer/Add")]
    nodes.append(helper.make_node("Identity", ["z"], ["y"]))
    graph = helper.make_graph(nodes, "linear", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def _run(model: onnx.ModelProto, x: Float32) -> Float32:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def _rows(inner: int, rank: int) -> Float32:
    """Rows of every scale, one with an outlier, one of zeros, one below the least peak."""
    rows = RNG.standard_normal((12, inner)).astype(np.float32) * np.logspace(-3, 3, 12, dtype=np.float32)[:, None]
    rows[3, inner // 2] = 4000.0
    rows[5] = 0.0
    rows[6] = LEAST_PEAK / 100
    return rows if rank == 2 else rows.reshape(3, 4, inner)


def _weight(inner: int, outer: int) -> Float32:
    weight = RNG.standard_normal((inner, outer)).astype(np.float32) * RNG.uniform(0.01, 3, outer).astype(np.float32)
    weight[:, 1] = 0.0
    return weight


@pytest.mark.parametrize(
    ("inner", "outer", "with_bias", "rank"),
    [(64, 96, False, 3), (97, 33, True, 2), (97, 33, True, 3), (768, 257, False, 2)],
)
def test_int8_product_is_its_definition_to_the_bit(inner: int, outer: int, with_bias: bool, rank: int) -> None:
    weight, x = _weight(inner, outer), _rows(inner, rank)
    bias = RNG.standard_normal(outer).astype(np.float32) if with_bias else None
    found = _run(quantize(_linear(weight, bias, rank), Precision.INT8), x)
    columns, column_scales = quantize_columns(weight)
    peaks = np.maximum(np.abs(x).max(axis=-1, keepdims=True), LEAST_PEAK)
    scales = peaks * (np.float32(1) / np.float32(127))
    rounded = np.rint(x / scales).astype(np.int64)
    assert np.abs(rounded).max() == 127
    expected = (rounded @ columns.astype(np.int64)).astype(np.float32) * column_scales * scales
    expected = expected if bias is None else expected + bias
    np.testing.assert_array_equal(found, expected)
    # And it is the product that was meant: each factor is off by half a step at most.
    magnitudes = np.abs(x).astype(np.float64)
    room = 0.5 * (scales * np.abs(weight).sum(axis=0) + magnitudes.sum(axis=-1, keepdims=True) * column_scales)
    room += 0.25 * inner * scales * column_scales
    exact = x.astype(np.float64) @ weight + (0 if bias is None else bias)
    assert (np.abs(found - exact) <= 1.001 * room + 1e-6 * np.abs(exact)).all()


@pytest.mark.parametrize(("with_bias", "rank"), [(True, 2), (False, 3)])
def test_int8_product_behind_a_relu_has_all_bytes_for_numbers_above_zero(with_bias: bool, rank: int) -> None:
    weight, x = _weight(97, 33), _rows(97, rank)
    bias = RNG.standard_normal(33).astype(np.float32) if with_bias else None
    model = _linear(weight, bias, rank)
    product = next(node for node in model.graph.node if node.op_type in ("MatMul", "Gemm"))
    product.input[0] = "rectified"
    model.graph.node.insert(0, helper.make_node("Relu", ["x"], ["rectified"], name="layer/Relu"))
    low = quantize(model, Precision.INT8)
    columns, column_scales = quantize_columns(weight)
    rectified = np.maximum(x, 0)
    scales = np.maximum(rectified.max(axis=-1, keepdims=True), LEAST_PEAK) * (np.float32(1) / np.float32(255))
    rounded = np.rint(rectified / scales).astype(np.int64)
    assert rounded.max() == 255
    expected = (rounded @ columns.astype(np.int64)).astype(np.float32) * column_scales * scales
    np.testing.assert_array_equal(_run(low, x), expected if bias is None else expected + bias)
    assert (_run(low, -np.abs(x)) == (0 if bias is None else bias)).all(), "a row of zeros stays one"
    if rank == 2:
        assert _run(low, x[:0]).shape == (0, 33)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(("inner", "outer"), [(96, 33), (768, 257)])
def test_a_rounded_row_knows_no_other_even_one_that_is_no_number(inner: int, outer: int, precision: Precision) -> None:
    model = quantize(_linear(_weight(inner, outer), None, 2), precision)
    rows = _rows(inner, 2)
    alone = [_run(model, row[None]) for row in rows]
    assert np.isfinite(alone).all()
    for number in (np.nan, np.inf):
        spoiled = np.insert(rows, [1, 7], number, axis=0)
        together = np.delete(_run(model, spoiled), [1, 8], axis=0)
        assert together.tobytes() == np.concatenate(alone).tobytes()
    assert _run(model, rows[:0]).shape == (0, outer)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize(("inner", "outer", "block"), [(256, 96, 32), (96, 33, 32), (48, 40, 16)])
def test_int4_product_is_that_of_its_blocks(inner: int, outer: int, block: int, rank: int) -> None:
    """The operator rounds activations block by block to eight bits: their error is all that may come in."""
    weight, x = _weight(inner, outer), _rows(inner, rank)
    model = quantize(_linear(weight, None, rank), Precision.INT4)
    (node,) = (node for node in model.graph.node if node.op_type in (INT4_LINEAR, "MatMulNBits"))
    assert (node.op_type == INT4_LINEAR) == (block == INT4_BLOCK)
    codes, scales = quantize_blocks(weight, block)
    scales = scales.astype(np.float16).astype(np.float32) if block == INT4_BLOCK else scales
    rounded = _unpacked(codes, scales)
    pieces = x.reshape(-1, inner // block, block)
    steps = np.abs(pieces).max(axis=-1) / 127
    room = (0.51 * steps[:, None, :] * np.abs(rounded.T.reshape(outer, -1, block)).sum(axis=-1)).sum(axis=-1)
    error = np.abs(_run(model, x).reshape(-1, outer) - x.reshape(-1, inner).astype(np.float64) @ rounded)
    assert (error <= room + 1e-5 * np.abs(x).max()).all()
    assert (error[5] == 0).all(), "a row of zeros stays one"


@pytest.mark.parametrize(("rest", "kind"), [(1.0, INT4_LINEAR), (1e-5, "MatMulNBits")])
def test_a_faint_block_leaves_a_matrix_to_our_operator_unless_all_are_faint(rest: float, kind: str) -> None:
    weight = np.float32(rest) * _weight(96, 33)
    weight[32:64, 7] *= np.float32(1e-5 if rest == 1 else 1)
    model = quantize(_linear(weight, None, 2), Precision.INT4)
    assert [node.op_type for node in model.graph.node if node.op_type in (INT4_LINEAR, "MatMulNBits")] == [kind]
    x = np.zeros((1, 96), np.float32)
    x[0, 32:64] = 1
    least = float(np.finfo(np.float16).tiny)
    room = 32 * (0.5 * least if rest == 1 else 0.1 * np.abs(weight).max())
    assert abs(_run(model, x)[0, 7] - weight[32:64, 7].sum()) <= room


def test_int4_blocks_are_within_half_a_step_and_better_than_the_plain_scale() -> None:
    weight = RNG.standard_normal((256, 64)).astype(np.float32)
    codes, scales = quantize_blocks(weight, 32)
    error = _unpacked(codes, scales) - weight
    blocks = weight.T.reshape(64, 8, 32)
    extremes = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], axis=-1)
    plain = np.clip(np.rint(blocks / (extremes / -8)), -8, 7) * (extremes / -8) - blocks
    assert np.square(error).sum() < np.square(plain).sum()
    in_range = np.abs(weight.T.reshape(64, 8, 32)) < 6.9 * np.abs(scales[..., None])
    steps = np.broadcast_to(np.abs(scales[..., None]), blocks.shape)
    assert (np.abs(error.T.reshape(64, 8, 32)) <= 0.501 * steps)[in_range].all()


def _unpacked(codes: npt.NDArray[np.uint8], scales: Float32) -> Float32:
    nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:2], -1).astype(np.float32) - 8
    return (nibbles * scales[..., None]).reshape(len(codes), -1).T


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("family", FAMILIES)
def test_export_in_fewer_bits_is_proven_and_says_by_what_measure(family: str, precision: Precision) -> None:
    folder = tiny_artifact(family, precision)
    manifest = artifact.load(folder)
    assert manifest.precision is precision
    report = verify(folder, lambda _: None)
    assert report.verdict is Verdict.PASSED
    tolerance = golden.TOLERANCES[precision]
    written = json.loads((folder / artifact.PARITY).read_text())
    assert (written["precision"], written["tolerance"]) == (precision, dataclasses.asdict(tolerance))
    for case, golden_case in zip(report.cases, golden.load(folder / artifact.GOLDEN), strict=True):
        assert case.tolerance == pytest.approx(tolerance.relative * golden_case.logits.std())
        assert case.max_abs_error > golden.TOLERANCES[Precision.FP32].absolute, "nothing was rounded"
    assert manifest.graphs == artifact.load(tiny_artifact(family)).graphs


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_of_additive_scores_in_int8_are_proven(family: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_artifact(family, **ADDITIVE[family]), tmp_path / "copy"))
    manifest = dataclasses.replace(artifact.load(folder), precision=Precision.INT8)
    for file in folder.glob("*.onnx"):
        quantize_file(file, manifest.precision)
    # Of the float32 graphs.
    cases = tuple(dataclasses.replace(case, exported=None) for case in golden.load(folder / artifact.GOLDEN))
    assert replay(folder, manifest, cases, lambda _: None).verdict is Verdict.PASSED
    for file in folder.glob("*.onnx"):
        names = [tensor.name for tensor in onnx.load(file, load_external_data=False).graph.initializer]
        assert any(name.endswith("score_vector") for name in names), "attention stays as it is"


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_product_with_a_weight_is_rewritten_and_nothing_else(family: str, precision: Precision) -> None:
    whole, low = tiny_artifact(family), tiny_artifact(family, precision)
    bits = {Precision.INT8: 8, Precision.INT4: 4}[precision]
    for name in (DECODER, ENCODER) if family == "encoder-decoder" else (DECODER,):
        before, after = (onnx.load(folder / f"{name}.onnx").graph for folder in (whole, low))
        products = [node for node in before.node if node.op_type.removeprefix(BIASED) == LINEAR]
        found = Counter(node.op_type.removeprefix(BIASED).removesuffix(SWIGLU) for node in after.node)
        # Blocks of 16 are the operator's of ONNX Runtime's own.
        in_int4 = found[INT4_LINEAR] + found["MatMulNBits"]
        assert (found[INT8_LINEAR], in_int4) == ((len(products), 0) if bits == 8 else (0, len(products)))
        assert found["MatMul"] + found["Gemm"] + found[LINEAR] == 0
        assert len({node.name for node in after.node}) == len(after.node)
        weights, kept = _stored(before), _stored(after)
        multiplied = {node.input[1] for node in products}
        (tokens,) = (node.input[1] for node in before.node if node.op_type == GATHER and node.domain == DOMAIN)
        assert found[{8: INT8_GATHER, 4: INT4_GATHER}[bits]] == 1
        for tensor, values in weights.items():
            assert (tensor in kept) == (tensor not in {*multiplied, tokens}), tensor
            if tensor in kept:
                np.testing.assert_array_equal(kept[tensor], values)
        for node in products:
            outer, inner = weights[node.input[1]].shape
            rounded = kept[f"{node.input[1]}_int{bits}"]
            if bits == 8:
                inner, outer = (-(-inner // GROUP_ROWS) * GROUP_ROWS), (-(-outer // PANEL_COLUMNS) * PANEL_COLUMNS)
            elif inner % INT4_BLOCK == 0:
                outer = -(-outer // INT4_PANEL_COLUMNS) * INT4_PANEL_COLUMNS
            assert rounded.nbytes == inner * outer * bits // 8


def _stored(graph: onnx.GraphProto) -> dict[str, npt.NDArray[Any]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def test_standard_operators_round_rows_once_that_several_products_read(tmp_path: Path) -> None:
    """As the memory is by all layers' keys and values: ONNX Runtime finds that their functions begin alike."""
    folder = tiny_artifact("encoder-decoder", Precision.INT8)
    options = ort.SessionOptions()
    options.log_severity_level = 3  # writing an optimised graph warns that it fits this machine alone
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(str(folder / "encoder.onnx"), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(tmp_path / "optimised.onnx", load_external_data=False).graph
    found = Counter(node.op_type for node in graph.node)
    readers = Counter(node.input[0] for node in graph.node if node.op_type == "MatMulIntegerToFloat")
    assert max(readers.values()) == tiny_config("encoder-decoder").num_layers == 2
    assert found["QuantizeLinear"] == len(readers)


def test_quantize_leaves_its_argument_alone() -> None:
    model = onnx.load(tiny_artifact("decoder-only") / "decoder.onnx")
    before = model.SerializeToString()
    products = [node.op_type for node in quantize(model, Precision.FP32).graph.node if node.op_type.endswith(LINEAR)]
    assert products == [node.op_type for node in model.graph.node if node.op_type.endswith(LINEAR)], "own already"
    assert quantize(model, Precision.INT8).SerializeToString() != before
    assert model.SerializeToString() == before
    with pytest.raises(ValueError, match="fp16"):
        quantize(model, Precision.FP16)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("family", FAMILIES)
def test_verify_fails_when_one_scale_of_one_weight_is_off(family: str, precision: Precision, tmp_path: Path) -> None:
    names = [
        tensor.name
        for tensor in onnx.load(tiny_artifact(family, precision) / "decoder.onnx").graph.initializer
        if tensor.name.endswith("_scale")
    ]
    assert len(names) == (13 if family == "encoder-decoder" else 9)
    if precision is Precision.INT4:
        # A single channel of queries and keys moves attention by less than four bits do everywhere.
        names = [name for name in names if ".qkv." not in name and ".query." not in name]
    for name in names:
        folder = Path(shutil.copytree(tiny_artifact(family, precision), tmp_path / name))
        change_tensor(folder, "decoder.onnx", name, _spoil_one(100.0))
        assert verify(folder, lambda _: None).verdict is Verdict.FAILED, name


def _spoil_one(factor: float) -> Callable[[Any], Any]:
    """Multiplies one number of a tensor."""

    def spoil(values: Any) -> Any:
        values.flat[values.size // 2] *= factor
        return values

    return spoil


def test_export_in_fewer_bits_fails_when_what_is_rounded_was_wrong_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wide tolerance is for rounding alone: the float32 graph is held to its own first."""
    source = checkpoint.load(tiny_checkpoint(tmp_path / "checkpoint", tiny_config("decoder-only", num_layers=1)))
    monkeypatch.setitem(golden.TOLERANCES, Precision.FP32, Tolerance(absolute=1e-12))
    with pytest.raises(ParityError) as caught:
        export(source, tmp_path / "out", Device.CPU, Precision.INT8, lambda _: None)
    assert caught.value.report.precision is Precision.FP32
    assert not (tmp_path / "out").exists()


def test_export_refuses_by_name_what_has_no_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dot, additive = tiny_config("decoder-only"), tiny_config("decoder-only", **ADDITIVE["decoder-only"])
    widths = {"d_model": 42, "num_heads * head_dim": 42, "d_ff": 97}
    unequal = [f"{name} is {width}, int4 needs a multiple of 16" for name, width in widths.items()]
    score = "int8 K/V is for dot-product attention, this model's score is additive"
    fp32, int8 = KVPrecision.FP32, KVPrecision.INT8
    for config, precision, kv_precision, problems in (
        (dot, Precision.FP16, fp32, ["precision fp16 is not for cpu, only fp32, bf16, int8, int4"]),
        (dot, Precision.INT4, int8, []),
        (additive, Precision.INT8, fp32, []),
        (additive, Precision.INT4, fp32, unequal),
        (additive, Precision.FP32, int8, [score]),
    ):
        assert slots.unsupported(config, precision, kv_precision, explain_graph=False) == problems
    source = tiny_checkpoint(tmp_path / "checkpoint", additive)
    options = ["--precision", "int4", "--kv-cache", "int8"]
    assert main([str(source), "--out", str(tmp_path / "out"), *options]) == 2
    assert _last_line(capsys)["problems"] == [*unequal, score]
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"layer\.weight has 42 inputs"):
        quantize(_linear(_weight(42, 8), None, 3), Precision.INT4)


def test_export_command_says_its_precision_and_how_often_greedy_choices_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", tiny_config("decoder-only", num_layers=1))
    assert main([str(source), "--out", str(tmp_path / "out"), "--precision", "int8"]) == 0
    result = _last_line(capsys)
    assert (result["verdict"], result["precision"]) == ("passed", "int8")
    agreements = [case["agreement"] for case in json.loads((tmp_path / "out" / artifact.PARITY).read_text())["cases"]]
    assert result["min_agreement"] == min(agreements) <= 1.0


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_over_int8_kv_is_proven_and_says_so(family: str, precision: Precision) -> None:
    folder = tiny_artifact(family, precision, KVPrecision.INT8)
    manifest = artifact.load(folder)
    assert manifest.kv_cache.precision is KVPrecision.INT8
    assert "4 sequences of 96 tokens drawn evenly" in manifest.kv_cache.calibration
    is_pair = family == "encoder-decoder"
    assert ("sources of 64, 16, 4, 1 tokens drawn evenly" in manifest.kv_cache.calibration) == is_pair
    report = verify(folder, lambda _: None)
    assert (report.verdict, report.kv_precision) == (Verdict.PASSED, KVPrecision.INT8)
    assert report.max_abs_error > golden.TOLERANCES[Precision.FP32].absolute, "nothing was rounded"
    written = json.loads((folder / artifact.PARITY).read_text())
    tolerance = golden.tolerance_of(precision, KVPrecision.INT8)
    assert (written["kv_precision"], written["tolerance"]) == ("int8", dataclasses.asdict(tolerance))
    before, after = (onnx.load(each / "decoder.onnx").graph for each in (tiny_artifact(family, precision), folder))
    expected = Counter(node.op_type for node in before.node)
    expected[INT8_ATTENTION] = expected.pop(ATTENTION)
    assert Counter(node.op_type for node in after.node) == expected
    weights, kept = _stored(before), _stored(after)
    assert all(np.array_equal(kept.pop(name), values) for name, values in weights.items())
    kinds = ("", "cross_") if is_pair else ("",)
    names = {f"{kind}{part}_{layer}" for kind in kinds for part in ("key", "value") for layer in range(2)}
    assert kept.keys() == {f"{name}_scale" for name in names} | ({"no_sinks"} if is_pair else set())
    if is_pair:
        before, after = (onnx.load(each / "encoder.onnx").graph for each in (tiny_artifact(family, precision), folder))
        rounding = {"Mul": 4, "QuantizeLinear": 4}
        assert Counter(node.op_type for node in after.node) - Counter(node.op_type for node in before.node) == rounding
        weights, kept = _stored(before), _stored(after)
        assert all(np.array_equal(kept[name], values) for name, values in weights.items())


def test_int8_kv_is_what_is_kept_in_float32_divided_by_its_scales() -> None:
    """The first layer's, to half a step, in a prefill and beyond; what it saturates at is never met in calibration."""
    whole = onnx.load(tiny_artifact("decoder-only") / "decoder.onnx")
    config = tiny_config("decoder-only")
    scales, _ = calibrate(tiny_artifact("decoder-only") / "decoder.onnx", config)
    ids = np.random.default_rng(5).integers(0, config.vocab_size, (1, config.context))
    kept = _present(quantize_kv(whole, scales), ids, config.num_layers, np.int8)
    exact = _present(whole, ids, config.num_layers, np.float32)
    for name in ("key_0", "value_0"):
        steps = exact[name] / scales[name][None, :, None, :]
        np.testing.assert_allclose(kept[name], np.clip(steps, -128, 127), rtol=0, atol=0.501)
        assert np.abs(kept[name].astype(int)).max() > 100, "the eight bits are used"
    key, width = exact["key_0"], config.head_dim // 2
    lengths = np.hypot(key[..., :width], key[..., width:]).max(axis=(0, 2))
    halves = np.split(scales["key_0"], 2, axis=-1)
    np.testing.assert_array_equal(*halves)
    assert (lengths <= 1.2 * 127 * halves[0]).all(), "a pair's length is what no position changes"


def test_a_sources_int8_kv_is_what_is_kept_in_float32_divided_by_its_scales() -> None:
    """To half a step, for sources that calibration never met, short ones and long ones."""
    folder, config = tiny_artifact("encoder-decoder"), tiny_config("encoder-decoder")
    scales, _ = calibrate(folder / "decoder.onnx", config, folder / "encoder.onnx")
    whole = onnx.load(folder / "encoder.onnx")
    before, after = (
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for model in (whole, quantize_sources(whole, scales))
    )
    names = [output.name for output in after.get_outputs()]
    assert names == [output.name for output in before.get_outputs()]
    assert set(names) == {name for name in scales if name.startswith("cross_")}
    rng, loudest = np.random.default_rng(5), dict.fromkeys(names, 0.0)
    for length in (1, 2, 7, 31, config.source_context):
        ids = rng.integers(0, config.source_vocab_size, (8, length))
        feeds = {"source_ids": ids, "source_lengths": np.full(8, length, np.int32)}
        for name, exact, kept in zip(names, before.run(names, feeds), after.run(names, feeds), strict=True):
            assert kept.dtype == np.int8
            steps = exact / scales[name][None, :, None, :]
            np.testing.assert_allclose(kept, np.clip(steps, -128, 127), rtol=0, atol=0.501)
            loudest[name] = max(loudest[name], np.abs(steps).max())
    assert all(100 < steps < 1.3 * 127 for steps in loudest.values()), "the eight bits are used, and hardly exceeded"


def _present(
    model: onnx.ModelProto, ids: npt.NDArray[np.int64], num_layers: int, dtype: type[np.generic]
) -> dict[str, npt.NDArray[Any]]:
    """K/V after a prefill of these tokens."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    length = ids.shape[1]
    names = [f"{part}_{layer}" for layer in range(num_layers) for part in ("key", "value")]
    shape = next(tuple(each.shape[1::2]) for each in session.get_inputs() if each.name == "past_key_0")
    feeds: dict[str, npt.NDArray[Any]] = {
        "input_ids": ids,
        "seqlens_k": np.array([length - 1], np.int32),
        "total_sequence_length": np.array(length, np.int32),
        "logits_indices": np.array([length - 1]),
    }
    feeds |= {f"past_{name}": np.zeros((1, shape[0], length, shape[1]), dtype) for name in names}
    return dict(zip(names, session.run([f"present_{name}" for name in names], feeds), strict=True))


@pytest.mark.parametrize(
    ("family", "graph", "names"),
    [
        ("decoder-only", DECODER, ("value_0_scale", "value_1_scale", "key_0_scale")),
        ("encoder-decoder", DECODER, ("value_1_scale", "cross_value_0_scale", "cross_value_1_scale")),
        ("encoder-decoder", ENCODER, ("cross_value_0.steps_in_one", "cross_value_1.steps_in_one")),
    ],
)
def test_verify_fails_when_a_scale_of_kv_is_off(
    family: str, graph: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    for name in names:
        folder = Path(shutil.copytree(tiny_artifact(family, kv_precision=KVPrecision.INT8), tmp_path / name))
        change_tensor(folder, f"{graph}.onnx", name, _spoil_one(1e-3))
        assert verify(folder, lambda _: None).verdict is Verdict.FAILED, name


def test_quality_of_outputs_is_that_of_the_reference() -> None:
    """The context ends every answer, so that the reference's tokens are known to the end."""
    folder = tiny_artifact("encoder-decoder", context=12, num_layers=1, num_encoder_layers=1)
    source = checkpoint.load(folder.parent / "checkpoint")
    tokenizer = Tokenizer.load(source.tokenizer)
    sources = [tokenizer.encode(text) for text in ("1 May 2026", "tomorrow", "x")]
    answers = [
        tokenizer.decode(reference.greedy(source.model, [], ids, max_tokens=11, eos_ids={2}, start_id=1))
        for ids in sources
    ]
    assert all(answers)
    assert quality.translate(folder, sources, [20] * 3, tokenizer, threads=1) == answers


def test_quality_of_translations_is_scored_on_the_recipes_held_out_pairs() -> None:
    folder = tiny_artifact("encoder-decoder")
    settings = quality.QualitySettings(
        checkpoint=folder.parent / "checkpoint",
        artifacts=(folder,),
        recipe=str(ROOT / "examples" / "recipes" / "en-de.toml"),
        corpus=str(ROOT / "tests" / "data" / "libreoffice-help-de.po"),
        num_pairs=4,
    )
    found = quality.measure(settings, Run())
    assert found["measure"] == "bleu"
    by_torch, served = (row["value"] for row in found["rows"])
    # One near-tie may fall otherwise in another order of additions.
    assert 0.0 <= by_torch == pytest.approx(served, abs=5.0)


def test_quality_refuses_what_cannot_be_compared() -> None:
    folder, other = tiny_artifact("decoder-only"), tiny_artifact("encoder-decoder")
    settings = quality.QualitySettings(checkpoint=folder.parent / "checkpoint", artifacts=(other,))
    with pytest.raises(RuntimeError, match="another model"):
        quality.measure(settings, Run())
    with pytest.raises(RuntimeError, match="there is no measure for that"):
        quality.measure(dataclasses.replace(settings, artifacts=(folder,)), Run())


def test_steps_of_graphs_are_timed_side_by_side_and_the_environment_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(graphs.NO_FLASH, "0")
    folders = tuple(tiny_artifact("decoder-only", kv_precision=kv) for kv in (KVPrecision.FP32, KVPrecision.INT8))
    settings = graphs.GraphsSettings(artifacts=folders, rounds=1, prefill=("33:16",), decode=("1:8", "3:90"))
    found = graphs.measure(settings, Run())["milliseconds"]
    assert found.keys() == {"prefill 33:16", "decode 1:8", "decode 3:90"}
    for figures in found.values():
        variants = ("kernels", "standard", "plain")
        assert figures.keys() == {f"{folder} {variant}" for folder in folders for variant in variants}
        assert all(milliseconds > 0 for milliseconds in figures.values())
    assert os.environ[graphs.NO_FLASH] == "0"
    encoder = graphs.GraphsSettings(artifacts=(tiny_artifact("encoder-decoder"),))
    with pytest.raises(RuntimeError, match="needs a decoder-only model with a context of 1024 or more"):
        graphs.measure(encoder, Run())


def test_steps_of_graphs_are_profiled_by_operator() -> None:
    folders, variants = (tiny_artifact("decoder-only"),), ("standard",)
    settings = graphs.GraphsSettings(
        artifacts=folders, rounds=2, prefill=("33:16",), decode=("2:8",), variants=variants, profile=True
    )
    found = graphs.measure(settings, Run())["operators"]
    assert found.keys() == {"prefill 33:16", "decode 2:8"}
    for figures in found.values():
        (by_operator,) = figures.values()
        assert {"GroupQueryAttention", "between"} < by_operator.keys()
        assert all(milliseconds >= 0 for milliseconds in by_operator.values())


def test_a_profile_is_summed_by_operator_over_the_runs_of_a_prompt_and_without_the_first() -> None:
    def event(name: str, start: int, duration: int, operator: str = "") -> dict[str, Any]:
        category = "Node" if operator else "Session"
        return {"name": name, "cat": category, "ts": start, "dur": duration, "args": {"op_name": operator}}

    events = [event("session_initialization", 0, 50)]
    # Two prompts of two runs, of which the first is slow; what was no kernel's is between.
    for number, product in enumerate((9000, 8000, 300, 500)):
        start = 10_000 * (number + 1)
        events += [
            event("a_fence_before", start + 1, 1, "Linear"),
            event("a_kernel_time", start + 1, product, "Linear"),
            event("b_kernel_time", start + product + 5, 100, "Relu"),
            event("model_run", start, product + 150),
        ]
    assert graphs.by_operator(events, 2, 1) == {"Linear": 0.8, "Relu": 0.2, "between": 0.1}
    assert list(graphs.by_operator(events, 1, 0)) == ["Linear", "Relu", "between"]


def _last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])
