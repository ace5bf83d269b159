"""Stages of a run as pure functions of the seconds since it began: number of users and prompt length.

`seconds` may be infinite. None is the end of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a run.

    Args:
        users: number of users.
        spawn_rate: users that start or stop per second until that number is reached.
        name: its name in the report; empty if the run has only one stage.
        prompt_tokens: length of every prompt; None leaves it to the workload.
    """

    users: int
    spawn_rate: float
    name: str = ""
    prompt_tokens: int | None = None


def constant(at: float, users: int, spawn_rate: float, seconds: float) -> Stage | None:
    """A constant number of users."""
    return Stage(users, spawn_rate) if at < seconds else None


def ramp(at: float, users: int, ramp_seconds: float, seconds: float) -> Stage | None:
    """Linearly from one user to all, then all."""
    if at >= seconds:
        return None
    now = users if at >= ramp_seconds else min(users, 1 + math.floor((users - 1) * at / ramp_seconds))
    return Stage(now, float(users))


def spike(at: float, base: int, users: int, stage_seconds: float, seconds: float) -> Stage | None:
    """Few users for one stage, all for one stage, then few until the end."""
    if at >= seconds:
        return None
    number = int(at // stage_seconds)
    name = ("before", "spike", "after")[min(number, 2)]
    return Stage(users if number == 1 else base, float(max(users, base)), name)


def concurrency_sweep(at: float, users: Sequence[int], stage_seconds: float) -> Stage | None:
    """Each number of users for one stage."""
    number = int(at // stage_seconds)
    if number >= len(users):
        return None
    return Stage(users[number], float(max(users)), f"{users[number]} users")


def length_sweep(at: float, lengths: Sequence[int], users: int, stage_seconds: float) -> Stage | None:
    """Each prompt length for one stage, with a constant number of users."""
    number = int(at // stage_seconds)
    if number >= len(lengths):
        return None
    return Stage(users, float(users), f"{lengths[number]} tokens", lengths[number])


def parse_steps(text: str) -> tuple[int, ...]:
    """Parses the steps of a sweep, as in `1,2,4,8`.

    Raises:
        ValueError: naming the text.
    """
    try:
        steps = tuple(int(each) for each in text.split(","))
    except ValueError:
        steps = ()
    if not steps or min(steps) < 1:
        raise ValueError(f"--steps: {text!r} is not a list of numbers above 0, as in 1,2,4,8")
    return steps
