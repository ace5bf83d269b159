"""`python -m model.kernels`: builds the kernels for this machine, unless they are up to date.

Exit status: 0 if they are built or this machine has none; 2 if the build failed.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from model.kernels import FOLDER, is_for_this_machine, library_in
from model.kernels.build import BuildError, build

_EXIT_FAILED = 2
_OTHERWISE = "graphs run by standard operators, slower"


def main(argv: Sequence[str], folder: Path = FOLDER) -> int:
    """Builds a folder's kernels; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m model.kernels",
        description="Build the kernels of our own operators. Without them graphs run all the same, only slower.",
        allow_abbrev=False,
    )
    parser.add_argument("--compiler", help="C++ compiler, forces a new build; default: the first found on PATH")
    parser.add_argument("--if-possible", action="store_true", help="on failure, print one line and exit with 0")
    given = parser.parse_args(argv)
    if not is_for_this_machine():
        print(f"kernels: none for {platform.machine()}, they are for x86-64; {_OTHERWISE}")
        return 0
    if given.compiler is None and (there := library_in(folder)):
        print(f"kernels: {there.name} is up to date")
        return 0
    began = time.perf_counter()
    try:
        built = build(given.compiler, folder)
    except BuildError as error:
        if given.if_possible:
            print(f"kernels: not built, {_OTHERWISE}; {error.summary}")
            return 0
        print(f"kernels: not built: {error}", file=sys.stderr)
        return _EXIT_FAILED
    if built.warnings:
        print(built.warnings, file=sys.stderr)
    print(f"kernels: {built.path.name} built by {built.compiler} in {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
