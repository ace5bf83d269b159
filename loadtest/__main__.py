"""Command line of load tests: `python -m loadtest COMMAND …`; each command is a module with a `main`."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "bench": ("loadtest.bench", "benchmark a server that streams tokens over gRPC"),
    "capacity": ("loadtest.capacity", "measure throughput and latency against offered load"),
    "scaling": ("loadtest.scaling.command", "measure and fit the quadratic cost of attention"),
}
_BAD_COMMAND = 2


def main() -> int:
    """Runs the named command with the remaining arguments; returns its exit status."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        usage = "".join(f"  python -m loadtest {command:<10} {does}\n" for command, (_, does) in COMMANDS.items())
        (sys.stdout if name in {"-h", "--help"} else sys.stderr).write(f"usage:\n{usage}")
        return 0 if name in {"-h", "--help"} else _BAD_COMMAND
    # Imported late: each command needs libraries that the others do not.
    module = importlib.import_module(COMMANDS[name][0])
    return int(module.main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
