"""The examples do what they say against a real server; those for containers keep to their specifications."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.frame.servers import serving
from model.spec.config import Architecture
from tests.artifacts import tiny_artifact
from tests.environment import ROOT, environment

EXAMPLES = ROOT / "examples"
PYTHON = EXAMPLES / "clients" / "python"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    models = tmp_path_factory.mktemp("models")
    (models / "dates").symlink_to(tiny_artifact(Architecture.ENCODER_DECODER))
    (models / "stdlib").symlink_to(tiny_artifact(Architecture.DECODER_ONLY))
    with serving(models, "--no-metrics") as address:
        yield address


def run(*command: str | Path) -> str:
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_ask_streams_an_answer(target: str) -> None:
    assert "tokens in" in run(sys.executable, PYTHON / "ask.py", "dates", "3 May 1977", target)


def test_a_file_is_translated_line_by_line_in_its_order(target: str, tmp_path: Path) -> None:
    lines = [f"{day} May 1977" for day in range(1, 30)]
    (tmp_path / "source").write_text("\n".join([*lines, "", "x" * 10_000, lines[0]]))
    said = run(sys.executable, PYTHON / "translate_file.py", "dates", tmp_path / "source", tmp_path / "out", target)
    assert "32 lines" in said
    assert "line 31: OUT_OF_RANGE" in said
    *texts, blank, too_long, again = (tmp_path / "out").read_text().splitlines()
    assert (blank, too_long) == ("", "")
    assert (len(texts), again) == (29, texts[0])
    assert len(set(texts)) > 1


def test_the_locust_scenario_counts_both_kinds_of_users(target: str) -> None:
    said = run(
        *(Path(sys.executable).with_name("locust"), "-f", EXAMPLES / "load" / "locustfile.py", "--host", target),
        *("--headless", "-u", "4", "-r", "10", "-t", "6s", "--stop-timeout", "5"),
    )
    for kind in ("first token", "stream"):
        for model in ("dates", "stdlib"):
            assert kind in said
            assert model in said
    assert "exit code 0" in said


def test_the_files_for_containers_keep_to_their_specifications() -> None:
    compose = EXAMPLES / "own-model" / "compose.yaml"
    run(Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", compose)
    run(Path(sys.executable).with_name("hadolint"), EXAMPLES / "own-model" / "Dockerfile")
