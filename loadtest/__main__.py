"""Command line of load tests: `python -m loadtest COMMAND …`; each command is a module with a `main`."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "bench": "one benchmark of a server that streams tokens over gRPC",
    "capacity": "throughput and latency against offered load",
    "scaling": "the quadratic law of attention, measured and fitted",
}
_BAD_COMMAND = 2


def main() -> int:
    """Hands the rest of the command line to the command's module; its exit status is this one's."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        usage = "".join(f"  python -m loadtest {command:<10} {does}\n" for command, does in COMMANDS.items())
        (sys.stdout if name in {"-h", "--help"} else sys.stderr).write(f"usage:\n{usage}")
        return 0 if name in {"-h", "--help"} else _BAD_COMMAND
    # Each command imports what it needs and no other does.
    module = importlib.import_module(f"loadtest.{name}")
    return int(module.main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
