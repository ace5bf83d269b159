"""`python -m service serve`, `plan FOLDER`, `ask MODEL TEXT`, `chat MODEL`, `explain MODEL TEXT`, `health` and `trace`.

Exit status: 0 done, 1 failed while running, 2 refused to start.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from service.config import (
    AskConfig,
    ChatConfig,
    ExplainConfig,
    HealthConfig,
    PlanConfig,
    ServeConfig,
    TraceConfig,
    parse_command_line,
)
from service.errors import StartupError
from service.process.huge_pages import restart_with_huge_pages

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_EXIT_REFUSED = 2


def main(argv: Sequence[str], *, is_own_process: bool = False) -> int:
    """Runs the command and returns the exit status.

    Args:
        argv: the command and its flags.
        is_own_process: whether this process is the command's own: it may restart itself, and signals may end it.
    """
    try:
        config = parse_command_line(argv)
        match config:
            case ServeConfig():
                if is_own_process:
                    _end_on_signals()
                    if config.huge_pages:
                        restart_with_huge_pages()
                    _end(_serve(config))
                return _serve(config)
            # Imported late: asking a server must not load the serving stack, nor serving a client.
            case PlanConfig():
                from service.commands.plan import plan

                return plan(config)
            case AskConfig():
                from service.commands.ask import ask

                return ask(config)
            case ChatConfig():
                from service.commands.chat import chat

                return chat(config, sys.stdin, sys.stdout, sys.stderr)
            case ExplainConfig():
                from service.commands.explain import explain

                return explain(config)
            case HealthConfig():
                from service.commands.ask import health

                return health(config)
            case TraceConfig():
                from service.commands.trace import trace

                return trace(config, sys.stdout, sys.stderr)
    except StartupError as error:
        for problem in error.problems:
            print(f"onward: {problem}", file=sys.stderr)
        return _EXIT_REFUSED


def _serve(config: ServeConfig) -> int:
    from service.app import Ready, serve
    from service.process.garbage import set_aside

    def announce(ready: Ready) -> None:
        at = ready.endpoint
        models = ", ".join(
            f"{name} {state}" + (f" (parity {parity.max_abs_error:.1e})" if (parity := ready.parity.get(name)) else "")
            for name, state in ready.states.items()
        )
        metrics = "" if at.metrics_port is None else f"; metrics on http://{at.host}:{at.metrics_port}/metrics"
        http = "" if at.http_port is None else f"; HTTP on port {at.http_port}"
        set_aside()
        print(f"onward: listening on {at.host}:{at.port}{http}; {models}{metrics}", flush=True)

    logging.basicConfig(level=config.log_level.upper(), format=_LOG_FORMAT)
    return serve(config, announce)


def _end_on_signals() -> None:
    """Ends the process at SIGTERM and SIGINT until the server handles them: there is nothing to drain yet.

    A container's first process ignores signals without handlers, and loading may take minutes.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)

    def end(number: int, frame: object) -> NoReturn:  # noqa: ARG001 (the signal module's)
        raise SystemExit(0)

    for number in numbers:
        signal.signal(number, end)
    # Python calls handlers between instructions of the main thread, so not while it waits for a disk or loads a graph.
    # The interpreter writes each signal's number to this pipe at once.
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    signal.set_wakeup_fd(sent)

    def wait() -> None:
        while os.read(received, 1)[0] not in numbers:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="onward-signals", daemon=True).start()


def _end(status: int) -> NoReturn:
    """Ends the process at once; everything is closed.

    A thread may still run ONNX Runtime, for example to load a model, and cannot be stopped. The interpreter's own exit
    would crash in it.
    """
    logging.shutdown()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], is_own_process=True))
