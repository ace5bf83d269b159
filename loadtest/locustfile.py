"""Locust's entry point: web page, headless, several processes, several machines.

    locust -f loadtest/locustfile.py --host 127.0.0.1:8001
    locust -f loadtest/locustfile.py --host 127.0.0.1:8001 --headless -u 8 --num-prompts 200
    locust -f loadtest/locustfile.py --host 127.0.0.1:8001 --headless --arrivals poisson --rate 4 -t 60s --processes 2

`docs/operate/loadtest.md` explains the options and the figures.
"""

from __future__ import annotations

import sys
from typing import Any

import grpc.experimental.gevent
import locust.stats
from flask import jsonify
from locust import events
from locust.runners import LocalRunner

from loadtest.locust.conductor import Conductor
from loadtest.locust.options import MODEL_VARIABLE, add_run_options
from loadtest.locust.shapes import (
    ConcurrencySweepShape,
    ConstantShape,
    LengthSweepShape,
    RampShape,
    SelectedShape,
    SpikeShape,
)
from loadtest.locust.users import ClosedLoopUser, OpenLoopUser

__all__ = [
    "ClosedLoopUser",
    "ConcurrencySweepShape",
    "ConstantShape",
    "LengthSweepShape",
    "OpenLoopUser",
    "RampShape",
    "SelectedShape",
    "SpikeShape",
]

DEFAULT_HOST = "127.0.0.1:8001"
_BAD_OPTIONS = 2


def add_options(parser: Any) -> None:
    """Adds our options to Locust's command line and web form."""
    add_run_options(parser, env_var=MODEL_VARIABLE)


def begin(environment: Any, web_ui: Any, **_: Any) -> None:
    """Sets up a process: gRPC's gevent support must start before any channel and after Locust's fork."""
    grpc.experimental.gevent.init_gevent()
    locust.stats.bucket_response_time = three_digits
    environment.host = environment.host or DEFAULT_HOST
    # The default among the shapes here: the one that follows the options.
    environment.shape_class = environment.available_shape_classes[SelectedShape.__name__]
    environment.shape_class.runner = environment.runner
    try:
        conductor = Conductor(environment)
    except ValueError as error:
        sys.stderr.write("".join(f"{each}\n" for each in str(error).split("; ")))
        sys.exit(_BAD_OPTIONS)
    if isinstance(environment.runner, LocalRunner) and web_ui is None:
        try:
            # The run is about to begin, which would check this, too, among Locust's tables.
            conductor.check()
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(_BAD_OPTIONS)
    if web_ui is not None:
        web_ui.app.add_url_rule("/load", "load", lambda: jsonify(conductor.report()))


def three_digits(response_time: float) -> int:
    """Rounds to three digits for Locust's histogram; its own two digits give classes up to 10 % wide."""
    if response_time < 1000.0:
        return round(response_time)
    return int(round(response_time, -1 if response_time < 10_000.0 else -2))


events.init_command_line_parser.add_listener(add_options)
events.init.add_listener(begin)
