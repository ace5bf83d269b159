"""The console script: its verbs, what they load and lack, and completion in a real bash."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from service import cli
from tests.environment import ROOT, environment

# What pip's script does, and then what was loaded.
SCRIPT = "import sys; sys.argv = ['onward', *sys.argv[1:]]; {}; from service.cli import main; status = main(); {}"


def onward(*words: str, before: str = "pass", after: str = "sys.exit(status)") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT.format(before, after), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=False)


def test_the_distribution_has_the_script() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["onward"].partition(":")
    assert getattr(import_module(module), function) is cli.main
    assert {verb.extra for verb in cli._VERBS.values()} <= project["optional-dependencies"].keys()


def test_asking_loads_neither_torch_nor_the_serving_stack() -> None:
    after = "print(status, {'torch', 'onnxruntime', 'service.app'} & {*sys.modules})"
    ran = onward("ask", "m", "x", "--target", "127.0.0.1:1", after=after)
    assert ran.stdout == "1 set()\n"
    assert "UNAVAILABLE" in ran.stderr


@pytest.mark.parametrize(("words", "extra"), [("train dates --out x", "train"), ("bench", "load"), ("ask m x", "core")])
def test_missing_library_is_one_line_with_the_extra_that_has_it(words: str, extra: str) -> None:
    lacks = "sys.modules.update(dict.fromkeys(('torch', 'grpc')))"
    ran = onward(*words.split(), before=lacks)
    assert (ran.returncode, ran.stdout) == (1, "")
    (line,) = ran.stderr.splitlines()
    assert line.endswith(f"pip install 'onward-server[{extra}]'")


@pytest.mark.parametrize("verb", ["ask", "bench", "train", "export"])  # one of each module
def test_verb_explains_itself_by_its_name(verb: str) -> None:
    ran = onward(verb, "--help")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"usage: onward {verb} ")


def test_unknown_verb_is_refused_with_all_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["fly"]) == 2
    usage = capsys.readouterr().err
    assert all(f"  {verb} " in usage for verb in cli._VERBS)
    assert (cli.run(["--help"]), capsys.readouterr().out) == (0, usage)


def test_bash_completes_verbs_and_flags_and_leaves_files_to_itself(tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(onward("completion").stdout)

    def complete(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _onward; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        command = ["bash", "-c", f". {script}; {asked}"]
        completed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return sorted(completed.split())

    assert complete("onward", "ex") == ["explain", "export"]
    assert complete("onward", "ask", "m", "--top") == ["--top-k", "--top-p"]
    assert complete("onward", "train", "dates", "--over") == ["--overfit-one-batch", "--overwrite"]
    assert complete("onward", "export", "--kv-l") == ["--kv-layout"]
    assert complete("onward", "import", "") == []
