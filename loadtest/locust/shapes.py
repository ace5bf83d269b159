"""Load shapes for Locust, chosen by `--shape` or on the web page; each asks the conductor for the current stage.

`SelectedShape` follows `--shape`, or with `--arrivals` has one dispatcher per process. Every shape ends the run when
all requests have ended.
"""

from __future__ import annotations

from locust import LoadTestShape, User

from loadtest.locust.conductor import conductor_of
from loadtest.locust.users import ClosedLoopUser, OpenLoopUser

Tick = tuple[int, float, list[type[User]]]


class _Shape(LoadTestShape):
    abstract = True
    use_common_options = True
    kind = ""

    def tick(self) -> Tick | None:
        """Number of users, spawn rate and user class; None ends the run."""
        assert self.runner is not None  # noqa: S101 (Locust sets it before it asks)
        conductor = conductor_of(self.runner.environment)
        stage = conductor.plan(self.kind)
        if stage is None:
            return None
        users = OpenLoopUser if conductor.options.is_open else ClosedLoopUser
        return stage.users, stage.spawn_rate, [users]


class SelectedShape(_Shape):
    """The shape in `--shape`, or the schedule in `--arrivals`."""


class ConstantShape(_Shape):
    """A constant number of users."""

    kind = "constant"


class RampShape(_Shape):
    """From one user to all within `--stage-seconds`."""

    kind = "ramp"


class SpikeShape(_Shape):
    """`--base-users`, then all for `--stage-seconds`, then those again."""

    kind = "spike"


class ConcurrencySweepShape(_Shape):
    """`--steps` users one after the other, each for `--stage-seconds`."""

    kind = "concurrency"


class LengthSweepShape(_Shape):
    """Prompts of `--steps` tokens one after the other, each for `--stage-seconds`."""

    kind = "length"
