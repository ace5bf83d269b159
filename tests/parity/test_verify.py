"""Verification: what a proof must notice, and what of a damaged artifact it must list."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from export.__main__ import main
from export.emit import emit
from export.graphs import DecoderGraph
from export.replay import Replayer
from export.verify import Verdict, replay, verify
from model.spec import artifact, golden
from tests.artifacts import random_model, rehash, tiny_artifact, tiny_config

FAMILIES = ("decoder-only", "encoder-decoder")


def test_verify_fails_when_one_weight_is_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _copy(tiny_artifact("decoder-only"), tmp_path)
    weights = np.fromfile(folder / "decoder.onnx.data", np.float32)
    weights[np.abs(weights).argmax()] += 0.5
    weights.tofile(folder / "decoder.onnx.data")
    rehash(folder)
    assert main(["verify", str(folder)]) == 1
    result = _last_line(capsys)
    assert result["verdict"] == "failed"
    assert result["max_abs_error"] > 1e-3


def _other_graphs(folder: Path, family: str, **values: float) -> None:
    """Puts in the graphs of the same weights under another configuration."""
    model = random_model(tiny_config(family, **values))
    emit(DecoderGraph(model), folder / "decoder.onnx")
    rehash(folder)


@pytest.mark.parametrize(
    "values", [{"rope_theta": 9000.0}, {"norm_epsilon": 1.2e-5}], ids=lambda values: next(iter(values))
)
def test_verify_fails_when_the_graph_computes_a_slightly_different_model(
    values: dict[str, float], tmp_path: Path
) -> None:
    folder = _copy(tiny_artifact("decoder-only"), tmp_path)
    _other_graphs(folder, "decoder-only", **values)
    assert verify(folder, lambda _: None).verdict is Verdict.FAILED


def _one_source_token_less(inputs: dict[str, Any]) -> None:
    inputs["source_lengths"] = np.maximum(inputs["source_lengths"] - 1, 1, dtype=np.int32)


def _one_position_further(inputs: dict[str, Any]) -> None:
    inputs["position_ids"] = np.minimum(inputs["position_ids"] + 1, 95)


@pytest.mark.parametrize("spoil", [_one_source_token_less, _one_position_further])
def test_golden_cases_tell_inputs_that_are_off_by_one(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, run = tiny_artifact("encoder-decoder"), Replayer._run_in_place

    def run_spoiled(self: Replayer, inputs: Any, buffers: Any) -> Any:
        spoil(inputs)
        return run(self, inputs, buffers)

    monkeypatch.setattr(Replayer, "_run_in_place", run_spoiled)
    assert verify(folder, lambda _: None).verdict is Verdict.FAILED


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["past_key_1", "past_value_1"])
def test_golden_cases_tell_a_cache_that_is_off_by_one(family: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, run = tiny_artifact(family), Replayer._run_in_place

    def run_shifted(self: Replayer, inputs: Any, buffers: Any) -> Any:
        logits = run(self, inputs, buffers)
        buffers[part][:] = np.roll(buffers[part], 1, axis=2)
        return logits

    monkeypatch.setattr(Replayer, "_run_in_place", run_shifted)
    assert verify(folder, lambda _: None).verdict is Verdict.FAILED


@pytest.mark.parametrize("is_absolute", [True, False])
def test_weights_outside_the_folder_are_never_read(
    is_absolute: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _copy(tiny_artifact("decoder-only"), tmp_path)
    shutil.copyfile(folder / "decoder.onnx.data", tmp_path / "outside.data")
    model = onnx.load(folder / "decoder.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = str(tmp_path / "outside.data") if is_absolute else "../outside.data"
    (folder / "decoder.onnx").write_bytes(model.SerializeToString())
    rehash(folder)
    assert main(["verify", str(folder)]) == 1
    (problem,) = _last_line(capsys)["problems"]
    assert problem.startswith("decoder.onnx: ")
    assert "external data" in problem.lower()


def test_verify_lists_golden_cases_that_the_model_cannot_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _copy(tiny_artifact("decoder-only"), tmp_path)
    config = artifact.load(folder).config
    beyond = (np.full(2, config.vocab_size, np.int64),)
    cases = golden.load(folder / artifact.GOLDEN)
    cases = tuple(dataclasses.replace(case, sequences=beyond) if case.name == "prefill-2" else case for case in cases)
    golden.save(folder / artifact.GOLDEN, cases)
    rehash(folder)
    assert main(["verify", str(folder)]) == 1
    assert "prefill-2: sequence 0 has ids outside" in _last_line(capsys)["problems"][0]
    # A replay that fails for whatever reason fails its case, and says so.
    stages: list[str] = []
    report = replay(folder, artifact.load(folder), cases, stages.append)
    assert [case.name for case in report.cases if not case.passed] == ["prefill-2"]
    assert json.loads(report.to_json())["max_abs_error"] is None
    assert any(stage.startswith("prefill-2: ") for stage in stages)


def test_verify_shows_names_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _copy(tiny_artifact("decoder-only"), tmp_path)
    case, *_ = golden.load(folder / artifact.GOLDEN)
    golden.save(folder / artifact.GOLDEN, [dataclasses.replace(case, name="[/x]")])
    rehash(folder)
    assert main(["verify", str(folder)]) == 0
    assert "[/x]" in capsys.readouterr().out


def test_verify_fails_on_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _copy(tiny_artifact("decoder-only"), tmp_path)
    (folder / artifact.TOKENIZER).write_text("{}")
    (folder / "decoder.onnx.data").unlink()
    assert main(["verify", str(folder)]) == 1
    problems = _last_line(capsys)["problems"]
    assert [problem.split()[0] for problem in problems] == ["decoder.onnx.data", "tokenizer.json"]


def _copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def _last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])
