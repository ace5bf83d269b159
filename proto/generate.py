"""Generates the Python stubs of every contract under proto/ and the API reference, or checks the committed ones.

    python -m proto.generate            write the stubs into `onward`, the reference into `docs/serve/api.md`
    python -m proto.generate --check    write nothing, exit 1 and name every file that differs

`package onward.v1` becomes `onward.v1`, the Open Inference Protocol `onward.inference`. protoc sees each contract at
the path of its stubs, so that the generated imports need no rewriting. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from proto.reference import render

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ("python", "grpc_python", "mypy", "mypy_grpc")
# Folders of contracts, by the folder of their stubs.
FOLDERS = {"onward/v1": "proto/onward/v1", "onward/inference": "proto/inference"}
REFERENCE = "docs/serve/api.md"
STUBS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def contracts() -> dict[str, Path]:
    """The .proto files, by the path at which protoc sees each."""
    found = ((mine, path) for mine, theirs in FOLDERS.items() for path in (ROOT / theirs).glob("*.proto"))
    return {f"{mine}/{path.name}": path for mine, path in sorted(found)}


def generate(target: Path) -> None:
    """Runs protoc over all contracts and renders the reference, into `target` in place of the root.

    Raises:
        subprocess.CalledProcessError: when protoc refuses a file, with the reason on stderr.
    """
    outputs = [f"--{plugin}_out={'quiet:' if plugin.startswith('mypy') else ''}{target}" for plugin in PLUGINS]
    # The mypy plugins lie beside this interpreter, whose environment may not be active.
    programs = {name: Path(sys.executable).parent / f"protoc-gen-{name}" for name in ("mypy", "mypy_grpc")}
    plugins = [f"--plugin=protoc-gen-{name}={program}" for name, program in programs.items()]
    roots = [f"--proto_path={mine}={theirs}" for mine, theirs in FOLDERS.items()]
    with tempfile.NamedTemporaryFile() as described:
        outputs += [f"--descriptor_set_out={described.name}", "--include_source_info"]
        command = [sys.executable, "-m", "grpc_tools.protoc", *roots, *plugins, *outputs, *contracts()]
        subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 — the arguments are all ours
        files = FileDescriptorSet.FromString(Path(described.name).read_bytes()).file
    page = target / REFERENCE
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(each for each in files if each.package == "onward.v1"), encoding="utf-8")


def stubs() -> list[str]:
    """The stubs of all contracts, relative to the repository's root."""
    return [contract.removesuffix(".proto") + suffix for contract in contracts() for suffix in STUBS]


def drift() -> list[str]:
    """Names every committed file that is missing, stale or without a contract."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        wanted = {name: (fresh / name).read_bytes() for name in (*stubs(), REFERENCE)}
    committed = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "onward").rglob("*_pb2*.py*")}
    committed = {name: path for name, path in committed.items() if path.suffix in {".py", ".pyi"}}
    committed |= {REFERENCE: page} if (page := ROOT / REFERENCE).exists() else {}
    problems = [f"{name} has no contract" for name in committed.keys() - wanted.keys()]
    for name, content in wanted.items():
        if name not in committed:
            problems.append(f"{name} is missing")
        elif committed[name].read_bytes() != content:
            problems.append(f"{name} differs from what its contract generates")
    return sorted(problems)


def main() -> int:
    """Command line; the exit status is 1 when the check fails."""
    parser = argparse.ArgumentParser(prog="python -m proto.generate", description="Generate the wire stubs.")
    parser.add_argument("--check", action="store_true", help="only compare with the committed stubs")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    problems = drift()
    for problem in problems:
        sys.stderr.write(f"{problem}; run: make proto\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
