"""Progress of a run as lines on stderr; nothing where another process reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

_NUM_LINES = 20
"""About how many lines of progress a whole run prints."""


@dataclass(frozen=True, slots=True)
class Progress:
    """After `step` of `steps`: recent mean loss in nats per token, recent speed, estimated time left."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    seconds_left: float

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:,.0f} tokens/s  {self.seconds_left:.0f} s left"
        return f"step {self.step}/{self.steps}  loss {self.loss:.3f}  {speed}"


class Reporter:
    """Prints to `stream`; None is silence."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._num_printed = 0

    def update(self, progress: Progress) -> None:
        """Prints a line each time another `1 / _NUM_LINES` of the run is done."""
        due = progress.step * _NUM_LINES // progress.steps
        if due > self._num_printed:
            self._num_printed = due
            self.say(str(progress))

    def say(self, line: str) -> None:
        """Prints and flushes."""
        if self._stream is not None:
            print(line, file=self._stream, flush=True)
