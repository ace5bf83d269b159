"""`python -m service serve …`, `ask MODEL TEXT …`, `explain MODEL TEXT …`, `health` and `trace`.

Exit status: 0 done, 1 failed while running, 2 refused to start.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from service.config import (
    AskConfig,
    ExplainConfig,
    HealthConfig,
    LogLevel,
    ServeConfig,
    TraceConfig,
    parse_command_line,
)
from service.errors import StartupError
from service.huge_pages import restart_with_huge_pages

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_EXIT_REFUSED = 2


def main(argv: Sequence[str], *, may_restart: bool = False) -> int:
    """Runs the command and returns the exit status.

    Args:
        argv: the command and its flags.
        may_restart: whether this process is the command's own and may be replaced.
    """
    try:
        config = parse_command_line(argv)
        match config:
            case ServeConfig():
                if may_restart and config.huge_pages:
                    restart_with_huge_pages()
                return _serve(config)
            case AskConfig():
                return _ask(config)
            case ExplainConfig():
                return _explain(config)
            case HealthConfig():
                return _health(config)
            case TraceConfig():
                return _trace(config)
    except StartupError as error:
        for problem in error.problems:
            print(f"onward: {problem}", file=sys.stderr)
        return _EXIT_REFUSED


def _serve(config: ServeConfig) -> int:
    # Late, as in `_ask`: asking a server must not load a serving stack, nor serving a client.
    from service.app import Ready, serve

    def announce(ready: Ready) -> None:
        at = ready.endpoint
        models = ", ".join(
            f"{name} {state}" + (f" (parity {parity.max_abs_error:.1e})" if (parity := ready.parity.get(name)) else "")
            for name, state in ready.states.items()
        )
        metrics = "" if at.metrics_port is None else f"; metrics on http://{at.host}:{at.metrics_port}/metrics"
        print(f"onward: listening on {at.host}:{at.port}; {models}{metrics}", flush=True)

    logging.basicConfig(level=_level(config.log_level), format=_LOG_FORMAT)
    return serve(config, announce)


def _ask(config: AskConfig) -> int:
    from service.client import ask

    return ask(config)


def _explain(config: ExplainConfig) -> int:
    from service.explain_client import explain

    return explain(config)


def _health(config: HealthConfig) -> int:
    from service.client import health

    return health(config)


def _trace(config: TraceConfig) -> int:
    from service.trace_file import trace

    return trace(config, sys.stdout, sys.stderr)


def _level(level: LogLevel) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], may_restart=True))
