"""`python -m model`: what it writes, what it says, and how it fails."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from model import checkpoint
from model.__main__ import main
from model.data import stdlib
from model.data.corpus import Document
from model.spec.tokenizer import Tokenizer
from model.training.loop import TrainingError
from model.training.parallel import Parallel, ParallelError
from tests.training_runs import write_recipe

TINY = ["--set", "d_model=32", "--set", "num_heads=2", "--set", "d_ff=32"]


def last_line(text: str) -> dict[str, object]:
    values = json.loads(text.splitlines()[-1])
    assert isinstance(values, dict)
    return values


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must refuse, and returns its one line."""
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


def test_init_gives_random_weights_and_a_tokenizer_for_every_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, folder in ((1, "a"), (1, "b"), (2, "c")):
        out = tmp_path / folder
        assert main(["init", "law", *TINY, "--set", "vocab_size=50", "--out", str(out), "--seed", str(seed)]) == 0
        said = last_line(capsys.readouterr().out)
        assert said["checkpoint"] == str(out)
    a, b, c = (checkpoint.load(tmp_path / folder) for folder in "abc")
    files = [(tmp_path / folder / checkpoint.WEIGHTS).read_bytes() for folder in "abc"]
    assert files[0] == files[1] != files[2]
    assert a.config == b.config == c.config
    tokenizer = Tokenizer.load(a.tokenizer)
    assert tokenizer.vocab_size == a.config.vocab_size == 50
    assert len(tokenizer.decode(range(50)).split()) == 46


def test_init_of_a_trained_preset_has_its_tokenizer(tmp_path: Path) -> None:
    assert main(["init", "dates", *TINY, "--set", "max_examples=50", "--out", str(tmp_path)]) == 0
    loaded = checkpoint.load(tmp_path)
    tokenizer = Tokenizer.load(loaded.tokenizer)
    assert tokenizer.decode(tokenizer.encode("2026-11-20")) == "2026-11-20"
    assert tokenizer.vocab_size == loaded.config.vocab_size == loaded.config.source_vocab_size


def test_training_dates_leaves_a_checkpoint_and_one_json_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*TINY, "--set", "steps=3", "--set", "max_examples=200"]
    assert main(["train", "dates", *overrides, "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    said = last_line(captured.out)
    assert len(captured.out.splitlines()) == 1
    assert {"checkpoint", "steps", "train_seconds", "num_parameters", "train_loss", "exact_match"} <= said.keys()
    assert said["steps"] == 3
    assert "step 3/3" in captured.err
    assert checkpoint.load(tmp_path).training["data"]["name"] == "dates"


def test_training_does_not_replace_another_run_without_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*TINY, "--set", "steps=2", "--set", "max_examples=200"]
    (tmp_path / "resume.safetensors").write_bytes(b"state")
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "config.json").write_text("best")
    assert main(["train", "dates", *overrides, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    for words in ("resume.safetensors, best", "--resume", "--overwrite"):
        assert words in said
    assert (tmp_path / "resume.safetensors").read_bytes() == b"state"
    assert (tmp_path / "best" / "config.json").read_text() == "best"
    assert main(["train", "dates", *overrides, "--out", str(tmp_path), "--overwrite"]) == 0
    assert not (tmp_path / "best").exists()
    # Nor a run that has ended.
    assert main(["train", "dates", *overrides, "--out", str(tmp_path)]) == 2


def test_training_stdlib_reaches_the_whole_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(stdlib.__file__).read_text(encoding="utf-8")
    texts = {"a": source, "b": source[:1000], "c": source[:900]}
    small = stdlib.Split(*((Document(f"{name}.py", text),) for name, text in texts.items()))
    monkeypatch.setattr(stdlib, "split", lambda: small)
    overrides = ["vocab_size=300", "context=64", "row_tokens=16", "batch_tokens=64", "steps=4", "long_fraction=0.5"]
    arguments = [argument for override in overrides for argument in ("--set", override)]
    assert main(["train", "stdlib", *TINY, *arguments, "--out", str(tmp_path)]) == 0
    said = last_line(capsys.readouterr().out)
    assert {"bits_per_byte", "xz_bits_per_byte", "xz_primed_bits_per_byte"} <= said.keys()
    assert said["num_target_tokens"] == 4 * 64


def test_every_problem_of_a_recipe_is_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = fail(capsys, "train", "dates", "--set", "steps=0", "--set", "heads=3", "--out", str(tmp_path / "x"))
    assert "steps is 0" in line
    assert "'heads'" in line
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("fly",),
        ("train",),
        ("train", "dates"),
        ("train", "detas", "--out", "x"),
        ("init", "law", "--out", "x", "--seed", "-1"),
        ("init", "law", "--out", "x", "--resume"),
        ("train", "dates", "--dry-run", "--overfit-one-batch"),
        ("train", "dates", "--out", "x", "--resume", "--overwrite"),
        ("evaluate", "x"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert fail(capsys, *arguments).startswith("python -m model")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("law",), "law has no data to train on"),
        (("dates", *TINY, "--set", "max_examples=50", "--resume"), "nothing to resume"),
        (("dates", *TINY, "--set", "max_examples=50", "--set", "source_context=8"), "source_context is 8"),
        (("paper", *TINY), "paths"),
    ],
)
def test_a_training_that_cannot_start_is_refused(
    arguments: tuple[str, ...], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments, "--out", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err.splitlines()[-1]


def test_an_untrained_preset_without_its_files_gets_the_stand_in_tokenizer(tmp_path: Path) -> None:
    sizes = ["vocab_size=60", "num_encoder_layers=1", "num_layers=1", "context=16", "max_examples=7"]
    overrides = [argument for size in sizes for argument in ("--set", size)]
    assert main(["init", "paper", *TINY, *overrides, "--out", str(tmp_path)]) == 0
    loaded = checkpoint.load(tmp_path)
    assert Tokenizer.load(loaded.tokenizer).vocab_size == loaded.config.vocab_size == 60


def test_a_dry_run_needs_no_folder_and_ends_in_one_json_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "dates", *TINY, "--set", "max_examples=200", "--dry-run"]) == 0
    captured = capsys.readouterr()
    said = last_line(captured.out)
    assert {"first_shape", "last_shape", "step_seconds", "train_seconds", "peak_bytes", "num_parameters"} <= said.keys()
    assert f"parameters  {said['num_parameters']:,}" in captured.err
    assert list(tmp_path.iterdir()) == []


def test_one_batch_is_learned_or_the_command_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    assert main(["train", str(recipe), "--overfit-one-batch"]) == 0
    assert last_line(capsys.readouterr().out)["learned"] is True
    slow = ["--set", "learning_rate=1e-9", "--set", "matrix_learning_rate=1e-9"]
    assert main(["train", str(recipe), *slow, "--overfit-one-batch"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "one batch was not learned" in captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("cause", "says"), [(OSError("no room"), "process 1: no room; saved"), (ParallelError("process 0: no room"), None)]
)
def test_what_fails_in_another_process_alone_is_said_by_that_one(
    cause: Exception,
    says: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(*_: object, **__: object) -> None:
        raise TrainingError(f"{cause}; saved") from cause

    @contextlib.contextmanager
    def start(_: object) -> Iterator[Parallel]:
        yield Parallel(rank=1, world_size=2)

    monkeypatch.setattr("model.training.trainer.train", train)
    monkeypatch.setattr("model.training.parallel.start", start)
    # There is no group of processes to agree that the folder is free.
    assert main(["train", "dates", "--out", str(tmp_path), "--overwrite"]) == 1
    assert capsys.readouterr().err.splitlines() == ([] if says is None else [f"python -m model: {says}"])


def test_a_checkpoint_can_be_scored_again_and_scores_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path)
    assert main(["train", str(recipe), "--set", "steps=5", "--out", str(tmp_path / "run")]) == 0
    trained = last_line(capsys.readouterr().out)
    assert main(["evaluate", str(tmp_path / "run"), str(recipe)]) == 0
    scored = last_line(capsys.readouterr().out)
    assert scored["checkpoint"] == str(tmp_path / "run")
    assert scored["bits_per_byte"] == pytest.approx(trained["bits_per_byte"], rel=1e-6)
    # The same text without one of its letters makes another tokenizer.
    text = tmp_path / "text.txt"
    text.write_text(text.read_text(encoding="utf-8").replace("m", "n"), encoding="utf-8")
    assert main(["evaluate", str(tmp_path / "run"), str(recipe)]) == 2
    assert "is not the tokenizer that tiny makes of its data" in capsys.readouterr().err.splitlines()[-1]
    assert main(["evaluate", str(tmp_path / "run"), "dates"]) == 2
    assert "is decoder-only, dates is for encoder-decoder" in capsys.readouterr().err.splitlines()[-1]
    assert main(["evaluate", str(tmp_path / "none"), str(recipe)]) == 2
    assert "config.json is missing" in capsys.readouterr().err.splitlines()[-1]
