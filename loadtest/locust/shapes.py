"""Load shapes for Locust: each asks the conductor what there is to be now. `--shape` chooses, or the web page's picker.

`SelectedShape` is what `--shape` says, and, with `--arrivals`, as many dispatchers as there are processes. All of them
end a run once everything that was to be sent has ended.
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
        """Users, how fast they come, and of which kind; None ends the run."""
        assert self.runner is not None  # noqa: S101 (Locust sets it before it asks)
        conductor = conductor_of(self.runner.environment)
        stage = conductor.plan(self.kind)
        if stage is None:
            return None
        users = OpenLoopUser if conductor.options.is_open else ClosedLoopUser
        return stage.users, stage.spawn_rate, [users]


class SelectedShape(_Shape):
    """What `--shape` and `--arrivals` say."""


class ConstantShape(_Shape):
    """As many users all the time."""

    kind = "constant"


class RampShape(_Shape):
    """From one user to all in `--stage-seconds`."""

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
