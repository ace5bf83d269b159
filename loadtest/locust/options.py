"""Options of a run under Locust in addition to `loadtest.core.options`: shape, pauses, report."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.core.access import Parser
from loadtest.core.arrivals import Pattern
from loadtest.core.options import LoadOptions, add_options, read_options
from loadtest.locust import stages
from loadtest.locust.stages import Stage

SHAPES = ("constant", "ramp", "spike", "concurrency", "length")


MODEL_VARIABLE = "LOCUST_MODEL"
"""The environment variable that stands for `--model`."""


def add_run_options(parser: Parser, **model: str) -> None:
    """Adds all options to Locust's parser, including those of `loadtest.core.options`; `model` as there."""
    add_options(parser, rate=1.0, arrivals="", **model)
    add = parser.add_argument
    add("--shape", default="constant", choices=list(SHAPES), help="number of users over time")
    add("--steps", default="1,2,4,8", help="steps of a sweep: numbers of users, or prompt lengths")
    add("--stage-seconds", type=float, default=10.0, help="duration of a sweep's step, of a ramp, of a spike")
    add("--base-users", type=int, default=1, help="users before and after a spike")
    add("--think", type=float, default=0.0, help="mean pause of a user between requests, in seconds")
    add("--connections", type=int, default=1, help="connections of an open loop, used round-robin")
    add("--report", default="", help="file for the report as JSON")
    add("--report-detailed", action="store_true", help="include every request in it")


def option_names() -> list[str]:
    """Names of the parsed options, which the leading process sends to its workers."""
    parser = argparse.ArgumentParser(add_help=False)
    add_run_options(parser)
    return list(vars(parser.parse_args([])))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The validated options; `run_seconds` is infinite without a time limit."""

    load: LoadOptions
    users: int
    spawn_rate: float
    run_seconds: float
    shape: str
    steps: tuple[int, ...]
    stage_seconds: float
    base_users: int
    think_seconds: float
    connections: int
    report: Path | None
    is_report_detailed: bool

    @property
    def seconds(self) -> float | None:
        """Time limit for sending; None for none."""
        return None if math.isinf(self.run_seconds) else self.run_seconds

    @property
    def is_open(self) -> bool:
        """Whether a schedule determines the sending times."""
        return self.load.arrivals is not None

    def check(self, processes: int) -> None:
        """Checks the options against the number of processes.

        Raises:
            ValueError: naming the invalid option.
        """
        arrivals = self.load.arrivals
        if arrivals is not None:
            if arrivals.pattern is not Pattern.TRACE and self.load.requests is None and self.seconds is None:
                raise ValueError(f"--num-prompts: {arrivals.pattern} has no end of its own; give this or --run-time")
        elif self.load.requests is not None and self.users < processes:
            raise ValueError(f"--users: {self.users} are fewer than the {processes} processes, so some would have none")

    def stage(self, kind: str, at: float, processes: int) -> Stage | None:
        """The stage at that time of a shape; an empty `kind` is the shape in the options. None ends the run."""
        if self.is_open:
            # One dispatcher in each process; the run ends when every scheduled request has ended.
            return Stage(processes, float(processes))
        kind = kind or self.shape
        if kind == "ramp":
            return stages.ramp(at, self.users, self.stage_seconds, self.run_seconds)
        if kind == "spike":
            return stages.spike(at, self.base_users, self.users, self.stage_seconds, self.run_seconds)
        if kind == "concurrency":
            return stages.concurrency_sweep(at, self.steps, self.stage_seconds)
        if kind == "length":
            return stages.length_sweep(at, self.steps, self.users, self.stage_seconds)
        return stages.constant(at, self.users, self.spawn_rate, self.run_seconds)


def read_run_options(values: Any) -> RunOptions:
    """Validates the options of Locust's command line or web form.

    Raises:
        ValueError: naming every invalid option.
    """
    problems: list[str] = []
    load = None
    try:
        load = read_options(values)
    except ValueError as error:
        problems.append(str(error))
    stage_seconds, think = float(values.stage_seconds or 0.0), float(values.think or 0.0)
    base_users, connections = int(values.base_users or 0), int(values.connections or 0)
    for name, value, least in (
        ("--stage-seconds", stage_seconds, 1.0),
        ("--think", think, 0.0),
        ("--base-users", base_users, 1),
        ("--connections", connections, 1),
    ):
        if not value >= least:
            problems.append(f"{name}: {value:g} is below {least:g}")
    if values.shape not in SHAPES:
        problems.append(f"--shape: {values.shape!r} is none of {', '.join(SHAPES)}")
    steps: tuple[int, ...] = ()
    try:
        steps = stages.parse_steps(str(values.steps))
    except ValueError as error:
        problems.append(str(error))
    if load is not None and load.requests and load.arrivals is None and values.shape != "constant":
        problems.append(f"--num-prompts: {load.requests} with --shape {values.shape}, which ends by its time")
    if load is not None and load.arrivals is not None and values.shape != "constant":
        problems.append(f"--arrivals: a schedule with --shape {values.shape}, which is a closed loop's")
    if problems or load is None:
        raise ValueError("; ".join(problems))
    return RunOptions(
        load=load,
        users=int(values.num_users or 1),
        spawn_rate=float(values.spawn_rate or values.num_users or 1),
        # Locust has parsed it: seconds, or None.
        run_seconds=float(values.run_time or math.inf),
        shape=values.shape,
        steps=steps,
        stage_seconds=stage_seconds,
        base_users=base_users,
        think_seconds=think,
        connections=connections,
        report=Path(values.report) if values.report else None,
        is_report_detailed=str(values.report_detailed).lower() == "true",
    )
