"""The exporter: every configuration answers as PyTorch does, the graphs are as lean as meant, and nothing unproven or
foreign is written over or left behind."""

from __future__ import annotations

import errno
import json
import shutil
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper

from export import golden_cases
from export.__main__ import main
from export.exporter import export
from export.graphs import unsupported
from export.operators import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    BF16_LINEAR,
    BIASED,
    DOMAIN,
    GELU,
    INT4_LINEAR,
    INT8_LINEAR,
    LINEAR,
    SWIGLU,
)
from export.staging import locked
from export.verify import Verdict, replay, verify
from model import checkpoint
from model.checkpoint import WEIGHTS
from model.nn import reference
from model.spec import artifact, golden
from model.spec.artifact import CPU_PRECISIONS, DECODER, ENCODER, Device, Precision
from model.spec.cost import num_parameters
from tests.artifacts import (
    ADDITIVE,
    LEARNED,
    paged_artifact,
    random_model,
    tiny_artifact,
    tiny_checkpoint,
    tiny_config,
    tiny_tokenizer,
)

FAMILIES = ("decoder-only", "encoder-decoder")
# Every pair of values of any two columns stands in one of these rows.
COLUMNS = "family positions norm norm_placement activation tie_embeddings num_kv_heads bias scale_embeddings"
CONFIGURATIONS = """\
    encoder-decoder rotary     rmsnorm   post gelu   0 1 1 0
    decoder-only    sinusoidal layernorm pre  gelu   1 2 0 1
    encoder-decoder learned    layernorm post swiglu 1 4 0 0
    decoder-only    learned    rmsnorm   pre  relu   0 2 1 0
    encoder-decoder rotary     rmsnorm   pre  relu   0 4 0 1
    decoder-only    learned    layernorm post relu   1 1 1 1
    encoder-decoder sinusoidal rmsnorm   pre  swiglu 0 1 0 1
    decoder-only    rotary     rmsnorm   post swiglu 1 2 1 1
    decoder-only    sinusoidal rmsnorm   post relu   0 4 1 0
    encoder-decoder rotary     layernorm pre  swiglu 0 2 1 1
    decoder-only    learned    layernorm pre  gelu   0 4 1 1
"""


UNUSUAL = {
    "decoder-only": {"head_dim": 32, "rope_theta": 500.0, "norm_epsilon": 1e-3},
    "encoder-decoder": {"head_dim": 32, "rope_theta": 1e6, "positions": "rotary", "source_vocab_size": 301},
}


def _artifact(row: str) -> Path:
    """One layer will do: that layers are not confused is shown by the default artifacts, which have two."""
    values: dict[str, Any] = dict(zip(COLUMNS.split(), row.split(), strict=True))
    family = values.pop("family")
    bias = values.pop("bias") == "1"
    values |= {name: values[name] == "1" for name in ("tie_embeddings", "scale_embeddings")}
    values |= {"num_kv_heads": int(values["num_kv_heads"]), "num_heads": 4, "d_model": 64, "num_layers": 1}
    if family == "encoder-decoder":
        values["num_encoder_layers"] = 1
    return tiny_artifact(family, attention_bias=bias, mlp_bias=bias, **values)


@pytest.mark.parametrize("row", CONFIGURATIONS.strip().splitlines(), ids=lambda row: "-".join(row.split()))
@pytest.mark.sampled(3)
def test_export_of_every_configuration_answers_as_pytorch_does_and_stores_no_tensor_twice(row: str) -> None:
    folder = _artifact(row)
    report = verify(folder, lambda _: None)
    assert report.verdict is Verdict.PASSED
    assert report.max_abs_error < 2e-5
    assert all(case.agreement == 1.0 for case in report.cases)
    config = artifact.load(folder).config
    for file in folder.glob("*.onnx"):
        tensors = [numpy_helper.to_array(tensor) for tensor in onnx.load(file).graph.initializer]
        large = [array for array in tensors if array.nbytes >= 1024]
        contents = [array.tobytes() for array in large] + [array.T.tobytes() for array in large]
        assert len(set(contents)) == len(contents)
        tables = [array for array in large if config.vocab_size in array.shape]
        assert len(tables) == (1 if config.tie_embeddings or file.stem == ENCODER else 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_of_unusual_sizes_answers_as_pytorch_does(family: str) -> None:
    config = tiny_config(family, num_layers=1, **UNUSUAL[family])
    assert config.head_dim != config.d_model // config.num_heads
    report = verify(tiny_artifact(family, num_layers=1, **UNUSUAL[family]), lambda _: None)
    assert report.verdict is Verdict.PASSED
    assert report.max_abs_error < 2e-5


def test_export_keeps_two_vocabularies_apart_that_are_equally_large() -> None:
    # Its only layer's output is tied to the target's table; a graph that read the source's would answer otherwise.
    sizes = {"num_layers": 1, "num_encoder_layers": 1, "share_embeddings": False}
    config = tiny_config("encoder-decoder", **sizes)
    assert config.tie_embeddings
    assert config.source_vocab_size == config.vocab_size
    folder = tiny_artifact("encoder-decoder", **sizes)
    assert verify(folder, lambda _: None).verdict is Verdict.PASSED
    tables = {
        numpy_helper.to_array(tensor).tobytes()
        for file in folder.glob("*.onnx")
        for tensor in onnx.load(file).graph.initializer
        if config.vocab_size in tensor.dims
    }
    assert len(tables) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_export_of_additive_scores_answers_as_pytorch_does(family: str) -> None:
    folder = tiny_artifact(family, **ADDITIVE[family])
    report = verify(folder, lambda _: None)
    assert report.verdict is Verdict.PASSED
    assert report.max_abs_error < 2e-5
    assert all(case.agreement == 1.0 for case in report.cases)
    for file in folder.glob("*.onnx"):
        graph = onnx.load(file, load_external_data=False)
        domains = {node.domain for part in (graph.graph, *graph.functions) for node in part.node}
        assert domains <= {"", DOMAIN}, "a contrib operator"
        vectors = [tensor.name for tensor in graph.graph.initializer if tensor.name.endswith("score_vector")]
        sides = ("self", "cross") if (family, file.stem) == ("encoder-decoder", DECODER) else ("self",)
        prefix = "encoder.layers" if file.stem == ENCODER else "layers"
        assert vectors == [f"{prefix}.0.{side}_attention_residual.score_vector" for side in sides]


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_cases_depend_on_every_part_of_every_additive_vector(family: str) -> None:
    cases = golden.load(tiny_artifact(family, **ADDITIVE[family]) / artifact.GOLDEN)
    case = max(cases, key=lambda case: len(case.sequences[0]))
    sequence, source = case.sequences[0].tolist(), case.sources[0].tolist() if case.sources else None
    model = random_model(tiny_config(family, **ADDITIVE[family]))
    vectors = [parameter for name, parameter in model.named_parameters() if name.endswith("score.vector")]
    assert len(vectors) == (1 if family == "decoder-only" else 3)
    before = reference.logits(model, sequence, source)
    for vector in vectors:
        for part in vector.detach().view(-1):
            part.add_(0.5)
            error = (reference.logits(model, sequence, source) - before).abs().max()
            assert error > golden.TOLERANCES[Precision.FP32].absolute
            part.sub_(0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_cases_cover_what_a_server_does(family: str) -> None:
    config = tiny_config(family)
    cases = golden.load(tiny_artifact(family) / artifact.GOLDEN)
    fed = {len(sequence) for case in cases for sequence in case.sequences}
    steps = [step for case in cases for step in case.steps]
    assert config.context in fed
    assert {len(step) for step in steps} >= {1, 2, 3, 4}
    pasts = [[feed.start for feed in step] for step in steps if len(step) > 1]
    assert any(max(starts) == config.context - 1 and min(starts) <= 33 for starts in pasts)
    if config.is_encoder_decoder:
        assert {1, 15, 16, 17, config.source_context} <= {len(source) for case in cases for source in case.sources}
        assert all(feed.count == 1 for step in steps for feed in step)
        longest = (config.context, config.source_context)
        pairs = [zip(case.sequences, case.sources, strict=True) for case in cases]
        assert longest in {(len(sequence), len(source)) for rows in pairs for sequence, source in rows}
    else:
        assert {1, 2, config.context} <= {feed.count for step in steps for feed in step}
        assert any(feed.start and feed.count > 1 for step in steps for feed in step)


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_cases_stay_small_when_the_vocabulary_is_large(family: str) -> None:
    config = tiny_config(family, vocab_size=50257, context=1024, num_layers=1, d_model=16, num_heads=1)
    cases = golden_cases.make_cases(random_model(config))
    assert sum(case.logits.nbytes for case in cases) < 12e6


LLAMA_7B = {"d_model": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "d_ff": 14336}
NLLB_600M = {"d_model": 1024, "num_layers": 12, "num_heads": 16, "num_kv_heads": 16, "d_ff": 4096}


@pytest.mark.parametrize(
    ("family", "sizes", "vocab_size", "context"),
    [
        ("decoder-only", LLAMA_7B, 128_256, 8192),
        ("decoder-only", LLAMA_7B | {"num_layers": 4}, 32_000, 4096),
        ("encoder-decoder", NLLB_600M, 256_206, 1024),
    ],
)
def test_golden_cases_are_long_enough_and_small_enough_whatever_the_models_size(
    family: str, sizes: dict[str, int], vocab_size: int, context: int
) -> None:
    sources = {"source_context": 512} if family == "encoder-decoder" else {}
    config = tiny_config(family, vocab_size=vocab_size, context=context, **sources, **sizes)
    plans = list(golden_cases.plan(config, num_parameters(config)))
    longest = max(max(each.lengths) for each in plans)
    if config.is_encoder_decoder:
        assert max(max(each.source_lengths) for each in plans) == 512
        assert longest > golden_cases.CHUNK
    else:
        assert longest >= golden_cases.MIN_TOKENS
        ends = {feed.start + feed.count for each in plans for step in each.steps for feed in step if len(step) == 1}
        assert ends >= {*range(golden_cases.CHUNK, longest, golden_cases.CHUNK)}, "every end of a chunk is compared"
        decoded = {feed.start for each in plans for step in each.steps for feed in step if feed.count == 1}
        assert decoded >= {golden_cases.CHUNK - 1, golden_cases.CHUNK, longest - 1}
    compared = [each.compared(vocab_size) or range(sum(map(len, each.steps))) for each in plans]
    # PyTorch's and the graphs' own.
    assert 2 * 4 * vocab_size * sum(map(len, compared)) < 100e6
    assert sum(len(each.steps) for each in plans) < golden.MAX_STEPS


def test_report_says_how_far_the_proof_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_artifact("encoder-decoder")
    report = verify(folder, lambda _: None)
    assert (report.proven_context, report.proven_source_context) == (report.context, report.source_context) == (96, 64)
    assert report.warnings == ()
    monkeypatch.setattr(golden_cases, "MIN_DECODED", 20)
    monkeypatch.setattr(golden_cases, "_MAX_DECODE_MULTIPLICATIONS", 0)
    monkeypatch.setattr(golden_cases, "_MAX_SCORE_BYTES", 4 * 2 * 50**2)
    model = random_model(tiny_config("encoder-decoder"))
    partial = replay(folder, artifact.load(folder), golden_cases.make_cases(model), lambda _: None)
    assert partial.verdict is Verdict.PASSED
    assert partial.warnings == (
        "warning: context of 96 tokens is proven to 20 only",
        "warning: source context of 64 tokens is proven to 50 only",
    )
    written = json.loads(partial.to_json())
    assert [written[f"proven_{name}"] for name in ("context", "source_context")] == [20, 50]


@pytest.mark.parametrize("family", FAMILIES)
def test_optimised_decoder_has_nothing_but_the_work(family: str, tmp_path: Path) -> None:
    folder = tiny_artifact(family)
    config = artifact.load(folder).config
    options = ort.SessionOptions()
    options.log_severity_level = 3  # writing an optimised graph warns that it fits this machine alone
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(str(folder / "decoder.onnx"), options, providers=["CPUExecutionProvider"])
    found = _operators(onnx.load(tmp_path / "optimised.onnx", load_external_data=False))
    sublayers = 3 if config.is_encoder_decoder else 2
    norm = "LayerNormalization" if config.is_encoder_decoder else "RMSNormalization"
    layer = Counter({norm: sublayers, "MatMul": 2 * sublayers, "Add": sublayers, "GroupQueryAttention": sublayers - 1})
    # Around the layers: token vectors, the choice of positions, in the stream and in what is added to it, the final
    # norm, the head.
    around = Counter({"Gather": 3, "Reshape": 3, "Squeeze": 1, norm: 1, "MatMul": 1})
    if config.is_encoder_decoder:
        layer["Relu"] = 1
        # Position vectors, and once for all layers: last positions, the longest source, the empty keys.
        around += Counter(Gather=1, Add=1, Sub=1, ReduceMax=1, Shape=1, Concat=1, ConstantOfShape=1)
        encoder = _operators(onnx.load(folder / "encoder.onnx", load_external_data=False))
        assert encoder["MultiHeadAttention"] == config.num_encoder_layers
    else:
        layer += Counter(Split=1, QuickGelu=1, Mul=1)
    assert found == Counter({name: count * config.num_layers for name, count in layer.items()}) + around


@pytest.mark.parametrize("kind", ["slots", "blocks", "additive"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(1)
def test_what_follows_the_last_attention_is_computed_of_wanted_tokens_alone(family: str, kind: str) -> None:
    if kind == "blocks":
        folder = paged_artifact(family)
    elif kind == "additive":
        folder = tiny_artifact(family, **ADDITIVE[family])
    else:
        folder = tiny_artifact(family)
    graph = onnx.load(folder / f"{DECODER}.onnx", load_external_data=False).graph
    writers = {name: node for node in graph.node for name in node.output}

    def is_selected(name: str) -> bool:
        if name not in writers:
            return name == "logits_indices"
        return any(map(is_selected, writers[name].input))

    config = artifact.load(folder).config
    last = f"layers.{config.num_layers - 1}."
    behind = [f"{last}feed_forward", f"{last}{'cross' if config.is_encoder_decoder else 'self'}_attention.output"]
    before = [f"{last}self_attention.qkv"]
    if config.is_encoder_decoder:
        before += [f"{last}self_attention.output", f"{last}cross_attention.query"]
    if config.num_layers > 1:
        before.append("layers.0.")
    found = set()
    for node in graph.node:
        if len(node.input) < 2 or not node.input[1].startswith("layers.") or "norm" in node.input[1]:
            continue
        part = next(part for part in (*behind, *before) if node.input[1].startswith(part))
        found.add(part)
        assert is_selected(node.input[0]) == (part in behind), node.input[1]
    assert found == {*behind, *before}


@pytest.mark.parametrize("precision", CPU_PRECISIONS)
def test_every_layer_has_the_operators_that_several_are_fused_into(precision: Precision) -> None:
    kinds = {
        Precision.FP32: LINEAR,
        Precision.BF16: BF16_LINEAR,
        Precision.INT8: INT8_LINEAR,
        Precision.INT4: INT4_LINEAR,
    }
    kind = kinds[precision]
    gelu, swiglu = tiny_artifact("decoder-only", precision, **LEARNED), tiny_artifact("decoder-only", precision)
    num_layers = artifact.load(gelu).config.num_layers
    found = Counter(node.op_type for node in onnx.load(gelu / "decoder.onnx", load_external_data=False).graph.node)
    assert found[f"{BIASED}{kind}{GELU}"] == num_layers
    assert found[ADD_LAYER_NORM] == 2 * num_layers
    assert found[GELU] == found["Add"] - 1 == 0, "but for positions nothing is added by itself"
    found = Counter(node.op_type for node in onnx.load(swiglu / "decoder.onnx", load_external_data=False).graph.node)
    gate = SWIGLU if kind in (LINEAR, BF16_LINEAR) else f"{kind}{SWIGLU}"
    assert (found[gate], found[ADD_RMS_NORM]) == (num_layers, 2 * num_layers)
    assert found["Mul"] == found["Sigmoid"] == found["Split"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_graph_names_come_from_the_model_and_nothing_from_the_machine(family: str) -> None:
    folder = tiny_artifact(family)
    names = {tensor.name for tensor in onnx.load(folder / "decoder.onnx", load_external_data=False).graph.initializer}
    assert "layers.1.feed_forward.down.weight" in names
    for file in folder.glob("*.onnx"):
        assert str(Path.cwd()).encode() not in file.read_bytes()
        assert b"stack_trace" not in file.read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_manifest_describes_the_files_which_the_umask_decides_who_can_read(family: str) -> None:
    # Weights in fewer bits and an explain graph are written by other calls than the float32 ones.
    folder = tiny_artifact(family, Precision.INT8, explain_graph=True)
    manifest = artifact.load(folder)
    assert manifest.files.keys() == {path.name for path in folder.iterdir()} - {artifact.MANIFEST}
    assert manifest.graphs[DECODER].inputs == artifact.decoder_signature(manifest.config)[0]
    assert (manifest.pad_id, manifest.decoder_start_id, manifest.eos_ids) == (0, 1, (2,))
    assert manifest.training == {"seed": 0}
    assert manifest.opset <= 26
    assert manifest.versions["torch"] == torch.__version__
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == dict.fromkeys(modes, stat.S_IMODE(folder.stat().st_mode) & 0o666)


def test_report_of_an_artifact_gives_every_case_its_figures() -> None:
    folder = tiny_artifact("decoder-only")
    report = json.loads((folder / artifact.PARITY).read_text())
    assert report["verdict"] == "passed"
    assert report["provider"] == "CPUExecutionProvider"
    names = [case.name for case in golden.load(folder / artifact.GOLDEN)]
    assert [case["name"] for case in report["cases"]] == names
    keys = {"name", "max_abs_error", "max_relative_error", "agreement", "tolerance", "verdict", "drift", "max_drift"}
    assert all(case.keys() == keys for case in report["cases"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer; tests must not write to it."""
    return tiny_checkpoint(tmp_path_factory.mktemp("source") / "checkpoint", tiny_config("decoder-only", num_layers=1))


Capture = pytest.CaptureFixture[str]


def command(capsys: Capture, checkpoint: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Runs the command; returns its status and the object in its last line."""
    status = main([str(checkpoint), "--out", str(out), *options])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_export_command_ends_in_one_json_line_and_replaces_an_artifact(
    source: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "models" / "tiny"
    shutil.copytree(tiny_artifact("encoder-decoder"), out)
    status, result = command(capsys, source, out, "--device", "cpu", "--precision", "fp32")
    assert (status, result["verdict"], result["artefact"]) == (0, "passed", str(out))
    assert not artifact.load(out).config.is_encoder_decoder
    assert not (out / "encoder.onnx").exists()
    assert list(out.parent.iterdir()) == [out]


def test_export_refuses_by_name_what_it_cannot_build(tmp_path: Path, capsys: Capture) -> None:
    config = tiny_config("decoder-only", head_dim=24, num_layers=1)
    narrow = tiny_checkpoint(tmp_path / "checkpoint", config)
    taken = tmp_path / "thesis"
    taken.mkdir()
    (taken / "chapter.txt").write_text("years of work")
    (taken / artifact.MANIFEST).write_text('{"name": "of something else"}')
    status, result = command(capsys, narrow, taken, "--device", "cuda", "--precision", "int8")
    assert status == 2
    for reason in ("fp16 or bf16 on cuda, asked for is int8", "head_dim is 24", "neither empty nor an artifact"):
        assert reason in "\n".join(result["problems"])
    assert len(list(taken.iterdir())) == 2


def test_export_refuses_additive_scores_that_would_not_fit_in_memory() -> None:
    wide = {"attention_score": "additive", "positions": "learned", "d_model": 64, "num_heads": 8, "num_kv_heads": 8}
    long = wide | {"context": 512, "head_dim": 65}
    (problem,) = unsupported(tiny_config("decoder-only", **long))
    assert problem == (
        "context is 512, additive scores of 8 heads of 65 take 545259520 bytes for each row, at most 536870912"
    )
    assert unsupported(tiny_config("decoder-only", **long | {"head_dim": 64})) == []
    # An encoder-decoder's output grows by one token at a time: only a source is met by itself as a whole.
    assert unsupported(tiny_config("encoder-decoder", **long)) == []
    (problem,) = unsupported(tiny_config("encoder-decoder", **long, source_context=512))
    assert problem.startswith("source_context is 512, additive scores")
    assert unsupported(tiny_config("decoder-only", head_dim=24)), "what refuses this width is the fused operator"


@pytest.mark.parametrize(
    ("family", "tokenizers", "problem"),
    [
        ("decoder-only", {artifact.TOKENIZER: 288}, "has ids up to 287, the model embeds 64"),
        ("encoder-decoder", {artifact.TOKENIZER: 0}, "tokenizer.json: not a tokenizer"),
        ("decoder-only", {artifact.TOKENIZER: 64, artifact.TARGET_TOKENIZER: 64}, "target_tokenizer.json is there"),
    ],
)
def test_export_refuses_tokenizers_that_do_not_fit(
    family: str, tokenizers: dict[str, int], problem: str, tmp_path: Path, capsys: Capture
) -> None:
    config = tiny_config(family, num_layers=1, vocab_size=64)
    texts = {
        name: tiny_tokenizer(size, ends_with_eos=config.is_encoder_decoder).to_str() if size else "{}"
        for name, size in tokenizers.items()
    }
    checkpoint.save(tmp_path / "checkpoint", random_model(config), config, texts, {})
    status, result = command(capsys, tmp_path / "checkpoint", tmp_path / "out")
    assert status == 2
    assert problem in result["problems"][0]
    assert not (tmp_path / "out").exists()


def test_export_refuses_a_prefill_graph_by_name(tmp_path: Path, capsys: Capture) -> None:
    status, result = command(capsys, tmp_path, tmp_path / "out", "--prefill-graph")
    assert status == 2
    assert result["problems"][0].startswith("--prefill-graph is not supported")


def test_export_refuses_folders_that_are_no_checkpoint_or_cannot_be_made(
    source: Path, tmp_path: Path, capsys: Capture
) -> None:
    status, result = command(capsys, tmp_path, tmp_path / "out")
    assert status == 2
    assert f"{WEIGHTS} is missing" in result["problems"]
    (tmp_path / "file").write_text("")
    status, result = command(capsys, source, tmp_path / "file" / "model")
    assert (status, len(result["problems"])) == (2, 1)


def test_export_that_fails_leaves_nothing_behind(
    source: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "models" / "tiny"
    with monkeypatch.context() as patch:
        patch.setattr(golden, "save", fail_to_write)
        status, result = command(capsys, source, out)
    assert (status, result["problems"]) == (2, ["[Errno 28] No space left on device"])
    with monkeypatch.context() as patch:
        patch.setitem(golden.TOLERANCES, Precision.FP32, golden.Tolerance(absolute=1e-12))
        status, result = command(capsys, source, out)
    assert (status, result["verdict"]) == (1, "failed")
    loaded = checkpoint.load(source)
    with torch.no_grad():
        loaded.model.final_norm.weight[0] = torch.inf
    tokenizers = {artifact.TOKENIZER: (source / artifact.TOKENIZER).read_text()}
    checkpoint.save(tmp_path / "spoiled", loaded.model, loaded.config, tokenizers, {})
    status, result = command(capsys, tmp_path / "spoiled", out)
    assert status == 1
    assert "the checkpoint's own logits are not finite" in result["problems"][0]
    assert list(out.parent.iterdir()) == []


def test_export_clears_what_a_killed_one_left_and_restores_what_it_had_set_aside(source: Path, tmp_path: Path) -> None:
    loaded = checkpoint.load(source)
    models = tmp_path / "models"
    shutil.copytree(tiny_artifact("decoder-only"), models / ".tiny.export-killed" / "old")
    (models / ".tiny.export-busy").mkdir()
    (models / ".tiny-other.export-killed").mkdir()
    loaded.model.final_norm.weight.data[0] = torch.nan
    with locked(models / ".tiny.export-busy"), pytest.raises(golden_cases.GoldenCaseError):
        export(loaded, models / "tiny", Device.CPU, Precision.FP32, lambda _: None)
    assert {path.name for path in models.iterdir()} == {"tiny", ".tiny.export-busy", ".tiny-other.export-killed"}
    artifact.load(models / "tiny")


def _operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)
