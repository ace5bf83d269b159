"""Checkpoints: what is saved is what loads, bit for bit; what is damaged is refused with everything that is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model import checkpoint
from model.checkpoint import CheckpointError
from model.nn.transformer import build, num_parameters
from model.spec.artifact import hash_file
from model.spec.config import Architecture, ModelConfig, Positions
from model.spec.files import StagedFiles

CONFIGS = {
    architecture.value: ModelConfig(
        architecture=architecture,
        vocab_size=23,
        context=16,
        d_model=16,
        num_layers=1,
        num_heads=2,
        d_ff=24,
        positions=Positions.LEARNED,
        num_encoder_layers=2 if architecture is Architecture.ENCODER_DECODER else 0,
    )
    for architecture in Architecture
}
TOKENIZERS = {"tokenizer.json": '{"source": "é"}', "target_tokenizer.json": "{}"}
MANIFEST = {"steps": 3, "data": {"sha256": "00"}}


def save(folder: Path, config: ModelConfig, seed: int = 0) -> Path:
    checkpoint.save(folder, build(config, seed=seed), config, TOKENIZERS, MANIFEST)
    return folder


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder)
    assert caught.value.folder == folder
    return caught.value.problems


def rehash(folder: Path) -> None:
    """Makes run.json name the files as they are now."""
    path = folder / checkpoint.RUN
    values = json.loads(path.read_text(encoding="utf-8"))
    values["files"] = {name: hash_file(folder / name).sha256 for name in values["files"]}
    path.write_text(json.dumps(values), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoint", CONFIGS["decoder-only"])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_checkpoint_loads_bit_for_bit(tmp_path: Path, config: ModelConfig) -> None:
    loaded = checkpoint.load(save(tmp_path / "new" / "checkpoint", config, seed=1))
    model = build(config, seed=1)
    assert loaded.config == loaded.model.config == config
    assert loaded.training == MANIFEST
    assert not loaded.model.training
    expected, found = model.state_dict(), loaded.model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert loaded.tokenizer.read_text(encoding="utf-8") == TOKENIZERS["tokenizer.json"]
    assert loaded.target_tokenizer.read_text(encoding="utf-8") == TOKENIZERS["target_tokenizer.json"]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_shared_tensor_is_stored_once_and_position_tables_never(tmp_path: Path, config: ModelConfig) -> None:
    tensors = load_file(save(tmp_path / "checkpoint", config) / checkpoint.WEIGHTS)
    assert sum(tensor.numel() for tensor in tensors.values()) == num_parameters(build(config))


def test_saving_again_replaces_everything_and_leaves_nothing_over(folder: Path) -> None:
    config = CONFIGS["encoder-decoder"]
    (folder / "curves.jsonl").write_text("kept")
    checkpoint.save(folder, build(config, seed=5), config, {"tokenizer.json": "{}"}, {"steps": 4})
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "run.json", "tokenizer.json", "curves.jsonl"}
    loaded = checkpoint.load(folder)
    assert (loaded.config, loaded.training) == (config, {"steps": 4})
    assert loaded.target_tokenizer == loaded.tokenizer


class Killed(BaseException):
    """Stands for the end of the process: nothing that handles errors handles it."""


@pytest.mark.parametrize("num_written", range(6))
def test_a_save_killed_before_all_is_written_leaves_the_old_checkpoint(
    num_written: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, remaining = StagedFiles.add, num_written

    def add_some(self: StagedFiles, name: str, write: Callable[[Path], object]) -> Path:
        nonlocal remaining
        if not remaining:
            raise Killed
        remaining -= 1
        return add(self, name, write)

    config = CONFIGS["decoder-only"]
    changed = dataclasses.replace(config, rope_theta=500.0)
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(StagedFiles, "add", add_some)
        checkpoint.save(folder, build(changed, seed=1), changed, TOKENIZERS, {"steps": 9})
    # Five files make a checkpoint.
    assert checkpoint.load(folder).config == (config if num_written < 5 else changed)


@pytest.mark.parametrize("num_renamed", range(5))
@pytest.mark.parametrize("is_first", [True, False])
def test_a_save_killed_between_two_renames_leaves_nothing_that_loads_wrongly(
    num_renamed: int, is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIGS["decoder-only"]
    folder = tmp_path / "checkpoint"
    if not is_first:
        checkpoint.save(folder, build(config, seed=0), config, {"tokenizer.json": "[]"}, MANIFEST)
    rename, remaining = Path.replace, num_renamed

    def rename_some(self: Path, target: Path) -> Path:
        nonlocal remaining
        if not remaining:
            raise Killed
        remaining -= 1
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", rename_some)
    changed = dataclasses.replace(config, rope_theta=500.0)
    with pytest.raises(Killed):
        checkpoint.save(folder, build(changed, seed=1), changed, TOKENIZERS, {"steps": 9})
    if is_first or num_renamed:
        assert problems_of(folder)
    else:
        assert checkpoint.load(folder).config == config


def test_what_is_said_of_a_checkpoint_may_be_amended(folder: Path) -> None:
    before = checkpoint.load(folder)
    checkpoint.amend(folder, {"steps": 8})
    after = checkpoint.load(folder)
    assert after.training == {"steps": 8}
    assert after.config == before.config


def test_a_removed_checkpoint_leaves_what_is_not_its_own(folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", CONFIGS["decoder-only"])
    (other / "notes.txt").write_text("kept")
    for each in (folder, other, tmp_path / "none"):
        checkpoint.remove(each)
    assert not folder.exists()
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


def test_a_file_of_another_save_is_named(folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", CONFIGS["decoder-only"], seed=1)
    shutil.copyfile(other / checkpoint.WEIGHTS, folder / checkpoint.WEIGHTS)
    (folder / "target_tokenizer.json").unlink()
    assert problems_of(folder) == (
        "model.safetensors is not the file that run.json names",
        "target_tokenizer.json is missing",
    )
    for run in ("{}", '{"files": 3}'):
        (folder / checkpoint.RUN).write_text(run)
        assert problems_of(folder) == ("run.json does not name the files beside it",)


def test_saving_under_another_configuration_or_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    config, other = CONFIGS.values()
    model = build(config)
    with pytest.raises(ValueError, match="not the model's"):
        checkpoint.save(tmp_path, model, other, TOKENIZERS, {})
    for tokenizers in ({}, {"tokenizer.json": "{}", "../evil.json": "{}"}):
        with pytest.raises(ValueError, match=r"must be tokenizer\.json"):
            checkpoint.save(tmp_path, model, config, tokenizers, {})
    with pytest.raises(ValueError, match="'files'"):
        checkpoint.save(tmp_path, model, config, TOKENIZERS, {"files": {}})
    assert list(tmp_path.iterdir()) == []


def test_a_half_precision_checkpoint_loads_as_float32(folder: Path) -> None:
    tensors = load_file(folder / checkpoint.WEIGHTS)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / checkpoint.WEIGHTS)
    rehash(folder)
    for name, parameter in checkpoint.load(folder).model.named_parameters():
        assert torch.equal(parameter.detach(), tensors[name].bfloat16().float())


def test_an_empty_folder_is_refused_file_by_file(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == tuple(
        f"{name} is missing" for name in ("config.json", "model.safetensors", "tokenizer.json", "run.json")
    )


def test_every_wrong_tensor_and_file_is_listed_at_once(folder: Path) -> None:
    tensors = load_file(folder / checkpoint.WEIGHTS)
    del tensors["final_norm.weight"]
    tensors["vision.weight"] = torch.zeros(2)
    tensors["layers.0.self_attention.qkv.weight"] = torch.zeros(48, 15)
    tensors["layers.0.self_attention.output.weight"] = torch.zeros(16, 16, dtype=torch.int32)
    save_file(tensors, folder / checkpoint.WEIGHTS)
    (folder / checkpoint.RUN).write_text("[]")
    (folder / "tokenizer.json").unlink()
    assert problems_of(folder) == (
        "tokenizer.json is missing",
        "run.json is not a JSON object",
        "model.safetensors lacks final_norm.weight",
        "model.safetensors has unexpected vision.weight",
        "model.safetensors: layers.0.self_attention.output.weight is I32, must be floating",
        "model.safetensors: layers.0.self_attention.qkv.weight is [48, 15], must be [48, 16]",
    )


def test_a_bad_configuration_is_listed_with_the_other_problems(folder: Path) -> None:
    values = json.loads((folder / checkpoint.CONFIG).read_text(encoding="utf-8"))
    (folder / checkpoint.CONFIG).write_text(json.dumps(values | {"d_model": 0, "dropout": 2.0}))
    (folder / checkpoint.RUN).write_text("{")
    problems = problems_of(folder)
    assert problems[:2] == (
        "config.json: d_model is 0, must be at least 1",
        "config.json: dropout is 2.0, must be in [0, 1)",
    )
    assert problems[2].startswith("run.json: ")


@pytest.mark.parametrize("data", [b"", b"not safetensors", b"\xff" * 64, None], ids=["empty", "text", "high", "cut"])
def test_weights_that_are_not_safetensors_are_refused(folder: Path, data: bytes | None) -> None:
    path = folder / checkpoint.WEIGHTS
    path.write_bytes(path.read_bytes()[:-8] if data is None else data)
    changed, problem = problems_of(folder)
    assert changed == "model.safetensors is not the file that run.json names"
    assert problem.startswith("model.safetensors: ")
