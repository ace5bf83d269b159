"""The graph for prompts alone: exported only when asked for, proven, and served by OpenVINO where that is possible.

No machine need have OpenVINO, nor a processor it takes. What is its own is tested where there is one; everything around
it by the CPU provider, which takes the same graph and is handed over in the same way. What the graph does to requests
is in `test_engine_parity`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest

from export.__main__ import main
from export.emit import EmitError, emit, share_weights
from export.prefill import PREFILL_OPSET, PrefillGraph
from export.verify import Verdict, verify
from model.spec import artifact, golden
from model.spec.artifact import DECODER, PREFILL, KVFormat, KVPrecision, Manifest, Precision
from service.engine import factory
from service.engine.engine import LastRun
from service.engine.scheduler import EngineLimits
from service.engine.sessions import prefill_provider, session
from service.engine.sessions.prefill_provider import choose_prefill_provider, has_amx_bf16
from service.engine.sessions.session import OpenVino, SessionOptions, find_openvino_device
from service.engine.types import PrefillProvider
from service.errors import StartupError
from service.repository.loading import load_models
from tests.artifacts import ADDITIVE, random_model, rehash, tiny_artifact, tiny_checkpoint, tiny_config

AUTO, CPU, OPENVINO = PrefillProvider.AUTO, PrefillProvider.CPU, PrefillProvider.OPENVINO
THREADS = SessionOptions(intra_op_threads=1, allow_spinning=False)
# Tied and not, grouped heads and not, biases and not, every kind of position.
SHAPES: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"positions": "learned", "norm": "layernorm", "activation": "gelu", "num_heads": 4, "num_kv_heads": 4}
    | {"attention_bias": True, "mlp_bias": True, "num_layers": 1},
    "sinusoidal": {"positions": "sinusoidal", "tie_embeddings": False, "num_kv_heads": 2, "norm_placement": "post"}
    | {"scale_embeddings": True, "head_dim": 32, "norm_epsilon": 1e-3, "num_layers": 1},
}


def external_places(path: Path) -> dict[str, dict[str, str]]:
    """Where the weights of a graph lie: file, offset and length by name."""
    graph = onnx.load(path, load_external_data=False).graph
    return {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in graph.initializer
        if tensor.external_data
    }


def of_prefill_graph(case: Any) -> bool:
    return str(case["name"]).endswith(f"by {PREFILL} graph")


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_graph_answers_as_pytorch_does_from_the_decoders_own_weights(shape: str) -> None:
    folder = tiny_artifact("decoder-only", prefill_graph=True, **SHAPES[shape])
    places = external_places(folder / "prefill.onnx")
    assert places
    assert places == external_places(folder / "decoder.onnx")
    assert {place["location"] for place in places.values()} == {"decoder.onnx.data"}
    assert not (folder / "prefill.onnx.data").exists()
    assert (folder / "prefill.onnx").stat().st_size < 40_000, "only what is not a weight"
    report = verify(folder, lambda _: None)
    assert report.verdict is Verdict.PASSED
    assert report.max_abs_error < 2e-5


def test_prefill_graph_beside_rounded_weights_keeps_its_own_and_float32s_tolerance() -> None:
    folder = tiny_artifact("decoder-only", Precision.INT8, prefill_graph=True)
    assert {place["location"] for place in external_places(folder / "prefill.onnx").values()} == {"prefill.onnx.data"}
    report = json.loads((folder / artifact.PARITY).read_text())
    cases = {case["name"]: case for case in report["cases"] if of_prefill_graph(case)}
    by_decoder = [case["name"] for case in report["cases"] if not of_prefill_graph(case)]
    assert by_decoder == [case.name for case in golden.load(folder / artifact.GOLDEN)]
    for name in ("prefill-96", "even-chunks-70"):
        case = cases[f"{name} by prefill graph"]
        assert case["tolerance"] == golden.TOLERANCES[Precision.FP32].absolute
        assert case["max_abs_error"] < 2e-5
    # The decoder's single tokens follow on the prefill graph's K/V, in fewer bits.
    assert cases["prefill-decode-29 by prefill graph"]["tolerance"] > 0.01
    assert {case["verdict"] for case in report["cases"]} == {"passed"}


def test_verify_fails_when_the_prefill_graph_alone_is_another_models(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(tiny_artifact("decoder-only", prefill_graph=True), folder)
    emit(PrefillGraph(random_model(tiny_config("decoder-only"), seed=1)), folder / "prefill.onnx", PREFILL_OPSET)
    with pytest.raises(EmitError, match=r"is not the same in decoder\.onnx"):
        share_weights(folder / "prefill.onnx", folder / "decoder.onnx")
    manifest = artifact.read_manifest(folder)
    files = {**manifest.files, "prefill.onnx.data": artifact.hash_file(folder / "prefill.onnx.data")}
    (folder / artifact.MANIFEST).write_text(dataclasses.replace(manifest, files=files).to_json())
    rehash(folder)
    report = verify(folder, lambda _: None)
    assert {case.name for case in report.cases if case.passed} == {
        case.name for case in golden.load(folder / artifact.GOLDEN)
    }
    assert report.verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("family", "values", "flags", "problem"),
    [
        ("encoder-decoder", {}, (), "a prefill graph is for decoder-only models, this one is encoder-decoder"),
        (
            "decoder-only",
            ADDITIVE["decoder-only"],
            (),
            "a prefill graph is for dot-product attention, this model's score is additive",
        ),
        ("decoder-only", {}, ("--kv-cache", "int8"), "a prefill graph is for fp32 K/V, asked for is int8"),
    ],
)
def test_export_refuses_a_prefill_graph_by_name(
    family: str, values: dict[str, Any], flags: tuple[str, ...], problem: str, tmp_path: Path, capsys: Any
) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", tiny_config(family, **values))
    assert main([str(source), "--out", str(tmp_path / "out"), "--prefill-graph", *flags]) == 2
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["problems"] == [problem]


def test_export_command_writes_a_prefill_graph_only_when_asked(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", tiny_config("decoder-only", num_layers=1))
    assert main([str(source), "--out", str(tmp_path / "out"), "--prefill-graph"]) == 0
    assert artifact.load(tmp_path / "out").graphs.keys() == {DECODER, PREFILL}
    assert artifact.load(tiny_artifact("decoder-only")).graphs.keys() == {DECODER}


def cpuinfo(root: Path, flags: str) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: amx_bf16\n")
    return root


@pytest.mark.parametrize(
    ("flags", "has_amx"),
    [
        ("fpu avx512_bf16 amx_bf16 avx512_fp16 amx_tile", True),
        ("fpu avx512_bf16", False),
        ("amx_bf16x amx_int8", False),
    ],
)
def test_amx_is_a_flag_of_the_processor(flags: str, has_amx: bool, tmp_path: Path) -> None:
    assert has_amx_bf16(cpuinfo(tmp_path, flags)) is has_amx
    assert not has_amx_bf16(tmp_path / "absent")


@pytest.fixture
def with_amx(tmp_path: Path) -> Path:
    return cpuinfo(tmp_path / "root", "fpu amx_bf16")


@pytest.fixture
def without_amx(tmp_path: Path) -> Path:
    return cpuinfo(tmp_path / "root", "fpu avx512_bf16")


@pytest.fixture
def openvino_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that it takes, but for the provider, which is the CPU's."""
    (device,) = (device for device in ort.get_ep_devices() if device.ep_name == "CPUExecutionProvider")
    monkeypatch.setattr(prefill_provider, "has_openvino_package", lambda: True)
    monkeypatch.setattr(prefill_provider, "find_openvino_device", lambda: device)


def manifest_of(precision: Precision = Precision.INT8, *, prefill_graph: bool = True) -> Manifest:
    return artifact.load(tiny_artifact("decoder-only", precision, prefill_graph=prefill_graph))


@pytest.mark.usefixtures("openvino_is_offered")
def test_auto_is_openvino_only_where_it_computes_on_amx(with_amx: Path, tmp_path: Path) -> None:
    rounded, whole = manifest_of(), manifest_of(Precision.FP32)
    assert choose_prefill_provider(AUTO, rounded, with_amx) is OPENVINO
    assert choose_prefill_provider(AUTO, rounded, cpuinfo(tmp_path / "other", "fpu")) is CPU
    assert choose_prefill_provider(AUTO, whole, with_amx) is CPU
    assert choose_prefill_provider(AUTO, manifest_of(prefill_graph=False), with_amx) is CPU
    assert choose_prefill_provider(CPU, rounded, with_amx) is CPU


@pytest.mark.usefixtures("openvino_is_offered")
def test_openvino_by_name_needs_no_amx_and_is_no_matter_of_an_encoder_decoder(without_amx: Path) -> None:
    for precision in (Precision.FP32, Precision.INT8):
        assert choose_prefill_provider(OPENVINO, manifest_of(precision), without_amx) is OPENVINO
    source = artifact.load(tiny_artifact("encoder-decoder"))
    assert choose_prefill_provider(OPENVINO, source, without_amx) is CPU


def test_openvino_by_name_stops_the_start_and_says_all_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, with_amx: Path
) -> None:
    bare = dataclasses.replace(manifest_of(prefill_graph=False), kv_cache=KVFormat(KVPrecision.INT8, "none"))
    monkeypatch.setattr(prefill_provider, "has_openvino_package", lambda: False)
    with pytest.raises(StartupError) as refusal:
        choose_prefill_provider(OPENVINO, bare, with_amx)
    assert refusal.value.problems == (
        "prefill_provider is openvino: the artifact has no prefill graph, export it with --prefill-graph",
        "prefill_provider is openvino: keys and values are int8, a prefill graph writes fp32",
        "prefill_provider is openvino: the package onnxruntime-ep-openvino is not installed, the extra `openvino` "
        "brings it",
    )
    monkeypatch.setattr(prefill_provider, "has_openvino_package", lambda: True)
    monkeypatch.setattr(prefill_provider, "find_openvino_device", lambda: None)
    with pytest.raises(StartupError, match="offers no processor here, it offers Intel's only"):
        choose_prefill_provider(OPENVINO, manifest_of(), with_amx)


def test_auto_says_what_keeps_prompts_from_openvino(
    monkeypatch: pytest.MonkeyPatch, with_amx: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise StartupError(["onnxruntime_ep_openvino: no such library"])

    monkeypatch.setattr(prefill_provider, "has_openvino_package", lambda: True)
    monkeypatch.setattr(prefill_provider, "find_openvino_device", broken)
    with caplog.at_level(logging.INFO):
        assert choose_prefill_provider(AUTO, manifest_of(), with_amx) is CPU
    assert "onnxruntime_ep_openvino: no such library" in caplog.text


def test_a_start_names_the_artifact_that_openvino_cannot_serve(tmp_path: Path) -> None:
    shutil.copytree(tiny_artifact("decoder-only"), tmp_path / "plain")
    assert [model.prefill_provider for model in load_models(tmp_path)] == [CPU]
    with pytest.raises(StartupError) as refusal:
        load_models(tmp_path, OPENVINO)
    missing = "the artifact has no prefill graph, export it with --prefill-graph"
    assert refusal.value.problems[0] == f"{tmp_path / 'plain'}: prefill_provider is openvino: {missing}"


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
@pytest.mark.usefixtures("openvino_is_offered")
def test_golden_cases_are_replayed_through_the_provider_in_use(
    precision: Precision, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(tiny_artifact("decoder-only", precision, prefill_graph=True), folder)

    def verdicts(provider: PrefillProvider) -> dict[str, bool]:
        manifest, limits = artifact.read_manifest(folder), EngineLimits(max_batch_size=2)
        engine = factory.build_engine(folder, manifest, lambda _: "", limits, THREADS, LastRun(), provider)
        tolerance = golden.tolerance_of(precision, KVPrecision.FP32)
        results = engine.verify_golden(golden.load(folder / artifact.GOLDEN), tolerance)
        return {result.name: result.passed for result in results}

    with caplog.at_level(logging.INFO):
        assert all(verdicts(OPENVINO).values())
    assert f"OpenVINO computes prompts in {'f32' if precision is Precision.FP32 else 'bf16'}" in caplog.text
    # Another model's graph: whoever uses it is found out, and nobody else.
    emit(PrefillGraph(random_model(tiny_config("decoder-only"), seed=1)), folder / "prefill.onnx", PREFILL_OPSET)
    assert all(verdicts(CPU).values())
    wrong = {name for name, passed in verdicts(OPENVINO).items() if not passed}
    assert {"prefill-96", "even-chunks-70"} <= wrong
    # Short beginnings and single tokens are the decoder's.
    assert not {"prefill-1", "prefill-2", "prefill-decode-29", "decode-6"} & wrong


def test_openvino_is_told_precision_and_threads_in_its_own_words() -> None:
    words = session._openvino_config(OpenVino(None, "bf16"), SessionOptions(intra_op_threads=2))
    assert json.loads(words) == {
        "CPU": {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": "2",
            "NUM_STREAMS": "1",
            "PERFORMANCE_HINT": "LATENCY",
        }
    }
    assert "INFERENCE_NUM_THREADS" not in session._openvino_config(OpenVino(None, "f32"), SessionOptions())


def test_openvinos_package_is_asked_as_often_as_one_likes() -> None:
    pytest.importorskip("onnxruntime_ep_openvino")
    first, second = find_openvino_device(), find_openvino_device()
    assert (first is None) == (second is None)
    assert first is None or first.ep_metadata["ov_device"] == "CPU"


def test_openvino_itself_replays_every_golden_case() -> None:
    pytest.importorskip("onnxruntime_ep_openvino")
    if find_openvino_device() is None:
        pytest.skip("OpenVINO's provider offers no processor here")
    for precision in (Precision.FP32, Precision.INT8):
        folder = tiny_artifact("decoder-only", precision, prefill_graph=True)
        limits = EngineLimits(max_batch_size=2)
        engine = factory.build_engine(folder, artifact.load(folder), lambda _: "", limits, THREADS, LastRun(), OPENVINO)
        tolerance = golden.tolerance_of(precision, KVPrecision.FP32)
        results = engine.verify_golden(golden.load(folder / artifact.GOLDEN), tolerance)
        assert [result for result in results if not result.passed] == []
