"""Interrupted at any step, by whatever, a run resumes to the same bits; what cannot go on says so in one line."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from model import checkpoint
from model.__main__ import main
from model.spec.config import Architecture
from model.training import curves, resume
from model.training.config import OptimizerName
from model.training.resume import ResumeError
from model.training.trainer import Terminated
from tests.environment import ROOT
from tests.training_runs import FakeTask, PowerCut, Quiet, assert_same_bits, cut_power, make_recipe, run, write_recipe


@pytest.mark.parametrize(("architecture", "optimizer"), [*zip(Architecture, OptimizerName, strict=True)])
def test_an_interrupted_run_resumes_to_the_same_bits(
    architecture: Architecture, optimizer: OptimizerName, tmp_path: Path
) -> None:
    recipe = make_recipe(
        architecture, dropout=0.1, optimizer=optimizer, checkpoint_every=5, evaluate_every=4, gradient_accumulation=2
    )
    run(recipe, tmp_path / "whole")
    with pytest.raises(PowerCut):
        run(recipe, tmp_path / "resumed", at={2 * 8 + 1: cut_power})
    reporter = Quiet()
    run(recipe, tmp_path / "resumed", resume_run=True, reporter=reporter)
    assert_same_bits(tmp_path / "whole", tmp_path / "resumed")
    # Step 8 had the best scores so far, so that it was saved though none of the fifth ones.
    assert "resuming after step 8" in reporter.lines
    assert not any("bit for bit" in line for line in reporter.lines)


def test_a_run_may_be_interrupted_at_every_step(tmp_path: Path) -> None:
    # Neither logs nor scores nor checkpoints fall together.
    recipe = make_recipe(
        Architecture.DECODER_ONLY, dropout=0.1, steps=7, log_every=3, evaluate_every=4, checkpoint_every=2
    )
    run(recipe, tmp_path / "whole")
    for step in range(2, 7):
        with pytest.raises(PowerCut):
            run(recipe, tmp_path / "resumed", at={step: cut_power}, resume_run=step > 2)
    run(recipe, tmp_path / "resumed", resume_run=True)
    assert_same_bits(tmp_path / "whole", tmp_path / "resumed")


def test_a_run_resumes_in_float16_with_the_scale_it_had(tmp_path: Path) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, precision="fp16", checkpoint_every=5)
    run(recipe, tmp_path / "whole")
    with pytest.raises(PowerCut):
        run(recipe, tmp_path / "resumed", at={8: cut_power})
    run(recipe, tmp_path / "resumed", resume_run=True)
    assert_same_bits(tmp_path / "whole", tmp_path / "resumed")


def test_early_stop_counts_on_after_a_resume(tmp_path: Path) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, evaluate_every=2, patience=3, checkpoint_every=4)
    with pytest.raises(PowerCut):
        run(recipe, tmp_path, scores=[1.0, 2.0, 2.0], at={5: cut_power})
    result = run(recipe, tmp_path, scores=[2.0, 2.0, 0.5], resume_run=True)
    assert result.steps == 8
    assert result.best is not None
    assert result.best.step == 2


def test_a_run_interrupted_while_it_is_scored_on_test_data_only_scores_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, evaluate_every=6)
    run(recipe, tmp_path / "whole")
    for strike, error in ((cut_power, PowerCut), (lambda: signal.raise_signal(signal.SIGTERM), Terminated)):
        with monkeypatch.context() as patch:
            patch.setattr(FakeTask, "test", lambda *_, strike=strike: strike())
            with pytest.raises(error):
                run(recipe, tmp_path / "resumed")
        run(recipe, tmp_path / "resumed", at={12: cut_power}, resume_run=True)
        assert_same_bits(tmp_path / "whole", tmp_path / "resumed")


def test_other_surroundings_are_named_and_gone_on_in(tmp_path: Path) -> None:
    recipe = make_recipe(Architecture.DECODER_ONLY, checkpoint_every=5)
    with pytest.raises(PowerCut):
        run(recipe, tmp_path, at={8: cut_power})
    assert recipe.train is not None
    other = replace(recipe, train=replace(recipe.train, precision="bf16", log_every=1, evaluate_every=3))
    reporter = Quiet()
    run(other, tmp_path, resume_run=True, reporter=reporter)
    assert 'resuming, but not bit for bit: precision is "bf16", was "fp32"' in reporter.lines


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="nothing to resume"):
        run(make_recipe(Architecture.DECODER_ONLY), tmp_path, resume_run=True)


def test_another_runs_state_is_refused_with_every_difference(tmp_path: Path) -> None:
    with pytest.raises(PowerCut):
        run(make_recipe(Architecture.DECODER_ONLY, checkpoint_every=5), tmp_path, at={8: cut_power})
    before = (tmp_path / resume.STATE).read_bytes()
    other = make_recipe(Architecture.DECODER_ONLY, dropout=0.1, learning_rate=0.5)
    with pytest.raises(ResumeError) as caught:
        run(other, tmp_path, resume_run=True)
    assert "model.dropout is 0.1, was 0.0" in str(caught.value)
    assert "train.learning_rate is 0.5, was 0.002" in str(caught.value)
    assert (tmp_path / resume.STATE).read_bytes() == before


@pytest.mark.parametrize("data", [b"", b"\x08\0\0\0\0\0\0\0{}", b"\xff" * 64])
def test_damaged_state_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / resume.STATE).write_bytes(data)
    with pytest.raises(ResumeError, match="damaged"):
        run(make_recipe(Architecture.DECODER_ONLY), tmp_path, resume_run=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_with_everything_saved(number: signal.Signals, tmp_path: Path) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    recipe = make_recipe(Architecture.DECODER_ONLY, dropout=0.1, evaluate_every=4, checkpoint_every=0)
    run(recipe, tmp_path / "whole")
    with pytest.raises(Terminated) as caught:
        run(recipe, tmp_path / "resumed", at={7: lambda: signal.raise_signal(number)})
    assert str(caught.value) == f"terminated at step 7: saved in {tmp_path / 'resumed'}, --resume continues"
    assert caught.value.number == number
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert checkpoint.load(tmp_path / "resumed").training["step"] == 7
    run(recipe, tmp_path / "resumed", resume_run=True)
    assert_same_bits(tmp_path / "whole", tmp_path / "resumed")


def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(make_recipe(Architecture.DECODER_ONLY), tmp_path, at={3: twice})
    assert not (tmp_path / resume.STATE).exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recipe, and the folder of a run of it that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    # On a busy machine a process must not be over before another gets to strike it.
    recipe = write_recipe(folder, steps=200)
    assert main(["train", str(recipe), "--out", str(folder / "run")]) == 0
    return recipe, folder / "run"


Child = subprocess.Popen[str]


@dataclass(frozen=True)
class Case:
    """What happens to a process in the middle of its run, with what exit status it ends, and what it says last."""

    strike: Callable[[Child], None]
    status: int
    says: str = ""


CASES = {
    "killed": Case(lambda child: child.kill(), -signal.SIGKILL),
    "terminated": Case(
        lambda child: child.terminate(),
        128 + signal.SIGTERM,
        "terminated at step {step}: saved in {folder}, --resume continues",
    ),
    # A file can get no larger than half its weights are: a real write fails, in the middle.
    "disk-full": Case(
        lambda child: resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (60_000, 60_000)),
        1,
        "File too large (os error 27); {folder} holds step {step}, --resume continues from there",
    ),
}


@dataclass(frozen=True)
class Struck:
    """A process that has ended, the folder it leaves, and after which step it was struck."""

    status: int
    out: str
    err: str
    folder: Path
    step: int


@pytest.fixture(scope="module")
def struck(
    request: pytest.FixtureRequest, whole: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Struck]:
    """The processes of this run's cases after their end; they run at once: most of what they do is to start."""
    recipe, _ = whole
    test = test_a_process_struck_at_a_random_step_leaves_what_resumes_to_the_same_bits.__name__
    names = [
        item.callspec.params["name"] for item in request.session.items if getattr(item, "originalname", "") == test
    ]
    folders = {name: tmp_path_factory.mktemp(name) / "run" for name in names}
    with contextlib.ExitStack() as stack:
        children = {}
        for name, folder in folders.items():
            command = [sys.executable, "-m", "model", "train", str(recipe), "--out", str(folder)]
            child = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=one_thread()
            )
            children[name] = stack.enter_context(child)
            stack.callback(child.kill)
        # Any step will do; those of a run in random order are drawn by its seed.
        steps = {name: random.randrange(5, 30) for name in names}
        waiting = dict(steps)
        deadline = time.monotonic() + 200
        while waiting and time.monotonic() < deadline:
            for name in [name for name, step in waiting.items() if has_come(folders[name], step)]:
                CASES[name].strike(children[name])
                del waiting[name]
            time.sleep(0.002)
        ends = {name: (child, *child.communicate(timeout=200)) for name, child in children.items()}
    return {
        name: Struck(child.returncode, out, err, folders[name], steps[name]) for name, (child, out, err) in ends.items()
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(1)
def test_a_process_struck_at_a_random_step_leaves_what_resumes_to_the_same_bits(
    name: str, struck: dict[str, Struck], whole: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    case, end = CASES[name], struck[name]
    recipe, unbroken = whole
    assert (end.status, end.out) == (case.status, ""), end.err
    if case.says:
        at = checkpoint.load(end.folder).training["step"]
        assert end.err.splitlines()[-1].endswith(case.says.format(step=at, folder=end.folder))
        assert "Traceback" not in end.err
        assert at >= end.step - 4
        assert not list(end.folder.glob(".staging*"))
    assert main(["train", str(recipe), "--out", str(end.folder), "--resume"]) == 0
    assert "bit for bit" not in capfd.readouterr().err
    assert_same_bits(unbroken, end.folder)
    assert not list(end.folder.glob(".staging*"))


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def has_come(folder: Path, step: int) -> bool:
    path = folder / curves.CURVES
    return path.exists() and path.read_text(encoding="utf-8").count('"gradient_norm"') >= step
