"""Checkpoints made by transformers, imported, exported and served: the same logits, texts and hypotheses."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers import hf_folder
from benchmarks.scenarios import _import_large, imports
from benchmarks.scenarios._import_cases import CASES, Case, make_folder
from benchmarks.scenarios.imports import Outcome
from export.__main__ import main as export_main
from export.exporter import export
from export.operators import BIASED, GELU, INT4_LINEAR, INT8_LINEAR, LINEAR, SWIGLU
from export.verify import Verdict
from model import checkpoint
from model.__main__ import main
from model.checkpoint import CheckpointError
from model.hf import pickled
from model.hf.folder import PICKLED, WEIGHTS, ImportRefused
from model.hf.importer import FAMILIES, plan, write
from model.nn.transformer import build, num_parameters
from model.spec.artifact import Device, KVFormat, KVPrecision, Precision
from model.spec.chat import Message
from model.spec.generation import GENERATION, GenerationDefaults, GenerationRules
from model.spec.tokenizer import Tokenizer
from model.tokenizer_training import one_word_per_id
from model.training.presets import resolve
from service.errors import StartupError
from service.repository.loading import load_models
from service.repository.models import Conversation
from tests.artifacts import rehash
from tests.environment import ROOT
from tests.hf_folders import llama_tensors, write_folder
from tests.import_cases import checking

_FULL = frozenset(next(case.name for case in CASES if case.family == family) for family in ("bart", "marian"))


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """Those of the cases that are to be tested in this run."""
    name = test_imported_checkpoint_answers_as_transformers_does.__name__
    asked = [
        item.callspec.params["case"] for item in request.session.items if getattr(item, "originalname", "") == name
    ]
    sources = [(case, imports.NUM_SOURCES if case.name in _FULL else 8) for case in asked]
    with checking(sources, tmp_path_factory.mktemp("cases")) as found:
        yield found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.sampled(4)
def test_imported_checkpoint_answers_as_transformers_does(case: Case, outcomes: dict[str, Future[Outcome]]) -> None:
    outcome = outcomes[case.name].result()
    assert not outcome.problems
    assert max(outcome.torch_error, outcome.graph_error) < 1e-4
    assert outcome.num_greedy == 4


def test_every_family_has_three_cases_that_cover_what_makes_families_differ() -> None:
    for family in FAMILIES:
        assert sum(case.family == family for case in CASES) >= 3
    assert {case.dtype for case in CASES} == {torch.float32, torch.float16, torch.bfloat16}
    assert any(case.is_sharded for case in CASES)


def test_documented_figures_are_of_these_cases() -> None:
    text = (ROOT / "docs" / "results" / "imports.md").read_text(encoding="utf-8")
    rows = [row.split("|") for row in text.splitlines() if row.startswith("| `") and "model_type" not in row]
    described = [(row[1].strip(), row[2].strip()) for row in rows if not row[1].strip().startswith("`python")]
    assert described == [(f"`{case.family}`", case.says) for case in CASES]
    assert all(float(row[column]) < 1e-4 for row in rows[: len(CASES)] for column in (3, 4))


def test_a_difference_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: one number of one matrix is enough."""

    def spoiled(*arguments: Any) -> Any:
        loaded = load(*arguments)
        with torch.no_grad():
            loaded.model.layers[1].feed_forward.down.weight[3, 5] += 0.05
        return loaded

    load = checkpoint.load
    monkeypatch.setattr(imports.checkpoint, "load", spoiled)
    outcome = imports.check(case_named("gpt2-tied"), tmp_path)
    assert any("torch is off" in problem for problem in outcome.problems)
    assert any("graph is off" in problem for problem in outcome.problems)


@pytest.mark.parametrize(
    ("name", "precision", "kv_precision"),
    [
        ("qwen3-wide-heads", Precision.INT8, KVPrecision.INT8),
        ("gpt2-tied", Precision.INT8, KVPrecision.FP32),
        ("bart-plain", Precision.INT4, KVPrecision.FP32),
    ],
)
@pytest.mark.sampled(1)
def test_imported_checkpoint_is_proven_in_fewer_bits(
    name: str, precision: Precision, kv_precision: KVPrecision, tmp_path: Path
) -> None:
    make_folder(case_named(name), tmp_path / "theirs")
    write(plan(tmp_path / "theirs"), tmp_path / "ours")
    loaded, artifact = checkpoint.load(tmp_path / "ours"), tmp_path / "artifact"
    report = export(loaded, artifact, Device.CPU, precision, lambda _: None, KVFormat(kv_precision))
    assert report.verdict is Verdict.PASSED
    nodes = onnx.load(artifact / "decoder.onnx").graph.node
    kinds = [node.op_type.removeprefix(BIASED).removesuffix(GELU).removesuffix(SWIGLU) for node in nodes]
    products = {kind for kind in kinds if kind in _PRODUCTS}
    # The feed-forward width is no multiple of 32: blocks of 16 are the operator's of ONNX Runtime's own.
    expected = {INT8_LINEAR} if precision is Precision.INT8 else {INT4_LINEAR, "MatMulNBits"}
    assert products == expected, "the head too, biased or not"


_PRODUCTS = ("MatMul", "Gemm", "MatMulNBits", LINEAR, INT8_LINEAR, INT4_LINEAR)


def test_numbers_come_through_in_every_dtype_and_from_shards(tmp_path: Path) -> None:
    for dtype in ("float32", "float16"):
        tensors = llama_tensors(dtype=dtype)
        folder = write_folder(tmp_path / dtype, tensors=tensors, sharded=dtype == "float16")
        write(plan(folder), tmp_path / f"{dtype}-ours")
        weights = load_file(tmp_path / f"{dtype}-ours" / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
        packed = np.concatenate([tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
        np.testing.assert_array_equal(weights["layers.1.self_attention.qkv.weight"].numpy(), packed.astype(np.float32))
        assert sum(tensor.numel() for tensor in weights.values()) == sum(each.size for each in tensors.values())


@pytest.mark.parametrize("preset", ["gpt2-124m", "llama-110m"])
def test_our_own_weights_come_back_from_their_layout_bit_by_bit(preset: str, tmp_path: Path) -> None:
    small = {"vocab_size": 40, "context": 24, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 48}
    small |= {"num_kv_heads": 2} if preset.startswith("llama") else {}
    config = resolve(preset, [f"{name}={value}" for name, value in small.items()]).model
    model = build(config, seed=3)
    tokenizers = {"tokenizer.json": one_word_per_id(40, config.architecture).to_json()}
    checkpoint.save(tmp_path / "ours", model, config, tokenizers, {})
    hf_folder.write(tmp_path / "ours", tmp_path / "theirs")
    write(plan(tmp_path / "theirs"), tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "ours" / "config.json").read_text()
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_folder_of_the_large_import_is_the_preset_of_its_size_and_a_small_one_imports(tmp_path: Path) -> None:
    size, config = _import_large.SIZES["gpt2-124m"], resolve("gpt2-124m", []).model
    assert (size["vocab_size"], size["n_positions"], size["n_embd"]) == (
        config.vocab_size,
        config.context,
        config.d_model,
    )
    assert (size["n_layer"], size["n_head"]) == (config.num_layers, config.num_heads)
    _import_large.make_folder(tmp_path / "theirs", _import_large.SIZES["tiny"])
    planned = plan(tmp_path / "theirs")
    tokenizer = Tokenizer.from_json(planned.tokenizers["tokenizer.json"])
    assert tokenizer.vocab_size == planned.config.vocab_size == 600
    assert tokenizer.decode(tokenizer.encode("def f(x): …")) == "def f(x): …"
    assert len(tokenizer.encode("return self")) < 5, "merges were learned"
    assert write(planned, tmp_path / "ours") == num_parameters(checkpoint.load(tmp_path / "ours").model)


def test_tied_tensors_that_differ_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", tie_word_embeddings=True)
    with pytest.raises(ImportRefused, match=r"lm_head\.weight is not what model\.embed_tokens\.weight is"):
        write(plan(folder), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    tensors = llama_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write(plan(write_folder(tmp_path / "alike", tie_word_embeddings=True, tensors=tensors)), tmp_path / "ours")
    assert "head.weight" not in load_file(tmp_path / "ours" / "model.safetensors")


def test_sinusoids_that_are_none_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    make_folder(case_named("marian-shared"), folder)
    weights = load_file(folder / "model.safetensors")
    rows = torch.rand(72, 48)
    save_file({**weights, "model.encoder.embed_positions.weight": rows}, folder / "model.safetensors")
    with pytest.raises(ImportRefused, match=r"encoder\.embed_positions\.weight is off the sinusoids by"):
        write(plan(folder), tmp_path / "ours")


def test_context_that_is_cut_keeps_the_first_positions(tmp_path: Path) -> None:
    for name, context in (("gpt2-tied", 24), ("bart-plain", 24), ("mistral-yarn", 24)):
        theirs = make_folder(case_named(name), tmp_path / name)
        write(plan(tmp_path / name, context=context), tmp_path / f"{name}-ours")
        loaded = checkpoint.load(tmp_path / f"{name}-ours")
        assert (loaded.config.context, loaded.config.sliding_window) == (context, 0)
        assert imports._torch_error(theirs, loaded) < 1e-4


def test_import_command_says_what_it_did_and_its_checkpoint_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "folder")
    assert main(["import", str(folder), "--out", str(tmp_path / "ours"), "--context", "32"]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out.splitlines()[-1])
    assert said["model_type"] == "llama"
    assert said["context"] == 32
    assert said["has_chat_template"]
    assert said["num_parameters"] == sum(tensor.size for tensor in llama_tensors().values())
    assert "temperature 0.6" in err
    assert "reading" in err.splitlines()[2]
    artifact = tmp_path / "models" / "imported"
    assert export_main([str(tmp_path / "ours"), "--out", str(artifact)]) == 0
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert manifest["eos_ids"] == [2, 7]
    (served,) = load_models(tmp_path / "models")
    assert served.manifest.generation_defaults == GenerationDefaults(temperature=0.6)
    text = served.prompt_tokenizer.encode_plain("user: <bos>\n")
    assert served.encode_prompt(Conversation((Message("user", "<bos>"),))) == (1, *text)
    (artifact / "chat.json").write_text('{"template": "{% for %}", "variables": {}}')
    rehash(artifact)
    with pytest.raises(StartupError, match=r"chat\.json: cannot be compiled"):
        load_models(tmp_path / "models")


def test_model_in_the_hubs_cache_is_found_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--Some--Model-0.1B"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0abc"
    write_folder(blobs)
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["import", "Some/Model-0.1B", "--out", str(tmp_path / "ours")]) == 0
    assert checkpoint.load(tmp_path / "ours").training["imported"]["folder"] == "Some/Model-0.1B"
    capsys.readouterr()
    assert main(["import", "Some/Other", "--out", str(tmp_path / "other")]) == 2
    assert str(tmp_path / "hub") in capsys.readouterr().err
    # Links still may not leave the model's own part of the cache.
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "ours" / "config.json")
    assert main(["import", "Some/Model-0.1B", "--out", str(tmp_path / "other")]) == 2
    assert "config.json is a link out of the folder" in capsys.readouterr().err


def test_import_command_lists_every_problem_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "folder", hidden_act="relu", rope_scaling={"type": "su"})
    (folder / "model.safetensors").unlink()
    assert main(["import", str(folder), "--out", str(tmp_path / "ours")]) == 2
    err = capsys.readouterr().err
    for said in ("hidden_act is 'relu'", "rope_type is 'su'", "neither model.safetensors"):
        assert said in err
    assert not (tmp_path / "ours").exists()


def test_import_does_not_overwrite_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "folder")
    assert main(["import", str(folder), "--out", str(folder)]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    for _ in range(2):
        assert main(["import", str(folder), "--out", str(tmp_path / "ours")]) == 0
    assert main(["import", str(folder), "--out", str(tmp_path / "ours"), "--no-chat"]) == 0
    assert not (tmp_path / "ours" / "chat.json").exists()
    assert checkpoint.load(tmp_path / "ours").chat is None


def test_generation_rules_survive_the_checkpoint_and_are_checked(tmp_path: Path) -> None:
    make_folder(case_named("marian-apart"), tmp_path / "theirs")
    write(plan(tmp_path / "theirs"), tmp_path / "ours")
    loaded = checkpoint.load(tmp_path / "ours")
    rules = GenerationRules(forced_last_id=0, suppressed_ids=(139,), renormalize=True, patience=0.0)
    assert loaded.generation.rules == rules
    assert loaded.generation.eos_ids == (0,)
    assert (loaded.config.bos_id, loaded.config.pad_id) == (139, 139)
    (tmp_path / "ours" / GENERATION).write_text('{"eos_ids": [160], "rules": {"forced_first_id": -1}}')
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path / "ours")
    assert any("forced_first_id is -1" in problem for problem in caught.value.problems)
    assert any("generation.json is not the file" in problem for problem in caught.value.problems)


@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "before-1.6"])
def test_pickled_tensors_are_read_as_those_of_safetensors(tmp_path: Path, *, is_archive: bool) -> None:
    folder = write_folder(tmp_path / "folder")
    write(plan(folder), tmp_path / "safe")
    pickle_weights(folder, load_file(folder / WEIGHTS), is_archive=is_archive)
    write(plan(folder), tmp_path / "ours")
    safe, ours = (load_file(tmp_path / name / WEIGHTS) for name in ("safe", "ours"))
    assert safe.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in safe.items())


class Trap:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(__file__).with_name("it-was-unpickled"),))


@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "before-1.6"])
@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"model.norm.weight": Trap()}, "cannot be read as tensors alone: .*Unsupported global"),
        ([torch.zeros(3)], "holds something else than tensors by name"),
        ({"model.norm.weight": torch.ones(24).to_sparse()}, "holds something else than tensors by name"),
        ({"model.norm.weight": torch.zeros(1).expand(1 << 40)}, r"model\.norm\.weight is \[1099511627776\]"),
        ({"model.norm.weight": torch.zeros(24, dtype=torch.float64)}, r"model\.norm\.weight is float64"),
    ],
    ids=["program", "list", "sparse", "huge", "double"],
)
def test_a_pickle_that_holds_anything_but_the_models_tensors_is_refused(
    tmp_path: Path, weights: Any, said: str, *, is_archive: bool
) -> None:
    folder = write_folder(tmp_path / "folder")
    pickle_weights(folder, weights, is_archive=is_archive)
    with pytest.raises(ImportRefused, match=said):
        plan(folder)
    assert not Path(__file__).with_name("it-was-unpickled").exists()


def test_a_pickle_that_grows_when_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "folder")
    pickle_weights(folder, load_file(folder / WEIGHTS))
    path = folder / PICKLED
    monkeypatch.setattr(pickled, "_MAX_PICKLE_BYTES", 1000)
    with pytest.raises(ImportRefused, match=r"data\.pkl' has \d+ bytes, must have at most 1000"):
        plan(folder)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(ImportRefused, match="is compressed"):
        plan(folder)
    monkeypatch.setattr(pickled, "_MAX_WHOLE_BYTES", 1000)
    pickle_weights(folder, {}, is_archive=False)
    path.write_bytes(path.read_bytes() + bytes(1000))
    with pytest.raises(ImportRefused, match="is no archive and has"):
        plan(folder)


def pickle_weights(folder: Path, weights: Any, *, is_archive: bool = True) -> None:
    """Saves weights as PyTorch does, in the place of safetensors."""
    (folder / WEIGHTS).unlink(missing_ok=True)
    torch.save(weights, folder / PICKLED, _use_new_zipfile_serialization=is_archive)


def test_plan_needs_no_torch(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder")
    program = (
        "import sys; from pathlib import Path; from model.hf.importer import plan; plan(Path(sys.argv[1])); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, cwd=ROOT, timeout=60)
