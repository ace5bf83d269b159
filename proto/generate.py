"""Generates the Python stubs of every contract under proto/, or checks that the committed ones are what they would be.

    python -m proto.generate            write the stubs beside their .proto files
    python -m proto.generate --check    write nothing, exit 1 and name every stub that differs

protoc runs with the repository's root as its only import path, so that the stubs import each other as `proto.…` and
need no rewriting. buf needs the module's root at proto/, where `package onward.v1` lies in onward/v1. Both hold
because no .proto file imports another of ours; `tests/unit/test_proto.py` keeps it so. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ("python", "grpc_python", "mypy", "mypy_grpc")
STUBS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def contracts() -> list[str]:
    """The .proto files, relative to the repository's root."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "proto").rglob("*.proto"))


def generate(target: Path) -> None:
    """Runs protoc over all contracts; the stubs land below `target` as they would below the root.

    Raises:
        subprocess.CalledProcessError: when protoc refuses a file; it has said why on stderr.
    """
    outputs = [f"--{plugin}_out={'quiet:' if plugin.startswith('mypy') else ''}{target}" for plugin in PLUGINS]
    # The mypy plugins are programs beside this interpreter, whose environment need not be activated.
    programs = {name: Path(sys.executable).parent / f"protoc-gen-{name}" for name in ("mypy", "mypy_grpc")}
    plugins = [f"--plugin=protoc-gen-{name}={program}" for name, program in programs.items()]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *plugins, *outputs, *contracts()]
    subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 — the arguments are all ours


def stubs() -> list[str]:
    """The stubs that the contracts call for, relative to the repository's root."""
    return [contract.removesuffix(".proto") + suffix for contract in contracts() for suffix in STUBS]


def drift() -> list[str]:
    """Names every committed stub that is missing, stale or without a contract."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        wanted = {name: (fresh / name).read_bytes() for name in stubs()}
    committed = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "proto").rglob("*_pb2*.py*")}
    committed = {name: path for name, path in committed.items() if path.suffix in {".py", ".pyi"}}
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
