"""The benchmarks' command line.

    python -m benchmarks list
    python -m benchmarks run NAME [options]      `--help` lists them
    python -m benchmarks evidence [options]      all tables behind the README's figures

The last line of stdout is one JSON object; progress goes to stderr. Documents, data and pictures go to `build/bench`,
or with `--docs` to `docs/results`. Exit status: 0 measured; 1 not measured, or a promise that must hold
does not; 2 wrong arguments.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from benchmarks import evidence
from benchmarks.frame.scenario import load, names


def main(arguments: Sequence[str]) -> int:
    """Runs one command; returns the exit status."""
    match arguments:
        case ["list"]:
            width = max(map(len, names()))
            for name in names():
                print(f"{name:{width}}  {load(name).claim}")
            return 0
        case ["run", name, *rest] if name in names():
            return load(name).run(rest)
        case ["evidence", *rest]:
            return evidence.main(rest)
    print(f"{(__doc__ or '').strip()}\n\nNAME is one of {', '.join(names())}.", file=sys.stderr)
    return 2


def _terminate(*_: object) -> None:
    """Ends as an exception does, so that servers that were started are ended."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main(sys.argv[1:]))
