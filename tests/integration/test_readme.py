"""README and docs/start do what they say: every shell and Python block is run, in order, as a newcomer would.

What downloads, builds images or trains for minutes is replaced by programs of the same names ahead on PATH, which leave
behind what theirs would: a clone, tiny models, a snapshot in the hub's cache. With `--whole` only downloads and images
are: it clones the last commit, installs, trains, and serves random weights in the true shapes (a quarter of an hour,
10 GB of memory).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from model.spec.config import Architecture
from tests.artifacts import tiny_artifact
from tests.environment import ROOT, environment
from tests.ports import free_port

TIMEOUT_SECONDS = 1800
PAGES = ["README.md", *sorted(f"docs/start/{path.name}" for path in (ROOT / "docs" / "start").glob("*.md"))]
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PORTS = {"127.0.0.1:8001": "$ONWARD_TARGET", "--http-port 8000": "--http-port $HTTP_PORT", ":8000/": ":$HTTP_PORT/"}
REPLACED = {
    "--set steps=200": "--set steps=2",
    "--context 8192": "--context 256",
    "--max-tokens 1024": "--max-tokens 9",
    **PORTS,
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SNAPSHOTS = {"Qwen/Qwen3-0.6B": ("tiny", "qwen3-0.6b"), "Helsinki-NLP/opus-mt-en-de": ("tiny-mt", "opus-mt")}
"""Shapes in the place of what is downloaded: small ones, and with `--whole` the true ones."""


@pytest.fixture(scope="module")
def is_whole(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--whole"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, *, is_whole: bool) -> Path:
    """Programs in the place of those that download, build or train."""
    folder = tmp_path_factory.mktemp("programs")
    made = tmp_path_factory.mktemp("made")
    shapes = {name: both[is_whole] for name, both in SNAPSHOTS.items()}
    for shape in shapes.values():
        # In a process of its own: it changes torch's default dtype.
        command = [sys.executable, "-m", "benchmarks.scenarios._shape_folders", shape, made / shape]
        subprocess.run(command, env=environment(), check=True)
    (made / shapes["Qwen/Qwen3-0.6B"] / "chat_template.jinja").write_text(TEMPLATE)
    models = {name: tiny_artifact(family, explain_graph=True) for name, family in FAMILIES.items()}
    cases = "\n".join(f"{name}) made={made / shape} ;;" for name, shape in shapes.items())
    copies = "\n".join(f"cp -r {path} build/models/{name}" for name, path in models.items())
    scripts = {
        "git": f'mkdir "$3" && ln -s {ROOT}/[!b]* {ROOT}/benchmarks {ROOT}/.venv "$3"',
        "make": f"mkdir -p build/models\n{copies}",
        "docker": "true",
        "hf": dedent(f"""\
            case $2 in
            {cases}
            *) exit 1 ;;
            esac
            kept=$HF_HOME/hub/models--${{2//\\//--}}
            mkdir -p $kept/snapshots $kept/refs
            echo -n 0a1b > $kept/refs/main
            cp -r $made $kept/snapshots/0a1b
        """),
    }
    if is_whole:
        del scripts["git"]
        scripts["make"] = f'[ "$1" = image ] || exec {shutil.which("make")} "$@"'
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\nset -eu\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


FAMILIES = {"dates": Architecture.ENCODER_DECODER, "stdlib": Architecture.DECODER_ONLY}


class Newcomer:
    """Types blocks into a terminal. A block that serves goes on, in one of its own, until the next one serves."""

    def __init__(self, folder: Path, programs: Path, *, is_whole: bool) -> None:
        self.folder = folder
        self.replaced = PORTS if is_whole else REPLACED
        port = free_port()
        # With `--whole`, what the clone has installed for itself.
        own = ".venv/bin" if is_whole else str(Path(sys.executable).parent)
        path = os.pathsep.join([str(programs), own, os.environ["PATH"]])
        self.variables = environment(
            PATH=path,
            HF_HOME=str(folder / "hf"),
            ONWARD_URL=str(ROOT),
            ONWARD_PORT=str(port),
            ONWARD_TARGET=f"127.0.0.1:{port}",
            ONWARD_METRICS_PORT=str(free_port()),
            HTTP_PORT=str(free_port()),
        )
        if is_whole:
            del self.variables["PYTHONPATH"]
        self.server: subprocess.Popen[str] | None = None

    def type(self, kind: str, block: str) -> None:
        for shown, meant in self.replaced.items():
            block = block.replace(shown, meant.replace("$ONWARD_TARGET", self.variables["ONWARD_TARGET"]))
        if kind == "python":
            self._run(["python", "-c", block])
            return
        # Activation would put the environment's programs ahead of these.
        block = block.replace("source .venv/bin/activate\n", "test -f .venv/bin/activate\n")
        before, serve, after = block.partition("onward serve ")
        self._run(["bash", "-euo", "pipefail", "-c", before])
        if serve:
            assert after.count("\n") == 1, "a block that serves goes no further"
            self._serve(serve + after)
        if "&& cd onward" in block:
            self.folder /= "onward"

    def stop(self) -> None:
        if self.server is not None:
            self.server.terminate()
            with self.server:
                assert self.server.wait(60) == 0
            self.server = None

    def _serve(self, command: str) -> None:
        self.stop()
        shell = ["bash", "-c", f"exec {command}"]
        self.server = subprocess.Popen(
            shell, cwd=self.folder, env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.server.stdout is not None
        assert self.server.stdout.readline().startswith("onward: listening on "), command

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.variables,
            input="Hello\n",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"


@pytest.fixture
def newcomer(tmp_path: Path, programs: Path, *, is_whole: bool) -> Iterator[Newcomer]:
    there = Newcomer(tmp_path, programs, is_whole=is_whole)
    yield there
    there.stop()


@pytest.mark.timeout(TIMEOUT_SECONDS)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.whole] * (page != "README.md"))
        for page in PAGES
        if BLOCK.search((ROOT / page).read_text(encoding="utf-8"))
    ],
)
def test_every_block_of_a_page_runs_as_it_stands(page: str, newcomer: Newcomer) -> None:
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    if page != "README.md":
        # These pages go on from the clone and what is downloaded there.
        lines = (ROOT / "README.md").read_text(encoding="utf-8")
        newcomer.type("sh", BLOCK.findall(lines)[0][1])
        newcomer.type("sh", "".join(f"{line}\n" for line in re.findall(r"^hf download .*", lines, re.MULTILINE)))
    for kind, block in blocks:
        newcomer.type(kind, block)
