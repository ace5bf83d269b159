"""The oracle of quantized exports: PyTorch with the stored weights answers alike, and a graph that differs is named."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from export import oracle, quantize, quantize_kv
from export.__main__ import main
from export.oracle import MAX_ERROR, OracleError, check
from export.replay import Replayer
from model.nn import attention, layers
from model.spec import artifact, golden
from model.spec.artifact import KVPrecision, Precision
from model.spec.config import Architecture
from tests.artifacts import change_tensor, random_model, tiny_artifact, tiny_checkpoint, tiny_config
from tests.served import VARIANTS

DECODER_ONLY, ENCODER_DECODER = Architecture.DECODER_ONLY, Architecture.ENCODER_DECODER
INT4_KV8: dict[str, Any] = {"precision": Precision.INT4, "kv_precision": KVPrecision.INT8}
QUANTIZED = [name for name, (_, overrides) in VARIANTS.items() if {"precision", "kv_precision"} & overrides.keys()]


@pytest.mark.parametrize("family", [DECODER_ONLY, ENCODER_DECODER])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8, Precision.INT4])
def test_pytorch_with_the_stored_weights_answers_as_the_graph_does(family: str, precision: Precision) -> None:
    for folder in (tiny_artifact(family, precision), tiny_artifact(family, precision, KVPrecision.INT8)):
        report = json.loads((folder / artifact.PARITY).read_text())["oracle"]
        assert report["num_tokens"] > 100
        assert report["num_products"] >= 9
        # Two hundred times below the limits, so that these say something.
        assert report["max_gap"] < oracle.MAX_GAP / 200
        assert report["max_error"] < MAX_ERROR / 200


@pytest.mark.parametrize("variant", QUANTIZED)
def test_all_that_chooses_kernels_is_computed_alike(variant: str) -> None:
    family, overrides = VARIANTS[variant]
    assert json.loads((tiny_artifact(family, **overrides) / artifact.PARITY).read_text())["oracle"]["max_error"] < 1e-5
    assert not list(tiny_artifact(family, **overrides).glob(".traced*"))


def differ(monkeypatch: pytest.MonkeyPatch, model: Any, what: str) -> None:
    """PyTorch's model without what the graph has, or with something else."""
    layer = model.layers[1]
    match what:
        case "norm":
            monkeypatch.setattr(layer.feed_forward_residual, "norm", torch.nn.Identity())
        case "position":
            # Of keys alone: what all have in common changes no product of a query with a key.
            turn, is_key = type(model.rotary).forward, itertools.cycle([False, True])

            def shifted(self: Any, x: torch.Tensor) -> torch.Tensor:
                return turn(self, torch.cat([x[:, :, :1], x], dim=2))[:, :, 1:] if next(is_key) else turn(self, x)

            monkeypatch.setattr(type(model.rotary), "forward", shifted)
        case "rope base":
            other = tiny_config(DECODER_ONLY, rope_theta=9000.0)
            monkeypatch.setattr(model, "rotary", random_model(other).rotary)
        case "residual":
            monkeypatch.setattr(
                layers.Residual, "forward", lambda self, x, sublayer, select=None: sublayer(self.norm(x))
            )
        case "scale":
            scores = attention.dot_scores

            def sharper(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
                return scores(q, k, scale=1.01 / math.sqrt(q.shape[-1]))

            monkeypatch.setattr(layer.self_attention, "score", sharper)
        case "mask":
            monkeypatch.setattr(attention, "causal_mask", lambda n, device=None: torch.ones(n, n).tril(1) > 0)
        case "activation":
            monkeypatch.setattr(torch.nn.functional, "silu", torch.nn.functional.gelu)


@pytest.mark.parametrize(
    ("what", "kv"),
    [
        *(
            (what, KVPrecision.FP32)
            for what in ("norm", "position", "rope base", "residual", "scale", "mask", "activation")
        ),
        ("position", KVPrecision.INT8),
    ],
)
def test_a_graph_that_computes_something_else_is_refused_by_the_place(
    what: str, kv: KVPrecision, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_artifact(DECODER_ONLY, Precision.INT4, kv)
    manifest, cases = artifact.load(folder), golden.load(folder / artifact.GOLDEN)
    model = random_model(tiny_config(DECODER_ONLY))
    # The folder must not be written to.
    folder = Path(shutil.copytree(folder, Path(folder.parent) / f"{what}-{kv}", dirs_exist_ok=True))
    check(folder, manifest, model, cases)
    differ(monkeypatch, model, what)
    with pytest.raises(OracleError, match=r"the rows of layers\.\d|past_key_\d is"):
        check(folder, manifest, model, cases)


def test_keys_and_values_of_a_sources_padding_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Replayer._encode

    def with_other_padding(self: Replayer, sources: Any) -> Any:
        encoded = encode(self, sources)
        for source, stored in zip(sources, encoded, strict=True):
            for array in stored.values():
                array[:, :, len(source) :] = 77
        return encoded

    monkeypatch.setattr(Replayer, "_encode", with_other_padding)
    folder = tiny_artifact(ENCODER_DECODER, **INT4_KV8)
    cases = golden.load(folder / artifact.GOLDEN)
    assert any(len(source) % 16 for case in cases for source in case.sources)
    check(folder, artifact.load(folder), random_model(tiny_config(ENCODER_DECODER)), cases)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layers.1.feed_forward.down.weight_scale", lambda scales: scales * 1.01),
        ("layers.0.self_attention.qkv.weight_scale", lambda scales: np.roll(scales, 1, axis=0)),
        ("past_value_1", lambda scales: scales * 1.01),
    ],
)
def test_a_scale_that_is_read_otherwise_than_it_was_written_is_refused(
    name: str, change: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_artifact(DECODER_ONLY, **INT4_KV8)
    manifest, cases = artifact.load(source), golden.load(source / artifact.GOLDEN)
    model, folder = random_model(tiny_config(DECODER_ONLY)), Path(shutil.copytree(source, tmp_path / "mutant"))
    # What is right is read from the graph that is not spoiled.
    products, scales = oracle._products(source, manifest, artifact.DECODER), oracle._kv_scales(source, manifest)
    monkeypatch.setattr(oracle, "_products", lambda *_: products)
    monkeypatch.setattr(oracle, "_kv_scales", lambda *_: scales)
    check(folder, manifest, model, cases)
    change_tensor(folder, "decoder.onnx", name.replace("past_value_1", "value_1_scale"), change)
    with pytest.raises(OracleError):
        check(folder, manifest, model, cases)


@pytest.mark.parametrize(("factor", "said"), [(1 / 4, "past_key_0 reaches"), (4, "failed")])
def test_an_export_whose_scales_of_keys_and_values_are_far_too_coarse_or_fine_is_refused(
    factor: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides read them from the graph, so that their bytes are alike."""
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", tiny_config(DECODER_ONLY))
    monkeypatch.setattr(quantize_kv, "LIMIT", np.float32(127 * factor))
    assert main([str(checkpoint), "--out", str(tmp_path / "out"), "--precision", "int8", "--kv-cache", "int8"]) == 1
    printed = capsys.readouterr()
    assert said in printed.err + printed.out


def test_standard_operators_round_blocks_of_a_row_as_the_oracle_does() -> None:
    """Numbers halfway between two steps: one in six is rounded otherwise by a division."""
    size, num_rows = 32, 4096
    identity = np.full((size, 1, size // 2), 0x88, np.uint8)
    identity[np.arange(size), 0, np.arange(size) // 2] += np.where(np.arange(size) % 2, 0x10, 1).astype(np.uint8)
    given = {"K": size, "N": size, "bits": 4, "block_size": size, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["rows", "weight", "scales"], ["out"], domain="com.microsoft", **given)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("rows", "out")]
    weights = {"weight": identity, "scales": np.ones(size, np.float32)}
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph([node], "g", values[:1], values[1:], stored)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    peaks = rng.uniform(0.1, 3, (num_rows, 1)).astype(np.float32)
    rows = ((rng.integers(-126, 126, (num_rows, size)) + 0.5).astype(np.float32) * (peaks / np.float32(127))).astype(
        "f4"
    )
    rows[:, :1] = peaks
    rounded = oracle._Product("decoder", "rows", lambda: torch.eye(size), 1 / 127, size).rounded(torch.from_numpy(rows))
    # The operator's sums cancel: they are good to a fraction of a step.
    assert np.abs(session.run(None, {"rows": rows})[0] - rounded.numpy()).max() < 0.2 * peaks.min() / 127


def test_an_export_whose_rows_are_rounded_otherwise_is_refused_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", tiny_config(DECODER_ONLY))
    arguments = [str(checkpoint), "--out", str(tmp_path / "out"), "--precision", "int8"]
    monkeypatch.setattr(quantize, "ROW_LIMIT", np.float32(120))
    assert main(arguments) == 1
    assert "the rows of layers.0.self_attention.output differ from PyTorch's by" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
