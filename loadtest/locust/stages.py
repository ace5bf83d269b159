"""How many users there are at a time, and what they ask then: a run as a function of the seconds since it began.

Pure: `loadtest.locust.shapes` gives these to Locust.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of a run.

    Args:
        users: how many there are.
        spawn_rate: users that come or go in a second until there are so many.
        name: what its figures are told under; empty where a run has one stage only.
        prompt_tokens: length of every prompt in it; None leaves it to the workload.
    """

    users: int
    spawn_rate: float
    name: str = ""
    prompt_tokens: int | None = None


def constant(at: float, users: int, spawn_rate: float, seconds: float) -> Stage | None:
    """As many users all the time; None when the time is over. `seconds` may be infinite, as in all of these."""
    return Stage(users, spawn_rate) if at < seconds else None


def ramp(at: float, users: int, ramp_seconds: float, seconds: float) -> Stage | None:
    """From one user to all of them in a straight line, then all of them."""
    if at >= seconds:
        return None
    now = users if at >= ramp_seconds else min(users, 1 + math.floor((users - 1) * at / ramp_seconds))
    return Stage(now, float(users))


def spike(at: float, base: int, users: int, stage_seconds: float, seconds: float) -> Stage | None:
    """A few users, then suddenly all of them, then few again: each for one stage's time, the last until the end."""
    if at >= seconds:
        return None
    number = int(at // stage_seconds)
    name = ("before", "spike", "after")[min(number, 2)]
    return Stage(users if number == 1 else base, float(max(users, base)), name)


def concurrency_sweep(at: float, users: Sequence[int], stage_seconds: float) -> Stage | None:
    """One number of users after the other, each for one stage's time."""
    number = int(at // stage_seconds)
    if number >= len(users):
        return None
    return Stage(users[number], float(max(users)), f"{users[number]} users")


def length_sweep(at: float, lengths: Sequence[int], users: int, stage_seconds: float) -> Stage | None:
    """One prompt length after the other, each for one stage's time, with the same users."""
    number = int(at // stage_seconds)
    if number >= len(lengths):
        return None
    return Stage(users, float(users), f"{lengths[number]} tokens", lengths[number])


def parse_steps(text: str) -> tuple[int, ...]:
    """Steps of a sweep, as in `1,2,4,8`.

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
