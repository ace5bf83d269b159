"""What golden cases cannot see: another tokenizer, template or special id, with every checksum made to fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export.__main__ import main as export_main
from export.verify import verify
from model.__main__ import main
from model.spec import artifact, golden
from model.spec.artifact import CHAT, GOLDEN, GOLDEN_TEXTS, MANIFEST, TOKENIZER, ArtifactError, Precision
from model.spec.chat import ChatSettings
from model.spec.generation import GenerationRules
from service.errors import StartupError
from service.repository.loading import load_model
from tests.artifacts import rehash, tiny_artifact, write_checksums
from tests.hf_folders import write_folder

Mutate = Callable[[Path], None]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of an imported model: merges, two end tokens, a template."""
    root = tmp_path_factory.mktemp("imported")
    assert main(["import", str(write_folder(root / "theirs")), "--out", str(root / "ours"), "--context", "32"]) == 0
    assert export_main([str(root / "ours"), "--out", str(root / "artifact")]) == 0
    return root / "artifact"


def changed(name: str, change: Callable[[dict[str, Any]], Any]) -> Mutate:
    """Changes one of an artifact's JSON files."""

    def mutate(folder: Path) -> None:
        described = json.loads((folder / name).read_text(encoding="utf-8"))
        change(described)
        (folder / name).write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")

    return mutate


def replaced(**fields: Any) -> Mutate:
    """Changes the manifest."""

    def mutate(folder: Path) -> None:
        manifest = artifact.read_manifest(folder)
        (folder / MANIFEST).write_text(dataclasses.replace(manifest, **fields).to_json(), encoding="utf-8")

    return mutate


def swap_words(described: dict[str, Any]) -> None:
    """Two tokens of the text below trade their ids, as in another file of the same size."""
    vocabulary = described["model"]["vocab"]
    vocabulary["e"], vocabulary["o"] = vocabulary["o"], vocabulary["e"]


def lower(described: dict[str, Any]) -> None:
    described["normalizer"] = {"type": "Lowercase"}


def forget_control_token(described: dict[str, Any]) -> None:
    described["post_processor"] = None


def lose_spaces(described: dict[str, Any]) -> None:
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    described["decoder"] = {"type": "Sequence", "decoders": [described["decoder"], strip]}


MUTANTS: dict[str, tuple[Mutate, str]] = {
    "ids of tokens": (changed(TOKENIZER, swap_words), "prompt of 'The quick"),
    "normalizer": (changed(TOKENIZER, lower), "prompt of 'The quick"),
    "bos or eos of a prompt": (changed(TOKENIZER, forget_control_token), "prompt of 'The quick"),
    "detokenizer": (changed(TOKENIZER, lose_spaces), "decoded of"),
    "end token": (replaced(eos_ids=(5,)), "['eos_ids', 5], at export ['eos_ids', 2]"),
    "start token": (replaced(decoder_start_id=5), "['decoder_start_id', 5], at export ['decoder_start_id', 1]"),
    "padding": (replaced(pad_id=5), "['pad_id', 5], at export ['pad_id', 0]"),
}


def refused(folder: Path, said: str) -> None:
    """Both refuse the folder."""
    with pytest.raises(ArtifactError) as problem:
        verify(folder, lambda _: None)
    assert said in str(problem.value)
    with pytest.raises(StartupError) as refusal:
        load_model(folder)
    assert said in str(refusal.value)


@pytest.mark.parametrize("family", ["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_tokenizer_or_special_id_is_refused(family: str, name: str, tmp_path: Path) -> None:
    mutate, said = MUTANTS[name]
    folder = Path(shutil.copytree(tiny_artifact(family), tmp_path / "mutant"))
    assert load_model(folder).name == "mutant"
    mutate(folder)
    rehash(folder)
    refused(folder, f"{GOLDEN_TEXTS}: {said}")


def test_a_model_of_words_is_trained_exported_and_loaded_and_its_golden_texts_hold_its_words(tmp_path: Path) -> None:
    text, ours, folder = tmp_path / "text.txt", tmp_path / "ours", tmp_path / "artifact"
    written = "The money bank grows.\nThe river bank flows, number {}, and the money grows.\n\n"
    text.write_text("".join(written.format(number) for number in range(300)), encoding="utf-8")
    recipe = Path(__file__).parents[2] / "examples/recipes/text.toml"
    data = {"paths": text, "tokenizer": "words", "min_frequency": 2, "vocab_size": 24}
    sizes = {"context": 32, "d_model": 16, "num_heads": 1, "d_ff": 16, "num_layers": 1}
    settings = data | sizes | {"steps": 2, "batch_tokens": 64}
    overrides = [f"--set={name}={value}" for name, value in settings.items()]
    assert main(["train", str(recipe), *overrides, "--out", str(ours)]) == 0
    assert export_main([str(ours), "--out", str(folder)]) == 0
    served = load_model(folder)
    ids = served.prompt_tokenizer.encode("The river bank overflows.")
    words = [served.prompt_tokenizer.token(index) for index in ids]
    assert words == ["<bos>", " The", " river", " bank", "<unk>", "."]
    assert served.output_tokenizer.decode(ids) == "The river bank."

    def swap(described: dict[str, Any]) -> None:
        vocabulary = described["model"]["vocab"]
        vocabulary[" river"], vocabulary[" money"] = vocabulary[" money"], vocabulary[" river"]

    changed(TOKENIZER, swap)(folder)
    rehash(folder)
    refused(folder, GOLDEN_TEXTS)


def forget_a_merge(described: dict[str, Any]) -> None:
    described["model"]["merges"].pop(0)


def greet(described: dict[str, Any]) -> None:
    described["template"] = described["template"].replace("user", "User") + " "


def test_wrong_merges_a_wrong_template_and_one_end_token_of_two_are_refused(imported: Path, tmp_path: Path) -> None:
    for number, (mutate, said) in enumerate(
        [
            (changed(TOKENIZER, forget_a_merge), "prompt of "),
            (changed(CHAT, greet), "written of 'The quick"),
            (replaced(eos_ids=(2,)), "3 ids, at export there were 4"),
        ]
    ):
        folder = Path(shutil.copytree(imported, tmp_path / str(number)))
        assert not verify(folder, lambda _: None).failed
        mutate(folder)
        rehash(folder)
        refused(folder, f"{GOLDEN_TEXTS}: {said}")


def config(**fields: Any) -> Mutate:
    """Changes the manifest's configuration."""
    return lambda folder: replaced(config=dataclasses.replace(artifact.read_manifest(folder).config, **fields))(folder)


def forget_texts(folder: Path) -> None:
    (folder / GOLDEN_TEXTS).unlink()
    files = {name: entry for name, entry in artifact.read_manifest(folder).files.items() if name != GOLDEN_TEXTS}
    replaced(files=files)(folder)


def add_template(folder: Path) -> None:
    (folder / CHAT).write_text(ChatSettings("{{ messages }}").to_json())
    files = {**artifact.read_manifest(folder).files, CHAT: artifact.hash_file(folder / CHAT)}
    replaced(files=files)(folder)
    # A template may not differ from the golden texts, of which there are none.
    forget_texts(folder)


def rewrite_a_word(described: dict[str, Any]) -> None:
    described["normalizer"] = {"type": "Replace", "pattern": {"String": "import os"}, "content": "import sys"}


UNSEEN: dict[str, tuple[Mutate, str]] = {
    "a word that no text has": (changed(TOKENIZER, rewrite_a_word), "tokenizer.json is not the file"),
    "no texts": (forget_texts, "golden_texts.json is missing"),
    "a file more": (add_template, "chat.json is not the file"),
    "positions beyond the tables": (config(context=192), "config.context is 192, at export 96"),
    "a wider tolerance": (replaced(precision=Precision.INT4), "precision is 'int4', at export 'fp32'"),
    "beam search": (replaced(generation=GenerationRules(patience=9.0)), "generation.patience is 9.0, at export 1.0"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_answer_shows_is_refused_by_the_origin_of_the_golden_cases(name: str, tmp_path: Path) -> None:
    mutate, said = UNSEEN[name]
    folder = Path(shutil.copytree(tiny_artifact("decoder-only"), tmp_path / "mutant"))
    mutate(folder)
    write_checksums(folder)
    refused(folder, said)


def test_an_origin_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_artifact("decoder-only"), tmp_path / "bad"))
    cases = golden.load(folder / GOLDEN)
    for origin in ([], {"files": {}}, {"files": 3, "manifest": {}}):
        golden.save(folder / GOLDEN, cases, origin)  # type: ignore[arg-type]
        write_checksums(folder)
        refused(folder, "has no origin")


def test_an_artifact_without_golden_texts_is_served_as_before(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_artifact("decoder-only"), tmp_path / "older"))
    forget_texts(folder)
    replaced(eos_ids=(5,))(folder)
    golden.save(folder / GOLDEN, golden.load(folder / GOLDEN))  # without an origin, as older ones
    write_checksums(folder)
    assert load_model(folder).manifest.eos_ids == (5,)
    assert not verify(folder, lambda _: None).failed


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"ids": 3, "texts": [], "conversations": []}', '{"ids": [], "texts": [{}], "conversations": []}',
     '{"ids": [], "texts": [{"text": 1}], "conversations": []}', "[" * 100_000,
     '{"ids": [], "texts": [], "conversations": [{"messages": [["user"]]}]}', " " * (artifact.MAX_TEXTS_BYTES + 1)],
    ids=str,
)  # fmt: skip
def test_golden_texts_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_artifact("decoder-only"), tmp_path / "bad"))
    (folder / GOLDEN_TEXTS).write_text(text)
    rehash(folder)
    with pytest.raises(ArtifactError):
        verify(folder, lambda _: None)
    with pytest.raises(StartupError, match=GOLDEN_TEXTS):
        load_model(folder)
