"""Installs the wheels of `dist` as users do, without a compiler, and uses them: the last part of `make release-check`.

The server's wheel serves a model with the kernels that it brings and answers; the client's wheel and proto-plus, which
owns the name `proto`, leave each other working. Needs pip's index, and the training side to make the model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from model import kernels
from model.spec.artifact import Precision
from model.spec.config import Architecture
from tests.artifacts import tiny_artifact
from tests.environment import ROOT

_CLIENT = """
import sys
from importlib import metadata
import proto
import onward
class Sheep(proto.Message):
    name = proto.Field(proto.STRING, number=1)
assert Sheep.deserialize(Sheep.serialize(Sheep(name="Dolly"))).name == "Dolly"
tops = {file.parts[0].partition("-")[0] for file in metadata.files("onward")}
assert tops == {"onward"}, tops
with onward.Client(sys.argv[1]) as client:
    print(client.generate("hello", model="tiny", max_tokens=4, temperature=0).text)
"""


def main() -> None:
    """Runs all of it; an AssertionError or CalledProcessError says what does not hold."""
    (server,) = (ROOT / "dist").glob("onward_server-*.whl")
    (client,) = (ROOT / "dist").glob("onward-*.whl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(tiny_artifact(Architecture.DECODER_ONLY, Precision.INT8), folder / "models" / "tiny")
        serving = _install(folder / "server", f"{server}[cpu]", str(client))
        asking = _install(folder / "client", str(client), "proto-plus")
        for missing in ("g++", "c++"):
            assert shutil.which(missing, path=str(serving.parent)) is None
        command = [serving, "-m", "service", "serve", "--models", folder / "models", "--port", "0", "--no-metrics"]
        log = folder / "log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, cwd=folder, env=_bare(serving), stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            assert process.stdout is not None
            listening = process.stdout.readline()
            assert listening.startswith("onward: listening on "), log.read_text()
            target = listening.split()[3].rstrip(";")
            print(_run(asking, "-c", _CLIENT, target), end="")
        finally:
            process.terminate()
            assert process.wait(60) == 0
        if kernels.library() is not None:
            assert "kernels compute these of our own operators: " in log.read_text()
    print(f"{server.name} serves, {client.name} asks beside proto-plus")


def _install(folder: Path, *wanted: str) -> Path:
    """A new environment's interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), *wanted)
    return python


def _run(python: Path, *arguments: str) -> str:
    # Not in the repository: what is installed must be imported.
    done = subprocess.run(
        [python, *arguments], cwd=python.parent, env=_bare(python), stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def _bare(python: Path) -> dict[str, str]:
    """An environment with no program but the interpreter's own."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}
    return {**kept, "HOME": os.environ["HOME"], "PATH": str(python.parent), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


if __name__ == "__main__":
    sys.exit(main())
