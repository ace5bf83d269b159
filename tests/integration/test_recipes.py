"""The recipes of examples/recipes: every command shown exists, and EN→DE runs from catalogs to an answer."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

import export.__main__ as exporter
import model.__main__ as trainer
from benchmarks.frame.servers import serving
from model.data import documents
from model.training.presets import resolve
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.config import parse
from tests.environment import ROOT, run_shown

RECIPES = ROOT / "examples" / "recipes"
FETCH = "examples/recipes/fetch-libreoffice-help"
CATALOG = ROOT / "tests" / "data" / "libreoffice-help-de.po"
TIMEOUT_SECONDS = 500
# 2,000 pairs, a minute fraction of the steps and a model to go with them.
SMALL = {"steps": 40, "vocab_size": 1000, "d_model": 64, "d_ff": 128, "evaluate_every": 20, "checkpoint_every": 20}


# Which lines of text.md make its example.
EXAMPLE = slice(2, 4)


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks, continued ones joined."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def every_command() -> list[str]:
    return [command for page in sorted(RECIPES.glob("*.md")) for command in commands(page)]


def module_arguments(command: str) -> tuple[str, list[str]]:
    """The module that a command runs, and what it is given."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        assert words[1].startswith("--nproc-per-node=")
        words = ["python", *words[2:]]
    assert words[:2] == ["python", "-m"], command
    return words[2], words[3:]


def check(command: str) -> None:
    """Fails for a command that its program would refuse."""
    if command.startswith("sh "):
        words = shlex.split(command)
        assert words[1] == FETCH
        assert len(words) >= 4
        return
    if command in commands(RECIPES / "text.md")[EXAMPLE]:
        return  # Its own test runs it.
    module, arguments = module_arguments(command)
    if module == "model":
        options = trainer._make_parser().parse_args(arguments)
        recipe = resolve(options.config, options.overrides)
        assert recipe.data is not None
        assert not recipe.data.lacks_files
    elif module == "export":
        exporter._export_parser().parse_args(arguments)
    else:
        assert module == "service"
        parse(arguments, {})


def test_every_command_shown_exists(monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in every_command():
        check(command)


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.toml")))
def test_every_recipe_resolves_and_is_documented(name):
    resolve(str(RECIPES / name))
    assert name in (RECIPES / "README.md").read_text(encoding="utf-8")
    assert any(name in command for command in every_command())


def fetch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", ROOT / FETCH, *arguments], capture_output=True, text=True, check=False)


def test_fetch_refuses_in_one_line_before_it_downloads(tmp_path):
    for arguments, words in (
        ((), "usage: fetch-libreoffice-help FOLDER LANGUAGE..."),
        ((tmp_path / "help",), "usage: fetch-libreoffice-help FOLDER LANGUAGE..."),
        ((tmp_path / "help", "../de"), "'../de' is no name of a language"),
    ):
        ended = fetch(*arguments)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr == f"fetch-libreoffice-help: {words}\n"
    assert list(tmp_path.iterdir()) == []


def test_fetch_leaves_what_is_there_as_it_is(tmp_path):
    (tmp_path / "de" / "helpcontent2").mkdir(parents=True)
    ended = fetch(tmp_path, "de")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"{tmp_path}/de/helpcontent2 is already there\n"


def test_example_text_needs_no_download_and_is_enough_to_train_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = commands(RECIPES / "text.md")
    for command in shown[EXAMPLE]:
        subprocess.run(["sh", "-c", command.replace("python", sys.executable, 1)], check=True)
    _, arguments = module_arguments(shown[EXAMPLE.stop])
    options = trainer._make_parser().parse_args([arguments[0], str(ROOT / arguments[1]), *arguments[2:]])
    corpus = documents.load(resolve(options.config, options.overrides).data)
    assert corpus.facts["num_training_bytes"] > 100_000
    assert corpus.facts["num_test_bytes"] > 10_000


def shown_output(command: str, folder: Path) -> str:
    return run_shown(command, folder, OMP_NUM_THREADS="1")


def last_line(output: str) -> dict[str, object]:
    return json.loads(output.splitlines()[-1])


@pytest.mark.timeout(TIMEOUT_SECONDS)
@pytest.mark.whole
def test_english_to_german_runs_from_catalogs_to_an_answer_over_grpc(tmp_path):
    shown = commands(RECIPES / "en-de.md")
    fetched, train, evaluate, export, serve, ask = shown[:6]
    assert fetched == f"sh {FETCH} build/data/libreoffice-help de"
    assert serve == "python -m service serve --models build/models"
    # Instead of the download: real pairs of the same catalogs.
    help_folder = tmp_path / "build" / "data" / "libreoffice-help" / "de"
    help_folder.mkdir(parents=True)
    (help_folder / CATALOG.name).symlink_to(CATALOG)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    trained = last_line(
        shown_output(" ".join([train, *(f"--set {key}={value}" for key, value in SMALL.items())]), tmp_path)
    )
    assert trained["steps"] == SMALL["steps"]
    for scores in (trained, last_line(shown_output(evaluate, tmp_path))):
        assert 0.0 <= scores["bleu"] <= 100.0
        assert 0.0 <= scores["chrf"] <= 100.0
        assert "tok:13a" in scores["bleu_signature"]
        assert "version:2." in scores["chrf_signature"]
        # It has learned something: guessing among all tokens would be as perplexed as they are many.
        assert 1.0 < scores["perplexity"] < SMALL["vocab_size"]
        assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    assert last_line(shown_output(export, tmp_path))["verdict"] == "passed"

    name, text = shlex.split(ask)[-2:]
    with serving(tmp_path / "build" / "models", "--no-metrics") as target, grpc.insecure_channel(target) as channel:
        request = pb.GenerateRequest(
            model=name,
            text=text,
            sampling=pb.SamplingParams(temperature=0.0),
            stopping=pb.StoppingParams(max_tokens=8),
        )
        (output,) = GenerationServiceStub(channel).Generate(request).outputs
    assert 1 <= len(output.token_ids) <= 8
