"""What `locust -f loadtest/locustfile.py` runs: in the web page, headless, in several processes, on several machines.

    locust -f loadtest/locustfile.py --host 127.0.0.1:8001
    locust -f loadtest/locustfile.py --host 127.0.0.1:8001 --headless -u 8 --num-prompts 200
    locust -f loadtest/locustfile.py --host 127.0.0.1:8001 --headless --arrivals poisson --rate 4 -t 60s --processes 2

`docs/loadtest.md` tells what the options and the figures mean.
"""

from __future__ import annotations

import sys
from typing import Any

import grpc.experimental.gevent
import locust.stats
from flask import jsonify
from locust import events

from loadtest.locust.conductor import Conductor
from loadtest.locust.options import add_run_options
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
    """Locust's command line and web form have our options too."""
    add_run_options(parser)


def begin(environment: Any, web_ui: Any, **_: Any) -> None:
    """A process is ready: gRPC learns of gevent before there is any channel, and after Locust has forked."""
    grpc.experimental.gevent.init_gevent()
    locust.stats.bucket_response_time = three_digits
    environment.host = environment.host or DEFAULT_HOST
    # Of all the shapes here, the one that does as the options say.
    environment.shape_class = environment.available_shape_classes[SelectedShape.__name__]
    environment.shape_class.runner = environment.runner
    try:
        conductor = Conductor(environment)
    except ValueError as error:
        sys.stderr.write("".join(f"{each}\n" for each in str(error).split("; ")))
        sys.exit(_BAD_OPTIONS)
    if web_ui is not None:
        web_ui.app.add_url_rule("/load", "load", lambda: jsonify(conductor.report()))


def three_digits(response_time: float) -> int:
    """Locust counts milliseconds in classes; its own, of two digits, are up to 10 % wide."""
    if response_time < 1000.0:
        return round(response_time)
    return int(round(response_time, -1 if response_time < 10_000.0 else -2))


events.init_command_line_parser.add_listener(add_options)
events.init.add_listener(begin)
