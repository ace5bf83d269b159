"""What the log says of the kernels."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from model import kernels
from service.config import Kernels
from service.errors import StartupError
from service.repository import startup
from service.repository.startup import report_kernels


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, startup.__name__)
    return caplog


def line(told: pytest.LogCaptureFixture) -> tuple[int, str]:
    (record,) = told.records
    return record.levelno, record.getMessage()


@pytest.mark.parametrize(
    ("has_tiles", "words"),
    [(False, ""), (True, "; AMX multiplies many rows in int8 and int4, and attends in long chunks")],
)
def test_operators_with_kernels_are_named(
    has_tiles: bool, words: str, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "why_not", lambda: None)
    monkeypatch.setattr(kernels, "operators", lambda: ("One", "Two"))
    monkeypatch.setattr(kernels, "has_tiles", lambda: has_tiles)
    report_kernels(Kernels.AUTO)
    assert line(told) == (logging.INFO, f"kernels compute these of our own operators: One, Two{words}")


def test_kernels_that_are_not_built_are_a_warning_with_what_to_do(
    told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "library", lambda: None)
    monkeypatch.setattr(kernels, "is_for_this_machine", lambda: True)
    report_kernels(Kernels.AUTO)
    level, message = line(told)
    assert level == logging.WARNING
    assert message.endswith(f"they are not built in {kernels.FOLDER}: `python -m model.kernels` does it")


def test_a_processor_that_can_run_none_is_a_warning(
    told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "why_not", lambda: None)
    monkeypatch.setattr(kernels, "operators", tuple)
    report_kernels(Kernels.AUTO)
    assert line(told)[0] == logging.WARNING
    assert line(told)[1].endswith("this processor can run no kernel")


def test_standard_operators_do_without_the_library(
    told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "libonward.so"
    broken.write_text("no library")
    monkeypatch.setattr(kernels, "library", lambda: broken)
    monkeypatch.setattr(kernels, "is_for_this_machine", lambda: True)
    with pytest.raises(StartupError) as refusal:
        report_kernels(Kernels.AUTO)
    (problem,) = refusal.value.problems
    assert problem.startswith(f"the kernels cannot be loaded, --kernels standard does without them: {broken}: ")
    assert not told.records
    report_kernels(Kernels.STANDARD)
    assert line(told) == (logging.INFO, "our own operators are computed by standard ones, as --kernels says")
