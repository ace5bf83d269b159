"""What quantization costs: the averages and their limits."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import entropy

from export import loss
from export.__main__ import main
from export.loss import CLEAR_LEAD, LossMeter, max_relative_rms
from export.verify import Verdict, replay, verify
from model.spec import golden
from model.spec.artifact import GOLDEN, PARITY, KVPrecision, Precision, load
from tests.artifacts import change_tensor, tiny_artifact


def test_a_loss_is_of_distributions_over_all_cases() -> None:
    draw = np.random.default_rng(3)
    theirs = draw.standard_normal((40, 50)).astype(np.float32)
    found = (theirs + 0.1 * draw.standard_normal(theirs.shape) + draw.standard_normal((40, 1))).astype(np.float32)
    meter = LossMeter(0.2)
    meter.add(theirs[:10], found[:10])
    meter.add(theirs[10:], found[10:])
    cost = meter.read()
    assert cost is not None
    assert cost.passed
    assert cost.relative_rms == pytest.approx(0.1, rel=0.05), "what all logits of a position have in common is no error"
    wanted, have = (np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in (theirs, found))
    assert cost.kl == pytest.approx(entropy(wanted, have, axis=-1).mean(), rel=1e-3)
    alike = theirs.argmax(-1) == found.argmax(-1)
    highest = np.sort(theirs, -1)
    clear = highest[:, -1] - highest[:, -2] >= CLEAR_LEAD * theirs.std()
    assert (cost.num_positions, cost.agreement) == (40, alike.mean())
    assert 0 < cost.num_clear < 40
    assert cost.num_clear == pytest.approx(clear.sum(), abs=1)
    assert cost.clear_agreement == 1.0 > cost.agreement


@pytest.mark.parametrize("spoiled", [np.full((2, 3), np.nan, np.float32), np.zeros((0, 0), np.float32)])
def test_logits_that_are_none_lose_everything(spoiled: np.ndarray) -> None:
    meter = LossMeter(1e9)
    meter.add(np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32))
    meter.add(np.eye(2, 3, dtype=np.float32), spoiled)
    cost = meter.read()
    assert cost is not None
    assert (cost.num_positions, cost.relative_rms, cost.passed) == (5, math.inf, False)


def test_only_what_is_quantized_has_a_limit() -> None:
    assert (
        max_relative_rms(Precision.FP32, KVPrecision.FP32) is max_relative_rms(Precision.BF16, KVPrecision.BF16) is None
    )
    int8, kv = (
        max_relative_rms(*each) for each in ((Precision.INT8, KVPrecision.FP32), (Precision.FP32, KVPrecision.INT8))
    )
    assert max_relative_rms(Precision.INT8, KVPrecision.INT8) == int8 + kv  # type: ignore[operator]


def test_a_worse_head_is_refused_by_the_average_where_single_logits_pass(tmp_path: Path) -> None:
    made = tiny_artifact("encoder-decoder", Precision.INT4, tie_embeddings=False)
    folder = Path(shutil.copytree(made, tmp_path / "worse"))
    change_tensor(folder, "decoder.onnx", "head.weight_scale", lambda scales: 1.5 * scales)
    # As on another processor, where the export's own answers decide nothing.
    cases = tuple(replace(case, exported=None) for case in golden.load(folder / GOLDEN))
    assert replay(folder, load(folder), cases, lambda _: None).failed == ("loss",)


def test_an_artifact_that_costs_too_much_is_refused_and_says_what(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_artifact("decoder-only", Precision.INT4)
    report = verify(folder, lambda _: None)
    written = json.loads((folder / PARITY).read_text(encoding="utf-8"))
    assert report.loss is not None
    assert written["loss"] == pytest.approx(asdict(report.loss))
    assert written["weights"]["num_tensors"] > 10
    assert {case["drift"] for case in written["cases"]} <= {0.0, None}, "sessions of their own answered alike"
    assert main(["verify", str(folder)]) == 0
    monkeypatch.setitem(loss._MAX_RMS, Precision.INT4, report.loss.relative_rms - 1e-6)
    report = verify(folder, lambda _: None)
    assert (report.failed, report.verdict) == (("loss",), Verdict.FAILED)
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 1
    *_, description, _, last = capsys.readouterr().out.splitlines()
    assert description.startswith("quantization costs ")
    assert json.loads(last)["relative_rms"] == pytest.approx(report.loss.relative_rms)
